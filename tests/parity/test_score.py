# SPDX-License-Identifier: Apache-2.0
"""A thousand completions scored in FP32 against transformers' logits (scripts/reference/score_fixtures.py): log-probabilities within
1e-5 relative, the same greedy hits, packed or one a row."""
import json
import os
import random
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from test_parity import at_most
from tiny import base, fixture, megatrain, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))


def samples(n):
    """Made up; of a completion at least a token is trained."""
    r = random.Random(11)
    for _ in range(n):
        ids = [r.randrange(96) for _ in range(r.randrange(2, 33))]
        first = r.randrange(1, len(ids))
        yield {"input_ids": ids, "labels": [-100] * first + ids[first:]}


def main(tmp):
    with open(os.path.join(HERE, "score", "expected.json")) as f:
        expected = json.load(f)
    print(expected["made_with"])
    data = os.path.join(tmp, "data.jsonl")
    with open(data, "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in samples(1000))
    for name, want in expected["models"].items():
        for packing in ("on", "off"):
            out = os.path.join(tmp, f"{name}-{packing}")
            ini = write_ini(out + ".ini", base(fixture(name), data, out, **{
                "model__init": "weights", "model__dtype": "f32", "data__eval": "", "data__packing": packing,
                "data__cache_dir": os.path.join(tmp, "cache")}))
            megatrain("-q", "score", ini, "--data", data, "--out", out + ".jsonl")
            with open(out + ".jsonl") as f:
                got = [json.loads(line) for line in f]
            assert len(got) == len(want["logprob"])
            at_most(f"{name}, packing {packing}: log-probabilities",
                    max(abs(g["logprob"] - w) / max(1, abs(w)) for g, w in zip(got, want["logprob"])), 1e-5)
            assert [g["greedy_hits"] for g in got] == want["greedy_hits"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
