# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of each family against what transformers and torch.optim.AdamW made of the same model and data.

The fixtures are of scripts/reference/parity_fixtures.py: the reference ran in double, with torch's own FP32 run beside it.
Tolerances: those asked of an FP32 run (losses 2e-6, norms 1e-5 or five times torch's own
error, but of half the steps always 1e-5, weights 2e-5 relative L2 a tensor; biases of the
keys, whose gradient nearly vanishes, 2e-2), some ten times what was measured. bf16: losses within 1%.
"""
import array
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from tiny import POISON, SLOW, base, fixture, megatrain, metrics, read_safetensors, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))
FEW = 4 if SLOW else None  # under sanitizers all of the code, but not all of the figures


def floats(raw):
    return array.array("f", raw)


def relative(a, b):
    return abs(a - b) / max(abs(b), 1e-30)


def at_most(what, value, limit):
    print(f"  {what}: {value:.1e} (limit {limit:.0e})")
    assert value <= limit, f"{what}: {value:.3e} is over {limit:.0e}"  # a NaN fails


def train(tmp, name, dtype, expected, **over):
    out = os.path.join(tmp, f"{name}-{dtype}-{len(over)}")
    data = os.path.join(tmp, "data.jsonl")
    shutil.copy(os.path.join(HERE, "data.jsonl"), data)
    ini = write_ini(out + ".ini", base(fixture(name), data, out, model__init="weights", model__dtype=dtype,
        data__eval="", data__packing="off", data__shuffle="off", train__steps=expected["steps"],
        train__router_aux_loss=expected.get("router_aux_loss", 0), train__batch_size=expected["rows"], train__micro_batch=2, train__learning_rate=expected["learning_rate"],
        train__min_lr_ratio=0, optimizer__grad_dtype="f32" if dtype == "f32" else "auto", **over))
    n = FEW or expected["steps"]
    megatrain("-q", "run", ini, "--max-steps", n, env=POISON if dtype == "bf16" else None)
    steps = [m for m in metrics(out) if "loss" in m]
    assert len(steps) == n and not any(m["skipped"] for m in steps)
    return steps, os.path.join(out, f"checkpoint-{n}")


def weight_errors(checkpoint, trained, model):
    """Of the masters, as an export in FP32 puts them together in the form of the family's files."""
    out = checkpoint + "-f32"
    megatrain("-q", "export", checkpoint, out, "--dtype=f32")
    got, want = read_safetensors(os.path.join(out, "model.safetensors")), sums.read(trained)
    errors = sums.errors(got, want)
    constant = ("e_score_correction_bias", "expert_bias")  # they choose experts, and are never trained
    others = ("visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.", "embed_vision.", "vision_embedder.",
              "vision_adapter.", "vision_projection.", ".indexer.")  # not computed: copied
    assert set(want) == {n for n in got if not n.endswith(constant) and not any(o in n for o in others)}
    given = read_safetensors(os.path.join(fixture(model), "model.safetensors"))
    for name in set(got) - set(want):
        assert given[name] == got[name], name
    return errors


def check(tmp, name):
    with open(os.path.join(HERE, name, "expected.json")) as f:
        expected = json.load(f)
    print(f"{name}: {expected['made_with']}")
    steps, checkpoint = train(tmp, name, "f32", expected)
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    own = max(relative(a, b) for a, b in zip(expected["torch_f32"]["norms"], expected["norms"]))
    errors = sorted(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"]))
    at_most("norms", errors[-1], max(1e-5, 5 * own))
    at_most("norm of the median step", errors[len(errors) // 2], 1e-5)
    if "aux_losses" in expected:
        at_most("balance", max(relative(m["aux_loss"], b) for m, b in zip(steps, expected["aux_losses"])), 2e-6)
    half, _ = train(tmp, name, "bf16", expected)
    at_most("bf16 from f32", max(relative(h["loss"], m["loss"]) for h, m in zip(half, steps)), 1e-2)
    at_most("bf16 from torch's", max(relative(h["loss"], l) for h, l in zip(half, expected["torch_bf16"]["losses"])), 1e-2)
    if FEW:
        megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
        return
    assert sum(m["clip"] < 1 for m in steps) >= 15, "clipping is active"
    errors = weight_errors(checkpoint, os.path.join(HERE, name, "trained.sums"), name)
    k_bias = [e for n, e in errors.items() if n.endswith("k_proj.bias")]
    at_most("weights", max(e for n, e in errors.items() if not n.endswith("k_proj.bias")), 2e-5)
    at_most("biases of keys", max(k_bias, default=0.0), 2e-2)
    # the comparison sees a change: a hundredth more of weight decay is not within the limits
    other, checkpoint = train(tmp, name, "f32", expected, optimizer__weight_decay=0.101)
    changed = weight_errors(checkpoint, os.path.join(HERE, name, "trained.sums"), name)
    assert max(changed.values()) > 3 * max(e for n, e in errors.items() if not n.endswith("k_proj.bias"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for case in sys.argv[1:]:
            check(tmp, case)
