# SPDX-License-Identifier: Apache-2.0
"""Training by blocks of layers: every home of the base and every cut gives the same bits; a run that is killed anywhere goes on
with them; exports are whole models; checkpoints of another plan are refused."""
import glob
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time

from tiny import BINARY, DEVICE, FULL, SLOW, base, config, least_host, megatrain, metrics, part, read_safetensors, write_data, write_ini, write_model

STEPS, BLOCK = 8, 3


def make_model(tmp, name, cfg, *export):
    model = write_model(os.path.join(tmp, name + "-config"), cfg)
    out, data = os.path.join(tmp, name + "-pre"), os.path.join(tmp, "data.jsonl")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=1, data__eval="", model__dtype="bf16"))
    megatrain("-q", "run", ini)
    megatrain("-q", "export", os.path.join(out, "checkpoint-1"), os.path.join(tmp, name), *export)
    return os.path.join(tmp, name)


def settings(tmp, model, out, **over):
    keys = dict(model__init="weights", model__dtype="bf16", train__blocks="layers", train__block_steps=BLOCK, train__steps=STEPS,
                checkpoint__every=2, data__eval="4", eval__every=4)
    keys.update(over)
    return write_ini(out + ".ini", base(model, os.path.join(tmp, "data.jsonl"), out, **keys))


def losses(out):
    return [(m["step"], m["loss"], m["grad_norm"]) for m in metrics(out) if "loss" in m and "grad_norm" in m]


def weights(folder):
    found = {}
    for path in glob.glob(os.path.join(folder, "*.safetensors")):
        found.update(read_safetensors(path))
    return found


def states(out, step=STEPS):
    found = {}
    for path in sorted(glob.glob(os.path.join(out, f"checkpoint-{step}", "megatrain", "state-*.safetensors"))):
        found.update(read_safetensors(path))
    return found


def exported(out, step=STEPS):
    to = f"{out}-export-{step}"
    shutil.rmtree(to, ignore_errors=True)
    megatrain("-q", "export", os.path.join(out, f"checkpoint-{step}"), to)
    return weights(to)


def floats(raw):
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def result(out):
    return losses(out), states(out), exported(out)


def layer_of(name):
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def a_block_at_a_time(tmp, model, want):
    """Of the exports of checkpoints only what was trained by then differs from the model."""
    given, order, seen = weights(model), [], set()
    for step in range(2, STEPS + 1, 2):
        now = exported(want, step)
        assert set(now) == set(given)
        layers = {layer_of(n) for n in now if now[n] != given[n]}
        assert None not in layers and seen <= layers, layers
        order += sorted(layers - seen)
        seen = layers
        trained = {layer_of(n) for n in states(want, step)}
        assert len(trained) == 1, "states of one block alone are kept"
    assert len(seen) == (STEPS + BLOCK - 1) // BLOCK, order
    # the last overlay has the blocks before, and what it linked is no copy
    last = sorted(glob.glob(os.path.join(want, "overlay-*")), key=lambda p: int(p.split("-")[-2]))[-1]
    files = [f for f in os.listdir(last) if f.endswith(".safetensors")]
    assert len(files) == len(seen) - 1 and any(os.stat(os.path.join(last, f)).st_nlink > 1 for f in files), files
    size = sum(os.path.getsize(os.path.join(last, f)) for f in files) / 1024
    promised = [re.search(r"overlays of phases +([\d.]+) KiB", megatrain("run", "--dry-run", settings(tmp, model, os.path.join(tmp, "dry"), **over)).stderr)
                for over in ({}, {"train__steps": BLOCK})]
    assert not promised[1] and size - 8 < float(promised[0].group(1)) <= size, (promised, size)
    return order


def every_placement(tmp, model, want):
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    ways = {"halves": dict(memory__unit="half"), "disk": dict(memory__states="disk", memory__base="disk", memory__nvme_paths=drive),
            "slots": dict(memory__slots=2, memory__activations="recompute", memory__verify="all"),
            "devices": dict(device__gpus=2, device__cpu_threads=1)}
    for name, keys in ways.items() if not SLOW else list(ways.items())[:1]:
        out = os.path.join(tmp, name)
        megatrain("-q", "run", settings(tmp, model, out, **keys))
        assert result(out) == want, name


