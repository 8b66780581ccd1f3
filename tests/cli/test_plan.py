# SPDX-License-Identifier: Apache-2.0
"""plan and probe through the binary; what is planned is what is run."""
import fcntl
import glob
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from tiny import SLOW, base, config, megatrain, metrics, part, write_data, write_ini, write_model

# Meson has malloc fill what is freed, which of a plan is hundreds of MiB: a third of its time.
os.environ["MALLOC_PERTURB_"] = "0"
CONFIGS = os.path.join(os.path.dirname(__file__), "..", "..", "configs")
SHAPES = {  # hidden, ffn, layers, heads, key heads, vocabulary; parameters in 1e9
    "0.6b": (1024, 3072, 28, 16, 8, 151936, 0.75), "8b": (4096, 14336, 32, 32, 8, 128256, 8.03),
    "14b": (5120, 17408, 40, 40, 8, 151936, 14.8), "70b": (8192, 28672, 80, 64, 8, 128256, 70.55),
    "405b": (16384, 53248, 126, 128, 8, 128256, 405.8), "671b": (18432, 65536, 150, 144, 8, 129280, 674),
}


def shape_json(tmp, name, layers=None):
    h, f, n, heads, kv, vocab, _ = SHAPES[name]
    path = os.path.join(tmp, f"{name}-{layers or n}.json")
    with open(path, "w") as out:
        json.dump(config("llama", hidden_size=h, intermediate_size=f, num_hidden_layers=layers or n, num_attention_heads=heads,
                         num_key_value_heads=kv, vocab_size=vocab, head_dim=128, max_position_embeddings=131072), out)
    return path


def plan(*args, expect=0):
    p = megatrain("plan", *args, "--json", expect=expect)
    return json.loads(p.stdout)


def answers_from_a_config_json_alone(tmp):
    for name, shape in SHAPES.items():
        r = plan("--machine", "h200", "--host-mem", "16384GiB", "--tokens-per-step", "32Ki", "--model", shape_json(tmp, name))
        assert r["fits"], name
        # norms and padding aside
        assert abs(r["parameters"] / 1e9 / shape[6] - 1) < 0.13, (name, r["parameters"])
        assert r["step_seconds"] > 0 and 0 < r["utilisation"] < 1, r
        assert sum(m["bytes"] for m in r["memory"] if m["tier"] == "device") == r["device_bytes"] <= r["device_budget"]
        assert abs(sum(p["seconds"] for p in r["phases"]) - r["step_seconds"]) < 0.01 * r["step_seconds"] + 0.01


