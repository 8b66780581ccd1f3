# SPDX-License-Identifier: Apache-2.0
"""train.groups: gradients are the sums of groups, added by a tree; the same on any number of devices, which share the layers
or the groups (device.map)."""
import json
import os
import random
import struct
import sys
import tempfile

from same_bits import DRIVE, LORA, PIECES, POISON, RECOMPUTE, Same
from tiny import base, megatrain, read_safetensors, write_ini

STEPS = 4
# seven micro-batches in four groups: of two, and one of one
COMMON = {"train__steps": STEPS, "train__batch_size": 7, "train__micro_batch": 1, "train__groups": 4}
DATA = {"device__map": "data"}
BALANCED = {"train__router_aux_loss": 0.01}
MODELS = {"adapters": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 8256}, True)}
#: of each kind of model: environment, changes of the configuration
CASES = {
    "dense": {
        "two devices": (POISON, {"device__gpus": 2, **RECOMPUTE, "memory__slots": 2}),
        "three, kept": (POISON, {"device__gpus": 3, "memory__activations": "keep"}),
        "states on a drive": (PIECES, DRIVE),
        "halves": ({}, {"memory__unit": "half", "memory__slots": 2, **RECOMPUTE}),
        "updates under backward": (POISON, {"memory__update": "backward", "train__grad_clip": 0}),
        "by data": (POISON, {**DATA, "device__gpus": 3, **RECOMPUTE, "memory__slots": 2, "eval__every": 2}),
        "by data, kept": (POISON, {**DATA, "device__gpus": 4, "memory__activations": "keep"}),
        "by data, rows gathered": (POISON, {**DATA, "device__gpus": 2, "memory__embedding": "host", **RECOMPUTE}),
        "by data, on a drive": (PIECES, {**DATA, **DRIVE, "device__gpus": 2, "memory__activations": "offload"}),
        "by data, under backward": (POISON, {**DATA, "device__gpus": 2, "memory__update": "backward", "train__grad_clip": 0}),
    },
    "tied": {
        "three devices": (POISON, {"device__gpus": 3, **RECOMPUTE}),
        "bf16": (POISON, {"model__dtype": "bf16", "device__gpus": 2, "memory__activations": "offload"}),
        "bf16 by data": (POISON, {"model__dtype": "bf16", **DATA, "device__gpus": 4, "memory__slots": 2, **RECOMPUTE}),
    },
    "mixture": {
        "few slots": (POISON, {"memory__expert_group": 3, "memory__slots": 2, **RECOMPUTE}),
        "an expert at a time": ({}, {"memory__expert_group": 1, "device__gpus": 2, "device__map": "units"}),
        "by data": (POISON, {"device__gpus": 4, "memory__expert_group": 2, **RECOMPUTE, "eval__every": 2}), # auto
        "by data, on a drive": (PIECES, {**DATA, **DRIVE, "device__gpus": 3, "memory__expert_group": 3}),
        "all on a drive": (PIECES, {**DRIVE, "memory__activations": "offload", "memory__expert_group": 2}),
        "balanced": (POISON, {**BALANCED, "memory__expert_group": 2, **RECOMPUTE}),
        "balanced by two": (POISON, {**BALANCED, "device__gpus": 2, "memory__expert_group": 2, **RECOMPUTE}), # auto
        "balanced by three": (POISON, {**BALANCED, **DATA, "device__gpus": 3, "memory__activations": "keep"}),
        "balanced by four": (PIECES, {**BALANCED, **DATA, **DRIVE, "device__gpus": 4, "memory__activations": "offload"}),
    },
    "adapters": {
        "streamed": (POISON, {**LORA, **RECOMPUTE, "device__gpus": 2}),
        "resident": (POISON, {**LORA, "memory__adapters": "resident", "device__gpus": 3, **RECOMPUTE}),
        "by data": (POISON, {**LORA, "memory__adapters": "resident", "device__gpus": 4, **RECOMPUTE}),
        "by data, base in files": (POISON, {**LORA, **DATA, "device__gpus": 2, "memory__base": "files"}),
        "by data, experts": (POISON, {**LORA, **DATA, "adapter__targets": "all-linear", "device__gpus": 3}),
        "experts": (POISON, {**LORA, "adapter__targets": "all-linear", "memory__expert_group": 3, **RECOMPUTE}),
    },
}


