# SPDX-License-Identifier: Apache-2.0
"""Data sets for the tests of data: a model with a tokenizer, files of samples, and what `megatrain data` says of them."""
import json
import os
import shutil
import sys
import tempfile
import time

import data_env
import warm_helper
from tiny import base, chosen, config, megatrain, write_ini, write_model

FIXTURES = os.path.join(data_env.ROOT, "tests", "data", "chat")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "find the word"},
        {"role": "assistant", "content": "the word is hot"}, {"role": "user", "content": "and the number?"},
        {"role": "assistant", "content": "one"}]


def model_of(tmp, style, **over):
    """A model folder with a fixture's tokenizer."""
    path = os.path.join(tmp, "model-" + style)
    if not os.path.isdir(path):
        shutil.copytree(os.path.join(FIXTURES, style), path)
        write_model(path, config("llama", **{"vocab_size": 700, "num_hidden_layers": 1, "max_position_embeddings": 8192, **over}))
    return path


def lines(path, records):
    with open(path, "w", encoding="utf-8") as f:
        for r in records:
            f.write(json.dumps(r) + "\n")
    return path


def ini_of(tmp, model, data, name="d", **over):
    over = {"data__eval": "", "data__seq_len": 4096, "data__cache_dir": os.path.join(tmp, "cache"), "train__batch_size": 1, **over}
    return write_ini(os.path.join(tmp, name + ".ini"), base(model, data, os.path.join(tmp, "out"), **over))


def show(tmp, model, data, n=1000, env=None, **over):
    out = megatrain("-q", "data", "show", ini_of(tmp, model, data, **over), "--json", "--samples", n, env=env).stdout
    return [json.loads(l) for l in out.splitlines()]


def text_of(tmp, model, data, **over):
    """The samples as text, trained parts in brackets."""
    return megatrain("-q", "data", "show", ini_of(tmp, model, data, **over), "--samples", 100).stdout


def fails(tmp, model, data, code, *words, env=None, command="prepare", **over):
    p = megatrain("-q", "data", command, ini_of(tmp, model, data, **over), expect=None, env=env)
    said = p.stdout + p.stderr
    assert p.returncode == code and all(w in said for w in words), (p.returncode, code, words, said)


def run_tests(tests, first=()):
    """Runs those that the command line names, or a part (tiny.chosen), each in a folder of its own."""
    with tempfile.TemporaryDirectory() as warm_folder:
        os.environ.update(warm_helper.serve(warm_folder))
        for test in chosen(tests, first):
            with tempfile.TemporaryDirectory() as folder:
                t0 = time.time()
                test(folder)
                print(f"ok {test.__name__} {time.time() - t0:.1f} s", flush=True)