def blocks_take_the_mean_of_the_lowest_and_the_highest(tmp):
    """Backward goes down to the block, so that times of blocks are on a straight line, of which some points are looked at."""
    path = os.path.join(tmp, "blocks.json")
    with open(path, "w") as out:
        json.dump(config("llama", hidden_size=1024, intermediate_size=3072, num_hidden_layers=9, num_attention_heads=16,
                         num_key_value_heads=8, vocab_size=4096, head_dim=64), out)
    args = ("--model", path, "--machine", "rtx4090", "--nvme", "3GB/s", "--seq-len", 2048, "--tokens-per-step", "64Ki",
            "--set", "train.block_steps=7", "--set")
    low, high = (plan(*args, f"model.freeze=model.embed_tokens.*,model.norm.*,lm_head.*,model.layers.{other}.*")["step_seconds"]
                 for other in ("[1-8]", "[0-7]"))
    for n, order, home in ((9, "descending", "auto"), (9, "random", "auto"), (9, "ascending", "disk"), (2, "ascending", "auto"), (1, "random", "disk")):
        own = *args, f"train.blocks={n}", "--set", f"train.block_order={order}", "--set", f"memory.states={home}"
        said, text = plan(*own), megatrain("plan", *own).stdout
        number = r"([\d.e+]+)"
        mean, speed, disk, overlay, weights = map(float, re.search(
            rf"Mean of all {n}: {number} s a step, {number} tokens/s, {number} GB written to drives a step\. "
            rf"A switch, every 7 steps, writes {number} GB and reads {number} GB\.", " ".join(text.split())).groups())
        middle = said["step_seconds"] - (low - high) / 8 * sum(9 * i // n for i in range(n)) / n  # by their first layers
        assert home == "disk" or abs(mean / middle - 1) < 0.03, (n, mean, middle, low, high)
        written = next(r["bytes"] for r in said["resources"] if r["resource"] == "disk writes")
        assert abs(speed * mean / 65536 - 1) < 1e-3 and abs(disk * 1e9 - written) < 1e-3 * written + 1 and (home == "auto" or written), text
        assert abs(overlay / (said["trained_parameters"] * 2e-9) - 1) < 1e-3 and abs(weights / (said["parameters"] * 2e-9) - 1) < 1e-3, text


def published_models_are_known_by_name(tmp):
    """Also with words after their names; the message names the stored file. A run still wants the model itself."""
    machine = ("--machine", "rtx4090", "--host-mem", "512GiB", "--nvme", "7GB/s", "--json")
    for name, stored in (("Qwen3-8B", "Qwen3-8B"), ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
                         ("zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"), ("zai-org/GLM-4.5-Base", "GLM-4.5"),
                         ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Nano")):
        p = megatrain("plan", *machine, "--model", name, "--set", "adapter.kind=lora")
        assert json.loads(p.stdout)["fits"] and p.stderr.rstrip().endswith(f"configs/models/{stored}.json"), (name, p.stderr)
    for name in ("Qwen/Qwen3-80B", "Qwen3", "Qwen/..", "-", "nvidia/Other-Nemotron-3-Nano", "Qwen/Qwen-", "/-"):
        assert "planned from" not in megatrain("plan", *machine, "--model", name, expect=3).stderr, name
    ini = os.path.join(tmp, "named.ini")
    with open(ini, "w") as out:
        out.write(f"[model]\npath = Qwen/Qwen3-8B\n[data]\ntrain = {ini}\n[train]\nsteps = 1\nbatch_size = 1\n[checkpoint]\ndir = {tmp}/named\n")
    assert "hf download Qwen/Qwen3-8B" in megatrain("run", ini, expect=3).stderr


def a_405b_plan_takes_seconds(tmp):
    """With drives and without, and where it does not fit, where many changes are tried. A search that is no longer cut
    short takes minutes: the bound on processor seconds has room for slow machines."""
    model = shape_json(tmp, "405b")
    for more, code in ((("--gpu-mem", "80GiB", "--host-mem", "1024GiB", "--nvme", "7GB/s", "--drives", "4"), 0),
                       (("--host-mem", "256GiB", "--nvme", "7GB/s", "--drives", "4"), 0),
                       (("--gpu-mem", "80GiB", "--host-mem", "8192GiB"), 0), ((), 4)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        r = plan("--machine", "rtx4090", *more, "--model", model, expect=code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < (120 if SLOW else 40), more
        if code == 0 and "--gpu-mem" not in more:
            assert r["settings"]["memory.unit"] == "half" and r["device_bytes"] <= r["device_budget"] <= 24 << 30
            # forward computes for a little less time than states take to be written to four drives
            assert [p["bound_by"] for p in r["phases"] if p["seconds"] > 1] == ["disk writes", "compute"], r["phases"]
            assert r["tokens_per_second"] > 40, r["tokens_per_second"]


def every_stored_machine_is_read_and_faster_ones_are_faster(tmp):
    model = shape_json(tmp, "8b")
    order = ("rtx3060", "rtx4070", "rtx3090", "rtx4080", "rtx5080", "a6000", "rtx4090", "rtx5090", "l40s", "a100", "rtxpro6000",
             "h100", "gh200", "h200", "b200")
    t = [plan("--machine", m, "--host-mem", "512GiB", "--model", model)["tokens_per_second"] for m in order]
    assert t == sorted(t), list(zip(order, t))
    stored = os.listdir(os.path.join(CONFIGS, "machines"))
    boxes = {f"rtx4090x{n}" for n in (2, 4, 8)}  # several_gpus_are_planned() has these
    assert {name[:-4] for name in stored if name.endswith(".ini")} == {*order, *boxes}


def the_other_choice_names_both_parts_of_records(tmp):
    for tokens, attention in (("128Ki", r"\d+ of attention"), ("64Ki", r"attention\.out:\d+")):
        args = ("--machine", "rtx4090", "--host-mem", "512GiB", "--tokens-per-step", tokens, "--model", shape_json(tmp, "8b"),
                "--set", "memory.device_budget=23GiB")
        chosen = plan(*args)["settings"]
        assert chosen["memory.offload_attention"] != chosen["memory.offload_layers"], chosen
        said = megatrain("plan", *args).stdout
        assert re.search(rf"memory.activations +recompute +\d+ offloaded, {attention}: ", said), said


def what_ifs_change_the_answer(tmp):
    model = shape_json(tmp, "8b")
    args = ("--machine", "rtx4090", "--host-mem", "256GiB", "--tokens-per-step", "4Ki", "--model", model)
    slow, fast = plan(*args, "--pcie", "5GB/s"), plan(*args, "--pcie", "50GB/s")
    assert slow["step_seconds"] > 1.3 * fast["step_seconds"]
    assert any("link" in p["bound_by"] or "optimizer" in p["bound_by"] for p in slow["phases"]), slow["phases"]
    said, quick = megatrain("plan", *args, "--pcie", "5GB/s").stdout, megatrain("plan", *args[:5], "256Ki", *args[6:]).stdout
    assert re.search(r"Link      copies (to|from) the GPU bind \(\d+% of the step\), at a rate that nobody measured", said), said
    assert "Link      " not in quick, quick
    disk = plan("--machine", "rtx4090", "--host-mem", "64GiB", "--nvme", "7GB/s", "--drives", "2", "--model", model)
    assert disk["disk_bytes"] > 0 and disk["units"]["states on disk"] + disk["units"]["all on disk"] > 0
    for wrong in (("--pcie", "fast"), ("--gpu-mem", "-3GiB"), ("--drives", "2"), ("--machine", "pentium")):
        machine = () if wrong[0] == "--machine" else ("--machine", "rtx4090")
        p = megatrain("plan", *machine, "--model", model, *wrong, expect=2)
        assert wrong[0].strip("-") in p.stderr or wrong[1] in p.stderr, p.stderr


def several_gpus_are_planned(tmp):
    """Steps of 32 micro-batches; each GPU has its own budget, and the table names the bytes of each."""
    model = shape_json(tmp, "8b")
    args = ("--machine", "rtx4090", "--host-mem", "1TiB", "--tokens-per-step", "128Ki", "--seq-len", "4096", "--model", model)
    one = plan(*args, "--micro-batch", "2")
    for n, least in ((2, 1.6), (4, 2.5)):
        r = plan(*args, "--gpus", n, "--micro-batch", "2")
        assert len(r["gpu_bytes"]) == n and sum(r["gpu_bytes"]) == r["device_bytes"], r["gpu_bytes"]
        assert max(r["gpu_bytes"]) <= r["device_budget"] < r["device_bytes"]
        ratio = r["tokens_per_second"] / one["tokens_per_second"]
        assert least < ratio < n * 1.05, (n, ratio)
    out = megatrain("plan", *args, "--gpus", "2", "--micro-batch", "2").stdout
    assert "of them, GPU 2" in out, out
    for n, least in ((2, 1.9), (4, 3.45)):
        box = ("--machine", f"rtx4090x{n}", "--tokens-per-step", "128Ki", "--seq-len", "4096", "--model", model)
        ratio = plan(*box, "--gpus", n, "--micro-batch", "2")["tokens_per_second"] / plan(*box)["tokens_per_second"]
        assert least < ratio < n, (n, ratio)
    box = (*box, "--gpus", 4, "--micro-batch", "2")
    shared = [plan(*box, "--link-share", n) for n in (1, 2, 4)]
    assert shared[0]["step_seconds"] == plan(*box)["step_seconds"]
    speeds = [r["tokens_per_second"] for r in shared]
    assert speeds[0] > speeds[1] > speeds[2] > speeds[0] / 4, speeds


def optimizers_are_compared():
    """Also for a configuration with keys that not all of them have."""
    args = ["--model", "Qwen/Qwen3-1.7B", "--machine", "rtx4090", "--optimizers"]
    rows = plan(*args, "--set", "optimizer.beta2=0.95", "--set", "optimizer.rounding=stochastic")
    assert len(rows) == 40 and [r["exact"] for r in rows] == [True, True] + [False] * 38, rows
    kept = {(r["optimizer.type"], r["optimizer.state_dtype"], r["memory.update"]): r["bytes_per_parameter"] for r in rows
            if r["optimizer.master"] == "f32" and r["train.blocks"] == "off"}
    # 12 for weights and states; gradients of the table, and of no more than half of the layers, wait for the next forward
    assert abs(kept["adamw", "f32", "forward"] - 14) < 0.1 and kept["adamw", "f32", "backward"] < 13.2, kept
    assert abs(kept["lion", "bf16", "forward"] - 8) < 0.1 and abs(kept["sgd", "f32", "forward"] - 6) < 0.1, kept
    assert 4 < kept["adafactor", "f32", "backward"] < 5, kept
    muon = ("optimizer.type=muon", "train.grad_clip=0", "optimizer.matrices=*.q_proj.weight")
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "small.json")
        with open(path, "w") as out:
            json.dump(config("llama", num_hidden_layers=2), out)
        small = ["--model", path, *args[2:]]
        assert len(plan(*small, *(a for s in muon for a in ("--set", s)))) == 40
        assert not [r for r in plan(*small, "--set", "adapter.kind=lora") if r["optimizer.type"] in ("adafactor", "muon", "apollo", "galore")]
        by_blocks = [[r["train.blocks"] for r in plan(*small, "--set", f"checkpoint.frozen={how}")] for how in ("name", "copy")]
        assert by_blocks[0].count("layers") == 2 and set(by_blocks[1]) == {"off"}, by_blocks
    assert "--measure" in megatrain("plan", *args, "--measure", expect=2).stderr
    assert "--score" in megatrain("plan", *args, "--score", 8, expect=2).stderr


def known_names_are_listed(tmp):
    want = [f"  {f.rpartition('.')[0]}" for kind, end in (("machines", ".ini"), ("models", ".json"))
            for f in sorted(os.listdir(os.path.join(CONFIGS, kind))) if f.endswith(end)]
    said = megatrain("plan", "--list").stdout.splitlines()
    assert sorted(l for l in said if l.startswith(" ")) == sorted(want) and len(said) == len(want) + 2, said


def every_price_has_a_source(tmp):
    """Of all stored machines; those that are derived say from what. A box of several GPUs has its GPU's prices."""
    listed = {}
    for path in sorted(glob.glob(os.path.join(CONFIGS, "machines", "*.ini"))):
        name = os.path.basename(path)[:-4]
        prices = plan("--prices", "--machine", name)["prices"]
        bare = [p["key"] for p in prices if not p["from"] or p["kind"] != "rated"]
        assert not bare and len(prices) > 24, (name, bare)
        listed[name] = {p["key"]: p for p in prices}
    one = {k: p for k, p in listed["rtx4090"].items() if k.startswith("compute.")}
    for n in 2, 4, 8:
        assert one == {k: p for k, p in listed[f"rtx4090x{n}"].items() if k.startswith("compute.")}, n
    text = megatrain("plan", "--prices", "--machine", "rtx4090", "--pcie", "12GB/s").stdout
    assert re.search(r"^compute.gemm_bf16_tflops +152  TFLOP/s  rated     0.92 of the sheet's", text, re.M), text
    assert re.search(r"^link.h2d_gbs +12  GB/s     rated     --pcie$", text, re.M), text
    assert re.search(r"^link.h2d_both_gbs +10.2  GB/s     rated     assumed: 0.85 of --pcie$", text, re.M), text
    assert re.search(r"^adam.16 +0.43\d* +ns       rated     assumed: 26 bytes, at 0.85 of dram_gbs", text, re.M), text
    assert "--machine" in megatrain("plan", "--prices", expect=2).stderr


def unknown_names_are_told_what_there_is(tmp):
    said = megatrain("plan", "--machine", "rtx4085", "--model", "Qwen3-8B", expect=2).stderr
    assert "rtx4090" in said and "h200" in said, said
    said = megatrain("plan", "--machine", "rtx4090", "--model", "qwen3-8", expect=3).stderr
    assert "there are Qwen3-8B\n" in said, said


def a_long_step_has_the_slots_that_help(tmp):
    """Of which a search tries little: 2,070 units of experts, read from a drive."""
    args = (os.path.join(CONFIGS, "lora_qwen3_235b.ini"), "--machine", "rtx4090", "--host-mem", "96GiB", "--nvme", "14GB/s", "--tokens-per-step",
            "32Ki", "--micro-batch", "4", "--set", "memory.activations=recompute", "--set", "memory.offload_layers=0",
            "--set", "memory.offload_attention=0", "--set", "memory.keep_layers=0")
    found, wanted = plan(*args), plan(*args, "--set", "memory.slots=12")
    assert found["step_seconds"] < 1.005 * wanted["step_seconds"], (found["settings"], found["step_seconds"], wanted["step_seconds"])


def optimizers_and_masters_are_compared(tmp):
    """A leaner master takes a byte or two less of each parameter and is priced by less time; f32 compute has none."""
    args = ("--machine", "rtx4090", "--host-mem", "64GiB", "--model", shape_json(tmp, "0.6b"), "--seq-len", "1024",
            "--tokens-per-step", "2Ki", "--micro-batch", "2", "--set", "memory.activations=recompute",
            "--set", "memory.keep_layers=0", "--set", "memory.slots=3", "--set", "memory.unit=layer")
    rows = {(r["optimizer.type"], r["optimizer.state_dtype"], r["optimizer.master"], r["memory.update"]): r
            for r in plan("--optimizers", *args) if r["train.blocks"] == "off"}
    assert {master for _, _, master, _ in rows} == {"f32", "24bit", "bf16"} and all(r["fits"] for r in rows.values()), rows
    for order in ("forward", "backward"):
        for states, saved in (("f32", 0), ("8bit", 5.875)):
            whole = rows["adamw", "f32", "f32", order]["bytes_per_parameter"]
            for master, less in (("f32", 0), ("24bit", 1), ("bf16", 2)):
                r = rows["adamw", states, master, order]
                # under backward one layer's gradients and the embedding's stay; forward keeps 2 bytes of each
                assert abs(whole - r["bytes_per_parameter"] - saved - less) < (0.02 if order == "forward" else 0.6), (r, whole)
                assert r["exact"] == (states == master == "f32")
    assert rows["adamw", "f32", "24bit", "forward"]["seconds"] < rows["adamw", "f32", "f32", "forward"]["seconds"]
    said = megatrain("plan", "--optimizers", *args, "--set", "model.dtype=f32").stdout
    assert "adamw 8bit/f32" in said and "24bit" not in said.split("\n\n")[0], said
    assert max(map(len, said.splitlines())) <= 84, max(said.splitlines(), key=len)


def lean_states_under_backward_are_planned(tmp):
    """70B on two drives, and 8B and 14B without drives, at 16,384 tokens a step."""
    lean = ("--machine", "rtx4090", "--seq-len", "4096", "--tokens-per-step", "16Ki", "--micro-batch", "4",
            "--set", "memory.activations=recompute", "--set", "memory.slots=2", "--set", "train.grad_clip=0",
            "--set", "optimizer.state_dtype=8bit", "--set", "optimizer.master=24bit", "--set", "memory.update=backward")
    drives = ("--host-mem", "128GiB", "--nvme", "7GB/s", "--drives", "2", "--model", shape_json(tmp, "70b"))
    r = plan(*lean, *drives)
    assert r["step_seconds"] < 66, r["step_seconds"]
    for name, gib in (("8b", 64), ("14b", 128)):
        r = plan(*lean, "--host-mem", f"{gib}GiB", "--model", shape_json(tmp, name))
        assert r["fits"] and r["disk_bytes"] == 0, r


def epochs_have_a_length_once_their_data_are_prepared(tmp):
    """Before, plan says what a billion tokens take; it prepares nothing itself."""
    model, data, cache = write_model(f"{tmp}/epochs", config()), f"{tmp}/epochs.jsonl", f"{tmp}/epochs-cache"
    with open(data, "w") as f:
        f.writelines(json.dumps({"text": f"text {i}"}) + "\n" for i in range(200))
    keys = dict(data__tokenizer="byte", data__eval="", data__cache_dir=cache, memory__states="disk", train__steps="", train__epochs=3,
                memory__nvme_paths=tmp)
    ini = write_ini(f"{tmp}/epochs.ini", base(model, data, f"{tmp}/none", **keys))
    ask = ("plan", ini, "--machine", "rtx4090", "--nvme", "7GB/s", "--drives", "1")
    said = megatrain(*ask).stdout
    assert "for a billion tokens" in said and "The run writes" not in said and not os.path.exists(cache), said
    assert megatrain("-q", "data", "prepare", ini) and os.path.exists(cache)
    rows = json.loads(megatrain("data", "stats", ini, "--json").stdout)["rows"]
    with open(os.path.join(cache, "lock"), "w") as lock:  # another run prepares data there: a plan does not wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        of_epochs = megatrain(*ask).stdout
    assert "for a billion tokens" in megatrain(*ask, "--score", 0).stdout  # a pass has no epochs
    ini = write_ini(f"{tmp}/epochs.ini", base(model, data, f"{tmp}/none", **{**keys, "train__epochs": "", "train__tokens": 3 * rows * 64}))
    assert "The run writes" in of_epochs and of_epochs == megatrain(*ask).stdout, of_epochs


def the_table_fits_a_terminal(tmp):
    out = megatrain("plan", "--machine", "rtx4090", "--host-mem", "256GiB", "--model", shape_json(tmp, "8b")).stdout
    assert max(map(len, out.splitlines())) <= 80, max(out.splitlines(), key=len)
    for word in ("train.micro_batch", "memory.activations", "bound by", "tokens/s", "Memory", "days"):
        assert word in out, word
    assert re.search(r"^Machine   GeForce RTX 4090 24 GB \(PCIe [^,]*, 256 GiB \(rated\)$", out, re.M), out
    rows = [(tier, int(n)) for tier, n in re.findall(r"^  (\S*) +\S.*?  +(\d+) +[\d.]+ [KMGT]?i?B$", out, re.M)]
    at = next(i for i, (tier, _) in enumerate(rows) if tier == "sum")
    host = next(i for i, (tier, _) in enumerate(rows) if tier == "host")
    assert rows[at][1] == sum(n for _, n in rows[:host]) and rows[at + 1][1] == sum(n for _, n in rows[host:at]), rows


def a_plan_is_reproduced_by_its_own_settings(tmp):
    model = shape_json(tmp, "8b")
    args = ("--machine", "rtx4090", "--host-mem", "256GiB", "--model", model)
    a = plan(*args)
    sets = [x for k, v in a["settings"].items() for x in ("--set", f"{k}={v}")]
    b = plan(*args, *sets)
    assert b["candidates"] == 1
    for key in ("step_seconds", "device_bytes", "host_bytes", "memory", "phases"):
        assert a[key] == b[key], key


def a_run_without_a_profile_follows_the_rules_and_with_one_the_plan(tmp, model, data):
    cache = os.path.join(tmp, "own-cache")
    env = {"XDG_CACHE_HOME": cache, "MEGATRAIN_PROBE_SMALL": "1"}
    ini = write_ini(os.path.join(tmp, "auto.ini"),
                    base(model, data, os.path.join(tmp, "auto"), train__micro_batch="auto", train__steps=3))
    p = megatrain("plan", ini, env=env)
    assert re.search("^Time +not measured: megatrain probe all", p.stdout, re.M) and "tokens/s" not in p.stdout, p.stdout
    assert re.search(r"^  train.micro_batch +\d+ +by rule$", p.stdout, re.M), p.stdout
    plan = json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)
    said = megatrain("run", ini, "--dry-run", env=env).stderr  # memory needs no rates: it is that of the run
    assert "step_seconds" not in plan and f"{plan['device_bytes'] / 2**20:.2f} MiB" in said, (plan, said)
    small = [*("plan", ini, "--set", "memory.host_budget=30MiB", "--set", "memory.device_budget=2MiB")]
    said = megatrain(*small, env=env, expect=4).stderr
    assert "budget" in said and "0 s" not in said, said
    assert "predicted" not in megatrain("run", ini, env=env).stderr
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive)
    megatrain("-q", "probe", "all", "--force", "--brief", "--threads", "2", "--dir", drive, env=env)
    assert json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)["fits"]
    trace = os.path.join(tmp, "trace.json")
    p = megatrain("run", ini, "--force", "--trace", trace, env=env)
    assert "predicted" in p.stderr
    assert "is not of this run" in p.stderr and "checkpoint-3" in p.stderr
    said = json.load(open(os.path.join(tmp, "auto", "run.json")))["predicted"]
    assert said["t_step"] > 0
    effective = open(os.path.join(tmp, "auto", "config.effective.ini")).read()
    assert "micro_batch = auto" not in effective and "slots = auto" not in effective, effective
    # resumed elsewhere, without a profile: the numerics stay those of the checkpoint
    micro = [l for l in effective.splitlines() if l.startswith("micro_batch")][0].split(";")[0]
    megatrain("-q", "run", ini, "--resume", "--set", "train.steps=4", env={"XDG_CACHE_HOME": cache + "2"})
    again = open(os.path.join(tmp, "auto", "config.effective.ini")).read()
    assert micro in again, (micro, again)
    check_trace(trace)
    return env


