# SPDX-License-Identifier: Apache-2.0
"""tekken.json and tiktoken.model: the ids of the libraries that define them, on 1,000 strings; without tiktoken refused.

Fixtures: scripts/reference/tokenizer_fixtures.py.
"""
import importlib.util
import json
import os
import sys
import tempfile

import data_env

data_env.enter("jinja2", "numpy", "pyarrow", "tokenizers")
sys.path[:0] = [os.path.join(data_env.ROOT, "scripts", *d) for d in ((), ("reference",))]

import tokenizer_texts  # noqa: E402
from megatrain_data import encode, errors, ranks  # noqa: E402

FOLDER = os.path.join(data_env.ROOT, "tests", "data", "ranks")
with open(os.path.join(FOLDER, "expected.json"), encoding="utf-8") as f:
    WANT = json.load(f)


def refused(folder, says):
    try:
        encode.open_tokenizer(folder)
    except errors.DataError as e:
        assert says in str(e), e
        return
    raise AssertionError(f"{folder} was read")


def ids_are_those_of_the_libraries():
    texts = tokenizer_texts.strings(1000)
    assert texts[:40] == WANT["strings"]
    for name in "tekken", "tiktoken":
        tok = encode.open_tokenizer(os.path.join(FOLDER, name))
        got = [[int(i) for i in ids] for ids in tok.encode(texts)]
        assert got[:40] == WANT["ids"][name]
        sums = [sum((i + 1) * (at + 1) for at, i in enumerate(v)) for v in got]
        assert sums == WANT["sums"][name], name
        assert [tok.decode(ids) for ids in got] == texts
        end = tok.special["eos_token"]
        (ids, mask), = tok.encode_spans(["e\u0301 12" + end], [[(3, 5)]])
        assert ids[-1] == tok.eos and not mask[0] and not mask[-1] and mask[:-1].any(), (ids, mask)
        assert (tok.prefix == [1] and tok.bos == 1) if name == "tekken" else tok.prefix == [], name


def what_cannot_be_is_refused(tmp):
    for name in "tekken.json", "tiktoken.model":
        folder = os.path.join(tmp, name)
        os.mkdir(folder)
        with open(os.path.join(folder, name), "w") as f:
            f.write("{}" if name == "tekken.json" else "YQ== 0\n")
        refused(folder, "is not a tekken.json" if name == "tekken.json" else "added_tokens_decoder")
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump({"added_tokens_decoder": {"1": {"content": "[EOS]"}}}, f)
    refused(folder, "pat_str")
    with open(os.path.join(folder, "tokenization_kimi.py"), "w") as f:
        f.write("import os\npat_str = os.environ['A']\n")
    refused(folder, "pat_str")  # what is not a constant is not run


with tempfile.TemporaryDirectory() as tmp:
    what_cannot_be_is_refused(tmp)
if importlib.util.find_spec("tiktoken"):
    ids_are_those_of_the_libraries()
else:
    refused(os.path.join(FOLDER, "tekken"), "pip install tiktoken")
    print("   (tiktoken is not here: only the refusal was tested)")
print("ok", ranks.FILES)
