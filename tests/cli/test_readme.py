# SPDX-License-Identifier: Apache-2.0
"""The commands of README.md, as a newcomer types them: every indented line that begins with "megatrain", in the order of
the page, in a folder with a model and conversations. DIR and OUT stand for the model's folder and the run's."""
import json
import os
import random
import re
import shlex
import tempfile

import data_env

data_env.enter("tokenizers")
ROOT = data_env.ROOT

from families import conversation, write_tokenizer
from tiny import config, megatrain, with_weights, write_data, write_model


def commands(page):
    """[(words of a command, file that its output goes to)], without what follows a #."""
    out = []
    for line in re.findall(r"^    (megatrain .*)$", page, re.M):
        words, _, target = line.split("  #")[0].partition(" > ")
        out.append((shlex.split(words)[1:], target.strip()))
    return out


def shown(page):
    """{command: the lines of what it prints that the page shows below it}"""
    found = re.findall(r"^    (megatrain .*)\n\n((?:    (?!megatrain|scripts).*\n)+)", page, re.M)
    return {command: [line.strip() for line in lines.splitlines()] for command, lines in found}


def make(tmp):
    shape = write_model(os.path.join(tmp, "shape"),
                        config("qwen3", vocab_size=704, num_hidden_layers=2, max_position_embeddings=8192))
    model = with_weights(tmp, shape, write_data(os.path.join(tmp, "ids.jsonl"), vocab=704), "model-of-mine")
    write_tokenizer(model, "qwen3")
    with open(os.path.join(tmp, "talk.jsonl"), "w") as f:
        for i in range(60):
            f.write(json.dumps(conversation(random.Random(i), "qwen3")) + "\n")
    return model


with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
    page = f.read()
asked, shows = commands(page), shown(page)
assert len(asked) >= 9 and any(" plan " in command for command in shows), (asked, shows)
os.environ["MEGATRAIN_PROBE_SMALL"] = "1" # small shapes
with tempfile.TemporaryDirectory() as tmp:
    model = make(tmp)
    os.chdir(tmp)
    os.environ["XDG_CACHE_HOME"] = os.path.join(tmp, "cache") # the profile of this machine is of small shapes
    for words, target in asked:
        words = [model if w == "DIR" else re.sub("^OUT\\b", "out", w) for w in words]
        if words == ["run", "config.ini"]: # the first line of the page says what kind of program it is
            continue
        said = megatrain(*words, *(["--force"] if words == ["probe", "all"] else [])) # other tests run meanwhile
        for line in shows.pop("megatrain " + " ".join(words), []):
            assert line in said.stdout.splitlines(), (words, line, said.stdout)
        if target:
            open(target, "w").write(said.stdout + "\n[device]\nkind = cpu\n")
        print(f"ok megatrain {' '.join(words)}", flush=True)
    ten, = re.findall(r"^    (\[model\]\n(?:    .*\n)+)", page, re.M)  # the configuration on the page
    with open("ten.ini", "w") as f:
        f.write(re.sub("^ +", "", ten, flags=re.M).replace("DIR", model))
    assert megatrain("check", "ten.ini", "--set", "data.overlong=truncate").stdout.endswith("ok\n")
    assert os.path.exists("out/report.html") and not shows, (os.listdir("out"), shows)