def start(ini, *args):
    return subprocess.Popen([BINARY, "-q", "run", ini, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def killed_anywhere(tmp, model, want, took, seed, n):
    """Kills at random times of a run that takes `took` seconds, many of them around switches; a folder that a killed
    switch left is in nobody's way."""
    r, out = random.Random(seed), os.path.join(tmp, f"killed{seed}")
    ini, kills = settings(tmp, model, out, checkpoint__every=1), 0
    p = start(ini)
    for _ in range(n):
        at_switch = r.random() < 0.5
        end = time.monotonic() + took * r.uniform(0.1, 0.6)
        n_overlays = len(glob.glob(out + "/overlay-*"))
        while p.poll() is None and (len(glob.glob(out + "/overlay-*")) == n_overlays if at_switch else time.monotonic() < end):
            time.sleep(0.001)
        if at_switch:
            time.sleep(took * r.uniform(0, 0.05))
        p.send_signal(signal.SIGKILL)
        p.wait()
        kills += p.returncode != 0
        os.makedirs(os.path.join(out, "overlay-1.tmp"), exist_ok=True)
        p = start(ini, "--resume", *([] if glob.glob(out + "/checkpoint-?") else ["--force"]))
    error = p.communicate()[1]
    assert p.returncode == 0, error
    assert result(out)[1:] == want[1:] and dict((s, (l, g)) for s, l, g in losses(out)) == {s: (l, g) for s, l, g in want[0]}
    return kills


def stopped_while_a_block_is_opened(tmp, model, want):
    """What was trained is saved, also if the request comes before the new block's first step."""
    out = os.path.join(tmp, "stopped")
    ini = settings(tmp, model, out, checkpoint__every=0)
    p = start(ini)
    while p.poll() is None and not glob.glob(out + "/overlay-1-*"):
        time.sleep(0.0005)
    p.send_signal(signal.SIGTERM)
    p.wait()
    assert glob.glob(out + "/checkpoint-*"), p.returncode
    megatrain("-q", "run", ini, "--resume")
    assert result(out) == want


def goes_on_elsewhere(tmp, model, out, want):
    """From any checkpoint, in a folder that was moved and from a model that was moved, in another output folder."""
    for step in range(2, STEPS, 2) if FULL else (4,):
        moved, other = os.path.join(tmp, f"moved{step}"), os.path.join(tmp, f"other{step}")
        shutil.copytree(out, moved, symlinks=True)
        for path in glob.glob(moved + "/checkpoint-*"):
            if int(path.split("-")[-1]) > step:
                shutil.rmtree(path)
        elsewhere = os.path.join(tmp, f"model{step}")
        shutil.copytree(model, elsewhere)
        named = settings(tmp, elsewhere, other)
        megatrain("-q", "run", named, f"--resume={moved}/checkpoint-{step}", "--force")  # --force: another model.path
        shutil.rmtree(moved)
        assert states(other) == want[1] and exported(other) == want[2], step
        shutil.rmtree(other)


def some_always(tmp, model):
    """LISA: embedding and head are trained with every block."""
    out = os.path.join(tmp, "always")
    always = "model.embed_tokens.*, lm_head.*, *layernorm*"
    megatrain("-q", "run", settings(tmp, model, out, train__blocks=2, train__block_order="ascending", train__blocks_always=always))
    given, now, trained = weights(model), exported(out), {n.rsplit(".", 1)[0] for n in states(out)}
    assert all(now[n] != given[n] for n in now if "embed" in n or "lm_head" in n or "layernorm" in n)
    assert now["model.norm.weight"] == given["model.norm.weight"]
    assert "lm_head.weight" in trained and "model.layers.0.mlp.up_proj.weight" in trained  # the third phase: the first block again
    assert "model.layers.3.mlp.up_proj.weight" not in trained and "model.layers.3.input_layernorm.weight" in trained
    home = os.path.join(tmp, "always-again")
    shutil.copytree(out, home, symlinks=True)
    for step in (6, 8):
        shutil.rmtree(f"{home}/checkpoint-{step}")
    ini = settings(tmp, model, home, train__blocks=2, train__block_order="ascending", train__blocks_always=always)
    megatrain("-q", "run", ini, "--resume")
    assert result(home)[1:] == result(out)[1:]


def other_bases(tmp):
    """Packed, in experts, with a table for both ends; read in place from the files where these are large enough."""
    cases = {"packed": (config(hidden_size=128, intermediate_size=256, head_dim=32), ("--quantize", "nf4")),
             "experts": (config("gpt_oss"), ()), "turned": (config("glm"), ()), "tied": (config(tie_word_embeddings=True, num_hidden_layers=3), ())}
    for name, (cfg, export) in cases.items():
        model = make_model(tmp, name, cfg, *export)
        out, over = os.path.join(tmp, name + "-out"), dict(train__block_order="ascending")
        megatrain("-q", "run", settings(tmp, model, out, **over))
        want = result(out)
        again = os.path.join(tmp, name + "-again")
        shutil.copytree(out, again, symlinks=True)
        for step in (6, 8):
            shutil.rmtree(f"{again}/checkpoint-{step}")
        megatrain("-q", "run", settings(tmp, model, again, **over), "--resume")
        assert result(again) == want, name
        if name == "experts":  # of a block that is trained last
            p = megatrain("-q", "run", settings(tmp, model, out + "-part", model__freeze="model.layers.3.mlp.experts.1.*", **over), expect=2)
            assert "in one tensor" in p.stderr and not os.path.exists(out + "-part/metrics.jsonl"), p.stderr
        loss = [m for m in metrics(out) if "eval_loss" in m][-1]["eval_loss"]
        wide = out + "-f32"
        megatrain("-q", "export", f"{out}/checkpoint-{STEPS}", wide, "--dtype", "f32")
        of = write_ini(out + "-eval.ini", base(wide, os.path.join(tmp, "data.jsonl"), out + "-eval",
                                               model__init="weights", model__dtype="bf16", data__eval="4"))
        text = megatrain("-q", "eval", of, "--json").stdout
        assert abs(json.loads(text)["loss"] - loss) < 1e-7 * loss, (name, text, loss)


def saved_at_each_switch(tmp, model):
    """A checkpoint of a block's last step is read back, and older ones are pruned, before the next block."""
    out = os.path.join(tmp, "switches")
    megatrain("-q", "run", settings(tmp, model, out, checkpoint__every=BLOCK, checkpoint__keep=1), "--max-steps", "7", "--no-save")
    assert [os.path.basename(p) for p in glob.glob(out + "/checkpoint-*")] == ["checkpoint-6"], os.listdir(out)


def what_rounding_leaves_of_a_block_is_said(tmp, model):
    """In files of bf16, with how much; in files of f32 nothing is lost."""
    out, wide = os.path.join(tmp, "rounded"), os.path.join(tmp, "model-f32")
    said = megatrain("run", settings(tmp, model, out, checkpoint__every=BLOCK), "--max-steps", BLOCK + 1).stderr
    masters, parts = {n[:-len(".master")]: v for n, v in states(out, BLOCK).items() if n.endswith(".master")}, {}
    for name, (_, _, raw) in masters.items():
        now, was = floats(raw), floats(b"".join(b"\0\0" + weights(model)[name][2][i:i + 2] for i in range(0, len(raw) // 2, 2)))
        left = floats(b"".join(struct.pack("<I", ((x + 0x8000) >> 16 << 16) & 0xffffffff) for x in struct.unpack(f"<{len(now)}I", raw)))
        parts[name] = [sum(x) for x in zip(*(((b - a) ** 2, (c - a) * (b - a), (c - b) ** 2) for a, b, c in zip(was, now, left)))]
    update, kept, lost = (sum(x) for x in zip(*parts.values()))
    least = min((p[1] / p[0], n) for n, p in parts.items() if p[0])
    want = (f"{100 * kept / update:.1f}% of what it learned is left, with an error of {100 * (lost / update) ** 0.5:.1f}% of its norm, "
            f"least of {least[1]} ({100 * least[0]:.1f}%)")
    assert want in said and "--dtype f32" in said, (want, said)
    megatrain("-q", "export", model, wide, "--dtype", "f32")
    said = megatrain("run", settings(tmp, wide, out + "-f32"), "--max-steps", BLOCK + 1).stderr
    assert glob.glob(out + "-f32/overlay-1-*") and "of what it learned" not in said, said
    for run, told in ((out, True), (out + "-f32", False)):  # an export in f32 has no more of it
        said = megatrain("export", f"{run}/checkpoint-{BLOCK + 1}", run + "-export", "--dtype", "f32").stderr
        assert ("what was trained before the last block began, or the last merge, is in bf16" in said) == told, said


def used_without_training(tmp, model, out):
    """The configuration of the run also evaluates, samples and plans: nothing of it trains then."""
    ini, export = settings(tmp, model, out), f"{out}-export-{STEPS}"
    loss = [m for m in metrics(out) if "eval_loss" in m][-1]["eval_loss"]
    text = megatrain("-q", "eval", ini, "--model", export, "--json").stdout
    assert abs(json.loads(text)["loss"] - loss) < 2e-3 * loss, (text, loss)
    megatrain("-q", "plan", ini, "--score", "0", "--machine", "rtx4090")


def refusals(tmp, model, out):
    ini = settings(tmp, model, os.path.join(tmp, "refused"))

    def refused(text, *args, code=2):
        p = megatrain("-q", "run", ini, *args, expect=code)
        assert text in p.stderr, p.stderr

    for key, text in (("adapter.kind=lora", "adapter.kind"), ("model.init=random", "model.init"), ("model.base_dtype=nf4", "base_dtype"),
                      ("checkpoint.frozen=copy", "checkpoint.frozen"), ("train.blocks=5", "4 layers"), ("train.blocks=some", "train.blocks"),
                      ("train.blocks_always=nothing", "blocks_always"), ("model.freeze=model.layers.0.*", "layers 0 to 0"),
                      ("model.freeze=model.layers.3.*", "layers 3 to 3")): # whichever is trained first
        refused(text, "--set", key, "--force", *(["--set", "train.block_order=ascending"] if "freeze" in key else []))
    for key in "train.blocks=off", "train.blocks=2", "train.block_steps=4", "train.block_order=ascending", "train.blocks_always=lm_head.*":
        refused(key.split("=")[0], "--set", key, f"--resume={out}/checkpoint-4")
    for key in "train.blocks=off", "train.blocks=2", "train.blocks_always=lm_head.*", "model.freeze=*.mlp.*":
        refused("overlay-1-", "--set", key, f"--resume={out}/checkpoint-4", "--force")
    alone = os.path.join(tmp, "alone")
    shutil.copytree(f"{out}/checkpoint-4", f"{alone}/checkpoint-4")
    p = megatrain("-q", "run", settings(tmp, model, os.path.join(tmp, "refused-too")), f"--resume={alone}/checkpoint-4", expect=None)
    assert p.returncode and "overlay-1-" in p.stderr and "is not there" in p.stderr, p.stderr


def the_dearest_block_is_known_at_the_start(tmp):
    """The last of two blocks has three of five layers: where there is room for the first alone, nothing is begun; what is
    promised for both holds to the end, and what the run never comes to is not asked for."""
    model = make_model(tmp, "unequal", config(num_hidden_layers=5, hidden_size=256, intermediate_size=1024, head_dim=64))
    data, out = os.path.join(tmp, "data.jsonl"), os.path.join(tmp, "unequal-out")
    over = dict(model__init="weights", model__dtype="bf16", train__blocks=2, train__block_order="ascending", train__block_steps=2,
                checkpoint__every=0, data__eval="", memory__unit="layer", train__steps=2)
    first = least_host(tmp, model, data, over, 2048)
    over.update(train__steps=4, memory__host_budget=first)
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    for command in ("run",), ("check",), ("plan",):
        p = megatrain("-q", *command, ini, expect=4)
        assert "layers 2 to 4, which train.blocks trains from step 2 on" in p.stderr, (command, p.stderr)
    assert not glob.glob(out + "/metrics.jsonl")
    over["memory__host_budget"] = least_host(tmp, model, data, over, 2048)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **over)), "--force")
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out + "-short", **{**over, "memory__host_budget": first})),
              "--set", "train.steps=2")


