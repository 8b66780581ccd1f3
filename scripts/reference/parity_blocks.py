# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/optimizers/*-badam: twenty steps of models of tests/parity, a layer at a time, by badam's own optimizer
over torch's AdamW; the model's gradients in double. Run by hand; the tests need no torch. badam 1.4 has to be found:
    .venv-parity/bin/pip install --no-deps --target DIR badam==1.4
    PYTHONPATH=DIR .venv-parity/bin/python scripts/reference/parity_blocks.py [MODEL]...
"""
import importlib.metadata
import json
import os
import sys

import torch
import transformers
import transformers.pytorch_utils

if not hasattr(transformers.pytorch_utils, "ALL_LAYERNORM_LAYERS"):  # which badam looks for, and transformers 5 has no more
    transformers.pytorch_utils.ALL_LAYERNORM_LAYERS = [torch.nn.LayerNorm]
from badam import BlockOptimizer

from parity import LR, ROWS, STEPS, load, release_state, train_torch
from seeded import PARITY as ROOT, fixture
import sums  # of tests/parity

BLOCK_STEPS = 7


def blocks(model):
    def make(groups):
        adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        opt = BlockOptimizer(adamw, list(model.named_parameters()), switch_block_every=BLOCK_STEPS, switch_mode="descending",
                             verbose=0)
        opt.global_step = -1  # else its first block has a step less than the others
        return opt
    return make


torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
for name in sys.argv[1:] or ("qwen2", "qwen2_moe"):
    model = load(fixture(name), torch.float64)
    losses, norms = train_torch(model, samples, "f64", optimizer=blocks(model), wd=0.0)  # badam decays norms, too
    to = os.path.join(ROOT, "optimizers", f"{name}-badam")
    sums.write(to + ".sums", {k: p for k, p in release_state(model).items() if ".layers." in k})
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, badam "
                f"{importlib.metadata.version('badam')}", "steps": STEPS, "rows": ROWS, "learning_rate": LR,
                "block_steps": BLOCK_STEPS, "order": "descending", "losses": losses, "norms": norms}
    with open(to + ".json", "w") as f:
        f.write(json.dumps(expected, indent=1) + "\n")
    print(name, losses[0], losses[-1], norms[0], norms[-1])