def so_many_texts_share_a_pass_as_the_plan_says(tmp, model, env):
    path = os.path.join(tmp, "prompts.jsonl")
    with open(path, "w") as f:
        f.write('{"prompt_ids": [1, 2, 3]}\n' * 100)
    plan = json.loads(megatrain("-q", "plan", "--model", model, "--generate", 35, "--json", env=env).stdout)
    best = max((r for r in plan["by_texts"] if r["texts"] in (16, 32, 64)), key=lambda r: r["tokens_per_second"])["texts"]
    said = megatrain("-vv", "generate", model, "--prompts", path, "--max-tokens", 32, "--dry-run", env=env).stderr
    n = int(re.search(r"(\d+) texts share a pass", said)[1])
    assert best <= n <= min(2 * best, 100), (n, best)


def a_probe_that_did_not_get_its_cores_is_not_kept(tmp):
    env = {"XDG_CACHE_HOME": os.path.join(tmp, "busy"), "MEGATRAIN_PROBE_SMALL": "1"}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        said = megatrain("probe", "all", "--brief", "--threads", 1, env=env, expect=1).stderr
    finally:
        for p in busy:
            p.kill()
            p.wait()
    assert re.search(r"got \d+% of the time of its cores", said) and "--force" in said, said
    assert not re.search("^measuring ", said, re.M), said  # it is seen before minutes are spent
    assert not os.path.exists(os.path.join(tmp, "busy", "megatrain")), os.listdir(os.path.join(tmp, "busy"))


