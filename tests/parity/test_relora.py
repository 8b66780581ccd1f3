# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of adapters that are merged every few of them against what PEFT and torch's AdamW made of the same
(scripts/reference/parity_relora.py). The model's files are in FP32 here, so that a merge rounds next to nothing."""
import json
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
from test_parity import at_most, floats, relative
from tiny import FULL, base, fixture, megatrain, metrics, read_safetensors, write_ini
from widen import widen


def model_of(tmp):
    return widen(fixture("qwen2"), os.path.join(tmp, "model"))


def train(tmp, model, expected, **over):
    out, data = os.path.join(tmp, "out" + "-".join(over)), os.path.join(tmp, "data.jsonl")
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    keys = {"adapter__" + k: expected[k] for k in ("merge_every", "merge_warmup", "rank", "alpha")}
    keys.update(over)
    ini = write_ini(out + ".ini", base(model, data, out, model__init="weights", model__dtype="f32", data__eval="",
        data__packing="off", data__shuffle="off", train__steps=expected["steps"], train__batch_size=expected["rows"],
        train__micro_batch=2, train__learning_rate=expected["learning_rate"], train__min_lr_ratio=0, optimizer__grad_dtype="f32",
        adapter__kind="lora", adapter__targets=", ".join(expected["targets"]), **keys))
    megatrain("-q", "run", ini)
    return out, [m for m in metrics(out) if "loss" in m]


def weight_errors(out, expected):
    to = out + "-export"
    megatrain("-q", "export", f"{out}/checkpoint-{expected['steps']}", to, "--dtype=f32")
    got, errors = read_safetensors(os.path.join(to, "model.safetensors")), []
    for name, (norm, some) in expected["weights"].items():
        all_of = floats(got[name][2])
        every = max(1, len(all_of) // 64)
        difference = sum((a - b) ** 2 for a, b in zip(all_of[::every], some)) / sum(b * b for b in some)
        errors.append(max(difference ** 0.5, relative(sum(a * a for a in all_of) ** 0.5, norm)))
    return errors


def main():
    with open(os.path.join(HERE, "adapters", "qwen2-relora.json")) as f:
        expected = json.load(f)
    with tempfile.TemporaryDirectory() as tmp:
        model = model_of(tmp)
        out, steps = train(tmp, model, expected)
        at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
        at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"])), 5e-5)
        at_most("weights", max(weight_errors(out, expected)), 1e-5)
        if not FULL:
            return
        # the comparison sees a change
        _, changed = train(tmp, model, expected, adapter__merge_warmup=2)
        assert max(relative(m["loss"], l) for m, l in zip(changed, expected["losses"])) > 1e-4


if __name__ == "__main__":
    main()
