# SPDX-License-Identifier: Apache-2.0
"""A student comes nearer to its teacher by the teacher's likeliest tokens than by the tokens alone, on data that neither has
seen; a call of `score --top` that was killed is gone on from; a damaged file and a foreign vocabulary are refused; the plan tells the
bytes. Numbers are compared with torch's in
parity/test_distill.py."""
import json
import math
import os
import random
import shutil
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


def score_top(tmp, name, model, data, top, *args, **over):
    out = f"{tmp}/{name}"
    ini = write_ini(out + ".ini", base(model, data, f"{tmp}/none", **{
        "data__tokenizer": "byte", "data__eval": "", "model__init": "weights", "train__batch_size": 2, "train__micro_batch": 1, **over}))
    return ["score", ini, "--data", data, "--out", out, "--top", str(top), *args], out + ".top"


def distributions(path):
    """[{id: probability}] of all rows, where --top took the whole vocabulary."""
    raw = open(path, "rb").read()
    _, top, _, n, rows, key = struct.unpack_from("<8sIIQQQ", raw)
    assert key == 0
    size, at, out = 8 * top + 4, 64 + 32 * n, []
    for i in range(rows):
        v = struct.unpack_from("<" + "If" * top, raw, at + i * size)
        out.append({k: math.exp(p) for k, p in zip(v[::2], v[1::2])})
    return out


def distance(teacher, student):
    return sum(sum(p * (math.log(p) - math.log(max(s[k], 1e-30))) for k, p in t.items() if p > 1e-12)
               for t, s in zip(teacher, student)) / len(teacher)


def run_ini(beside, name, teacher, model=None, data=None, **over):
    """A student's run, of the model and the data that lie beside the file unless they are named."""
    tmp = os.path.dirname(beside)
    ini = write_ini(f"{tmp}/{name}.ini", base(model or f"{tmp}/small", data or f"{tmp}/train.jsonl", f"{tmp}/{name}", **{
        "data__tokenizer": "byte", "train__steps": 3, "train__batch_size": 2, "train__micro_batch": 1, "data__eval": "", "distill__top": TOP,
        "checkpoint__save": "weights", "train__objective": "distill", "distill__teacher": teacher, **over}))
    return megatrain("run", ini, expect=None)