def check_trace(path):
    events = json.load(open(path))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "measured"), (2, "predicted")}, names
    by = {pid: sorted((e["cat"], e["args"]["unit"], e["args"]["micro_batch"]) for e in spans if e["pid"] == pid)
          for pid in (1, 2)}
    assert by[1] == by[2], "measured and predicted are of the same instructions"
    assert {"forward", "backward", "update", "load", "store_grad"} <= {e["cat"] for e in spans}
    for pid in (1, 2):  # a queue does one thing at a time
        for tid in range(4):
            lane = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
            for (a, d), (b, _) in zip(lane, lane[1:]):
                assert a + d <= b + 1, (pid, tid, a, d, b)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)


def what_is_planned_is_what_is_run(tmp, model, data, env):
    """Memory of every tier to the byte, and the bytes over the link and to the disk, in each sort of placement."""
    ini = write_ini(os.path.join(tmp, "agree.ini"), base(model, data, os.path.join(tmp, "agree"), train__steps=3,
                                                         memory__nvme_paths=os.path.join(tmp, "drive"),
                                                         data__packing="off"))
    without = {**env, "XDG_CACHE_HOME": os.path.join(tmp, "no-drive-cache")}
    shutil.copytree(env["XDG_CACHE_HOME"], without["XDG_CACHE_HOME"])
    profile = glob.glob(os.path.join(without["XDG_CACHE_HOME"], "megatrain", "machine-*.ini"))[0]
    text = open(profile).read()
    with open(profile, "w") as f:
        f.write("".join(p for p in re.split(r"(?m)^(?=\[)", text) if not p.startswith("[disk]")))
    p = megatrain("plan", ini, env=without, expect=1)
    assert "have not been measured" in p.stderr and "--dir" in p.stderr, p.stderr
    assert "drives" in megatrain("run", ini, "--force", env=without).stderr
    for over in ({}, {"memory.states": "disk"}, {"memory.states": "disk", "memory.activations": "disk"},
                 {"memory.states": "disk", "memory.activations": "recompute"}):
        sets = [x for k, v in over.items() for x in ("--set", f"{k}={v}")]
        said = json.loads(megatrain("-q", "plan", ini, "--json", *sets, env=env).stdout)
        megatrain("-q", "run", ini, "--force", *sets, env=env)
        did = json.load(open(os.path.join(tmp, "agree", "run.json")))
        step = metrics(os.path.join(tmp, "agree"))[-2]
        assert said["device_bytes"] == did["device_bytes"], over
        tables = [[r for r in x["memory"] if r["use"] not in ("a checkpoint", "process")] for x in (said, did)]
        assert tables[0] == tables[1] and len(tables[0]) > 8, (over, tables)
        process = [next(r["bytes"] for r in x["memory"] if r["use"] == "process") for x in (said, did)]
        assert abs(process[0] - process[1]) < 8 << 20, (over, process)  # what each process has in memory as it begins
        planned = {r["resource"]: r["bytes"] for r in said["resources"]}
        for name, key in (("disk reads", "disk_read"), ("disk writes", "disk_write")):
            assert planned[name] == sum(step.get(key, {}).values()), (over, name)
        assert planned["H2D link"] == step["h2d_bytes"] and planned["D2H link"] == step["d2h_bytes"], over
        assert bool(planned["disk writes"]) == bool(over), over


