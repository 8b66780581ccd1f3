# SPDX-License-Identifier: Apache-2.0
"""Fifteen steps of students on a teacher's likeliest tokens against torch (scripts/reference/distill_fixtures.py, in FP32): losses,
divergences and norms, with one micro-batch a step and with four; all tokens of the vocabulary; capped logits; a mixture;
an adapter. The teacher's file is made by `score --top`, whatever its placement, and by a call that was killed."""
import json
import os
import struct
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from test_parity import at_most, relative
from tiny import base, fixture, megatrain, metrics, planes, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))


def settings(tmp, model, data, out, **over):
    return base(fixture(model), data, out, **{
        "model__init": "weights", "model__dtype": "f32", "data__eval": "", "data__packing": "off", "data__shuffle": "off",
        "data__cache_dir": os.path.join(tmp, "cache"), **over})


def read_top(path):
    """(samples: [(rows)], K); a row: [(id, log-probability)], rest."""
    raw = open(path, "rb").read()
    magic, top, vocab, n, rows, key = struct.unpack_from("<8sIIQQQ", raw)
    assert magic == b"MTTOPK2\0" and key == 0 and vocab == 96, (magic, key, vocab)
    at = 64
    entries = [struct.unpack_from("<QQQQ", raw, at + 32 * i) for i in range(n)]
    at += 32 * n
    size = 8 * top + 4
    assert len(raw) == at + rows * size

    def row(i):
        values = struct.unpack_from("<" + "If" * top + "f", raw, at + i * size)
        return list(zip(values[0:-1:2], values[1:-1:2])), values[-1]
    return [[row(first + i) for i in range(count)] for _, first, count, _ in entries]


def make_teacher(tmp, name, data, top, *args, **over):
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", settings(tmp, "qwen3_moe", data, os.path.join(tmp, "none"), **over))
    said = megatrain("score", ini, "--data", data, "--out", out, "--top", top, *args).stderr
    assert f"{8 * top + 4} bytes for each" in said, said
    return out + ".top"


def teachers(tmp, data, expected):
    path = make_teacher(tmp, "teacher", data, 96)
    samples = read_top(path)
    for case in expected["cases"].values():
        logps, ids = case["teacher"]
        assert [i for i, _ in samples[0][0][0][:5]][:len(ids)] == ids
        at_most("teacher's log-probabilities", max(abs(a - b) for (_, a), b in zip(samples[0][0][0], logps)), 1e-5)
    few = read_top(make_teacher(tmp, "teacher-8", data, 8))
    for rows, all_rows in zip(few, samples):
        for (tokens, rest), (every, nothing) in zip(rows, all_rows):
            assert tokens == every[:8] and nothing < 1e-5
            assert abs(rest - sum(2.718281828459045 ** p for _, p in every[8:])) < 1e-5
    for over in (dict(memory__slots=2, memory__unit="half", memory__expert_group=2), dict(device__cpu_threads=1)):
        other = make_teacher(tmp, "teacher-other", data, 8, "--force", **over)
        assert open(other, "rb").read() == open(os.path.join(tmp, "teacher-8.top"), "rb").read(), over
    return path


def train(tmp, name, case, expected, teacher, label="", expect=0, **over):
    out = os.path.join(tmp, name + label)
    keys = {}
    if case["student"] == "llama":
        keys.update(adapter__kind="lora", adapter__path=fixture("adapters/llama/start"))
    ini = write_ini(out + ".ini", settings(tmp, case["student"], os.path.join(tmp, "data.jsonl"), out, **{
        "train__steps": expected["steps"], "train__batch_size": expected["rows"], "train__micro_batch": expected["rows"],
        "train__learning_rate": expected["learning_rate"], "train__schedule": "constant", "train__warmup": 0,
        "train__grad_clip": 1, "optimizer__weight_decay": 0, "optimizer__grad_dtype": "f32", "train__objective": "distill",
        "distill__teacher": teacher, "distill__top": case["top"], "distill__sft": case["sft"],
        "distill__temperature": case.get("temperature", 1), **keys, **over}))
    p = megatrain("-q", "run", ini, *["--force"] if expect is None else [], expect=expect)
    return p if expect != 0 else [m for m in metrics(out) if "loss" in m]


