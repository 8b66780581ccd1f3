# SPDX-License-Identifier: Apache-2.0
"""Five steps on rollouts against TRL's GRPOTrainer (scripts/reference/policy_trl_fixtures.py, in FP32, a step one micro-batch): ten
losses, two models, whole and with adapters.

Limits are those of an FP32 run beside another: losses 2e-6 of the size of their terms, norms 2e-5, tensors after five steps
2e-5 relative L2 (entropy 2e-6, the divergence 2e-5)."""
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from test_parity import at_most, relative
from tiny import SLOW, base, fixture, megatrain, metrics, read_safetensors, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))
START = {"qwen3": "adapters/qwen3-upper/start", "olmoe": "policy/olmoe-start"}


def train(tmp, name, case, expected, **over):
    out = os.path.join(tmp, name.replace(" ", "-"))
    data = os.path.join(HERE, "policy", case["model"] + ("-lora" if case["lora"] else "") + ".jsonl")
    keys = {"policy__old": "file", **{f"policy__{k}": v for k, v in case["keys"].items()}}
    if case["lora"]:
        keys.update(adapter__kind="lora", adapter__path=fixture(START[case["model"]]))
    n = expected["rollouts"]
    ini = write_ini(out + ".ini", base(fixture(case["model"]), data, out, **{
        "model__init": "weights", "model__dtype": "f32", "data__eval": "", "data__packing": "off", "data__shuffle": "off",
        "data__cache_dir": f"{tmp}/cache", "train__steps": expected["steps"], "train__batch_size": n, "train__micro_batch": n,
        "train__learning_rate": expected["learning_rate"], "train__schedule": "constant", "train__warmup": 0, "train__grad_clip": 1,
        "optimizer__weight_decay": 0, "optimizer__grad_dtype": "f32", "policy__loss": case["loss"],
        "policy__max_tokens": expected["most"], **keys, **over}))
    megatrain("-q", "run", ini)
    return [m for m in metrics(out) if "loss" in m], os.path.join(out, f"checkpoint-{expected['steps']}")


def compare(name, case, steps):
    size = [5 if case["loss"] == "cispo" else 1] * len(steps)  # A lp, or A
    at_most(f"{name}: losses", max(abs(m["loss"] - l) / s for m, l, s in zip(steps, case["losses"], size)), 2e-6)
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, case["norms"])), 2e-5)
    assert "entropy" in steps[0]
    for measure, want in case["measures"].items():
        ours = {"cispo_clip_ratio": "clip_ratio/high_mean"}.get(measure, measure)
        if ours in steps[0]:
            at_most(measure, max(abs(m[ours] - w) / max(abs(w), 0.1) for m, w in zip(steps, want)), 2e-5)


def tensor_errors(checkpoint, name, case):
    if case["lora"]:
        got = read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    else:
        megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
        got = read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))
    want = sums.read(os.path.join(HERE, "policy", name.split()[0] + ".sums"))
    assert set(want) == set(got), set(want) ^ set(got)
    return sums.errors(got, want).values()


def main(tmp):
    with open(os.path.join(HERE, "policy", "expected.json")) as f:
        expected = json.load(f)
    print(expected["made_with"])
    for name, case in expected["cases"].items():
        if SLOW and not name.endswith(("dapo", "mismatch")):
            continue
        steps, checkpoint = train(tmp, name, case, expected)
        compare(name, case, steps)
        if name.endswith("dapo"):
            at_most("tensors", max(tensor_errors(checkpoint, name, case)), 2e-5)
    # the comparison sees a change
    case = expected["cases"]["qwen3 divergence"]
    other, _ = train(tmp, "other", case, expected, policy__kl_weight=0.1005)
    assert max(abs(m["loss"] - l) for m, l in zip(other, case["losses"])) > 2e-6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