def run_and_plan_say_the_same(tmp, model, data, env):
    """The very same choice and memory table, of packed rows too, where both processes begin with as much in memory."""
    env = {**env, "MEGATRAIN_RESIDENT": str(40 << 20)}
    drive = os.path.join(tmp, "drive")
    for name, over in (("plain", {}), ("packed bf16", {"model__dtype": "bf16", "data__packing": "on", "data__seq_len": 128}),
                       ("fixed", {"train__micro_batch": 2, "memory__slots": 2, "memory__activations": "recompute"}),
                       ("halves", {"memory__unit": "half", "memory__device_budget": "1MiB"}),
                       ("disk", {"memory__states": "disk", "memory__nvme_paths": drive}),
                       ("by share", {"memory__device_budget": "3%", "memory__host_budget": "6GiB"})):
        out = os.path.join(tmp, "same")
        ini = write_ini(os.path.join(tmp, "same.ini"), base(model, data, out, **{
            "train__micro_batch": "auto", "memory__host_budget": "6GiB", **over}))
        said = json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)
        table_of_plan = memory_table(megatrain("plan", ini, env=env).stdout)
        assert memory_table(megatrain("run", ini, "--dry-run", env=env).stderr) == table_of_plan, name
        megatrain("-q", "run", ini, "--force", "--max-steps", 1, "--no-save", env=env)
        did = json.load(open(os.path.join(out, "run.json")))
        assert [r for r in did["memory"] if r["use"] != "a checkpoint"] == said["memory"], (name, said["memory"], did["memory"])
        assert (said["device_bytes"], said["device_budget"]) == (did["device_bytes"], did["device_budget"]), name
        assert said["step_seconds"] == did["predicted"]["t_step"], name
        effective = open(os.path.join(out, "config.effective.ini")).read()
        for key, value in said["settings"].items():
            line = f"\n{key.split('.')[1]} = {value} ;"
            assert line in effective, (name, line, effective)


