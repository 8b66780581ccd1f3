# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: no placement changes a bit, a killed run goes on with the same bits, frozen experts take
neither states nor traffic, evaluation, sampling and plans work, and what cannot be is refused by name."""
import csv
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import tempfile

from tiny import (ORACLE, SLOW, base, config, drawn, fixture, losses, megatrain, metrics, planes, read_safetensors,
                  write_data, write_ini, write_model, write_safetensors)

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))  # budgets that bite are found in other processes and builds
STEPS = 5
MOE = dict(mlp_only_layers=[1], num_hidden_layers=3)
PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}
PLACEMENTS = {
    "an expert at a time": ({}, {"memory__expert_group": 1, "memory__slots": 2, "memory__expert_sums": 1024}),
    "groups of 3": ({}, {"memory__expert_group": 3, "memory__slots": 3, "memory__expert_sums": 3}),
    "all experts, 5 slots": ({}, {"memory__expert_group": 8, "memory__slots": 5}),
    "kept": ({}, {"memory__activations": "keep", "memory__expert_group": 3}),
    "offloaded": ({}, {"memory__activations": "offload"}),
    "recomputed": ({}, {"memory__activations": "recompute", "memory__expert_group": 2}),
    "half layers": ({}, {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"}),
    "one thread": ({}, {"device__cpu_threads": 1}),
    "poisoned": ({"MEGATRAIN_POISON": "1"}, {"memory__expert_group": 3, "memory__slots": 2}),
    "eval and save at every step": ({}, {"eval__every": 1, "checkpoint__every": 1}),
    "states on disk": (PIECES, {"memory__states": "disk", "memory__nvme_paths": "{drive}", "memory__expert_group": 2}),
    "all on disk": ({**PIECES, "MEGATRAIN_POISON": "1"},
                    {"memory__states": "disk", "memory__nvme_paths": "{drive}", "memory__activations": "disk",
                     "memory__device_budget": "{device}", "memory__host_budget": "{host}"}),
}


def smallest(tmp, sections, key, most):
    lo, hi = 64, most
    while hi - lo > 64:
        mid = (lo + hi) // 2
        sections["memory"][key] = f"{mid}KiB"
        ini = write_ini(os.path.join(tmp, "probe.ini"), sections)
        if megatrain("-q", "run", "--dry-run", ini, expect=None, binary=ORACLE).returncode == 0:
            hi = mid
        else:
            lo = mid
    return f"{hi}KiB"


def run(tmp, name, model, data, env=None, **over):
    out = os.path.join(tmp, name.replace(" ", "-").replace(",", ""))
    over = {"train__steps": STEPS, **over}
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    megatrain("-q", "run", ini, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def tight(tmp, model, data, over):
    """Fills in budgets: the least that are accepted, so that what belongs to a step leaves the device."""
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    over = {k: v.replace("{drive}", drive) if isinstance(v, str) else v for k, v in over.items()}
    for key in ("device", "host"):
        if over.get(f"memory__{key}_budget") == f"{{{key}}}":
            rest = {k: v for k, v in over.items() if "{" not in str(v)}
            over[f"memory__{key}_budget"] = smallest(tmp, base(model, data, os.path.join(tmp, "none"), **rest),
                                                     f"{key}_budget", 256 << 10)
    return over


def placement_moves_no_bit(tmp, model, data):
    for dtype in ("f32", "bf16"):
        first = run(tmp, f"first {dtype}", model, data, model__dtype=dtype)
        for name, (env, over) in PLACEMENTS.items():
            if dtype == "f32" and (SLOW and name != "all on disk" or
                                   name in ("half layers", "eval and save at every step", "groups of 3")):
                continue
            other = run(tmp, f"{name} {dtype}", model, data, env, **tight(tmp, model, data, {**over, "model__dtype": dtype}))
            assert other[0] == first[0], (dtype, name, other[0], first[0])
            assert other[1] == first[1], (dtype, name)
        resumed(tmp, model, data, dtype, first)


def balance_moves_with_no_placement(tmp, model, data):
    """A shared expert with a gate, and the loss that balances experts: the same bits; the loss is of the step, however
    many micro-batches it has."""
    shared = write_model(os.path.join(tmp, "shared"), config("qwen2_moe", **MOE))
    def steps(name, env=None, **over):
        out = os.path.join(tmp, name.replace(" ", "-"))
        megatrain("-q", "run", write_ini(out + ".ini", base(shared, data, out, train__steps=3, train__router_aux_loss=0.1,
                                                            **over)), env=env)
        return [(m["loss"], m["grad_norm"], m["aux_loss"]) for m in metrics(out) if "loss" in m], \
            planes(os.path.join(out, "checkpoint-3"))
    first = steps("kept", memory__activations="keep")
    assert steps("one at a time", memory__expert_group=1, memory__slots=2, memory__activations="recompute") == first
    assert steps("three at a time", {"MEGATRAIN_POISON": "1"}, memory__expert_group=3, memory__activations="offload") == first
    assert steps("half layers", memory__unit="half", memory__activations="recompute") == first
    for a, b in zip(first[0], steps("other micro-batches", train__micro_batch=3)[0]):
        assert all(abs(x - y) < 1e-6 * x for x, y in zip(a, b)), (a, b)
    assert all(m[2] >= 2 for m in first[0]), "top_k where evenly, more where not"


def biases_and_other_routers_move_no_bit(tmp, model, data):
    """gpt-oss: biases of experts, a clamped unit, sinks; GLM-4.5: sigmoids, groups of experts, a shared expert; DeepSeek:
    latent attention, with a latent of queries and without."""
    data = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    for family in ("gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        released = fixture(family)
        def bits(name, env=None, **over):
            out = os.path.join(tmp, f"{family}-{name}")
            megatrain("-q", "run", write_ini(out + ".ini", base(released, data, out, model__init="weights", train__steps=3,
                                                                model__dtype="bf16", data__eval="", **over)), env=env)
            return losses(out), planes(os.path.join(out, "checkpoint-3"))
        first = bits("all")
        assert bits("one", memory__expert_group=1, memory__slots=2, memory__activations="recompute") == first, family
        assert bits("three", {"MEGATRAIN_POISON": "1"}, memory__expert_group=3, memory__activations="offload") == first, family


def f32_routers_are_f32_in_bf16(tmp, model, data):
    """ERNIE, Hunyuan: bits of a router below bf16's count in bf16 compute; no placement moves one; files keep them."""
    data = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    families = ("ernie4_5_moe", "mlp.gate.weight"), ("hunyuan_v1_moe", "mlp.gate.wg.weight")
    for family, name in families[:1] if SLOW else families:  # parity/ has the other's names under sanitizers
        released = fixture(family)
        t = read_safetensors(os.path.join(released, "model.safetensors"))
        routers = [n for n in t if n.endswith(name)]
        assert routers and all(t[n][0] == "F32" for n in routers)
        r, wide = random.Random(1), dict(t)
        for n in routers:  # lo anew, below half a unit of hi: the same in bf16
            wide[n] = (*t[n][:2], b"".join(struct.pack("<I", u & 0xffff0000 | r.randrange(0x7fff))
                                           for u, in struct.iter_unpack("<I", t[n][2])))
        models = {}
        for kind, tensors in (("wide", wide), ("rounded", t)):
            models[kind] = os.path.join(tmp, f"{family}-{kind}")
            shutil.copytree(released, models[kind])
            write_safetensors(os.path.join(models[kind], "model.safetensors"), tensors)
        def bits(run, kind="wide", env=None, split=0, **over):
            out = os.path.join(tmp, f"{family}-{run}-run")
            ini = write_ini(out + ".ini", base(models[kind], data, out, **{
                "model__init": "weights", "train__steps": 3, "model__dtype": "bf16", "data__eval": "", **over}))
            if split:
                megatrain("-q", "run", ini, "--max-steps", split)
            megatrain("-q", "run", ini, *["--resume"] * bool(split), env=env)
            return losses(out), planes(os.path.join(out, "checkpoint-3"))
        first = bits("all")
        assert bits("rounded", "rounded")[0][0] != first[0][0], f"{family}: what is below bf16 does not count"
        assert bits("f32", model__dtype="f32")[0][0] != bits("f32r", "rounded", model__dtype="f32")[0][0]
        for run, more in {"one": {"memory__expert_group": 1, "memory__slots": 2, "memory__activations": "recompute",
                                  "env": {"MEGATRAIN_POISON": "1"}},
                          "half": {"memory__unit": "half", "memory__activations": "offload", "env": {"MEGATRAIN_POISON": "1"}},
                          "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "env": PIECES},
                          "split": {"split": 1}}.items():
            assert bits(run, **more) == first, (family, run)
        host = smallest(tmp, base(models["wide"], data, os.path.join(tmp, "none"), model__init="weights", data__eval="",
            model__dtype="bf16", memory__states="disk", memory__nvme_paths=drive), "host_budget", 256 << 10)
        assert bits("all on disk", memory__states="disk", memory__nvme_paths=drive, memory__host_budget=host,
                    env={**PIECES, "MEGATRAIN_POISON": "1"}) == first, family
        saved = read_safetensors(os.path.join(tmp, f"{family}-all-run", "checkpoint-3", "model.safetensors"))
        assert all(saved[n][0] == "F32" and saved[n][2] != wide[n][2] for n in routers)
        assert all(v[0] == t[n][0] for n, v in saved.items()), "dtypes of the release"
        # frozen they stay as they are, with other bits or none below bf16
        for kind, tensors in (("wide", wide), ("rounded", t)):
            frozen = {"model__freeze": "*.gate.w*"}
            one = bits(f"frozen-{kind}", kind, **frozen)
            assert one == bits(f"frozen-{kind}-disk", kind, memory__states="disk", memory__nvme_paths=drive, **frozen)
            saved = read_safetensors(os.path.join(tmp, f"{family}-frozen-{kind}-run", "checkpoint-3", "model.safetensors"))
            assert all(saved[n] == tensors[n] for n in routers), kind


