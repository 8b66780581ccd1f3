# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/generate.json: what transformers' generate() adds to three prompts, greedily, in FP32, for small models of
tests/parity of many kinds. Run by hand; the test needs no torch.
    PYTHON scripts/reference/generate_fixtures.py [FAMILY]...
"""
import json
import os
import random
import sys

import torch
import transformers

from parity import load
from seeded import PARITY as ROOT, fixture

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3", "qwen3_next", "nemotron_h", "granite4", "gemma3_text")
NEW = 200
UNCACHED = ("nemotron_h",)  # whose own cache (transformers 5) gives a prompt shorter than its convolution another text



def main():
    torch.set_num_threads(1)
    path, made = os.path.join(ROOT, "generate.json"), {}
    if sys.argv[1:]:
        with open(path) as f:
            made = json.load(f)["models"]
    for name in sys.argv[1:] or FAMILIES:
        model = load(fixture(name))
        r, prompts, out = random.Random(5), [], []
        for n in (1, 7, 30):
            ids = [r.randrange(3, model.config.vocab_size) for _ in range(n)]
            with torch.no_grad():
                text = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, n, dtype=torch.long), do_sample=False, use_cache=name not in UNCACHED,
                                      max_new_tokens=NEW, pad_token_id=0)
            prompts.append(ids)
            out.append(text[0, n:].tolist())
        made[name] = {"prompts": prompts, "completions": out, "max_tokens": NEW}
        print(name, [len(o) for o in out], len(set(sum(out, []))))
    with open(path, "w") as f:
        json.dump({"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "models": made}, f)
        f.write("\n")


main()