def memory_table(text):
    """(tier, use, size) of each row; the rows of checkpoints and limits, which only a run has, left out."""
    rows, tier = [], ""
    for line in text[text.index("\nMemory "):].splitlines()[2:]:
        m = re.match(r"^  (\S*) +(\S.*?)  +(?:\d+  +)?([\d.]+ [KMGT]?i?B)$", line)
        if not m:
            break
        tier = m[1] or tier
        if m[2] != "a checkpoint" and tier != "sum":
            rows.append((tier, m[2], m[3]))
    assert len(rows) > 8, text
    return rows


def rows_of_a_step_are_refused_alike(tmp, model, data, env):
    ini = write_ini(os.path.join(tmp, "rows.ini"), {**base(model, data, os.path.join(tmp, "rows"), data__seq_len=512),
                                                    "train": {"steps": 1, "tokens_per_step": 1000}})
    for command in (("plan", ini), ("run", ini, "--dry-run"), ("check", ini),
                    ("plan", "--model", model, "--tokens-per-step", 1000, "--seq-len", 512, "--machine", "rtx4090")):
        p = megatrain(*command, env=env, expect=2)
        assert "512 and 1024" in p.stderr, p.stderr


def main():
    with tempfile.TemporaryDirectory() as tmp:
        if part("first"):
            answers_from_a_config_json_alone(tmp)
            blocks_take_the_mean_of_the_lowest_and_the_highest(tmp)
            what_ifs_change_the_answer(tmp)
            unknown_names_are_told_what_there_is(tmp)
            known_names_are_listed(tmp)
            every_price_has_a_source(tmp)
            the_table_fits_a_terminal(tmp)
            optimizers_and_masters_are_compared(tmp)
            epochs_have_a_length_once_their_data_are_prepared(tmp)
        if part("rest"):
            published_models_are_known_by_name(tmp)
            every_stored_machine_is_read_and_faster_ones_are_faster(tmp)
            the_other_choice_names_both_parts_of_records(tmp)
            lean_states_under_backward_are_planned(tmp)
            a_405b_plan_takes_seconds(tmp)
            several_gpus_are_planned(tmp)
            optimizers_are_compared()
            a_long_step_has_the_slots_that_help(tmp)
            a_plan_is_reproduced_by_its_own_settings(tmp)
            model, data = write_model(os.path.join(tmp, "model"), config()), write_data(os.path.join(tmp, "d.jsonl"))
            env = a_run_without_a_profile_follows_the_rules_and_with_one_the_plan(tmp, model, data)
            so_many_texts_share_a_pass_as_the_plan_says(tmp, model, env)
            a_probe_that_did_not_get_its_cores_is_not_kept(tmp)
            what_is_planned_is_what_is_run(tmp, model, data, env)
            run_and_plan_say_the_same(tmp, model, data, env)
            rows_of_a_step_are_refused_alike(tmp, model, data, env)


if __name__ == "__main__":
    sys.exit(main())