def norms_that_files_have_in_f32_stay_so(tmp, model, data):
    data = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    released = fixture("gpt_oss")
    t = read_safetensors(os.path.join(released, "model.safetensors"))
    for n, (dtype, shape, raw) in t.items():
        if "norm" in n:  # a bit below bf16's
            t[n] = ("F32", shape, b"".join(struct.pack("<I", u << 16 | 5) for u, in struct.iter_unpack("<H", raw)))
    wide = os.path.join(tmp, "norms")
    shutil.copytree(released, wide)
    write_safetensors(os.path.join(wide, "model.safetensors"), t)
    for freeze in "", "*norm*":
        out = os.path.join(tmp, "norms-run" + str(bool(freeze)))
        megatrain("-q", "run", write_ini(out + ".ini", base(wide, data, out, model__init="weights", train__steps=2,
                                                            model__dtype="bf16", data__eval="", model__freeze=freeze,
                                                            checkpoint__frozen="copy")))
        for folder in os.path.join(out, "checkpoint-2"), os.path.join(out, "export"):
            if folder.endswith("export"):
                megatrain("-q", "export", os.path.join(out, "checkpoint-2"), folder)
            saved = read_safetensors(os.path.join(folder, "model.safetensors"))
            assert {n: v[0] for n, v in saved.items()} == {n: v[0] for n, v in t.items()}
            norms = [n for n in t if "norm" in n]
            assert norms and all((saved[n] == t[n]) == bool(freeze) for n in norms), freeze


