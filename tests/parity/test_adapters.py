# SPDX-License-Identifier: Apache-2.0
"""Twenty steps from adapters that PEFT wrote, with B away from zero, against what PEFT, transformers and
torch.optim.AdamW made of them. The fixtures are of scripts/reference/adapter_fixtures.py; the reference ran in double.
"""
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from test_parity import FEW, at_most, relative
from tiny import POISON, base, fixture, megatrain, metrics, read_safetensors, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))


def train(tmp, name, dtype, expected, start=None, steps=None, **over):
    out = os.path.join(tmp, f"{name}-{dtype}-{len(os.listdir(tmp))}")
    data = os.path.join(tmp, "data.jsonl")
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    ini = write_ini(out + ".ini", base(fixture(expected["model"]), data, out, model__init="weights",
        model__dtype=dtype, data__eval="", data__packing="off", data__shuffle="off", train__steps=steps or expected["steps"],
        train__batch_size=expected["rows"], train__micro_batch=2, train__learning_rate=expected["learning_rate"],
        train__min_lr_ratio=0, adapter__kind=expected.get("kind", "lora"), adapter__path=start or fixture(f"adapters/{name}/start"),
        adapter__lr_ratio_b=expected["lr_ratio_b"], adapter__dropout=expected.get("dropout", 0), **over))
    n = steps or FEW or expected["steps"]
    megatrain("-q", "run", ini, "--max-steps", n, env=POISON if dtype == "bf16" else None)
    found = [m for m in metrics(out) if "loss" in m]
    assert len(found) == n and not any(m["skipped"] for m in found)
    return found, os.path.join(out, f"checkpoint-{len(found)}")


def errors_of(checkpoint, name):
    got = read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    want = sums.read(os.path.join(HERE, "adapters", name, "trained.sums"))
    assert set(got) == set(want), set(got) ^ set(want)
    return sums.errors(got, want)


def modules(folder):
    """Of the adapters and of what is trained whole, as PEFT finds them by our configuration."""
    with open(os.path.join(folder, "adapter_config.json")) as f:
        c = json.load(f)
    assert c["peft_type"] == "LORA" and c["bias"] == "none" and isinstance(c["target_modules"], list)
    return c


def check(tmp, name):
    with open(os.path.join(HERE, "adapters", name, "expected.json")) as f:
        expected = json.load(f)
    print(f"{name}: {expected['made_with']}")
    steps, checkpoint = train(tmp, name, "f32", expected)
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    own = max(relative(a, b) for a, b in zip(expected["torch_f32"]["norms"], expected["norms"]))
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"])), max(2e-5, 2 * own))
    if not FEW:
        errors = errors_of(checkpoint, name)
        at_most("tensors", max(errors.values()), 1e-4)
    # the checkpoint is a folder like the one it began from: going on from it is the same model
    config = modules(checkpoint)
    assert config["base_model_name_or_path"] == fixture(expected["model"])
    assert not os.path.exists(os.path.join(checkpoint, "config.json"))
    again, _ = train(tmp, name, "f32", expected, start=checkpoint, steps=1)
    resumed, _ = train(tmp, name, "f32", expected, steps=1)
    assert again[0]["loss"] != resumed[0]["loss"]
    megatrain("verify", checkpoint)
    half, _ = train(tmp, name, "bf16", expected)
    at_most("bf16 from f32", max(relative(h["loss"], m["loss"]) for h, m in zip(half, steps)), 1e-2)
    at_most("bf16 from torch's", max(relative(h["loss"], l) for h, l in zip(half, expected["torch_bf16"]["losses"])), 1e-2)
    if FEW:
        return
    # the comparison sees a change: a hundredth more of weight decay is not within the limits
    _, checkpoint = train(tmp, name, "f32", expected, optimizer__weight_decay=0.101)
    assert max(errors_of(checkpoint, name).values()) > 3 * max(errors.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for case in sys.argv[1:]:
            check(tmp, case)
