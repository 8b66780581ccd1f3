# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of layers that share weights, the last ten of them each with its own again, against modules of transformers with
the same parameters, which are then copied with AdamW's states (scripts/reference/parity_share.py): layers with a window beside
layers without, and a mixture. In FP32; torch in double."""
import json
import os
import re
import shutil
import tempfile

import sums
from test_parity import FEW, HERE, at_most, relative
from tiny import base, config, megatrain, metrics, read_safetensors, write_ini, write_model

#: family, what its configuration has of its own, layers of a group
MODELS = {"gemma3_text": ({"num_hidden_layers": 5, "pad_token_id": None}, 2),
          "qwen3_moe": ({"num_hidden_layers": 4, "pad_token_id": None}, 4)}


#: weights that are compared: those of the first two layers, of their experts the first
KEPT = re.compile(r"layers\.[0-1]\.(?!.*experts\.[1-7]\.)")


def train(tmp, name, expected, **over):
    own, share = MODELS[name]
    model, data = write_model(os.path.join(tmp, name), config(name, **own)), os.path.join(tmp, "data.jsonl")
    out = os.path.join(tmp, name + "-out" + "-".join(over))
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    keys = {"model__share_layers": share, "train__delink_at": expected["delink_at"], **over}
    ini = write_ini(out + ".ini", base(model, data, out, data__eval="", data__packing="off", data__shuffle="off",
        train__steps=expected["steps"], train__batch_size=expected["rows"], train__micro_batch=2,
        train__learning_rate=expected["learning_rate"], train__min_lr_ratio=0, optimizer__grad_dtype="f32", **keys))
    megatrain("-q", "run", ini)
    return out, [m for m in metrics(out) if "loss" in m]


def exported(out, step):
    """The weights of a checkpoint in FP32, and their folder."""
    to = f"{out}-f32-{step}"
    megatrain("-q", "export", os.path.join(out, f"checkpoint-{step}"), to, "--dtype=f32")
    return read_safetensors(os.path.join(to, "model.safetensors")), to


def check(tmp, name):
    with open(os.path.join(HERE, "optimizers", f"{name}-share.json")) as f:
        expected = json.load(f)
    print(f"{name}: {expected['made_with']}")
    out, steps = train(tmp, name, expected)
    assert len(steps) == expected["steps"]
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"])), 2e-5)
    got, _ = exported(out, expected["steps"])
    want = sums.read(os.path.join(HERE, "optimizers", f"{name}-share.sums"))
    assert set(want) == {n for n in got if KEPT.search(n)}
    at_most("weights", max(sums.errors(got, want).values()), 2e-5)
    # the comparison sees a change: a step more with the same weights
    _, changed = train(tmp, name, expected, train__delink_at=expected["delink_at"] + 1)
    assert max(relative(m["loss"], l) for m, l in zip(changed, expected["losses"])) > 1e-4


if __name__ == "__main__":
    for model in list(MODELS)[:1 if FEW else None]:
        with tempfile.TemporaryDirectory() as folder:
            check(folder, model)
