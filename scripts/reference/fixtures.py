# SPDX-License-Identifier: Apache-2.0
"""Makes the small fixtures of tests/unit from transformers: rotary tables and learning rates.

Run by hand when a variant is added (scripts/setup --parity makes the environment); the tests need none of it.
    .venv-parity/bin/python scripts/reference/fixtures.py
"""
import json
import os

import torch
import transformers
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "unit")
POSITIONS = [0, 1, 2, 5, 17, 63, 64, 255]
ROTARY = {"llama": LlamaRotaryEmbedding, "mistral": MistralRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding,
          "qwen3": Qwen3RotaryEmbedding}
ARCH = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM"}
SHORT = [1.0 + 0.1 * i for i in range(8)]
LONG = [2.0 + 1.7 * i for i in range(8)]

# name -> family, keys of config.json, sequence length
ROPE = {
    "default-v4": ("llama", {"rope_theta": 500000.0}, 300),
    "default-v5": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 32}, 300),
    "absent": ("mistral", {}, 300),
    "linear-v4-type": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}, 300),
    "linear-v5": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4}}, 300),
    "dynamic-short": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 256),
    "dynamic-long": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 1000),
    "dynamic-original": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0,
                                                    "original_max_position_embeddings": 64}}, 1000),
    "llama3-v4": ("llama", {"rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}, 300),
    "llama3-v5": ("llama", {"head_dim": 64, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128}}, 300),
    "yarn-v4": ("qwen2", {"rope_theta": 1e6, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 300),
    "yarn-betas": ("qwen3", {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 0.9}, "head_dim": 32}, 300),
    "yarn-mscale": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.707,
        "mscale_all_dim": 0.5, "truncate": False}}, 300),
    "longrope-short": ("llama", {"rope_scaling": {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64,
        "factor": 4.0}}, 60),
    "longrope-long": ("llama", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}}, 300),
    "longrope-attention": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e5, "short_factor": SHORT, "long_factor": LONG,
        "original_max_position_embeddings": 64, "attention_factor": 1.25}}, 300),
}


def rope_case(name):
    family, keys, seq_len = ROPE[name]
    config = {"architectures": [ARCH[family]], "model_type": family, "hidden_size": 64, "intermediate_size": 64,
              "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
              "max_position_embeddings": 256, **keys}
    hf = AutoConfig.for_model(**{k: v for k, v in json.loads(json.dumps(config)).items() if k != "architectures"})
    rope = ROTARY[family](hf)
    positions = torch.arange(seq_len)[None]
    cos, sin = rope(torch.zeros(1, dtype=torch.float32), positions)
    at = [p for p in POSITIONS if p < seq_len]
    half = cos.shape[-1] // 2
    return {"name": name, "config": config, "seq_len": seq_len, "positions": at, "half": half,
            "cos": [v for p in at for v in cos[0, p, :half].tolist()],
            "sin": [v for p in at for v in sin[0, p, :half].tolist()]}


def lr_cases():
    from transformers import optimization as o
    out = []
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def add(schedule, warmup, total, ratio, make):
        rates = [make().lr_lambdas[0](k) for k in range(total)]
        out.append({"schedule": schedule, "warmup": warmup, "total": total, "min_ratio": ratio, "rates": rates})

    for warmup, total in ((0, 10), (3, 20), (7, 50), (20, 20)):
        add("constant", warmup, total, 0.0, lambda: o.get_constant_schedule_with_warmup(opt, warmup))
        add("linear", warmup, total, 0.0, lambda: o.get_linear_schedule_with_warmup(opt, warmup, total))
        for ratio in (0.0, 0.1):
            add("cosine", warmup, total, ratio,
                lambda: o.get_cosine_with_min_lr_schedule_with_warmup(opt, warmup, total, min_lr_rate=ratio))
        decay = max(total // 10, 1)
        # if the warm-up leaves no steps for a stable part, ours decays after it and theirs has no step left
        if warmup + decay <= total:
            add("wsd", warmup, total, 0.0,
                lambda: o.get_wsd_schedule(opt, warmup, decay, num_training_steps=total, decay_type="linear",
                                           min_lr_ratio=0.0))
        if not warmup:  # theirs warms up from the least rate, ours from 0
            add("wsd", warmup, total, 0.2,
                lambda: o.get_wsd_schedule(opt, warmup, decay, num_training_steps=total, decay_type="linear",
                                           min_lr_ratio=0.2))
    return out


def write(path, cases):
    made = f"transformers {transformers.__version__}, torch {torch.__version__}"
    with open(os.path.join(ROOT, path), "w") as f:
        json.dump({"made_with": made, "cases": cases}, f, separators=(",", ":"))
        f.write("\n")


write("hf/rope.json", [rope_case(n) for n in ROPE])
write("optim/lr.json", lr_cases())