def on_a_gpu(tmp, model, data):
    """The same with rows padded to what its products like; less of it, for the emulated one is slow."""
    over = dict(model__dtype="bf16", train__steps=2, memory__device_budget="128MiB")
    def bits(name, env=None, **more):
        out = os.path.join(tmp, name)
        megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **{**over, **more})), env=env)
        return losses(out), planes(os.path.join(out, "checkpoint-2"))
    first = bits("all")
    assert bits("one", {"MEGATRAIN_POISON": "1"}, memory__expert_group=1, memory__slots=2) == first
    assert bits("half", memory__expert_group=3, memory__unit="half", memory__activations="offload") == first


def resumed(tmp, model, data, dtype, first):
    """Three steps with one placement, the rest with another."""
    out = os.path.join(tmp, f"resumed-{dtype}")
    a = write_ini(out + ".a.ini", base(model, data, out, model__dtype=dtype, train__steps=STEPS, memory__expert_group=1,
                                       checkpoint__every=3))
    b = write_ini(out + ".b.ini", base(model, data, out, model__dtype=dtype, train__steps=STEPS, memory__expert_group=5))
    megatrain("-q", "run", a, "--max-steps", 3)
    megatrain("-q", "run", b, "--resume")
    assert (losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))) == first, "resumed"