def check_bits(tmp, kind):
    same = Same(tmp, kind, COMMON, models=MODELS)
    same.check(CASES[kind])
    for n, (numerics, want) in enumerate(list(same.known.items())):
        one = same.result(same.run(f"one group {n}", {**dict(numerics), "train__groups": 1}))
        for a, b in zip(one[0], want[0]):
            assert all(abs(x - y) < 1e-3 * abs(x) for x, y in zip(a[1:], b[1:])), (kind, a, b)
        assert one[2] != want[2], "train.groups = 4 sums as 1 does"


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def first_moments(out):
    """Of each tensor, after one step."""
    d, m = os.path.join(out, "checkpoint-1", "megatrain"), {}
    for n in os.listdir(d):
        if n.endswith(".safetensors"):
            for name, (dtype, _, data) in read_safetensors(os.path.join(d, n)).items():
                if name.endswith(".exp_avg"):
                    assert dtype == "F32"
                    m[name] = struct.unpack(f"<{len(data) // 4}f", data)
    return m


def check_oracle(tmp):
    """Four micro-batches of 32 loss tokens: each alone in a step has four times its part of the gradient, exactly; their
    sum by the tree is that of all. With beta1 = 0.5 the first moments are half of the gradients."""
    for kind in ("dense", "mixture"):
        model, r, rows = Same(tmp, kind, COMMON).model, random.Random(5), []
        for _ in range(4):
            ids = [r.randrange(272) for _ in range(40)]
            rows.append(json.dumps({"input_ids": ids, "labels": [-100] * 8 + ids[8:]}))
        got = []
        for name, lines, groups in [("all", rows, 4), ("chain", rows, 1)] + [(f"row {i}", [x], 1) for i, x in enumerate(rows)]:
            data, out = os.path.join(tmp, f"{kind}-{name}.jsonl"), os.path.join(tmp, f"{kind}-{name}".replace(" ", "-"))
            with open(data, "w") as f:
                f.write("\n".join(lines) + "\n")
            over = {"train__steps": 1, "train__batch_size": len(lines), "train__micro_batch": 1, "train__groups": groups,
                    "train__grad_clip": 0, "data__packing": "off", "data__shuffle": "off", "data__eval": "",
                    "optimizer__beta1": 0.5, "optimizer__grad_dtype": "f32", "train__warmup": 0}
            megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **over)))
            got.append(first_moments(out))
        whole, chain, parts = got[0], got[1], got[2:]
        assert whole and whole != chain, "the order of sums makes no difference: nothing is tested"
        for name, sums in whole.items():
            for k, x in enumerate(sums):
                a, b, c, d = (p[name][k] / 4 for p in parts)
                assert x == f32(f32(a + b) + f32(c + d)), (kind, name, k, x, a, b, c, d)


def check_map(tmp):
    """auto takes data where it gains, and never what moves bits."""
    for kind, groups, want in (("dense", 4, "units"), ("mixture", 4, "data"), ("mixture", 2, "units")):
        out = Same(tmp, kind, COMMON).run(f"{kind}-{groups}", {"device__gpus": 3, "train__groups": groups, "train__steps": 1})
        assert f"map = {want}" in open(os.path.join(out, "config.effective.ini")).read(), (kind, groups)


def check_resume(tmp):
    """With the checkpoint's groups, on other devices; another number is refused by name."""
    same = Same(tmp, "dense", COMMON)
    out = same.run("parts", RECOMPUTE, "--max-steps", 2, env=POISON)
    assert "groups = 4" in open(os.path.join(out, "config.effective.ini")).read()
    ini = os.path.join(tmp, "other.ini")
    for groups in (1, 2):
        write_ini(ini, base(same.model, same.data, out, **same.keys({"train__groups": groups})))
        said = megatrain("run", ini, "--resume", expect=2).stderr
        assert "train.groups" in said and "4" in said, said
    got, want = same.result(same.run("parts", {**RECOMPUTE, **DATA, "device__gpus": 3}, "--resume", env=POISON)), same.reference({})
    assert (got[0], got[2]) == (want[0], want[2]), (got[0], want[0])


def check_refusals(tmp):
    same = Same(tmp, "dense", {"train__steps": STEPS})
    for over, words in (({"train__groups": 3}, ("train.groups = 3", "power of two")),
                        ({"train__groups": 128}, ("train.groups", "64")),
                        ({"train__groups": 4}, ("train.groups = 4", "3 micro-batches")),
                        ({"train__groups": 2, "device__gpus": 3, **DATA}, ("device.map = data", "train.groups = 3", "is 2"))):
        same.refused(over, *words)
    paths = []
    for i in range(2):
        one = os.path.join(tmp, f"learner-{i}")
        paths.append(write_ini(one + ".ini", base(same.model, same.data, one, adapter__kind="lora", train__groups=2)))
    said = megatrain("run", "--dry-run", *paths, expect=2).stderr
    assert "train.groups above 1" in said and "learner-0" in said, said


def main():
    case = sys.argv[1]
    with tempfile.TemporaryDirectory() as tmp:
        if case in CASES:
            check_bits(tmp, case)
        else:
            {"oracle": check_oracle, "map": check_map, "resume": check_resume, "refusals": check_refusals}[case](tmp)


main()