def blocks_are_one_run_to_who_watches(tmp, model, want):
    """One command gets all records, run.json keeps whence the run came, and rates of earlier blocks stay in their file."""
    out, got, rates = os.path.join(tmp, "watched"), os.path.join(tmp, "got.jsonl"), os.path.join(tmp, "rates.jsonl")
    ini = settings(tmp, model, out, log__exec=f"echo begin >> {got}; cat >> {got}")
    args = ["--rates", rates] if FULL else []
    if FULL:
        megatrain("-q", "probe", "all", "--force", "--brief")
    megatrain("-q", "run", ini, "--max-steps", 2)
    assert "resumed_from" not in json.load(open(out + "/run.json"))
    os.remove(got)
    megatrain("-q", "run", ini, "--resume", *args)
    assert losses(out) == want[0]
    said = open(got).read().splitlines()
    assert said.count("begin") == 1 and [m["step"] for m in map(json.loads, said[1:]) if "lr" in m] == list(range(3, STEPS + 1)), said
    assert json.load(open(out + "/run.json"))["resumed_from"].endswith("/checkpoint-2")
    steps = [m.get("step", "ops") for m in map(json.loads, open(rates))] if FULL else []
    assert not FULL or steps == ["ops", 2, 3, "ops", 3, 4, 5, 6, "ops", 6, 7, 8], steps