def gradients_of_experts_do_not_depend_on_the_micro_batch(tmp, model, data):
    """An expert's gradient is one product over the step's rows; what other tensors add up by micro-batch does differ."""
    def moments(micro):
        out = os.path.join(tmp, f"micro-{micro}")
        megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, train__steps=1, train__micro_batch=micro,
                                                            train__grad_clip=0, data__shuffle="off")))
        d, all_ = os.path.join(out, "checkpoint-1", "megatrain"), {}
        for f in os.listdir(d):
            if f.endswith(".safetensors"):
                all_.update(read_safetensors(os.path.join(d, f)))
        return {k: v for k, v in all_.items() if not k.endswith(".master")}
    first = moments(1)
    experts = [k for k in first if ".experts." in k]
    assert len(experts) == 2 * 8 * 3 * 2
    assert any(any(first[k][2]) for k in experts)
    for micro in (2, 3, 6):
        other = moments(micro)
        assert all(other[k] == first[k] for k in experts), micro
        assert any(other[k] != first[k] for k in first), "the comparison sees a difference"


def rows(text, tier):
    """Memory table of a dry run or plan: use -> bytes."""
    table, now = {}, None
    for line in text.splitlines():
        m = re.match(r"\s+(device|host|nvme|disk|sum)?\s*(\S.*?)\s{2,}(\d+)\b", line)
        if m:
            now = m.group(1) or now
            if now == tier:
                table[m.group(2)] = int(m.group(3))
    return table


def kib(text, resource):
    return int(float(re.search(resource + r"\s+\S+%\s+([0-9.]+) KiB", text).group(1)) * 1024)