def compare(name, case, steps, limit=2e-6):
    at_most(f"{name}: losses", max(relative(m["loss"], l) for m, l in zip(steps, case["losses"])), limit)
    at_most("divergences", max(abs(m["kl"] - l) / max(l, 0.1) for m, l in zip(steps, case["kl"])), 5e-6)  # the mixture begins as its teacher
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, case["norms"])), 2e-5)


def refusals(tmp, data, case, expected, teacher):
    whole = bytearray(open(teacher, "rb").read())

    def other(name, at):
        with open(os.path.join(tmp, name + ".top"), "wb") as f:
            f.write(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        return dict(teacher=f.name)
    with open(os.path.join(tmp, "short.top"), "wb") as short, open(os.path.join(tmp, "foreign.top"), "wb") as foreign:
        short.write(whole[:-5])
        foreign.write(b"x" * 4096)
    half = os.path.join(tmp, "half.jsonl")
    with open(half, "w") as f:
        f.writelines(open(data).readlines()[:30])
    of_half = make_teacher(tmp, "of-half", half, 8)
    for what, over in (("it is not whole", dict(teacher=short.name)), ("the header, its first 64 bytes", other("header", 20)),
                       ("from byte 64 on, is damaged", other("samples", 64 + 32 * 7)), ("no file of megatrain score", dict(teacher=foreign.name)),
                       ("rows of " + data + ":60, ", other("rows", len(whole) - 9)), ("samples, the first of them", dict(teacher=of_half)),
                       ("distill.top", dict(teacher=os.path.join(tmp, "teacher-8.top"), distill__top=9)),
                       ("set distill.teacher", dict(teacher="")), ("what is minimized is", dict(teacher=teacher, train__objective="cross_entropy")),
                       ("eval.best_by", dict(teacher=teacher, eval__best_by="kl"))):
        p = train(tmp, "refused", case, expected, over.pop("teacher"), expect=None, **over)
        assert p.returncode not in (0, -11) and what in p.stderr, (what, p.returncode, p.stderr)


def main(tmp):
    with open(os.path.join(HERE, "distill", "expected.json")) as f:
        expected = json.load(f)
    print(expected["made_with"])
    data = os.path.join(tmp, "data.jsonl")
    with open(os.path.join(HERE, "data.jsonl")) as f, open(data, "w") as out:
        out.writelines(f.readlines()[:expected["steps"] * expected["rows"]])
    teacher = teachers(tmp, data, expected)
    for name, case in expected["cases"].items():
        compare(name, case, train(tmp, name, case, expected, teacher))
    case = expected["cases"]["top8"]
    compare("top8 in four micro-batches", case, train(tmp, "top8", case, expected, teacher, "-4", train__micro_batch=1))
    compare("top8 of a file of 8", case, train(tmp, "top8", case, expected, os.path.join(tmp, "teacher-8.top"), "-8"))
    # placement changes no bit, and pieces of rows are rows
    kept = [train(tmp, "top8", case, expected, teacher, f"-{i}", data__packing="on", data__shuffle="on", **over) and
            planes(os.path.join(tmp, f"top8-{i}", f"checkpoint-{expected['steps']}"))
            for i, over in enumerate(({}, dict(memory__slots=2, memory__unit="half", memory__activations="recompute"), dict(device__cpu_threads=1)))]
    assert kept[0] == kept[1] == kept[2]
    steps = train(tmp, "top8", case, expected, teacher, "-bf16", model__dtype="bf16", memory__logits_chunk=64, memory__logits_piece=64)
    at_most("bf16: losses", max(relative(m["loss"], l) for m, l in zip(steps, case["losses"])), 0.05)
    refusals(tmp, data, case, expected, teacher)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
