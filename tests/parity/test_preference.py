# SPDX-License-Identifier: Apache-2.0
"""Fifteen steps on preferences against TRL's trainers (scripts/reference/preference_fixtures.py, in FP32, a step one micro-batch).

Limits are those of an FP32 run beside another: losses 2e-6, norms 2e-5, log-probabilities 1e-5 relative, rewards 1e-5 of
beta times a log-probability, of which they are differences; tensors 1e-4 relative L2. The first step has no margin at all
and a loss of ln 2, to the bit. Four micro-batches a step are within the same limits. Also answers that are cut, where TRL's
collator cuts them, and models, losses and betas that were drawn at random.
"""
import json
import math
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from test_parity import at_most, relative
from tiny import SLOW, base, fixture, megatrain, metrics, read_safetensors, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))
WITHOUT = ("cpo", "simpo", "orpo")  # no reference


def unpaired(pairs, tmp):
    path = os.path.join(tmp, "rated.jsonl")
    with open(pairs) as f, open(path, "w") as out:
        for row in map(json.loads, f):
            for kind in ("chosen", "rejected"):
                out.write(json.dumps({"prompt_ids": row["prompt_ids"], "completion_ids": row[kind + "_ids"],
                                      "label": kind == "chosen"}) + "\n")
    return path


def train(tmp, name, case, expected, label="", **over):
    out = os.path.join(tmp, name + label)
    data = os.path.join(tmp, "data.jsonl")
    shutil.copy(os.path.join(HERE, "preferences", "data.jsonl"), data)
    batch = expected["pairs"]
    if case["loss"] == "kto" or name == "truncated_rated":  # in TRL's order, on which it depends whose answers are mismatched
        data, batch = unpaired(data, tmp), 2 * batch
    keys = {f"preference__{k}": v for k, v in case["keys"].items()}
    if "row" in case:  # TRL's max_length is of an answer: half of a row of two
        keys.update(data__seq_len=case["row"], data__overlong="truncate")
    if name == "lora":
        keys.update(adapter__kind="lora", adapter__path=fixture("adapters/llama/start"))
    ini = write_ini(out + ".ini", base(fixture(case["model"]), data, out, **{
        "model__init": "weights", "model__dtype": "f32", "data__eval": "", "data__packing": "off", "data__shuffle": "off",
        "train__steps": expected["steps"], "train__batch_size": batch, "train__micro_batch": batch,
        "train__learning_rate": expected["learning_rate"], "train__schedule": "constant", "train__warmup": 0,
        "train__grad_clip": 1, "optimizer__weight_decay": 0, "optimizer__grad_dtype": "f32",
        "preference__loss": case["loss"], **keys, **over}))
    megatrain("-q", "run", ini)
    steps = [m for m in metrics(out) if "loss" in m]
    assert len(steps) == expected["steps"] and not any(m["skipped"] for m in steps)
    return steps, os.path.join(out, f"checkpoint-{expected['steps']}")


def beta_of(case):
    return case["keys"].get("beta", 2 if case["loss"] == "simpo" else 0.1)


def compare(name, case, steps):
    if name.startswith("drawn"):  # with a large beta a loss has the rounding of beta times a log-probability
        size = [max(abs(l), beta_of(case) * abs(w) / 10) for l, w in zip(case["losses"], case["measures"]["logps/chosen"])]
        at_most(f"{name}: losses", max(abs(m["loss"] - l) / s for m, l, s in zip(steps, case["losses"], size)), 2e-6)
    else:
        at_most(f"{name}: losses", max(relative(m["loss"], l) for m, l in zip(steps, case["losses"])), 2e-6)
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, case["norms"])), 2e-5)
    for measure, want in case["measures"].items():
        if measure == "kl" and not any(want):  # of a loss without it
            continue
        if measure in ("mean_token_accuracy", "rewards/accuracies"):
            at_most(measure, max(abs(m[measure] - w) for m, w in zip(steps, want)), 1e-6)
        elif measure.startswith("log_odds"):  # differences of numbers of some 5
            at_most(measure, max(abs(m[measure] - w) for m, w in zip(steps, want)), 1e-5)
        elif measure.startswith("rewards/") or measure == "kl":
            beta = 1 if measure == "kl" else beta_of(case)
            size = [beta * abs(w) for w in case["measures"]["logps/chosen"]]
            at_most(measure, max(abs(m[measure] - w) / s for m, w, s in zip(steps, want, size)), 1e-5)
        elif any(want):  # TRL says 0 for what it does not compute
            at_most(measure, max(relative(m[measure], w) for m, w in zip(steps, want)), 1e-5)


def tensor_errors(checkpoint, name):
    if name == "sigmoid":
        megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
        got = read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))
    else:
        got = read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    want = sums.read(os.path.join(HERE, "preferences", name + ".sums"))
    assert set(want) == set(got), set(want) ^ set(got)
    return sums.errors(got, want).values()


def main(tmp):
    with open(os.path.join(HERE, "preferences", "expected.json")) as f:
        expected = json.load(f)
    print(expected["made_with"])
    for name, case in expected["cases"].items():
        if SLOW and name not in ("sigmoid", "orpo", "kto"):
            continue
        steps, checkpoint = train(tmp, name, case, expected)
        compare(name, case, steps)
        first = steps[0]
        if case["loss"] not in WITHOUT:
            assert first["rewards/margins"] == first["rewards/chosen"] == first["rewards/rejected"] == 0
        if case["loss"] in ("sigmoid", "sigmoid_norm") and "sft" not in case["keys"]:
            assert first["loss"] == math.log(2), first["loss"]
        if name in ("sigmoid", "lora"):
            at_most("tensors", max(tensor_errors(checkpoint, name)), 1e-4)
    case = expected["cases"]["sigmoid"]
    for size in (1, 2):
        compare(f"micro-batches of {size}", case, train(tmp, "sigmoid", case, expected, f"-{size}", train__micro_batch=size)[0])
    # the comparison sees a change
    other, _ = train(tmp, "sigmoid", case, expected, "-other", preference__beta=0.1001)
    assert max(relative(m["loss"], l) for m, l in zip(other, case["losses"])) > 2e-6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
