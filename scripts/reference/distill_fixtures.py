# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/distill/expected.json: fifteen steps of small models of tests/parity that learn from another one's
likeliest tokens, by torch in FP32: forward KL over the K likeliest tokens and all others together, at a temperature. Run by hand;
the test needs no torch.
    PYTHON scripts/reference/distill_fixtures.py [CASE...]
"""
import json
import os
import sys

import torch
import transformers
from peft import PeftModel

from parity import load
from seeded import PARITY as ROOT, fixture

OUT = os.path.join(ROOT, "distill")
STEPS, ROWS, LR, TEACHER = 15, 4, 5e-4, "qwen3_moe"
# student, K, share of the data's own tokens, temperature
CASES = {"top8": ("qwen3", 8, 0.0, 1), "mixed": ("qwen3", 20, 0.3, 1), "all": ("qwen3", 96, 0.0, 1), "mixture": ("qwen3_moe", 5, 0.5, 1),
         "capped": ("gemma2", 8, 0.2, 1), "lora": ("llama", 8, 0.0, 1), "warm": ("qwen3", 8, 0.3, 2), "warm_all": ("llama", 96, 0.0, 3),
         "warm_capped": ("gemma2", 8, 0.2, 1.5), "cold": ("qwen3", 8, 0.0, 0.5)}


def logits_of(model, row):
    """Of the rows that predict a trained token, and these tokens."""
    ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
    keep = labels[1:] != -100
    return model(ids[None]).logits[0, :-1][keep], ids[1:][keep]


def distance(logits, top_ids, top_logp, rest, temperature):
    """The K and all others as one outcome, or the whole vocabulary: there the last line is torch's KL of softmax(logits / T)."""
    logq = torch.log_softmax(logits.double(), -1)
    p, q = top_logp, logq.gather(-1, top_ids)
    if top_ids.shape[-1] < logits.shape[-1]:
        others = torch.ones_like(logq, dtype=torch.bool).scatter(-1, top_ids, False)
        log_rest = torch.logsumexp(logq.masked_fill(~others, -torch.inf), -1)
        p, q = torch.cat([p, rest.log()[:, None]], -1), torch.cat([q, log_rest[:, None]], -1)
    p, q = torch.log_softmax(p / temperature, -1), torch.log_softmax(q / temperature, -1)
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1) * temperature ** 2


def train(student, k, share, temperature, rows):
    model, teacher = load(fixture(student)), load(fixture(TEACHER))
    if student == "llama":
        model = PeftModel.from_pretrained(model, fixture("adapters/llama/start"), is_trainable=True)
    known = []
    for row in rows:
        with torch.no_grad():
            logp = torch.log_softmax(logits_of(teacher, row)[0].double(), -1)
        top = logp.topk(k, -1)
        known.append((top.indices, top.values, 1 - top.values.exp().sum(-1)))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    losses, kls, norms = [], [], []
    for step in range(STEPS):
        n, kl, nll = 0, 0.0, 0.0
        for i in range(step * ROWS, (step + 1) * ROWS):
            logits, targets = logits_of(model, rows[i])
            kl = kl + distance(logits, *known[i], temperature).sum()
            nll = nll + torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum")
            n += len(targets)
        loss = ((1 - share) * kl + share * nll) / n
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        optimizer.step()
        losses.append(loss.item())
        kls.append((kl / n).item())
    return {"student": student, "top": k, "sft": share, "temperature": temperature, "losses": losses, "kl": kls, "norms": norms,
            "teacher": [[round(float(v), 7) for v in known[0][1][0][:5]], [int(i) for i in known[0][0][0][:5]]]}


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    with open(os.path.join(ROOT, "data.jsonl")) as f:
        rows = [json.loads(line) for line in f][:STEPS * ROWS]
    cases, path = {}, os.path.join(OUT, "expected.json")
    if sys.argv[1:]:  # the others stay
        with open(path) as f:
            cases = json.load(f)["cases"]
    for name in sys.argv[1:] or CASES:
        case = cases[name] = train(*CASES[name], rows)
        print(name, case["losses"][0], case["losses"][-1], case["norms"][0], flush=True)
    with open(path, "w") as f:
        json.dump({"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "steps": STEPS, "rows": ROWS,
                   "learning_rate": LR, "teacher": TEACHER, "cases": cases}, f)
        f.write("\n")


main()
