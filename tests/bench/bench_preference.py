# SPDX-License-Identifier: Apache-2.0
"""What preferences cost, through the binary: figures beside their targets (meson test --benchmark -v).

A step beside one of the same rows without a preference, the pass of the reference beside as many forwards, and `score` beside
`eval`. Runs take turns, and the best of each counts; run it on a machine that does nothing else.
"""
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import BINARY, base, config, megatrain, metrics, write_ini, write_model

STEPS, TURNS, HALF = 5, 3, 128


def write(tmp, n=64):
    """The same tokens as pairs, and as samples of both answers: a row of each is one pair, or its two answers."""
    r = random.Random(5)
    ids = lambda k: [r.randrange(256) for _ in range(k)]
    with open(f"{tmp}/pairs.jsonl", "w") as pairs, open(f"{tmp}/plain.jsonl", "w") as plain:
        for _ in range(n):
            prompt, answers = ids(HALF // 2), [ids(HALF // 2) for _ in range(2)]
            pairs.write(json.dumps({"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1]}) + "\n")
            for a in answers:
                plain.write(json.dumps({"input_ids": prompt + a, "labels": [-100] * len(prompt) + a}) + "\n")


def run(tmp, model, name, loss, turn):
    out = f"{tmp}/{name}-{turn}"
    ini = write_ini(out + ".ini", base(model, f"{tmp}/{name}.jsonl", out, data__eval="", data__seq_len=2 * HALF, train__steps=STEPS,
                                       train__batch_size=4, train__micro_batch=2, model__init="weights", checkpoint__save="weights",
                                       memory__device_budget="2GiB", preference__loss=loss, data__shuffle="off"))
    megatrain("-q", "run", ini)
    rows = [m for m in metrics(out) if "loss" in m][1:]
    return {k: statistics.median(m[k] for m in rows) for k in ("t_step", "t_fwd")}, out


def seconds(*args):
    t = time.monotonic()
    subprocess.run([BINARY, *args], check=True, capture_output=True)
    return time.monotonic() - t


def figure(what, value, target):
    print(f"{what:66s} {value:8.3f}   target {target}")


with tempfile.TemporaryDirectory() as tmp:
    cfg = config("qwen3", num_hidden_layers=2, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
                 head_dim=64)
    write(tmp)
    made = write_model(f"{tmp}/made", cfg)
    ini = write_ini(f"{tmp}/first.ini", base(made, f"{tmp}/plain.jsonl", f"{tmp}/first", data__eval="", data__seq_len=2 * HALF, train__steps=1,
                                             train__batch_size=1, train__micro_batch=1, checkpoint__save="weights", memory__device_budget="2GiB"))
    megatrain("-q", "run", ini)
    model = f"{tmp}/first/checkpoint-1"
    print(f"load average {os.getloadavg()[0]:.2f}")
    got = {}
    for turn in range(TURNS):
        for name, loss in (("plain", "off"), ("pairs", "simpo"), ("pairs", "sigmoid")):
            values, out = run(tmp, model, name, loss, f"{loss}-{turn}")
            for k, v in values.items():
                got.setdefault((loss, k), []).append(v)
    best = {k: min(v) for k, v in got.items()}
    figure("step of SimPO over one of the same rows", best["simpo", "t_step"] / best["off", "t_step"], "<= 1.03")
    figure("step of DPO over one of the same rows", best["sigmoid", "t_step"] / best["off", "t_step"], "<= 1.03")
    # the reference: the time of a run without a step's time, with and without it
    whole = {}
    for turn in range(TURNS):
        for loss in ("simpo", "sigmoid"):
            out = f"{tmp}/pass-{loss}-{turn}"
            ini = write_ini(out + ".ini", base(model, f"{tmp}/pairs.jsonl", out, data__eval="", data__seq_len=2 * HALF, train__steps=8,
                                               train__batch_size=4, train__micro_batch=2, model__init="weights", checkpoint__save="weights",
                                               memory__device_budget="2GiB", preference__loss=loss))
            spent = seconds("-q", "run", ini)
            steps = sum(m["t_step"] for m in metrics(out) if "loss" in m)
            fwd = statistics.median(m["t_fwd"] for m in metrics(out) if "loss" in m)
            whole.setdefault(loss, []).append((spent - steps, 8 * fwd))
    rest = {k: min(v[0] for v in values) for k, values in whole.items()}
    forwards = min(v[1] for v in whole["simpo"])
    figure("pass of the reference over as many forwards", (rest["sigmoid"] - rest["simpo"]) / forwards, "<= 1.05")
    rates = {}
    ini = write_ini(f"{tmp}/eval.ini", base(model, f"{tmp}/plain.jsonl", f"{tmp}/none", data__eval=f"{tmp}/plain.jsonl", data__seq_len=2 * HALF,
                                            train__batch_size=4, train__micro_batch=2, model__init="weights", memory__device_budget="2GiB"))
    for turn in range(TURNS):
        rates.setdefault("eval", []).append(seconds("-q", "eval", ini))
        rates.setdefault("score", []).append(seconds("-q", "score", ini, "--out", f"{tmp}/scores", "--force"))
    figure("rate of score over that of eval, both as whole commands", min(rates["eval"]) / min(rates["score"]), ">= 0.95")
