# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice tasks as lm-evaluation-harness asks for them (scripts/reference/lm_eval_fixtures.py): `score` reads the requests of its
--log_samples, and finds the same log-probabilities within 1e-5, the same choices by sum and by length, the same scores of
the tasks; also with a request a line, where requests with the same context are one question."""
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import data_env
from test_parity import at_most
from tiny import base, fixture, megatrain, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURE = os.path.join(HERE, "lm_eval")


def read(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def score(tmp, ini, data, name):
    out = os.path.join(tmp, name + ".scores")
    megatrain("-q", "score", ini, "--data", data, "--out", out, "--choices")
    return read(out)


def likeliest(values):
    return values.index(max(values))


def compare(name, requests, scores, want):
    """The scores of a task's questions, in the order of its lines."""
    by_question = [[g for g in scores if g["question"] == q] for q in range(len(requests))]
    right = right_by_length = worst = 0
    for line, (row, got, w) in enumerate(zip(requests, by_question, want["samples"]), 1):
        choices = [a["arg_1"] for a in row["arguments"].values()]
        sums = [g["logprob"] for g in got]
        assert len(got) == len(choices) and all(g["line"] == line for g in got), (name, line, got)
        worst = max(worst, *(abs(a - b) / max(1, abs(b)) for a, b in zip(sums, w["logprob"])))
        assert [g["is_greedy"] for g in got] == w["is_greedy"]
        assert likeliest(sums) == likeliest(w["logprob"]) == [g["best"] for g in got].index(True), (name, line)
        lengths = [len(c.strip(" ")) if name == "spaced" else len(c) for c in choices]  # lm-eval's, of the choice alone
        hit, hit_by_length = likeliest(sums) == row["target"], likeliest([s / n for s, n in zip(sums, lengths)]) == row["target"]
        assert (hit, hit_by_length) == (w["acc"] == 1, w["acc_norm"] == 1), (name, line)
        right, right_by_length = right + hit, right_by_length + hit_by_length
    at_most(f"{name}: log-probabilities", worst, 1e-5)
    assert abs(right / len(requests) - want["acc"]) < 1e-9 and abs(right_by_length / len(requests) - want["acc_norm"]) < 1e-9
    print(f"{name}: acc {want['acc']:.3f}, acc_norm {want['acc_norm']:.3f}")


def main(tmp):
    with open(os.path.join(FIXTURE, "expected.json")) as f:
        expected = json.load(f)
    print(expected["made_with"])
    model = shutil.copytree(fixture("qwen3"), os.path.join(tmp, "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(FIXTURE, name), model)
    ini = write_ini(f"{tmp}/a.ini", base(model, f"{tmp}/none", f"{tmp}/none", data__eval="", model__dtype="f32", model__init="weights",
                                         data__cache_dir=f"{tmp}/cache"))
    for name, want in expected["tasks"].items():
        data = os.path.join(FIXTURE, f"samples_{name}.jsonl")
        requests = read(data)
        scores = score(tmp, ini, data, name)
        compare(name, requests, scores, want)
        if name == "no_context":
            continue
        # a request a line, in both ways: neighbours with one context are a question's
        for form, line in (("pair", lambda a: {"context": a["arg_0"], "continuation": a["arg_1"]}),
                           ("instance", lambda a: {"request_type": "loglikelihood", "arguments": [a["arg_0"], a["arg_1"]]})):
            path = f"{tmp}/{name}-{form}.jsonl"
            with open(path, "w") as f:
                f.writelines(json.dumps(line(a)) + "\n" for row in requests for a in row["arguments"].values())
            single = score(tmp, ini, path, f"{name}-{form}")
            assert [g["logprob"] for g in single] == [g["logprob"] for g in scores]
            assert [g["line"] for g in single] == list(range(1, len(scores) + 1))
    for bad, row in (("two strings", {"arguments": {"gen_args_0": {"arg_0": "a"}}}), ("two strings", {"context": "a", "continuation": 3})):
        with open(f"{tmp}/bad.jsonl", "w") as f:
            f.write(json.dumps({"context": "the", "continuation": " sky"}) + "\n" + json.dumps(row) + "\n")
        p = megatrain("score", ini, "--data", f"{tmp}/bad.jsonl", "--out", f"{tmp}/bad", expect=3)
        assert "bad.jsonl:2" in p.stderr and bad in p.stderr, p.stderr


if __name__ == "__main__":
    data_env.enter("tokenizers")
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
