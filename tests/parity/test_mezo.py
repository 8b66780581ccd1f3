# SPDX-License-Identifier: Apache-2.0
"""Fifty steps of MeZO against its formulas in double (scripts/reference/mezo_fixtures.py): of all weights and of adapters, with
both noises, several samples and some of the layers."""
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from test_parity import HERE, SLOW, at_most, relative
from tiny import base, fixture, megatrain, metrics, read_safetensors, write_ini

CASES = {
    "normal": ("qwen2", 2e-4, {"noise": "normal", "eps": 5e-3, "samples": 2}),
    "sign": ("qwen2", 2e-4, {"noise": "sign", "eps": 5e-3, "layers": 0.5}),
    "small": ("qwen2", 2e-4, {"noise": "sign", "eps": 5e-3, "small": 0.4}),
    "adapters-normal": ("llama", 1e-3, {"noise": "normal", "eps": 5e-3}),
    "adapters-sign": ("llama", 1e-3, {"noise": "sign", "eps": 5e-3, "samples": 3, "layers": 0.5}),
}


def train(tmp, case, expected, **over):
    out, data, adapters = os.path.join(tmp, "run"), os.path.join(tmp, "data.jsonl"), case.startswith("adapters")
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    more = {"adapter__kind": "lora", "adapter__path": fixture("adapters/llama/start")} if adapters else {}
    ini = write_ini(out + ".ini", base(fixture(expected["model"]), data, out, **{
        "model__init": "weights", "data__eval": "", "data__packing": "off", "data__shuffle": "off", "train__steps": expected["steps"],
        "train__batch_size": expected["rows"], "train__learning_rate": expected["learning_rate"], "train__min_lr_ratio": 0,
        "train__grad_clip": 0, "optimizer__type": "mezo", **{f"mezo__{k}": v for k, v in expected["mezo"].items()}, **more, **over}))
    megatrain("-q", "run", ini)
    return [m for m in metrics(out) if "loss" in m], os.path.join(out, f"checkpoint-{expected['steps']}")


def trained(checkpoint, case):
    """Tensors that were trained, in FP32, by their names in files."""
    if case.startswith("adapters"):
        return read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
    return read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))


def check(tmp, case):
    with open(os.path.join(HERE, "mezo", case + ".json")) as f:
        expected = json.load(f)
    print(f"{case}: {expected['made_with']}")
    steps, checkpoint = train(tmp, case, expected)
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    slopes = sorted(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"]))
    at_most("slope of the median step", slopes[len(slopes) // 2], 4e-5)
    errors = sums.errors(trained(checkpoint, case), sums.read(os.path.join(HERE, "mezo", case + ".sums")))
    at_most("weights", max(errors.values()), 1e-5)


for case in list(CASES)[:1] if SLOW else CASES:
    with tempfile.TemporaryDirectory() as tmp_:
        if __name__ == "__main__":
            check(tmp_, case)
