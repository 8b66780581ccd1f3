# SPDX-License-Identifier: Apache-2.0
"""Texts from packed weights on the emulated GPU, whose products of few rows take the codes: beside the cpu device, which
decodes them first, and with the same bits however many texts there are."""
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import config, megatrain, with_weights, write_data, write_model

PROMPTS = [[1, 2, 3], [4], [7, 8], [9, 1, 5, 6], [2], [3], [5, 5], [8], [6, 1]]
CLOSE = 0.05  # log-probabilities, of sums of bf16 products in another order


def generate(tmp, model, fmt, kind, prompts, *more):
    path = os.path.join(tmp, "prompts.jsonl")
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts)
    said = megatrain("generate", model, "--prompts", path, "--temperature", 0, "--max-tokens", 6, "--set", f"model.base_dtype={fmt}", "--set",
                     "model.dtype=bf16", "--set", f"device.kind={kind}", *more)
    return [json.loads(line) for line in said.stdout.splitlines()] if not more else said.stdout + said.stderr


def slots(said):
    size, unit = re.search(r"weight slots +([0-9.]+) ([KM])iB", said).groups()
    return float(size) * (1024 if unit == "M" else 1)


def check(tmp, family, fmt, **shape):
    folder = os.path.join(tmp, family)
    os.mkdir(folder)
    model = with_weights(folder, write_model(os.path.join(folder, "m"), config(family, **shape)), write_data(os.path.join(folder, "ids.jsonl")))
    want, got = generate(tmp, model, fmt, "cpu", PROMPTS), generate(tmp, model, fmt, "cuda", PROMPTS)
    decoded, codes = (slots(generate(tmp, model, fmt, kind, PROMPTS, "--dry-run")) for kind in ("cpu", "cuda"))
    assert codes < 0.6 * decoded, (family, codes, decoded)
    for a, b in zip(want, got):
        same = [x == y for x, y in zip(a["completion_ids"], b["completion_ids"])] + [False]
        for x, y in list(zip(a["logprobs"], b["logprobs"]))[:same.index(False)]:
            assert abs(x - y) < CLOSE, (family, fmt, a, b)
        assert same[0], (family, fmt, a, b)
    assert generate(tmp, model, fmt, "cuda", PROMPTS[:1]) == got[:1], f"{family}: a text alone has other bits"


with tempfile.TemporaryDirectory() as tmp:
    check(tmp, "qwen3", "nf4", hidden_size=64, intermediate_size=192, num_hidden_layers=2)
    check(tmp, "qwen3_moe", "mxfp4", hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2)
