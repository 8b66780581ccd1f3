# SPDX-License-Identifier: Apache-2.0
"""Which tokens a span of characters has: told by the tokens' lengths, it is as the tokenizer's own places tell it."""
import json
import os
import random
import shutil
import sys
import tempfile
import unicodedata

import data_env

data_env.enter("tokenizers")
ROOT = data_env.ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from families import SCRAPS, words
from megatrain_data import byte_level
from megatrain_data.encode import ModelTokenizer

FIXTURES = os.path.join(ROOT, "tests", "data", "chat")


def texts(r, n=400):
    """Words and scraps with the tokens of templates between them, and up to four spans in each."""
    for _ in range(n):
        text = "".join(r.choice([words(r, 12), r.choice(SCRAPS), "<|im_end|>\n", "<|im_start|>", "<think>", "<|eot_id|>", "e\u0301"])
                       for _ in range(r.randrange(1, 9)))
        borders = sorted(r.randrange(len(text) + 1) for _ in range(2 * r.randrange(5)))
        yield text, list(zip(borders[::2], borders[1::2]))


def compare(tokenizer, samples):
    """How many of the samples the lengths told."""
    batch, spans = zip(*samples)
    by_length = [byte_level.mask(t, ids, ss, tokenizer.lengths)
                 for t, ids, ss in zip(batch, tokenizer.encode(batch), spans)]
    got, want = tokenizer.encode_spans(batch, spans), tokenizer._by_offsets(batch, spans)
    for k, ((a, m), (b, n)) in enumerate(zip(got, want)):
        assert a.tolist() == b.tolist() and m.tolist() == n.tolist(), (batch[k], spans[k], m.tolist(), n.tolist())
    return sum(m is not None for m in by_length)


def with_tokens_that_take_spaces(folder):
    """The tokenizer of a fixture, its added tokens widened by the spaces before them."""
    shutil.copytree(os.path.join(FIXTURES, "qwen2"), folder)
    path = os.path.join(folder, "tokenizer.json")
    state = json.load(open(path))
    for token in state["added_tokens"]:
        token["lstrip"] = True
    json.dump(state, open(path, "w"))
    return ModelTokenizer(folder)


r = random.Random(3)
for style in sorted(os.listdir(FIXTURES)):
    tokenizer = ModelTokenizer(os.path.join(FIXTURES, style))
    assert (tokenizer.lengths is None) == (style in ("gemma", "mistral", "zephyr")), style
    if tokenizer.lengths is not None:
        samples = list(texts(r))
        told = compare(tokenizer, samples)
        assert told == sum(unicodedata.is_normalized("NFC", t) for t, _ in samples) > 150, (style, told)
        print(f"ok {style}: {told} of {len(samples)} texts by lengths")
with tempfile.TemporaryDirectory() as tmp:
    tokenizer = with_tokens_that_take_spaces(os.path.join(tmp, "wide"))
    samples = [(f"a {t} <|im_end|>b", [(1, len(t) + 1)]) for t, _ in texts(r, 50)] + list(texts(r, 50))
    told = compare(tokenizer, samples)
    assert 0 < told < 60, told
    print(f"ok tokens that take spaces with them: {told} of {len(samples)} texts by lengths")
