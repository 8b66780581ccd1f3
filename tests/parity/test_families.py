# SPDX-License-Identifier: Apache-2.0
"""Adapters on all linear layers and experts of each family, six steps, on the model as it is and on a packed one, against
what PEFT, transformers and torch.optim.AdamW made of them in double. The fixtures are of scripts/reference/family_fixtures.py:
losses, norms, sum and norm of all tensors, and sums of two of each (sums.py). A dozen families, with MEGATRAIN_TEST_FULL all.
"""
import json
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
import sums
from seeded import encode, uniform
from test_parity import floats, relative
from tiny import FULL, POISON, SLOW, base, fixture, megatrain, metrics, read_safetensors, write_ini, write_safetensors

STEPS, ROWS, RATE = 6, 4, 2e-3
#: one of each kind of mixer, norm, router and nesting
SOME = ["qwen3_5_text", "qwen3_next", "gemma4_moe", "deepseek_v3", "kimi_k25", "nemotron_super", "granite4_moe", "mistral4",
        "muse_glimmer", "afmoe", "cohere2", "phi3"]


def start_of(family, shapes):
    """Adapters to begin from, by their names: of the size that training gives them; A by its number of columns, as PEFT
    begins it."""
    most = {t: shape[-1] ** -0.5 if "lora_A" in t else 0.09 for t, shape in shapes.items()}
    of = lambda t, shape: encode("F32", uniform(f"{family} {t}", shape, -most[t], most[t]))
    return {t: ("F32", shape, of(t, shape)) for t, shape in shapes.items()}


def write_start(folder, family, config, shapes):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "adapter_model.safetensors"), start_of(family, shapes))


def digest(numbers):
    """Sum and Euclidean norm of a tensor."""
    return [sum(numbers), sum(x * x for x in numbers) ** 0.5]


def packed_base(tmp, name, fmt):
    out = os.path.join(tmp, name + "-packed")
    megatrain("-q", "export", fixture(name), out, "--quantize", fmt)
    return out


def run(tmp, name, expected, kind):
    """Trains; the errors, each as a part of its limit, and the checkpoint."""
    want = expected[kind]
    model = packed_base(os.path.join(tmp, kind), name, want["format"]) if kind == "packed" else fixture(name)
    start, data, out = (os.path.join(tmp, f"{name}-{kind}-{x}") for x in ("start", "data.jsonl", "out"))
    write_start(start, name, expected["adapter"], expected["shapes"])
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, model__init="weights", data__eval="", data__packing="off",
        data__shuffle="off", train__steps=STEPS, train__batch_size=ROWS, train__micro_batch=2, train__learning_rate=RATE,
        train__min_lr_ratio=0, adapter__kind="lora", adapter__path=start)), env=POISON if kind == "packed" else None)
    steps = [m for m in metrics(out) if "loss" in m]
    assert len(steps) == STEPS and not any(m["skipped"] for m in steps)
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    got = read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    assert {k: v[1] for k, v in got.items()} == expected["shapes"]
    with open(os.path.join(HERE, name, "config.json")) as f:
        nested = "text_config" in json.load(f)
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        modules = json.load(f)["target_modules"]
    assert not nested or all(f"base_model.model.{m}.lora_A.weight" in got for m in modules), f"PEFT adapts others, too: {modules}"
    off = {"losses": max(relative(m["loss"], l) for m, l in zip(steps, want["losses"])) / 2e-6,
           "norms": max(relative(m["grad_norm"], n) for m, n in zip(steps, want["norms"])) / 2e-5}
    off["tensors"] = max(sums.errors(got, {k: (expected["shapes"][k], v) for k, v in want["sums"].items()}).values()) / 1e-4
    digests = {k: digest(floats(v[2])) for k, v in got.items()}
    off["digests"] = max(max(abs(a - b) for a, b in zip(digests[k], d)) / d[1] for k, d in want["digests"].items()) / 1e-4
    return off, checkpoint


def check(tmp, name):
    with open(os.path.join(HERE, "families", name + ".json")) as f:
        expected = json.load(f)
    for kind in ("lora", "packed"):
        if kind not in expected:
            continue
        off, _ = run(tmp, name, expected, kind)
        print(name, kind, " ".join(f"{k} {v:.2f}" for k, v in off.items()))
        bad = [k for k, v in off.items() if not v <= 1]  # a NaN fails
        assert not bad, f"{name}, {kind}: {bad} of {off}"


if __name__ == "__main__":
    every = sorted(f.removesuffix(".json") for f in os.listdir(os.path.join(HERE, "families")))
    assert set(SOME) <= set(every)
    for case in sys.argv[1:] or (every if FULL else SOME[:4] if SLOW else SOME):
        with tempfile.TemporaryDirectory() as tmp:
            check(tmp, case)
