#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/ranks: small tokenizers in Mistral's and Kimi's formats, and what their libraries make of texts.

tokenizer_fixtures.py OUT            (needs mistral-common, which brings tiktoken)
tokenizer_fixtures.py --check TEKKEN_JSON    1,000 strings by mistral-common and by the data helper, on a released file
"""
import base64
import json
import os
import sys

import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from tokenizer_texts import strings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# Kimi's way to write its pattern: read by the helper, not run
PATTERN = ['[\\p{Han}]+', "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?", '\\p{N}{1,3}',
           ' ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*', '\\s*[\\r\\n]+', '\\s+(?!\\S)', '\\s+']


def by_helper(folder, texts):
    from megatrain_data import encode
    return [[int(i) for i in ids] for ids in encode.open_tokenizer(folder).encode(texts)]


def merges():
    """The bytes, and common pairs of what the strings have."""
    tokens, text = [bytes([b]) for b in range(256)], "".join(strings(300)).encode()
    for size in (2, 3, 4, 5, 6):
        seen = {}
        for i in range(len(text) - size + 1):
            seen[text[i:i + size]] = seen.get(text[i:i + size], 0) + 1
        have = set(tokens)
        tokens += [t for t, k in sorted(seen.items(), key=lambda x: (-x[1], x[0]))
                   if k > 25 and any(t[:c] in have and t[c:] in have for c in range(1, size))][:120]
    return tokens


def write(folder, name, text):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        f.write(text)


def main(out):
    tokens, texts = merges(), strings(1000)
    tekken, kimi = os.path.join(out, "tekken"), os.path.join(out, "tiktoken")
    pattern = "|".join(PATTERN[1:])
    write(tekken, "tekken.json", json.dumps({
        "config": {"pattern": pattern, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 40,
                   "default_num_special_tokens": 40, "version": "v3"},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]}))
    write(kimi, "tiktoken.model", "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens)))
    special = {len(tokens) + i: t for i, t in enumerate(["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>"])}
    write(kimi, "tokenizer_config.json", json.dumps({"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": {
        str(i): {"content": t, "special": True} for i, t in special.items()}}))
    write(kimi, "tokenization_kimi.py", "# SPDX-License-Identifier: Apache-2.0\nclass Tokenizer:\n    pat_str = \"|\".join([\n" +
          "".join(f"        {p!r},\n" for p in PATTERN) + "    ])\n")
    reference = tiktoken.Encoding("kimi", pat_str="|".join(PATTERN), mergeable_ranks={t: i for i, t in enumerate(tokens)},
                                  special_tokens={t: i for i, t in special.items()})
    tok = Tekkenizer.from_file(os.path.join(tekken, "tekken.json"))
    ids = {"tekken": [tok.encode(t, bos=False, eos=False) for t in texts],
           "tiktoken": [reference.encode(t, allowed_special="all") for t in texts]}
    sums = {k: [sum((i + 1) * (at + 1) for at, i in enumerate(v)) for v in all_ids] for k, all_ids in ids.items()}
    write(out, "expected.json", json.dumps({"strings": texts[:40], "ids": {k: v[:40] for k, v in ids.items()}, "sums": sums}))


def check(path):
    texts = strings(1000)
    tok = Tekkenizer.from_file(path)
    want = [tok.encode(t, bos=False, eos=False) for t in texts]
    assert os.path.basename(path) == "tekken.json", "name it tekken.json"
    have = by_helper(os.path.dirname(os.path.abspath(path)), texts)
    assert have == want, [(t, h, w) for t, h, w in zip(texts, have, want) if h != w][:3]
    print(f"ok: {len(texts)} strings, {sum(map(len, want))} ids")


if __name__ == "__main__":
    check(sys.argv[2]) if len(sys.argv) == 3 and sys.argv[1] == "--check" else main(sys.argv[1])