def drives_wear_out(ini, freeze):
    """What the plan says of it: experts that are trained wear drives out, and what would not."""
    plan = ["plan", ini, "--machine", "rtx4090", "--nvme", "7GB/s", "--drives", "2"]
    text = megatrain(*plan).stdout  # of the steps that the configuration asks for
    assert re.search(r"The run writes \S+ TB, \S+% of that", text) and "wears the drives out" not in text, text
    # an epoch of data that are not prepared is a run of unknown length
    plan += ["--set", "train.steps=0", "--set", "train.epochs=1", "--set", f"data.cache_dir={ini}.unprepared"]
    text, j = megatrain(*plan).stdout, json.loads(megatrain(*plan, "--json").stdout)
    a_day = next(r["bytes"] for r in j["resources"] if r["resource"] == "disk writes") / j["step_seconds"] * 86400e-12
    assert abs(j["drives_tb_a_day"] / a_day - 1) < 1e-6, j
    assert abs(j["drives_worn_out_days"] * j["drives_tb_a_day"] / j["drives_rated_tb"] / 2 - 1) < 1e-6
    tokens = j["drives_worn_out_days"] * 86400 / j["step_seconds"] * j["tokens_per_step"]
    assert abs(j["drives_worn_out_tokens"] / tokens - 1) < 1e-6, j
    a_million = float(re.search(r"written a step, (\S+) TB for a million tokens", text)[1])
    assert abs(a_million * j["drives_worn_out_tokens"] * 1e-6 / j["drives_rated_tb"] / 2 - 1) < 1e-3, (a_million, j)
    assert "2400 TB each (assumed)" in text and "wears the drives out in" in text, text
    experts = 2 * 8 * 3 * 48 * 64
    told = re.search(r"model.freeze = \*.experts.\*: \S+ parameters are trained, states of (\S+) GB\s+instead of (\S+) GB", text)
    assert bool(told) == (not freeze) and ("the others are frozen" in text) == bool(freeze), text
    if told:  # master, two moments and a gradient in bf16
        assert abs((float(told[2]) - float(told[1])) * 1e9 / (14 * experts) - 1) < 1e-2, told
        in_bf16 = megatrain(*plan, "--set", "optimizer.state_dtype=bf16").stdout
        sums = [float(re.search(r"host memory for the states: (\S+) GB", t)[1]) for t in (in_bf16, text)]
        assert abs(sums[0] / sums[1] * 14 / 10 - 1) < 1e-3, sums
        less = [float(re.search(r"state_dtype = 8bit: states of (\S+) GB less", t)[1]) for t in (in_bf16, text)]
        assert all(abs(l / s * whole / saved - 1) < 1e-3 for l, s, whole, saved in
                   zip(less, sums, (10, 14), (1.875, 5.875))), (less, sums)


def frozen_experts_take_nothing(tmp, model, data):
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive)
    bytes_of, moments = [], []
    for freeze in ("", "*.experts.*"):
        out = os.path.join(tmp, "frozen" + str(bool(freeze)))
        ini = write_ini(out + ".ini", base(model, data, out, model__dtype="bf16", model__freeze=freeze, train__steps=3,
                                           memory__states="disk", memory__nvme_paths=drive))
        megatrain("-q", "run", ini)
        m = metrics(out)
        steps = [x for x in m if "loss" in x]
        assert steps[-1]["grad_norm"] > 0 and not steps[-1]["skipped"]
        names = set()
        d = os.path.join(out, "checkpoint-3", "megatrain")
        for f in os.listdir(d):
            if f.endswith(".safetensors"):
                raw = open(os.path.join(d, f), "rb").read()
                names |= set(json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")]))
        moments.append({n for n in names if ".experts." in n and not n.endswith(".master")})
        text = megatrain("plan", ini, "--machine", "rtx4090", "--set", "memory.states=host").stdout
        bytes_of.append({**rows(text, "host"), "d2h": kib(text, "D2H link")})
        drives_wear_out(ini, freeze)
    experts = 2 * 8 * 3 * 48 * 64  # parameters: two of the layers are mixtures
    assert moments[0] and not moments[1], moments
    for use, size in {"first moments": 4, "second moments": 4, "gradients": 2, "d2h": 2}.items():
        assert bytes_of[0][use] - bytes_of[1][use] == size * experts, (use, bytes_of)
    assert bytes_of[1]["frozen weights (hi)"] == 2 * experts


def other_commands(tmp, model, data):
    out = os.path.join(tmp, "eval")
    over = dict(model__dtype="f32", train__steps=2, eval__every=1, eval__at_start="on", log__csv="on", train__router_aux_loss=0.01)
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    megatrain("-q", "run", ini)
    evals = [m["eval_loss"] for m in metrics(out) if "eval_loss" in m]
    assert len(evals) == 3 and evals[0] > evals[-1] > 0, evals
    pictures = drawn(out, html=os.path.join(tmp, "page.html"))
    for title in ("Balance of experts", "Entropy of the choice of experts", "Experts without rows", "Share of the fullest expert"):
        assert not pictures or any(title in p for p in pictures.values()), title
    layers = [m for m in metrics(out) if "layer" in m]
    assert [(m["step"], m["layer"]) for m in layers] == [(1, 0), (1, 2), (2, 0), (2, 2)], layers
    for m in layers:
        assert 1 <= m["expert_balance"] <= 8 and 0 <= m["expert_entropy"] <= 1 and 1 / 8 <= m["expert_max_share"] <= 0.5, m
    with open(os.path.join(out, "metrics-layers.csv")) as f:
        assert [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)] == layers
    with open(os.path.join(out, "metrics.csv")) as f:
        told = [row for row in csv.DictReader(f) if row["loss"]]
    assert [float(row["aux_loss"]) for row in told] == [m["aux_loss"] for m in metrics(out) if "loss" in m]
    plan = megatrain("plan", ini, "--machine", "rtx4090").stdout
    assert re.search(r"memory.expert_group\s+8\s+of 8 experts", plan), plan
    for use in ("rows of a step", "sums of a step", "routing"):
        assert use in plan, plan
    tokens = [int(x) for x in re.search(r"Step\s+(\d+) tokens", plan).groups()]
    assert tokens[0] == 6 * 64
    saved = os.path.join(out, "checkpoint-2")
    text, told = megatrain("inspect", saved).stdout, json.loads(megatrain("inspect", saved, "--json").stdout)
    size = {t["name"]: math.prod(t["shape"]) for t in told["tensors"]}
    experts = sum(n for name, n in size.items() if ".experts." in name)
    active = told["parameters"] - size["model.embed_tokens.weight"] - experts * (8 - 2) // 8
    assert told["active_parameters"] == active and experts * 2 > told["parameters"], told["active_parameters"]
    assert f"8 experts of width 48, 2 for each token; {told['parameters']} parameters, {active / 1e6:.3g}M of them active" in text, text
    assert f", {active / 1e6:.3g}M of them active" in plan, plan


