# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/score/expected.json: log-probabilities and greedy hits of 1,000 made-up completions by transformers, of
the small dense model and the mixture of tests/parity, in FP32. Run by hand; the test needs no torch.
    PYTHON scripts/reference/score_fixtures.py
"""
import json
import os
import sys

import torch
import transformers

from parity import load
from seeded import PARITY as ROOT, fixture

sys.path.insert(0, ROOT)  # tests/cli has one of the same name
from test_score import samples

OUT = os.path.join(ROOT, "score")


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    rows, made = list(samples(1000)), {}
    for name in ("qwen3", "qwen3_moe"):
        model = load(fixture(name))
        sums, hits = [], []
        for row in rows:
            ids = torch.tensor(row["input_ids"])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1].double()
            lp = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
            trained = torch.tensor(row["labels"])[1:] != -100
            sums.append(float(f"{lp[trained].sum().item():.9g}"))
            hits.append(int(((logits.argmax(-1) == ids[1:]) & trained).sum()))
        made[name] = {"logprob": sums, "greedy_hits": hits}
    with open(os.path.join(OUT, "expected.json"), "w") as f:
        json.dump({"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "models": made}, f)
        f.write("\n")


main()
