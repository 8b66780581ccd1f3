# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose files are ranks of byte strings, through `tiktoken`: Mistral's tekken.json, Kimi's tiktoken.model.

Equal ids on ordinary text: mistral_common for tekken.json, tiktoken with the release's pattern for tiktoken.model
(scripts/reference/tokenizer_fixtures.py). Names of special tokens in a text become these tokens, as chat templates need it.
"""
import ast
import base64
import glob
import os

import numpy as np

from . import byte_level
from .errors import DataError, read_json

FILES = ("tekken.json", "tiktoken.model")
# the first special tokens of tekken.json of version 7 and before, which does not list them
TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
          "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
          "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")


def read_tekken(path):
    """(pattern, {bytes: id}, {special text: id}, texts that begin a document)."""
    d = read_json(path)
    try:
        config, listed = d["config"], d.get("special_tokens")
        n_special = config["default_num_special_tokens"]
        special = {t["token_str"]: t["rank"] for t in listed} if listed else {t: i for i, t in enumerate(TEKKEN)}
        n = config["default_vocab_size"] - n_special
        ranks = {base64.b64decode(v["token_bytes"]): v["rank"] + n_special for v in d["vocab"][:n]}
        return config["pattern"], ranks, special, ["<s>"]
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path} is not a tekken.json: {type(e).__name__}: {e}") from None


def literal(node):
    """The text of an expression of string constants: "...", or "|".join([...]); None: it is another one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
            and len(node.args) == 1 and isinstance(node.args[0], (ast.List, ast.Tuple))):
        parts = [literal(node.func.value), *map(literal, node.args[0].elts)]
        return None if None in parts else parts[0].join(parts[1:])
    return None


def pattern_of(model_dir):
    """`pat_str` of the release's tokenization_*.py, which is read and not run."""
    for path in sorted(glob.glob(os.path.join(glob.escape(model_dir), "tokenization_*.py"))):
        try:
            with open(path, encoding="utf-8") as f:
                tree = ast.parse(f.read())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as e:  # the last two: nested too deep
            raise DataError(f"cannot read {path}: {type(e).__name__}: {e}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(getattr(t, "id", getattr(t, "attr", "")) == "pat_str" for t in node.targets):
                found = literal(node.value)
                if found is not None:
                    return found
    raise DataError(f"{model_dir} has a tiktoken.model, but no tokenization_*.py that says pat_str, the pattern by which text is "
                    "cut: put the release's beside it, or convert it to tokenizer.json (transformers' save_pretrained)")


def read_tiktoken(path, config):
    try:
        with open(path, "rb") as f:
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}
    except (OSError, ValueError) as e:
        raise DataError(f"cannot read {path}: {e}") from None
    try:
        special = {a["content"]: int(i) for i, a in (config.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path}: added_tokens_decoder in tokenizer_config.json beside it is not what names special tokens: "
                        f"{type(e).__name__}: {e}") from None
    if not special:
        raise DataError(f"{path}: tokenizer_config.json beside it has no added_tokens_decoder, which names the special tokens")
    return pattern_of(os.path.dirname(path)), ranks, special, []


class Ranks:
    """What the rest asks of a tokenizer of the `tokenizers` library."""

    def __init__(self, special):
        self.special = special

    def token_to_id(self, text):
        return self.special.get(text)


def make(path, pattern, ranks, special):
    try:
        import tiktoken
    except ImportError:
        raise DataError(f"{path} needs the Python package tiktoken: pip install tiktoken regex, into the data helper's Python "
                        "(megatrain doctor names it); or convert it to tokenizer.json (transformers' save_pretrained)",
                        "environment") from None
    least = min(ranks.values(), default=0)
    try:
        # the library's ids are ranks; those of tekken.json begin after the special tokens
        return tiktoken.Encoding(os.path.basename(path), pat_str=pattern,
                                 mergeable_ranks={t: i - least for t, i in ranks.items()},
                                 special_tokens={t: MOVED + i for t, i in special.items()}), least
    except Exception as e:
        raise DataError(f"cannot use {path}: {e}") from None


MOVED = 1 << 24  # so that ids of special tokens meet no rank


class RankTokenizer:
    """The interface of encode.ModelTokenizer."""

    bytes = False

    def __init__(self, model_dir, name, settings):
        path = os.path.join(model_dir, name)
        self.config, self.stops = settings.config, settings.stops
        pattern, ranks, special, begin = (read_tekken(path) if name == "tekken.json"
                                          else read_tiktoken(path, self.config))
        self.encoding, self.least = make(path, pattern, ranks, special)
        self.special = settings.named
        if name == "tekken.json":
            self.special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **self.special}
        self.t = Ranks(special)
        self.max_id = max([*ranks.values(), *special.values()])
        self.prefix, self.suffix = [special[b] for b in begin if b in special], []
        self.bos, self.eos = (special.get(self.special.get(k)) for k in ("bos_token", "eos_token"))
        self.ends = set(special.values()) | ({self.eos} - {None}) | self.stops
        self.end_texts = sorted(special)
        self.lengths = np.full(self.max_id + 1, byte_level.MISFIT, dtype=np.int64)
        self.of = {i: t for t, i in ranks.items()} | {i: t.encode() for t, i in special.items()}
        for i, t in self.of.items():
            self.lengths[i] = len(t)

    def encode(self, texts):
        out = []
        for ids in self.encoding.encode_batch(texts, allowed_special="all"):
            ids = np.array(ids, dtype=np.int64)
            out.append(np.where(ids >= MOVED, ids - MOVED, ids + self.least).astype(np.uint32))
        return out

    def encode_spans(self, texts, spans):
        """Ids, and a mask of the tokens that overlap a span, if only in part: tokens are runs of the text's bytes."""
        return [(ids, byte_level.mask(t, ids, ss, self.lengths, normalizes=False))
                for t, ids, ss in zip(texts, self.encode(texts), spans)]

    def decode(self, ids):
        return b"".join(self.of.get(int(i), b"") for i in ids).decode(errors="replace")
