# SPDX-License-Identifier: Apache-2.0
"""Each configs/sft_*.ini passes `check` on a small stand-in of its model: same architecture, pre-tokeniser, template;
and the plans that their first lines name are made, from the published shapes."""
import glob
import json
import os
import random
import re
import shlex
import sys
import tempfile

import data_env

data_env.enter("tokenizers")
ROOT = data_env.ROOT

from families import conversation, write_tokenizer
from tiny import config, megatrain, part, write_model

#: configuration: (family of the model, style of its tokenizer, token that ends a turn)
MODELS = {"sft_qwen3": ("qwen3", "qwen3", "<|im_end|>"), "sft_qwen3_moe": ("qwen3_moe", "qwen3", "<|im_end|>"),
          "sft_qwen2.5": ("qwen2", "qwen2", "<|im_end|>"), "sft_llama3": ("llama", "llama3", "<|eot_id|>"),
          "sft_mistral": ("mistral", "mistral", "</s>"), "sft_gpt_oss": ("gpt_oss", "harmony", "<|return|>"),
          "sft_gemma4": ("gemma4_text", "gemma", "<end_of_turn>"), "sft_qwen3.5": ("qwen3_5_text", "qwen3", "<|im_end|>")}

paths = sorted(glob.glob(os.path.join(ROOT, "configs", "sft_*.ini")))
assert {os.path.basename(p)[:-4] for p in paths} == set(MODELS), paths
with tempfile.TemporaryDirectory() as tmp:
    for path in paths if part("first") else []:
        name = os.path.basename(path)[:-4]
        family, style, end = MODELS[name]
        small = config(family, vocab_size=704, num_hidden_layers=2, max_position_embeddings=8192)
        model = write_model(os.path.join(tmp, name), small)
        assert write_tokenizer(model, style) <= 704
        r = random.Random(name)
        data = os.path.join(tmp, name + ".jsonl")
        with open(data, "w") as f:
            for _ in range(200):
                sample = conversation(r, style)
                if len(json.dumps(sample)) < 8000:
                    f.write(json.dumps(sample) + "\n")
        sets = {"model.path": model, "model.init": "random", "data.train": data, "data.cache_dir": os.path.join(tmp, "cache"),
                "checkpoint.dir": os.path.join(tmp, "out-" + name), "memory.device_budget": "400MiB"}
        options = [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
        said = megatrain("check", path, *options)
        assert said.stdout.endswith("ok\n") and "messages" in said.stderr, said.stderr
        shown = megatrain("-q", "data", "show", path, *options, "--samples", 30).stdout
        assert shown.count(end + "⟧") >= 30 and "warning" not in shown, shown[:2000]
        print(f"ok {name}", flush=True)

def speed(said):
    return float(re.search(r"([\d.]+) tokens/s", said.stdout).group(1))


plans = [c for path in sorted(glob.glob(os.path.join(ROOT, "configs", "*.ini")))
         for c in re.findall(r"^; +megatrain (plan \S+(?: -\S+ \S+)+)", open(path).read(), re.M)]
assert len(plans) >= 4, plans
for command in plans if part("rest") else []:
    said = megatrain(*shlex.split(command.replace("configs/", os.path.join(ROOT, "configs", ""), 1)))
    assert "tokens/s" in said.stdout, (command, said.stderr)
    if "dpo_" in command:  # the head's second pass is all that a preference costs
        plain = megatrain(*shlex.split(command.replace("configs/", os.path.join(ROOT, "configs", ""), 1)), "--set", "preference.loss=off")
        assert 0.97 * speed(plain) < speed(said) < speed(plain), command
    least = {"lora_deepseek_v3": 418, "lora_kimi_k2": 540, "dpo_llama3_70b": 330, "dpo_qwen3": 2100}
    for name, tokens_per_second in least.items():
        assert name not in command or speed(said) >= tokens_per_second, (command, said.stdout)
        assert name not in command or "lora_" not in name or "read in place" in said.stdout, (command, said.stdout)
    print(f"ok {command}", flush=True)
