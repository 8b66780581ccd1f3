# SPDX-License-Identifier: Apache-2.0
"""Samples to token ids and masks: the model's tokenizer.json through `tokenizers`, ranks (ranks.py), or bytes."""
import array
import glob
import os
import re

import jinja2
import numpy as np

from . import answers, byte_level, formats, limits, ranks, template
from .errors import DataError, read_json
from .formats import Bad, Chat, Ids, Pair, Request

BYTE_BOS, BYTE_EOS, BYTE_VOCAB = 256, 257, 259
# what expressions of templates raise
OF_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# keys of messages that have a meaning, or none that anybody would miss
KNOWN = {"role", "content", "tool_calls", "tool_call_id", "function_call", *formats.THOUGHTS}
END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|endoftext|>", "<|end_of_text|>")


class Refused(Bad):
    """A conversation that the template will not, or cannot, render."""


def as_text(token):
    return token["content"] if isinstance(token, dict) else token


class Settings:
    """What a folder's files say of its tokenizer beside the tokenizer itself, as transformers 5 reads them.

    named: {name: token} of the special tokens with a name, which templates are given; missing(have): tokens that the tokenizer may
    lack, [(id or None, fields of the token)], in the order in which it gets them."""

    def __init__(self, model_dir):
        path = lambda name: os.path.join(model_dir, name)
        self.config = read_json(path("tokenizer_config.json"), needed=False)
        self.decoder = self.config.get("added_tokens_decoder")
        given = {} if self.decoder is not None else read_json(path("special_tokens_map.json"), needed=False)
        marked = {k: {**v, "__type": "AddedToken"} if isinstance(v, dict) and "content" in v else v for k, v in given.items()}
        whole = {**self.config, **marked}
        extra = whole.get("extra_special_tokens") or whole.get("additional_special_tokens") or []
        own = {k: v for k, v in whole.items() if k.endswith("_token") and k not in NAMED and self._is_token(v)}
        own.update(extra if isinstance(extra, dict) else {})
        self.named = {k: as_text(v) for k, v in {**{k: whole[k] for k in NAMED if whole.get(k) is not None}, **own}.items()}
        self.extra = [as_text(v) for v in extra] if isinstance(extra, list) else []
        self.late = {} if self.decoder is not None else read_json(path("added_tokens.json"), needed=False)
        self.stops = set()  # ids at which generation stops
        for name in ("generation_config.json", "config.json"):
            value = read_json(path(name), needed=False).get("eos_token_id")
            self.stops |= set(value if isinstance(value, list) else [] if value is None else [value])

    @staticmethod
    def _is_token(value):
        return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")

    def missing(self, have):
        """`have`: the texts of the tokens that it has as tokens of their own."""
        special, out = {*self.named.values(), *self.extra}, []
        for i, a in sorted((int(i), a) for i, a in (self.decoder or {}).items()):
            if isinstance(a, dict) and i not in have:
                keep = {k: a[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in a}
                out.append((i, {"content": a["content"], "special": a.get("special", False), **keep}))
        for text, i in sorted(self.late.items(), key=lambda item: item[1]):
            if i not in have:
                out.append((i, {"content": text, "special": text in special, "normalized": text not in special}))
        known = {*have.values(), *(a["content"] for _, a in out)}
        out += [(None, {"content": t, "special": True}) for t in dict.fromkeys([*self.named.values(), *self.extra]) if t not in known]
        return out


def ids_of(encoding):
    return np.asarray(array.array("I", encoding.ids), dtype=np.uint32)  # five times as fast as from the list


class ByteTokenizer:
    """256 bytes, then bos, eos and pad, as in the trainer itself."""

    def __init__(self):
        self.prefix, self.suffix = [BYTE_BOS], []
        self.bos, self.eos, self.ends = BYTE_BOS, BYTE_EOS, {BYTE_EOS}
        self.special, self.end_texts, self.config, self.max_id = {}, list(END_NAMES), {}, BYTE_VOCAB - 1
        self.bytes, self.stops = True, set()

    def encode(self, texts):
        return [np.frombuffer(t.encode(), dtype=np.uint8).astype(np.uint32) for t in texts]

    def encode_spans(self, texts, spans):
        out = []
        for t, ids, ss in zip(texts, self.encode(texts), spans):
            mask = np.zeros(len(ids), dtype=bool)
            for s, e in ss:
                mask[len(t[:s].encode()):len(t[:e].encode())] = True
            out.append((ids, mask))
        return out

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class ModelTokenizer:
    """tokenizer.json, and what tokenizer_config.json adds to it."""

    bytes = False

    def __init__(self, model_dir):
        import tokenizers
        path = os.path.join(model_dir, "tokenizer.json")
        if not os.path.exists(path):
            raise DataError(f"{model_dir} has no tokenizer.json, tekken.json or tiktoken.model (convert its tokenizer with transformers' "
                            "save_pretrained), or set data.tokenizer = byte")
        try:
            self.t = tokenizers.Tokenizer.from_file(path)
        except Exception as e:
            raise DataError(f"cannot read {path}: {e}") from None
        settings = Settings(model_dir)
        self.config, self.special, self.stops = settings.config, settings.named, settings.stops
        self.t.no_truncation()
        self.t.no_padding()
        self.t.encode_special_tokens = bool(self.config.get("split_special_tokens", False))
        self._add_missing(tokenizers, settings, path)
        added = self.t.get_added_tokens_decoder()
        self.max_id = max(max(self.t.get_vocab(with_added_tokens=True).values(), default=0), max(added, default=0))
        id_of = lambda name: self.t.token_to_id(self.special[name]) if name in self.special else None
        self.bos, self.eos = id_of("bos_token"), id_of("eos_token")
        self.ends = {i for i, a in added.items() if a.special}
        self.ends |= {self.eos} - {None} | self.stops
        self.end_texts = sorted({a.content for a in added.values() if a.special} | {self.special.get("eos_token", "")} - {""})
        self._learn_ends_of_text()
        self.lengths = byte_level.token_lengths(self.t, self.max_id)

    def _add_missing(self, tokenizers, settings, path):
        """Adds tokens that only the files beside the tokenizer have; those that say an id must get it."""
        have = {i: a.content for i, a in self.t.get_added_tokens_decoder().items()}
        for i, fields in settings.missing(have):
            token = tokenizers.AddedToken(**fields)
            (self.t.add_special_tokens if token.special else self.t.add_tokens)([token])
            got = self.t.token_to_id(token.content)
            if i is not None and got != i:
                raise DataError(f'tokenizer_config.json or added_tokens.json beside {path} gives the token "{token.content}" the id {i}, '
                                f"tokenizer.json {got}")

    def _learn_ends_of_text(self):
        """Finds what the post-processor puts before and after a text, and removes it: it would trim offsets."""
        inner = self.t.encode("a", add_special_tokens=False).ids
        whole = self.t.encode("a", add_special_tokens=True).ids
        at = next((k for k in range(len(whole)) if whole[k:k + len(inner)] == inner), 0)
        self.prefix, self.suffix = whole[:at], whole[at + len(inner):]
        self.t.post_processor = None

    def encode(self, texts):
        return [ids_of(e) for e in self.t.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_spans(self, texts, spans):
        """Ids, and a mask of the tokens that overlap a span, if only in part."""
        if self.lengths is None:
            return self._by_offsets(texts, spans)
        out = [(ids, byte_level.mask(t, ids, ss, self.lengths)) for t, ids, ss in zip(texts, self.encode(texts), spans)]
        rest = [k for k, (_, mask) in enumerate(out) if mask is None]
        for k, got in zip(rest, self._by_offsets([texts[k] for k in rest], [spans[k] for k in rest])):
            out[k] = got
        return out

    def _by_offsets(self, texts, spans):
        """The same, from the place of each token as the tokenizer gives it."""
        out = []
        for text, e, ss in zip(texts, self.t.encode_batch(texts, add_special_tokens=False), spans):
            ids, mask = ids_of(e), np.zeros(len(e), dtype=bool)
            for s, end in ss:
                first, last = self._first(e, s, end), self._after(e, end, len(text), len(ids))
                if first is not None:
                    mask[first:last] = True
            out.append((ids, mask))
        return out

    @staticmethod
    def _first(e, at, end):
        while at < end:  # characters that the normaliser removed have no token
            token = e.char_to_token(at)
            if token is not None:
                return token
            at += 1
        return None

    @staticmethod
    def _after(e, at, length, n):
        end = at
        while at < length:
            token = e.char_to_token(at)
            if token is not None:
                return token + 1 if e.token_to_chars(token)[0] < end else token
            at += 1
        return n

    def decode(self, ids):
        return self.t.decode([int(i) for i in ids], skip_special_tokens=False)


def open_tokenizer(model_dir):
    """tokenizer.json, or the file of ranks that the folder has instead."""
    try:
        for name in ranks.FILES:
            if not os.path.exists(os.path.join(model_dir, "tokenizer.json")) and os.path.exists(os.path.join(model_dir, name)):
                return ranks.RankTokenizer(model_dir, name, Settings(model_dir))
        return ModelTokenizer(model_dir)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as e:
        raise DataError(f"the tokenizer's files of {model_dir} are not as transformers writes them: {type(e).__name__}: {e}") from None


class Encoder:
    """A tokenizer and its templates: samples in, (ids, mask) out; mask None: all tokens are trained."""

    def __init__(self, job):
        model_dir = job.get("model_dir")
        self.train_on, self.vocab = job.get("train_on", "assistant"), job["vocab"]
        with limits.bounded(f"opening the tokenizer of {model_dir}"):
            self.tok = ByteTokenizer() if job["tokenizer"] == "byte" else open_tokenizer(model_dir)
        splits = self.tok.bytes or self.tok.config.get("split_special_tokens")
        self.special = None if splits or not self.tok.end_texts else re.compile("|".join(map(re.escape, self.tok.end_texts)))
        self.which, self.date, self.model_dir = job.get("template", "model"), job.get("date"), model_dir
        self._templates = None
        self.is_end = np.zeros(self.tok.max_id + 2, dtype=bool)  # by id; the last one is for all larger ids
        self.is_end[[i for i in self.tok.ends if i <= self.tok.max_id]] = True

    def templates(self):
        if self._templates is None:
            found = template.sources(self.which, None if self.tok.bytes else self.model_dir, self.tok.config)
            self._templates = {k: template.ChatTemplate(v, self.tok.special, self.tok.end_texts, name, self.date)
                               for k, (v, name) in found.items()}
        return self._templates

    def template_for(self, tools):
        t = self.templates()
        return t["tool_use"] if "default" not in t or (tools is not None and "tool_use" in t) else t["default"]

    def render(self, chat, prompt=False, odd=None, index=0):
        """(template, rendering). odd: to which is added, of this index, what the template makes nothing of."""
        t = self.template_for(chat.tools)
        messages = chat.messages
        if any("function_call" in m for m in messages) and not t.reads("function_call"):
            messages = formats.with_tool_calls(messages)
        try:
            r = t.render(messages, chat.tools, prompt, chat.variables)
        except jinja2.exceptions.TemplateError as e:
            raise Refused(f"{t.name} says: {e.message or e}") from None
        except OF_TEMPLATES as e:
            raise Refused(f"{t.name} fails: {type(e).__name__}: {e}") from None
        if odd is not None:
            self._note(odd, index, t, r, chat._replace(messages=messages))
        return t, r

    def _note(self, odd, index, t, r, chat):
        for kind, text in template.lost(t, r, chat.messages, chat.tools).items():
            odd.add(kind, index, text)
        written = template.specials_in(chat.messages, self.special) if self.special else None
        if written:
            odd.add("special", index, f"message {written[0]} writes {written[1]} out, which becomes that special token, as if the "
                    "template had put it there")
        for name in chat.variables:
            if not t.reads(name) or name in ("messages", "add_generation_prompt"):
                why = "this program gives it itself" if t.reads(name) else f"{t.name} does not read it"
                odd.add("variables:" + name, index, f'the template argument "{name}" has no effect: {why}')
        for name in t.bare - set(t.special) - set(chat.variables):
            odd.add("undefined:" + name, index, f"{t.name} prints {{{{ {name} }}}}, to which nothing gives a value")
        for name in chat.fields:
            if not t.reads(name):
                odd.add("field:" + name, index, f'"{name}" of a sample has no effect in this format')
        for i, m in enumerate(chat.messages):
            for key in m.keys() - KNOWN:
                value = m[key]
                if value not in ("", [], {}) and not t.reads(key) and not (key in formats.MARKS and value in (0, 1)) \
                        and not (key == "name" and m["role"] == "tool"):
                    why = ("as a mark of what is trained it must be true, false, 0 or 1" if key in formats.MARKS else
                           f"it is no key of messages, and {t.name} does not read it")
                    odd.add("key:" + key, index, f'"{key}" of message {i} has no effect: {why}')

    def chat_text(self, chat, odd=None, index=0):
        """The text of a conversation, and the spans of it that are trained."""
        t, r = self.render(chat, odd=odd, index=index)
        return r.text, t.spans(r, chat.messages, chat.flags, self.train_on)

    def begun(self, ids):
        """The tokens that begin a text, where `ids` do not begin with them: whoever writes them gets no second ones."""
        prefix = self.tok.prefix
        return [] if list(ids[:len(prefix)]) == prefix else prefix

    def ended(self, ids):
        """The same of those that end a text."""
        after = self.tok.suffix or ([self.tok.eos] if self.tok.eos is not None else [])
        return [] if after and list(ids[-len(after):]) == after else after

    def around(self, ids, mask):
        """Adds the tokenizer's prefix and an end of text, unless they are there."""
        ahead, after = self.begun(ids), self.ended(ids)
        if ahead or after:
            ids = np.concatenate([np.array(ahead, np.uint32), ids, np.array(after, np.uint32)])
        full = np.ones(len(ids), dtype=bool)
        full[:len(ahead)] = False
        if mask is not None:
            full[len(ahead):len(ahead) + len(mask)] = mask
        return ids, full

    def request(self, context, continuation):
        """Ids and mask of a request, as lm-evaluation-harness makes them (`_encode_pair`): spaces at the end of the context
        belong to the continuation. Both are tokenized as one text; of that, what follows as many tokens as the context has
        alone is the continuation, behind the context's own tokens, even where a token of the text reaches into both."""
        tok = self.tok
        end = len(context.rstrip())
        whole, alone = [list(i) for i in tok.encode([context + continuation, context[:end]])]
        prefix = list(self.begun(whole))
        if not context:
            first = tok.bos if tok.bos is not None else tok.eos
            prefix = [] if first is None or whole[:1] == [first] else [first]
            alone = whole[:1] if not prefix else []
        ids = np.array(prefix + alone + whole[len(alone):], np.uint32)
        return ids, np.arange(len(ids)) >= max(len(prefix) + len(alone), 1)

    def encode(self, samples, odd=None):
        """[(ids, mask)] of samples; raises Bad with (index, message) if one cannot be encoded.

        odd: a notes.Odd, which collects warnings; with it, conversations that the template refuses are None."""
        plain, spanned, out = [], [], [None] * len(samples)
        for i, s in enumerate(samples):
            try:
                if isinstance(s, answers.Answers):
                    out[i] = answers.encode(self, s, odd, i)
                elif isinstance(s, Request):
                    out[i] = self.request(*s)
                elif isinstance(s, Ids):
                    mask = None if s.labels is None else np.array(s.labels) != -100
                    out[i] = (self._checked_ids(s.ids), mask)
                elif isinstance(s, Chat):
                    spanned.append((i, *self.chat_text(s, odd, i)))
                elif isinstance(s, Pair):
                    text = s.prompt + s.completion
                    spanned.append((i, text, [(len(s.prompt), len(text))]))
                else:
                    plain.append((i, s.text))
            except Refused as e:
                if odd is None:
                    raise Bad((i, str(e))) from None
                odd.add("refused", i, str(e))
            except (Bad, DataError) as e:
                raise Bad((i, str(e))) from None
        self._batch(plain, lambda texts: [(ids, None) for ids in self.tok.encode(texts)], out)
        self._batch(spanned, lambda texts: self.tok.encode_spans(texts, [s[2] for s in spanned]), out)
        for i, s in enumerate(samples):
            wrap = not isinstance(s, (Ids, Chat, Request, answers.Answers)) or (isinstance(s, Chat) and self.tok.bytes)
            if wrap and out[i] is not None:
                out[i] = self.around(*out[i])
        return out

    def beyond(self, token):
        """What is wrong with a token that the model has no row for."""
        name = "" if self.tok.bytes else f" ({self.tok.decode([token])!r})"
        return (f"token {token}{name} is beyond the model's vocab_size of {self.vocab}, the rows of its embedding"
                + (f": the tokenizer of {self.model_dir} has ids up to {self.tok.max_id}" if token <= self.tok.max_id else ""))

    def _checked_ids(self, ids):
        ids = np.array(ids, dtype=np.int64)
        worst = int(ids.argmax())
        if ids[worst] >= self.vocab:
            raise Bad(f"input_ids[{worst}] = {ids[worst]} is beyond the model's vocab_size of {self.vocab}")
        return ids.astype(np.uint32)

    @staticmethod
    def _batch(items, encode, out):
        try:
            for item, got in zip(items, encode([item[1] for item in items]) if items else []):
                out[item[0]] = got
        except (UnicodeEncodeError, TypeError):
            for item in items:
                try:
                    item[1].encode()
                except UnicodeEncodeError:
                    raise Bad((item[0], "a lone surrogate (\\ud800 to \\udfff) cannot be encoded")) from None
            raise


def template_files():
    return sorted(glob.glob(os.path.join(template.BUILT_IN, "*.jinja")))
