# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/optimizers/*-share.*: twenty steps of transformers' layers, each group of which has the same parameters, and
after ten each its own copies, with copies of their states in torch's AdamW; in double. Random weights are drawn by megatrain: they
are taken from a run's checkpoint after its first step, whose rate is 0. Run by hand; the test needs no torch:
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/parity_share.py
"""
import json
import os
import sys
import tempfile

import torch
import transformers
from transformers import AutoModelForCausalLM

from parity import LR, ROWS, STEPS, adamw, release_state, train_torch
import sums  # of tests/parity
import test_shared_layers as ours

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity")


def set_parameter(module, name, value):
    *path, leaf = name.split(".")
    for part in path:
        module = getattr(module, part)
    setattr(module, leaf, value)


def link(layers, share):
    for i, layer in enumerate(layers):
        for name, p in list(layers[i - i % share].named_parameters()):
            assert torch.equal(p, layer.get_parameter(name)), "megatrain has begun with the same weights"
            set_parameter(layer, name, p)


class Delinking:
    """AdamW, which at a step gives every layer of a group parameters and states of its own."""

    def __init__(self, groups, layers, share, at):
        self.opt, self.layers, self.share, self.left = adamw(groups), layers, share, at
        self.param_groups, self.zero_grad = self.opt.param_groups, self.opt.zero_grad

    def step(self):
        self.opt.step()
        self.left -= 1
        if self.left:
            return
        for i, layer in enumerate(self.layers):
            for name, p in list(layer.named_parameters()) if i % self.share else ():
                own = torch.nn.Parameter(p.detach().clone())
                group = next(g for g in self.param_groups if any(q is p for q in g["params"]))
                group["params"].append(own)
                self.opt.state[own] = {k: v.clone() for k, v in self.opt.state[p].items()}
                set_parameter(layer, name, own)


torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
for name, (_, share) in ours.MODELS.items():
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "steps": STEPS, "rows": ROWS,
                "learning_rate": LR, "delink_at": STEPS // 2}
    with tempfile.TemporaryDirectory() as tmp:
        out, _ = ours.train(tmp, name, expected, checkpoint__every=1, checkpoint__keep=STEPS)
        _, folder = ours.exported(out, 1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                                     experts_implementation="eager")
    layers = model.model.layers
    link(layers, share)
    losses, norms = train_torch(model, samples, "f64",
                                optimizer=lambda groups: Delinking(groups, layers, share, expected["delink_at"]))
    to = os.path.join(ROOT, "optimizers", f"{name}-share")
    sums.write(to + ".sums", {k: p for k, p in release_state(model).items() if ours.KEPT.search(k)})
    with open(to + ".json", "w") as f:
        f.write(json.dumps({**expected, "losses": losses, "norms": norms}, indent=1) + "\n")
    print(name, losses[0], losses[-1], norms[0], norms[-1])
