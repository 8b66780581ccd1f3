# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/preference.json: conversations with answers, and the tokens that TRL's DPOTrainer makes of them with the
tokenizers of tests/data/chat. Run by hand, with TRL in a Python environment.
    PYTHON scripts/reference/preference_tokens.py
"""
import json
import os
import types

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "data")
STYLES = ("gemma", "llama3", "mistral", "qwen2", "qwen3", "zephyr", "glm4")
USER, HOT, COLD = {"role": "user", "content": "find the word"}, "the word is hot", "the number is one"
answer = lambda text: [{"role": "assistant", "content": text}]
CASES = {
    "explicit": {"prompt": [USER], "chosen": answer(HOT), "rejected": answer(COLD)},
    "implicit": {"chosen": [USER] + answer(HOT), "rejected": [USER] + answer(COLD)},
    "turns": {"prompt": [USER] + answer("which word?") + [{"role": "user", "content": "hot"}], "chosen": answer(HOT), "rejected": answer("no")},
    "ends_with_assistant": {"prompt": [USER] + answer("the word"), "chosen": answer("is hot"), "rejected": answer("is one")},
    "system": {"prompt": [{"role": "system", "content": "Be brief."}, USER], "chosen": answer(HOT), "rejected": answer(COLD)},
    "thinking": {"prompt": [USER], "chosen": answer("<think>\nhot or cold?\n</think>\n\nthe word is hot"), "rejected": answer(COLD)},
    "tools": {"prompt": [USER], "chosen": answer(HOT), "rejected": answer(COLD),
              "tools": json.dumps([{"type": "function", "function": {"name": "find", "description": "finds", "parameters":
                                    {"type": "object", "properties": {"word": {"type": "string"}}}}}])},
    "strings": {"prompt": "find the word: ", "chosen": "hot", "rejected": "the number"},
    "merge": {"prompt": "find the wo", "chosen": "rd", "rejected": "rd is hot"},
    "implicit_strings": {"chosen": "the word is hot", "rejected": "the word is one"},
}


def tokens(tok, record):
    fake = types.SimpleNamespace(_tokenizer=tok)
    args = DPOConfig(output_dir="/tmp/none", use_cpu=True, bf16=False, max_length=None)
    row = DPOTrainer._prepare_dataset(fake, Dataset.from_list([record]), tok, args, "train")[0]
    return {k: row[k] for k in ("prompt_ids", "chosen_ids", "rejected_ids")}


def main():
    out = {}
    for style in STYLES:
        tok = AutoTokenizer.from_pretrained(os.path.join(ROOT, "chat", style))
        out[style] = {}
        for name, record in CASES.items():
            try:
                out[style][name] = tokens(tok, dict(record))
            except Exception as e:  # a template that refuses it
                out[style][name] = None
                print(style, name, type(e).__name__, str(e)[:100])
    with open(os.path.join(ROOT, "preference.json"), "w") as f:
        json.dump({"cases": CASES, "tokens": out}, f)
        f.write("\n")
    print({s: sum(v is not None for v in c.values()) for s, c in out.items()})


main()
