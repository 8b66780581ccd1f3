# SPDX-License-Identifier: Apache-2.0
"""Tokens of answers with a preference are those of TRL (scripts/reference/preference_tokens.py); dataset_info.json with "ranking" and
"kto_tag"; what is left out. Runs in .venv-data."""
import json
import os
import tempfile

import data_env

data_env.enter("pyarrow")
import shutil

from tiny import base, config, losses, megatrain, write_ini, write_model

DATA = os.path.join(data_env.ROOT, "tests", "data")


def model_of(tmp, style):
    path = f"{tmp}/model-{style}"
    shutil.copytree(os.path.join(DATA, "chat", style), path, dirs_exist_ok=True)
    return write_model(path, config("llama", vocab_size=700, num_hidden_layers=1, max_position_embeddings=8192))


def ini_of(tmp, model, data, loss="sigmoid", **over):
    return write_ini(f"{tmp}/d.ini", base(model, data, f"{tmp}/out", **{
        "data__eval": "", "data__seq_len": 4096, "train__batch_size": 1, "train__micro_batch": 1, "preference__loss": loss, **over}))


def lines(path, records):
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)
    return path


def show(tmp, model, data, **over):
    out = megatrain("-q", "data", "show", ini_of(tmp, model, data, **over), "--json", "--samples", 100).stdout
    return [json.loads(l) for l in out.splitlines()]


def tokens_are_those_of_trl(tmp):
    with open(os.path.join(DATA, "preference.json")) as f:
        stored = json.load(f)
    n = 0
    for style, cases in stored["tokens"].items():
        cases = {name: want for name, want in cases.items() if want}
        data = lines(f"{tmp}/{style}.jsonl", [stored["cases"][name] for name in cases])
        shown = show(tmp, model_of(tmp, style), data)
        assert len(shown) == len(cases)
        for s, (name, want) in zip(shown, cases.items()):
            both = [want["prompt_ids"] + want[k] for k in ("chosen_ids", "rejected_ids")]
            masks = [[-100] * len(want["prompt_ids"]) + want[k] for k in ("chosen_ids", "rejected_ids")]
            assert s["input_ids"] == both[0] + both[1], (style, name)
            assert s["labels"] == masks[0] + masks[1], (style, name)
            n += 1
    assert n >= 60, n
    return n


def entries_of_llama_factory(tmp):
    model = model_of(tmp, "qwen2")
    turns = [{"from": "human", "value": "find the word"}]
    files = {"pairs": [{"conversations": turns, "chosen": {"from": "gpt", "value": "hot"}, "rejected": {"from": "gpt", "value": "one"}}],
             "alpaca": [{"instruction": "find the word", "chosen": "hot", "rejected": "one"}],
             "rated": [{"conversations": turns + [{"from": "gpt", "value": "hot"}], "tag": True}]}
    info = {"pairs": {"file_name": "pairs.json", "formatting": "sharegpt", "ranking": True,
                      "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
            "alpaca": {"file_name": "alpaca.json", "ranking": True,
                       "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
            "rated": {"file_name": "rated.json", "formatting": "sharegpt", "columns": {"messages": "conversations", "kto_tag": "tag"}}}
    for name, records in files.items():
        with open(f"{tmp}/{name}.json", "w") as f:
            json.dump(records, f)
    with open(f"{tmp}/dataset_info.json", "w") as f:
        json.dump(info, f)
    plain = {"prompt": [{"role": "user", "content": "find the word"}], "chosen": [{"role": "assistant", "content": "hot"}],
             "rejected": [{"role": "assistant", "content": "one"}]}
    want, = show(tmp, model, lines(f"{tmp}/plain.jsonl", [plain]))
    for name in "pairs", "alpaca":
        got, = show(tmp, model, f"{tmp}/dataset_info.json#{name}")
        assert got == want, name
    got, = show(tmp, model, f"{tmp}/dataset_info.json#rated", loss="apo_zero_unpaired")
    assert got["input_ids"] == want["input_ids"][:len(got["input_ids"])]
    return model, want, got


def records_with_turns_before_their_answers(tmp, model, pair, one):
    """The same without a dataset_info.json: by the names alone."""
    word, hot, off = ({"role": r, "content": c} for r, c in (("user", "find the word"), ("assistant", "hot"), ("assistant", "one")))
    shared = [{"from": "human", "value": "find the word"}]
    tokens = lambda shown: [(s["input_ids"], s["labels"]) for s in shown]
    for record in ({"instruction": "find the word", "input": "", "chosen": "hot", "rejected": "one"},
                   {"messages": [word], "chosen": hot, "rejected": off},
                   {"conversations": shared, "chosen": {"from": "gpt", "value": "hot"}, "rejected": {"from": "gpt", "value": "one"}},
                   {"messages": [word, off], "prompt": "find the word", "chosen": [word, hot], "rejected": [word, off]}):
        assert tokens(show(tmp, model, lines(f"{tmp}/bare.jsonl", [record]))) == tokens([pair]), record
    for record in ({"messages": [word, hot], "label": True}, {"instruction": "find the word", "output": "hot", "label": True},
                   {"conversations": [*shared, {"from": "gpt", "value": "hot"}], "label": True}):
        data = lines(f"{tmp}/bare.jsonl", [record])
        assert tokens(show(tmp, model, data, loss="kto")) == tokens([one]), record
        said = megatrain("data", "show", ini_of(tmp, model, data, loss="off"), expect=2).stderr  # not as if all were good
        assert "set data.format = " in said and "kto" in said, said
    labelled = []  # a table has words for true and false, and programs write numbers
    for name, words in (("words.csv", ("True", "False")), ("numbers.csv", ("1", "0")), ("numbers.jsonl", (1, 0))):
        rows = [{"prompt": "find the word ", "completion": "hot", "label": words[i]} for i in range(2)]
        lines(f"{tmp}/{name}", rows)
        if name.endswith(".csv"):
            with open(f"{tmp}/{name}", "w") as f:
                f.writelines(",".join(r) + "\n" for r in [rows[0], *(r.values() for r in rows)])
        labelled.append(tokens(show(tmp, model, f"{tmp}/{name}", loss="kto")))
    assert labelled[0] == labelled[1] == labelled[2] and len(labelled[0]) == 2, labelled
    asked = lines(f"{tmp}/bare.jsonl", [{"question": "find the word", "chosen": "hot", "rejected": "one"}])
    said = megatrain("data", "show", ini_of(tmp, model, asked), expect=3).stderr
    assert "data.columns = instruction:question" in said, said
    assert tokens(show(tmp, model, asked, data__columns="instruction:question")) == tokens([pair])


def it_trains_and_tells_what_is_left_out(tmp):
    model = model_of(tmp, "qwen3")
    pair = lambda i: {"prompt": [{"role": "user", "content": f"word {i}"}], "chosen": [{"role": "assistant", "content": "hot"}],
                      "rejected": [{"role": "assistant", "content": "one" if i else "hot"}]}
    data = lines(f"{tmp}/train.jsonl", [pair(i) for i in range(12)])
    ini = ini_of(tmp, model, data, model__init="random", train__steps=3, train__batch_size=4, data__seq_len=64)
    megatrain("-q", "run", ini)
    assert len(losses(f"{tmp}/out")) == 3
    stats = megatrain("data", "stats", ini, "--json").stdout
    assert json.loads(stats)["samples"] == 11, stats


with tempfile.TemporaryDirectory() as tmp:
    print(tokens_are_those_of_trl(tmp), "conversations")
    records_with_turns_before_their_answers(tmp, *entries_of_llama_factory(tmp))
    it_trains_and_tells_what_is_left_out(tmp)
