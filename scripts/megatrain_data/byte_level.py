# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie in a text, by their lengths: for byte-level tokenizers, whose tokens are runs of its bytes.

`encode_batch` remembers the place and the text of every token, which takes it about a third longer than
`encode_batch_fast`, which gives ids alone. If a token always stands for the same number of bytes, its place follows from the
ids: it is the sum of the lengths before it. Each time it is checked that the lengths add up to the length of the text;
if they do not (an added token that takes spaces with it, an unknown character), `encode_batch` is used after all.
"""
import json
import unicodedata

import numpy as np

MISFIT = 1 << 40  # length of a token that is not a run of bytes: longer than any text


def alphabet():
    """The characters by which byte-level tokenizers (first GPT-2's) write bytes."""
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    return frozenset(map(chr, plain)) | frozenset(chr(256 + k) for k in range(256 - len(plain)))


def parts(component):
    """The steps of a normaliser or pre-tokeniser, as tokenizer.json has them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state.get("pretokenizers") or state.get("normalizers") or [state]


def applies(tokenizer):
    """Whether tokens are runs of the text's bytes (if NFC is the only normaliser: of the normalised text's)."""
    model, steps = tokenizer.model, parts(tokenizer.pre_tokenizer)
    bare = not getattr(model, "continuing_subword_prefix", None) and not getattr(model, "end_of_word_suffix", None)
    return (bare and all(n["type"] == "NFC" for n in parts(tokenizer.normalizer)) and bool(steps)
            and steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"]
            and all(s["type"] in ("Split", "Digits", "Punctuation", "ByteLevel") for s in steps))


def token_lengths(tokenizer, max_id):
    """The number of bytes of each token, by id; None: not every id has one."""
    if not applies(tokenizer):
        return None
    known, lengths = alphabet(), np.full(max_id + 1, MISFIT, dtype=np.int64)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if not known.issuperset("".join(vocab)):
        vocab = {token: i for token, i in vocab.items() if known.issuperset(token)}
    lengths[np.fromiter(vocab.values(), np.int64, len(vocab))] = np.fromiter(map(len, vocab), np.int64, len(vocab))
    for i, added in tokenizer.get_added_tokens_decoder().items():
        lengths[i] = len(added.content.encode())
    return lengths


def byte_offsets(text, places):
    """The places of characters, counted in bytes."""
    if text.isascii():
        return places
    at, n_bytes, of = 0, 0, {}
    for p in sorted(set(places)):
        n_bytes += len(text[at:p].encode())
        at, of[p] = p, n_bytes
    return [of[p] for p in places]


def mask(text, ids, spans, lengths, normalizes=True):
    """Mask of the tokens that overlap a span; None: the lengths do not add up to the text's, which the tokenizer may have
    normalised."""
    ends = np.cumsum(lengths[ids])
    size = len(text) if text.isascii() else len(text.encode())
    if (ends[-1] if len(ids) else 0) != size or (normalizes and not text.isascii() and not unicodedata.is_normalized("NFC", text)):
        return None
    out = np.zeros(len(ids), dtype=bool)
    edges = byte_offsets(text, [place for span in spans for place in span])
    for first, last in zip(edges[::2], edges[1::2]):
        if first < last:
            out[np.searchsorted(ends, first, "right"):np.searchsorted(ends - lengths[ids], last, "left")] = True
    return out
