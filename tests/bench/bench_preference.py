# SPDX-License-Identifier: Apache-2.0
"""What preferences and policies cost, through the binary: figures beside their targets (meson test --benchmark -v).

A step beside one of the same rows without either, the pass of the reference beside as many forwards, and `score` beside `eval`, in CPU time of one thread, which other programs disturb least: each is the difference of a long and a short command, of which
the quickest of several counts.
"""
import json
import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import BINARY, base, config, megatrain, write_ini, write_model

SHORT, LONG, TURNS, HALF, BATCH = 2, 8, 2, 128, 2


def write(tmp, steps):
    """The same tokens as pairs, as samples of both answers, and as rollouts: a row is a pair, or its two answers."""
    r = random.Random(5)
    ids = lambda k: [r.randrange(256) for _ in range(k)]
    names = f"{tmp}/pairs-{steps}.jsonl", f"{tmp}/plain-{steps}.jsonl", f"{tmp}/rollouts-{steps}.jsonl"
    with open(names[0], "w") as pairs, open(names[1], "w") as plain, open(names[2], "w") as rollouts:
        for _ in range(steps * BATCH):
            prompt, answers = ids(HALF // 2), [ids(HALF // 2) for _ in range(2)]
            pairs.write(json.dumps({"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1]}) + "\n")
            for i, a in enumerate(answers):
                plain.write(json.dumps({"input_ids": prompt + a, "labels": [-100] * len(prompt) + a}) + "\n")
                rollouts.write(json.dumps({"prompt_ids": prompt, "completion_ids": a, "logprobs": [-5.5] * len(a), "reward": i,
                                           "group": str(prompt)}) + "\n")
    return names


def cpu_seconds(*args):
    p = subprocess.Popen([BINARY, "-q", *args], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(p.pid, 0)
    p.returncode = status
    assert status == 0, args
    return used.ru_utime + used.ru_stime


class Costs:
    """The cost of `LONG` less `SHORT` steps of a command, each the quickest of several."""

    def __init__(self, tmp, model):
        self.tmp, self.model, self.least = tmp, model, {}

    def command(self, what, loss, steps, turn):
        out = f"{self.tmp}/{what}-{loss.replace(' ', '')}-{steps}-{turn}"
        policy = loss.startswith("old = ")
        data = write(self.tmp, steps)[2 if policy else 0 if loss != "off" else 1]
        of = {"policy__loss": "dapo", "policy__old": loss[6:], "data__format": "rollouts"} if policy else {"preference__loss": loss}
        ini = write_ini(out + ".ini", base(self.model, data, out, **{
            "data__eval": data if what != "run" else "", "data__seq_len": 2 * HALF, "train__steps": steps, "train__batch_size": BATCH,
            "train__micro_batch": BATCH, "model__init": "weights", "checkpoint__save": "weights", "memory__device_budget": "2GiB",
            "device__cpu_threads": 1, "eval__max_samples": 100000, **of}))
        return [what, ini] + (["--out", out, "--force"] if what == "score" else [])

    def measure(self, what, loss):
        for steps in (SHORT, LONG):
            for turn in range(TURNS):
                t = cpu_seconds(*self.command(what, loss, steps, turn))
                self.least[what, loss, steps] = min(t, self.least.get((what, loss, steps), t))
        return self.least[what, loss, LONG] - self.least[what, loss, SHORT]


def figure(what, value, target):
    print(f"{what:66s} {value:8.3f}   target {target}", flush=True)


with tempfile.TemporaryDirectory() as tmp:
    cfg = config("qwen3", num_hidden_layers=2, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
                 head_dim=64)
    made = write_model(f"{tmp}/made", cfg)
    ini = write_ini(f"{tmp}/first.ini", base(made, write(tmp, 1)[1], f"{tmp}/first", data__eval="", data__seq_len=2 * HALF, train__steps=1,
                                             train__batch_size=1, train__micro_batch=1, checkpoint__save="weights", memory__device_budget="2GiB"))
    megatrain("-q", "run", ini)
    print(f"load average {os.getloadavg()[0]:.2f}")
    costs = Costs(tmp, f"{tmp}/first/checkpoint-1")
    plain, simpo, dpo, forward = (costs.measure(*of) for of in (("run", "off"), ("run", "simpo"), ("run", "sigmoid"), ("eval", "off")))
    figure("step of SimPO over one of the same rows", simpo / plain, "<= 1.03")
    figure("pass of the reference over as many forwards", (dpo - simpo) / forward, "<= 1.05")
    figure("step of DAPO, old = batch, over one of the same rows", costs.measure("run", "old = batch") / plain, "<= 1.03")
    figure("step of DAPO, old = file", costs.measure("run", "old = file") / plain, "<= 1.05")
    figure("rate of score over that of eval", forward / costs.measure("score", "off"), ">= 0.95")
