# SPDX-License-Identifier: Apache-2.0
"""
Random input for the data helper: templates and tokenizers that are damaged anyhow end with its own error or a result,
within limits; and what it writes is what the program itself writes of the same samples, or both refuse them.
"""
import gzip
import json
import os
import random
import shutil
import sys
import tempfile

import data_env

data_env.enter("jinja2", "numpy", "tokenizers")
import jinja2

ROOT = data_env.ROOT
sys.path.insert(0, os.path.join(ROOT, "scripts"))
from megatrain_data import encode, limits
from megatrain_data import template as T
from megatrain_data.errors import DataError
from tiny import FULL, base, config, megatrain, write_ini, write_model

FOLDERS = [os.path.join(ROOT, *f) for f in (("scripts", "megatrain_data", "templates"), ("tests", "data", "templates"))]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = ["<|im_end|>", "<|eot_id|>", "</s>"]
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"}, {"role": "assistant", "content": "A2"}]
SEED = int(os.environ.get("MEGATRAIN_TEST_SEED", "1"))
WORDS = ("{% for m in messages %}", "{% endfor %}", "{% if ", "%}", "{{ ", " }}", "messages", "loop", "[0]", ".content", "| tojson",
         "range(99999)", "'x' * 99999", "~", "{% set x = x ~ x %}", "namespace(a=1)", "raise_exception('e')", "{% generation %}",
         "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "__class__", "none", "-1", "{#", "\x00", "\u2028", "{% include 'x' %}",
         "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "'x'.center(999999999)", "%", "{", "\n",
         "{{ 1 // 0 }}", "{{ 9.0 ** 9999 }}", "{{ [] | first | upper }}", "{{ 'a' | int(base=99) }}", "{{ messages | sum }}")


def damaged(r, text):
    for _ in range(r.randrange(1, 5)):
        a = r.randrange(len(text) + 1)
        b = min(len(text), a + r.choice((0, 1, 5, 40)))
        text = text[:a] + r.choice(("", r.choice(WORDS), text[r.randrange(len(text) + 1):][:r.randrange(40)])) + text[b:]
    return text


def templates_end_with_a_result_or_an_error(tmp, r):
    counts = {True: 0, False: 0}
    old = limits.CPU_SECONDS, limits.MEMORY
    limits.CPU_SECONDS, limits.MEMORY = 0.5, 256 << 20
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    sources = [plain] * 5 + [open(os.path.join(d, n), encoding="utf-8").read() for d in FOLDERS for n in sorted(os.listdir(d))]
    for k in range(20000 if FULL else 300):
        source = WORDS[k] if k < len(WORDS) else damaged(r, r.choice(sources))
        try:
            with limits.bounded("rendering"):
                t = T.ChatTemplate(source, SPECIAL, ENDS, "random")
                shown = t.render(CHAT)
                spans = t.spans(shown, CHAT, [None] * len(CHAT), "assistant")
                assert all(0 <= a <= b <= len(shown.text) for a, b in spans), source
            counts[True] += 1
        except (DataError, jinja2.exceptions.TemplateError, *encode.OF_TEMPLATES):  # the helper reports each of these as an error
            counts[False] += 1
        except BaseException:
            print(repr(source), file=sys.stderr)
            raise
    limits.CPU_SECONDS, limits.MEMORY = old
    assert all(counts.values()), counts


def rows_at_random(r):
    rows = []
    for _ in range(r.randrange(1, 60)):
        ids = [r.randrange(272) for _ in range(r.choice((2, 3, 8, 9, 40)))]
        row = {"input_ids": ids}
        if r.random() < 0.5:
            row["labels"] = [t if r.random() < 0.6 else -100 for t in ids[:-1]] + ids[-1:]
        if r.random() < 0.2:
            row["attention_mask"] = [1] * len(ids)
        rows.append(row)
    if r.random() < 0.4:
        row = r.choice(rows)
        r.choice((lambda: row.update(input_ids=row["input_ids"] + [272]), lambda: row.update(labels=[1]),
                  lambda: row.update(input_ids=[]), lambda: row.update(input_ids=["a"]), lambda: row.update(input_ids=[-1]),
                  lambda: row.update(input_ids=[1.5, 2]), lambda: row.pop("input_ids"), lambda: row.update(attention_mask=[2]),
                  lambda: row.update(labels=[-100] * len(row["input_ids"]))))()
    return rows


def the_helper_writes_what_the_program_writes(tmp, r):
    model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=1))
    cache, counts = os.path.join(tmp, "cache"), {}
    for k in range(300 if FULL else 8):
        text = "".join(json.dumps(row) + "\n" for row in rows_at_random(r)).encode()
        got = []
        for ending, pack in ((".jsonl", lambda b: b), (".jsonl.gz", gzip.compress)):
            data = os.path.join(tmp, "rows" + ending)
            with open(data, "wb") as f:
                f.write(pack(text))
            ini = write_ini(os.path.join(tmp, "rows.ini"), base(model, data, tmp + "/out", data__cache_dir=cache, data__eval="",
                                                                data__tokenizer="byte", model__init="random"))
            code = megatrain("-q", "data", "prepare", ini, expect=None).returncode
            shards = [n for n in os.listdir(cache) if n.endswith(".tokens")] if os.path.isdir(cache) else []
            raw = open(os.path.join(cache, shards[0]), "rb").read() if shards else b""
            # without what names the source: its hash, its size, its name among places, and the header's sum
            got.append((code, raw[:40] + raw[48:72] + raw[80:112] + raw[272:3368] + raw[3376:]))
            shutil.rmtree(cache, ignore_errors=True)
        assert got[0] == got[1], (k, got[0][0], got[1][0], text)
        counts[got[0][0]] = counts.get(got[0][0], 0) + 1
    assert counts.get(0) and len(counts) > 1, counts


def tokenizers_end_with_a_result_or_an_error(tmp, r):
    vocab = {chr(c): c for c in range(32, 127)} | {"[U]": 127}
    good = json.dumps({"version": "1.0", "added_tokens": [{"id": 128, "content": "</s>", "special": True, "single_word": False,
                                                            "lstrip": False, "rstrip": False, "normalized": False}],
                       "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                       "truncation": None, "padding": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[U]"}})
    model = write_model(os.path.join(tmp, "spoken"), config("qwen3", num_hidden_layers=1))
    data = os.path.join(tmp, "text.jsonl")
    with open(data, "w") as f:
        f.write(json.dumps({"text": "a b c"}) + "\n")
    ini = write_ini(os.path.join(tmp, "spoken.ini"), base(model, data, tmp + "/out", data__eval="", data__cache_dir=tmp + "/spoken-cache"))
    codes = {}
    for k in range(100 if FULL else 6):
        with open(model + "/tokenizer.json", "w") as f:
            f.write(damaged(r, good) if k else good)
        p = megatrain("-q", "data", "prepare", ini, expect=None)
        assert p.returncode in (0, 3) and (p.returncode == 0 or "tokenizer" in p.stderr or "spoken" in p.stderr), (k, p.stderr)
        assert "Traceback" not in p.stderr, p.stderr
        codes[p.returncode] = codes.get(p.returncode, 0) + 1
        shutil.rmtree(tmp + "/spoken-cache", ignore_errors=True)
    assert codes.get(0), codes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp_dir:
        for test in (templates_end_with_a_result_or_an_error, the_helper_writes_what_the_program_writes,
                     tokenizers_end_with_a_result_or_an_error):
            test(tmp_dir, random.Random(SEED))
            print(f"ok {test.__name__}", flush=True)
