# SPDX-License-Identifier: Apache-2.0
"""A student comes nearer to its teacher by the teacher's likeliest tokens than by the tokens alone, on data that neither has
seen; a call of `score --top` that was killed is gone on from; the plan tells the bytes. Numbers are compared with torch's in
parity/test_distill.py."""
import json
import math
import os
import random
import signal
import struct
import subprocess
import tempfile
import time

from tiny import BINARY, base, config, megatrain, metrics, write_ini, write_model

THINGS, COLOURS = ["sky", "grass", "blood", "snow", "coal", "sun"], ["blue", "green", "red", "white", "black", "yellow"]
TOP, STEPS = 12, 150


def write(path, n, seed):
    """Of each thing some colours are likelier than others: a distribution that a token alone does not show."""
    r = random.Random(seed)
    with open(path, "w") as f:
        for _ in range(n):
            thing = r.randrange(len(THINGS))
            colour = COLOURS[(thing + int(r.random() ** 2 * len(COLOURS))) % len(COLOURS)]
            f.write(json.dumps({"prompt": f"{THINGS[thing]} {r.randrange(1000)} is", "completion": f" {colour}"}) + "\n")
    return path


def run(tmp, name, model, data, **over):
    out = f"{tmp}/{name}"
    keys = {"data__tokenizer": "byte", "train__steps": STEPS, "train__batch_size": 4, "train__micro_batch": 4, "train__grad_clip": 1,
            "data__eval": "", "checkpoint__save": "weights", "optimizer__weight_decay": 0, "train__learning_rate": "1e-2", **over}
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **keys)))
    return f"{out}/checkpoint-{keys['train__steps']}"


def score_top(tmp, name, model, data, top, *args):
    out = f"{tmp}/{name}"
    ini = write_ini(out + ".ini", base(model, data, f"{tmp}/none", data__tokenizer="byte", data__eval="", model__init="weights",
                                       train__batch_size=2, train__micro_batch=1))
    return ["score", ini, "--data", data, "--out", out, "--top", str(top), *args], out + ".top"


def distributions(path):
    """[{id: probability}] of all rows, where --top took the whole vocabulary."""
    raw = open(path, "rb").read()
    _, top, _, n, rows, key = struct.unpack_from("<8sIIQQQ", raw)
    assert key == 0
    size, at, out = 8 * top + 4, 64 + 24 * n, []
    for i in range(rows):
        v = struct.unpack_from("<" + "If" * top, raw, at + i * size)
        out.append({k: math.exp(p) for k, p in zip(v[::2], v[1::2])})
    return out


def distance(teacher, student):
    return sum(sum(p * (math.log(p) - math.log(max(s[k], 1e-30))) for k, p in t.items() if p > 1e-12)
               for t, s in zip(teacher, student)) / len(teacher)


def killed_calls_are_gone_on_from(command, path, want):
    out = path[:-4]
    p = subprocess.Popen([BINARY, "-q", *command])
    while p.poll() is None and (not os.path.exists(out + ".part") or os.path.getsize(out + ".part") < 1500):
        time.sleep(0.001)
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not os.path.exists(out), "it was not killed in time"
    os.rename(path, path + ".away")  # what is done is nowhere: rows of zeros would be the teacher
    said = megatrain(*command, expect=None)
    assert said.returncode not in (0, -11) and path in said.stderr and "--force" in said.stderr, said
    os.rename(path + ".away", path)
    said = megatrain(*command).stderr
    assert "are in " in said and open(path, "rb").read() == want, said


with tempfile.TemporaryDirectory() as tmp:
    train, held_out = write(f"{tmp}/train.jsonl", 400, 1), write(f"{tmp}/held-out.jsonl", 60, 2)
    for name, layers, hidden in (("large", 3, 64), ("small", 2, 32)):
        write_model(f"{tmp}/{name}", config(num_hidden_layers=layers, hidden_size=hidden, head_dim=16))
    teacher = run(tmp, "teacher", f"{tmp}/large", train, train__steps=200, train__learning_rate="3e-3")
    command, top = score_top(tmp, "known", teacher, train, TOP)
    megatrain("-q", *command)
    killed, path = score_top(tmp, "killed", teacher, train, TOP)
    killed_calls_are_gone_on_from(killed, path, open(top, "rb").read())
    students = {"sft": run(tmp, "sft", f"{tmp}/small", train),
                "distill": run(tmp, "distill", f"{tmp}/small", train, train__objective="distill", distill__teacher=top, distill__top=TOP)}
    told = {}
    for name, model in {"teacher": teacher, **students}.items():
        command, path = score_top(tmp, f"{name}-all", model, held_out, 272)
        megatrain("-q", *command)
        told[name] = distributions(path)
    far = {name: distance(told["teacher"], told[name]) for name in students}
    print(f"divergence from the teacher on held-out data: {far['sft']:.4f} after SFT, {far['distill']:.4f} after distillation")
    assert far["distill"] < 0.8 * far["sft"], far
    log = [m for m in metrics(f"{tmp}/distill") if "kl" in m]
    assert log[-1]["kl"] < 0.2 * log[0]["kl"] and log[0]["loss"] == log[0]["kl"], (log[0], log[-1])
    said = megatrain("plan", f"{tmp}/distill.ini", "--machine", "rtx4090").stdout
    assert f"{8 * TOP + 4} bytes for each trained token" in said, said