def a_file_that_shrinks_ends_the_run_with_a_message(tmp, top):
    """A mapping would end it by a signal. The rows that are left are still learned from."""
    path = shutil.copy(top, f"{tmp}/shrinks.top")
    ini = f"{tmp}/shrinks.ini"
    p = run_ini(path, "shrinks", path, train__steps=1)
    assert p.returncode == 0, p
    text = open(ini).read().replace("steps = 1\n", "steps = 100000\n")
    with open(ini, "w") as f:
        f.write(text)
    p = subprocess.Popen([BINARY, "-q", "run", ini, "--force"], stderr=subprocess.PIPE, text=True)
    while p.poll() is None and len(metrics(f"{tmp}/shrinks")) < 3:
        time.sleep(0.01)
    os.truncate(path, os.path.getsize(path) // 2)
    said = p.communicate()[1]
    assert p.returncode == 3 and "the rows of " in said and "has shrunk" in said and path in said, (p.returncode, said)


def tables_of_other_lengths(tmp, train):
    """A padded table counts: its tokens are among all others of a student that has none of them. Without proof that the
    tokenizers are one, it is refused."""
    few = write(f"{tmp}/few.jsonl", 4, 3)
    for name, size in (("padded", 320), ("exact", 272)):
        write_model(f"{tmp}/{name}", config(vocab_size=size, num_hidden_layers=1, hidden_size=32, head_dim=16))
        run(tmp, f"{name}-begun", f"{tmp}/{name}", few, train__steps=1, train__learning_rate="1e-9")
    begun = {name: f"{tmp}/{name}-begun/checkpoint-1" for name in ("padded", "exact")}
    rows = {}
    for name, size in (("padded", 320), ("exact", 272)):
        command, path = score_top(tmp, f"{name}-whole", begun[name], few, size)
        megatrain("-q", *command)
        rows[name] = distributions(path)
    command, path = score_top(tmp, "padded-few", begun["padded"], few, 40)
    megatrain("-q", *command)
    far, beyond = 0, 0
    for t, s in zip(rows["padded"], rows["exact"]):
        top = sorted(t, key=lambda k: -t[k])[:40]
        own = [k for k in top if k < 272]
        beyond += 40 - len(own)
        p, q = [t[k] for k in own], [s[k] for k in own]
        far += sum(a * math.log(a / b) for a, b in zip(p + [1 - sum(p)], q + [1 - sum(q)])) / len(rows["exact"])
    keys = dict(model=begun["exact"], data=few, model__init="weights", distill__top=40, train__batch_size=4, train__micro_batch=4, train__steps=1)
    p = run_ini(path, "of-padded", path, **keys)
    assert p.returncode == 0 and "of the same tokenizer" in p.stderr, p
    got = metrics(f"{tmp}/of-padded")[0]["kl"]
    assert beyond > len(rows["exact"]) and abs(got - far) < 1e-4 * far, (beyond, got, far)
    command, narrow = score_top(tmp, "exact-few", begun["exact"], few, 40)
    megatrain("-q", *command)
    p = run_ini(narrow, "of-narrow", narrow, **dict(keys, model=begun["padded"]))
    assert p.returncode == 0 and "left to the model" in p.stderr, p
    ids = f"{tmp}/ids.jsonl"
    with open(ids, "w") as f:
        f.write(json.dumps({"input_ids": [5, 6, 7, 8]}) + "\n")
    for words, what in ((({}, {}), "no tokenizer.json of both"), (({"a": 0, "b": 1}, {"a": 1, "b": 0}), "another tokenizer"),
                        (({"a": 0, "b": 1}, {"b": 1, "a": 0}), None)):
        for model, names in zip(begun.values(), words):
            with open(f"{model}/tokenizer.json", "w") as f:
                json.dump({"model": {"type": "BPE", "vocab": names}}, f)
        command, path = score_top(tmp, "ids", begun["padded"], ids, 5, "--force", data__tokenizer="model")
        megatrain("-q", *command)
        p = run_ini(path, "of-ids", path, **dict(keys, data=ids, distill__top=5, data__tokenizer="model", train__batch_size=1, train__micro_batch=1))
        assert p.returncode == 3 and what in p.stderr if what else p.returncode == 0, (what, p)


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
    said = run_ini(out, "early", path)
    assert said.returncode == 3 and "is not complete" in said.stderr, said
    said = megatrain(*command).stderr
    assert "are in " in said and open(path, "rb").read() == want, said


with tempfile.TemporaryDirectory() as tmp:
    train, held_out = write(f"{tmp}/train.jsonl", 400, 1), write(f"{tmp}/held-out.jsonl", 60, 2)
    for name, layers, hidden in (("large", 3, 64), ("small", 2, 32)):
        write_model(f"{tmp}/{name}", config(num_hidden_layers=layers, hidden_size=hidden, head_dim=16))
    teacher = run(tmp, "teacher", f"{tmp}/large", train, train__steps=200, train__learning_rate="3e-3")
    command, top = score_top(tmp, "dry", teacher, train, TOP, "--dry-run", model__dtype="bf16")
    said = megatrain(*command)
    said = said.stdout + said.stderr
    assert not os.path.exists(top) and "a teacher's tokens" in said and "weights (lo)" not in said, said  # nothing trains: no masters
    command, top = score_top(tmp, "known", teacher, train, TOP)
    megatrain("-q", *command)
    rows = json.loads(megatrain("data", "stats", command[1], "--json").stdout)["trained"]
    assert os.path.getsize(top) == 64 + 400 * 32 + rows * (8 * TOP + 4) and f"{8 * TOP + 4} bytes for each of {rows} trained tokens" in said, said
    several, path = score_top(tmp, "several", teacher, train, TOP, device__gpus=3)
    megatrain("-q", *several)
    assert open(path, "rb").read() == open(top, "rb").read(), "three devices found other tokens"
    said = megatrain("plan", command[1], "--machine", "rtx4090", "--score", TOP).stdout
    assert "forward alone" in said and f"{8 * TOP + 4} bytes for each" in said and "gradients" not in said and "a teacher's tokens" in said, said
    killed, path = score_top(tmp, "killed", teacher, train, TOP)
    killed_calls_are_gone_on_from(killed, path, open(top, "rb").read())
    a_file_that_shrinks_ends_the_run_with_a_message(tmp, top)
    tables_of_other_lengths(tmp, train)
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
    assert f"{8 * TOP + 4} bytes for each trained token" in said and "a teacher's tokens" in said, said
    p = megatrain("plan", f"{tmp}/distill.ini", "--machine", "rtx4090", "--set", "model.freeze=*", expect=2)
    assert "leaves nothing to train" in p.stderr, p.stderr
