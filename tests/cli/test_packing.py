# SPDX-License-Identifier: Apache-2.0
"""Packed rows train as single samples do, and nothing leaks from one sample of a row into another."""
import json
import math
import os
import random
import struct
import tempfile
import time

from tiny import base, config, megatrain, metrics, read_safetensors, write_ini, write_model

SEQ = 64


def samples(n=41, seed=2, vocab=272):
    """Ragged, from two tokens to a whole row; masks in pieces."""
    r = random.Random(seed)
    out = []
    for k in range(n):
        ids = [r.randrange(vocab) for _ in range((2, 3, SEQ, SEQ - 1)[k] if k < 4 else r.randrange(2, SEQ // 2))]
        labels = [i if r.random() < 0.6 else -100 for i in ids[:-1]] + ids[-1:]
        out.append({"input_ids": ids, "labels": labels})
    return out


def write(path, rows):
    with open(path, "w") as f:
        for s in rows:
            f.write(json.dumps(s) + "\n")
    return path


def floats(raw):
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def relative_error(a, b):
    """L2, by tensor."""
    num = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))
    return num / max(math.sqrt(sum(y * y for y in b)), 1e-30)


def train(tmp, name, model, data, rows, packing, micro):
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", base(model, data, out, data__eval="", data__packing=packing, data__seq_len=SEQ, train__steps=5,
        train__batch_size=rows, train__micro_batch=micro, train__warmup=0, checkpoint__every=1, device__cpu_threads=1))
    megatrain("-q", "run", ini)
    first = os.path.join(out, "checkpoint-1", "megatrain")
    moments = {}
    for f in sorted(os.listdir(first)):
        if f.endswith(".safetensors"):
            moments.update({k: v[2] for k, v in read_safetensors(os.path.join(first, f)).items() if k.endswith(".exp_avg")})
    return [m for m in metrics(out) if "loss" in m], moments


def packed_training_equals_unpacked_training(tmp, family):
    """f32. Each step sees all samples in both; the sums run in another order. Bounds: losses and norms 2e-6 relative,
    every tensor's gradient (ten times the first moment after one step) 5e-6 relative in L2; measured 2e-7 and 4e-7."""
    model = write_model(os.path.join(tmp, family), config(family, num_hidden_layers=3))
    rows = samples()
    data = write(os.path.join(tmp, "ragged.jsonl"), rows)
    stats = json.loads(megatrain("-q", "data", "stats", write_ini(os.path.join(tmp, "s.ini"), base(model, data, tmp, data__eval="",
        data__seq_len=SEQ)), "--json").stdout)
    assert stats["rows"] < len(rows) / 2 and stats["efficiency"] > 0.9, stats
    packed, a = train(tmp, family + "-packed", model, data, stats["rows"], "on", 3)
    single, b = train(tmp, family + "-single", model, data, len(rows), "off", 7)
    targets = sum(l != -100 for s in rows for l in s["labels"][1:])
    worst = 0.0
    for p, s in zip(packed, single):
        assert p["loss_tokens"] == s["loss_tokens"] and p["loss_tokens"] % targets == 0, (p["loss_tokens"], targets)
        for key in ("loss", "grad_norm"):
            worst = max(worst, abs(p[key] - s[key]) / s[key])
    grads = max(relative_error(floats(a[k]), floats(b[k])) for k in a)
    print(f"   {family}: {len(rows)} samples in {stats['rows']} rows; losses and norms {worst:.1e}, gradients {grads:.1e}")
    assert len(packed) == len(single) == 5 and len(a) == len(b) >= 30 and worst <= 2e-6 and grads <= 5e-6


def rotary_scaling_goes_by_the_samples_own_length(tmp, name, scaling):
    """A sample's loss is the same alone in a row of its own length, and in packed rows beside shorter and longer ones."""
    half = 8
    model = write_model(os.path.join(tmp, name), config("llama", num_hidden_layers=2, max_position_embeddings=24, initializer_range=0.3,
        rope_scaling={"factor": 4.0, **scaling, **({"short_factor": [1.0 + i / 9 for i in range(half)],
            "long_factor": [2.0 + i for i in range(half)], "original_max_position_embeddings": 24} if "longrope" in scaling.values() else {})}))
    r = random.Random(4)
    rows = [{"input_ids": [r.randrange(272) for _ in range(n)]} for n in (20, 24, 25, 40, 64, 2, 30, 23)]
    data = write(os.path.join(tmp, name + ".jsonl"), rows)
    out = os.path.join(tmp, name + "-run")
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, data__eval="", data__seq_len=SEQ, train__steps=1)))

    def losses(rows, seq_len):
        ini = write_ini(out + ".e.ini", base(model, data, out, data__eval=write(os.path.join(tmp, name + ".e.jsonl"), rows),
            data__train="", data__seq_len=seq_len, train__micro_batch=1))
        said = megatrain("-q", "eval", ini, "--model", os.path.join(out, "checkpoint-1"), "--per-sample", "--json",
                         "--set", "data.overlong=drop").stdout
        return {f["sample"]: f["loss_sum"] for f in map(json.loads, said.splitlines()) if "sample" in f}

    packed = losses(rows, SEQ)
    assert "data.train is not set" in megatrain("check", out + ".e.ini", expect=2).stderr
    for i, row in enumerate(rows):
        alone = losses([row], len(row["input_ids"]))[0]
        assert abs(packed[i] - alone) <= 2e-6 * alone, (name, i, len(row["input_ids"]), packed[i], alone)


def nothing_leaks_between_samples_of_a_row(tmp, family, dtype):
    model = write_model(os.path.join(tmp, family), config(family, num_hidden_layers=3))
    rows = samples()
    data = write(os.path.join(tmp, "leak.jsonl"), rows)
    out = os.path.join(tmp, f"leak-{family}-{dtype}")
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, data__eval="", data__seq_len=SEQ, train__steps=1)))

    def losses(rows):
        ini = write_ini(out + ".e.ini", base(model, data, out, data__eval=write(os.path.join(tmp, "eval.jsonl"), rows), data__seq_len=SEQ,
            train__micro_batch=3, model__dtype=dtype))
        said = megatrain("-q", "eval", ini, "--model", os.path.join(out, "checkpoint-1"), "--per-sample", "--json").stdout
        found = [json.loads(l) for l in said.splitlines()]
        return {f["sample"]: f["loss_sum"] for f in found if "sample" in f}

    want = losses(rows)
    assert len(want) == len(rows)
    r = random.Random(5)
    for j in (0, 1, 2, 7, 20, len(rows) - 1):
        other = [dict(s) for s in rows]
        ids = [r.randrange(272) for _ in rows[j]["input_ids"]]  # trained where it was: the head's rows stay in place
        other[j] = {"input_ids": ids, "labels": [i if l != -100 else l for i, l in zip(ids, rows[j]["labels"])]}
        got = losses(other)
        moved = [i for i in want if got[i] != want[i]]
        assert moved == [j], (family, dtype, j, moved)


with tempfile.TemporaryDirectory() as tmp:
    for name, scaling in (("longrope", {"rope_type": "longrope"}), ("dynamic", {"rope_type": "dynamic"})):
        rotary_scaling_goes_by_the_samples_own_length(tmp, name, scaling)
        print(f"ok {name}", flush=True)
    for family in ("qwen3", "mistral"):
        t0 = time.time()
        packed_training_equals_unpacked_training(tmp, family)
        for dtype in ("f32", "bf16"):
            nothing_leaks_between_samples_of_a_row(tmp, family, dtype)
        print(f"ok {family} {time.time() - t0:.1f} s", flush=True)
