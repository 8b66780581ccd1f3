# SPDX-License-Identifier: Apache-2.0
"""A row of 8,192 tokens in chunks beside transformers, which computes it whole in double: loss and gradient norm of each case of
tests/parity/test_long.py (or of those that are named), whose models the program draws. --store writes tests/parity/long.json.
Run by scripts/parity long."""
import json
import os
import sys
import tempfile

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", d) for d in ("cli", "parity")]
import test_long
import torch
import transformers
from tiny import megatrain


def whole(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                                              experts_implementation="eager").train()
    model.get_input_embeddings().padding_idx = None  # that token is trained like any other
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    return {"loss": loss.item(), "grad_norm": norm.item()}


def main(tmp):
    path, cases = os.path.join(test_long.HERE, "long.json"), {}
    if os.path.exists(path):
        cases = json.load(open(path))["cases"]
    for name in [a for a in sys.argv[1:] if a[0] != "-"] or test_long.CASES:
        ours, ids, out = test_long.step(tmp, name)
        folder = os.path.join(tmp, name + "-export")
        megatrain("-q", "export", os.path.join(out, "checkpoint-1"), folder, "--dtype=f32")
        cases[name] = whole(folder, ids)
        print(name, *(f"{k}: {ours[k]:.9g}, transformers {v:.9g}, relative {abs(ours[k] / v - 1):.1e};" for k, v in cases[name].items()), flush=True)
    if "--store" in sys.argv:
        with open(path, "w") as f:
            json.dump({"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "cases": cases}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