def a_changed_overlay_is_found(tmp, model, out):
    copy = os.path.join(tmp, "changed")
    shutil.copytree(out, copy, symlinks=True)
    for path in glob.glob(copy + "/checkpoint-[68]"):
        shutil.rmtree(path)
    path = glob.glob(copy + "/overlay-1-*/layers-*.safetensors")[0]
    with open(path, "r+b") as f:
        f.seek(-3, os.SEEK_END)
        byte = f.read(1)
        f.seek(-3, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))
    p = megatrain("-q", "run", settings(tmp, model, copy), "--resume", expect=3)
    assert "checksum" in p.stderr and "overlay-1-" in p.stderr, p.stderr
    p = megatrain("-q", "export", copy + "/checkpoint-4", copy + "-export", expect=3)
    assert "checksum" in p.stderr, p.stderr


with tempfile.TemporaryDirectory() as tmp:
    write_data(os.path.join(tmp, "data.jsonl"))
    model, out = make_model(tmp, "model", config()), os.path.join(tmp, "out")
    began = time.monotonic()
    megatrain("-q", "run", settings(tmp, model, out))
    took = time.monotonic() - began
    want = result(out)
    if part("first"):
        a_block_at_a_time(tmp, model, out)
        every_placement(tmp, model, want)
        refusals(tmp, model, out)
        the_dearest_block_is_known_at_the_start(tmp)
    if part("rest") and DEVICE == "cpu" and not SLOW:
        kills = [killed_anywhere(tmp, model, want, took, seed, 5) for seed in range(20 if FULL else 1)]
        assert sum(kills) > 0, kills
        stopped_while_a_block_is_opened(tmp, model, want)
        goes_on_elsewhere(tmp, model, out, want)
        other_bases(tmp)
    if part("rest"):
        blocks_are_one_run_to_who_watches(tmp, model, want)
        some_always(tmp, model)
        saved_at_each_switch(tmp, model)
        what_rounding_leaves_of_a_block_is_said(tmp, model)
        used_without_training(tmp, model, out)
        a_changed_overlay_is_found(tmp, model, out)
