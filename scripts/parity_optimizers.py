# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/optimizers: twenty steps of models of tests/parity with optimizers other than AdamW, in double.
Run by hand; the tests need no torch. lion-pytorch has to be installed beside what scripts/setup --parity installs.
    .venv-parity/bin/python scripts/parity_optimizers.py [MODEL]...
"""
import importlib.metadata
import json
import os
import sys

import torch
import transformers
from lion_pytorch import Lion
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from parity import ROWS, STEPS, release_state, train_torch

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "parity")


class DecoupledSGD(torch.optim.SGD):
    """torch.optim.SGD after weights have decayed as AdamW's do, and not with the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        decay = [g["weight_decay"] for g in self.param_groups]
        for g in self.param_groups:
            for p in g["params"]:
                p.mul_(1 - g["lr"] * g["weight_decay"])
            g["weight_decay"] = 0.0
        super().step(closure)
        for g, wd in zip(self.param_groups, decay):
            g["weight_decay"] = wd


# the keys of [optimizer], the learning rate, and the same in torch
CASES = {
    "lion": ({"type": "lion", "beta1": 0.9, "beta2": 0.99}, 2e-4, lambda groups: Lion(groups, lr=1e-3, betas=(0.9, 0.99))),
    "momentum": ({"type": "sgd", "momentum": 0.9}, 0.02, lambda groups: DecoupledSGD(groups, lr=1e-3, momentum=0.9)),
    "sgd": ({"type": "sgd"}, 0.1, lambda groups: DecoupledSGD(groups, lr=1e-3)),
}

torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
os.makedirs(os.path.join(ROOT, "optimizers"), exist_ok=True)
for name in sys.argv[1:] or ("qwen2", "qwen2_moe"):
    for case, (keys, lr, optimizer) in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(os.path.join(ROOT, name), dtype=torch.float64, attn_implementation="eager",
                                                     experts_implementation="eager")
        losses, norms = train_torch(model, samples, "f64", optimizer=optimizer, lr=lr)
        to = os.path.join(ROOT, "optimizers", f"{name}-{case}")
        save_file({k: p.float().contiguous() for k, p in release_state(model).items()}, to + ".safetensors")
        expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, "
                    f"lion-pytorch {importlib.metadata.version('lion-pytorch')}", "steps": STEPS, "rows": ROWS,
                    "learning_rate": lr, "optimizer": keys, "losses": losses, "norms": norms}
        with open(to + ".json", "w") as f:
            f.write(json.dumps(expected, indent=1) + "\n")
        print(name, case, losses[0], losses[-1], norms[0], norms[-1])
