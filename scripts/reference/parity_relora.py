# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/adapters/qwen2-relora.json: twenty steps of PEFT's LoRA over torch's AdamW with the model's gradients in
double, in which adapters are added to the weights every few steps, and new ones begin with a new optimizer and a rate that rises
again (ReLoRA). Their A is drawn by megatrain: it is taken from a run's checkpoints after the first step of each phase, whose rate
is 0. Run by hand; the test needs no torch:
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/parity_relora.py
"""
import json
import os
import sys
import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity")
sys.path.insert(0, ROOT)
from parity import LR, ROWS, STEPS, lr_at
import test_relora as ours

EVERY, WARMUP, RANK, ALPHA, RATE = 6, 3, 4, 8, 10 * LR
EXPECTED = {"steps": STEPS, "rows": ROWS, "learning_rate": RATE, "merge_every": EVERY, "merge_warmup": WARMUP, "rank": RANK,
            "alpha": ALPHA, "targets": ["q_proj", "up_proj", "down_proj"]}


def new_adapters(model, folder):
    """The model with new adapters, of which A is that of the checkpoint."""
    c = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=EXPECTED["targets"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, c, autocast_adapter_dtype=False)
    drawn = load_file(os.path.join(folder, "adapter_model.safetensors"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                value = drawn[name.replace(".default", "")].double()
                assert "lora_A" in name or not value.any(), "B is 0 until the first update with a rate"
                p.data = value.clone()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def step_of(model, opt, samples, step):
    batch = [samples[i % len(samples)] for i in range(step * ROWS, (step + 1) * ROWS)]
    total, loss = sum(sum(l != -100 for l in s["labels"][1:]) for s in batch), 0.0
    opt.zero_grad()
    for s in batch:
        logits = model(input_ids=torch.tensor([s["input_ids"]])).logits
        l = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(s["labels"][1:]), ignore_index=-100, reduction="sum")
        (l / total).backward()
        loss += l.item()
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5).item()
    at = step % EVERY
    for g in opt.param_groups:
        g["lr"] = lr_at(step, STEPS, 2) / LR * RATE * (at / WARMUP if step >= EVERY and at < WARMUP else 1)
    opt.step()
    return loss / total, norm


torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
with tempfile.TemporaryDirectory() as tmp:
    folder = ours.model_of(tmp)
    out, _ = ours.train(tmp, folder, EXPECTED, checkpoint__every=1, checkpoint__keep=STEPS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    result = []
    for step in range(STEPS):
        if step % EVERY == 0:
            model = model.merge_and_unload() if step else model
            model, opt = new_adapters(model, f"{out}/checkpoint-{step + 1}")
        result.append(step_of(model, opt, samples, step))
    model = model.merge_and_unload()
norms = {n: p.double().norm().item() for n, p in model.named_parameters()}
EXPECTED.update(made_with=f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
                losses=[r[0] for r in result], norms=[r[1] for r in result],
                weights={n: [norms[n], p.flatten()[::max(1, p.numel() // 64)].tolist()] for n, p in model.named_parameters()
                         if any(t in n for t in EXPECTED["targets"])})
with open(os.path.join(ROOT, "adapters", "qwen2-relora.json"), "w") as f:
    f.write(json.dumps(EXPECTED, indent=None).replace('], "', '],\n"') + "\n")
print(result[0], result[-1])