def refusals(tmp, model, data):
    def fails(words, **over):
        ini = write_ini(os.path.join(tmp, "refused.ini"), base(model, data, os.path.join(tmp, "refused"), **over))
        p = megatrain("run", ini, expect=None)
        assert p.returncode != 0 and all(w in p.stderr for w in words), p.stderr
    fails(["for its experts", "would fit"], train__batch_size=400, memory__device_budget="32MiB")
    dense = write_model(os.path.join(tmp, "dense-alone"), config("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]))  # not one has experts
    ini = write_ini(os.path.join(tmp, "dense-alone.ini"), base(dense, data, os.path.join(tmp, "dense-alone-out"), train__router_aux_loss=0.01))
    said = megatrain("run", ini, expect=2).stderr
    assert "train.router_aux_loss balances the experts of a mixture" in said, said


def logits_that_are_not_finite_skip_the_step(tmp, model, data):
    out = os.path.join(tmp, "skips")
    wild = write_model(os.path.join(tmp, "wild"), config("qwen3_moe", **{**MOE, "initializer_range": 1.8e18}))
    p = megatrain("run", write_ini(out + ".ini", base(wild, data, out, train__steps=2)), expect=6)
    steps = [m for m in metrics(out) if "loss" in m]
    assert [m["skipped"] for m in steps] == [True, True], steps
    assert steps[0]["bad_tensor"] == "model.layers.0.mlp.gate.weight", steps[0]
    assert "logits of model.layers.0.mlp.gate.weight are not finite" in p.stderr, p.stderr


with tempfile.TemporaryDirectory() as tmp:
    model = write_model(os.path.join(tmp, "model"), config("qwen3_moe", **MOE))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    for case in sys.argv[1:]:
        print(case)
        globals()[case](tmp, model, data)
