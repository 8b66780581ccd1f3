# SPDX-License-Identifier: Apache-2.0
"""Twenty steps by blocks of layers against badam's own optimizer over torch's AdamW (scripts/reference/parity_blocks.py), on a dense
model and on a mixture. The model's files are in FP32 here, so that a switch rounds nothing, as in badam."""
import json
import os
import shutil
import tempfile

import sums
from test_parity import FEW, HERE, at_most, relative
from tiny import base, fixture, megatrain, metrics, read_safetensors, write_ini
from widen import widen


def train(tmp, model, expected, **over):
    out = os.path.join(tmp, "out" + "-".join(over))
    data = os.path.join(tmp, "data.jsonl")
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    keys = {"train__block_steps": expected["block_steps"], **over}
    ini = write_ini(out + ".ini", base(model, data, out, model__init="weights", model__dtype="f32", data__eval="",
        data__packing="off", data__shuffle="off", train__steps=expected["steps"], train__batch_size=expected["rows"],
        train__micro_batch=2, train__learning_rate=expected["learning_rate"], train__min_lr_ratio=0, train__blocks="layers",
        train__block_order=expected["order"], optimizer__grad_dtype="f32", optimizer__weight_decay=0, **keys))
    megatrain("-q", "run", ini)
    return [m for m in metrics(out) if "loss" in m], os.path.join(out, f"checkpoint-{expected['steps']}")


def weight_errors(checkpoint, want, model):
    megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
    got = read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))
    given = read_safetensors(os.path.join(model, "model.safetensors"))
    assert set(got) == set(given) and all(got[n] == given[n] for n in set(got) - set(want)), "what no block has stays"
    assert all(got[n] != given[n] for n in want)
    return sums.errors(got, want)


def check(tmp, name):
    path = os.path.join(HERE, "optimizers", f"{name}-badam")
    with open(path + ".json") as f:
        expected = json.load(f)
    print(f"{name}: {expected['made_with']}")
    model, want = widen(fixture(name), os.path.join(tmp, "model")), sums.read(path + ".sums")
    steps, checkpoint = train(tmp, model, expected)
    assert len(steps) == expected["steps"]
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 1e-6)
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"])), 2e-5)
    errors = weight_errors(checkpoint, want, model)
    own = {n: e for n, e in errors.items() if not n.endswith("k_proj.bias")}  # its gradient is 0 but for rounding
    # a new first moment makes a whole step of a gradient that is almost 0: of such an element the sign may differ
    at_most("weights of the median tensor", sorted(own.values())[len(own) // 2], 1e-6)
    at_most("weights", max(own.values()), 2e-5)
    # the comparison sees a change: a switch a step later
    _, changed = train(tmp, model, expected, train__block_steps=expected["block_steps"] + 1)
    assert max(weight_errors(changed, want, model).values()) > 10 * max(own.values())


for name in ("qwen2",) if FEW else ("qwen2", "qwen2_moe"):
    with tempfile.TemporaryDirectory() as tmp:
        check(tmp, name)
