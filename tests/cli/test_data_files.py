# SPDX-License-Identifier: Apache-2.0
"""Files of data through the binary: formats, columns, mixtures, the cache, what is shown, progress, errors. Runs in .venv-data."""
import csv
import datetime
import decimal
import gzip
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import data_env

data_env.enter("pyarrow")
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

ROOT = data_env.ROOT
sys.path.insert(0, os.path.join(ROOT, "scripts"))

from corpus import CHAT, FIXTURES, fails, ini_of, lines, model_of, run_tests, show, text_of
from megatrain_data import sources
from tiny import BINARY, config, losses, megatrain, patience, write_model


def formats_and_files_of_one_conversation_agree(tmp):
    model = model_of(tmp, "qwen2")
    turns = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT[1:]]
    records = {
        "messages": {"messages": CHAT},
        "sharegpt": {"system": CHAT[0]["content"], "conversations": turns},
        "alpaca": {"system": CHAT[0]["content"], "history": [[CHAT[1]["content"], CHAT[2]["content"]]],
                   "instruction": CHAT[3]["content"], "input": "", "output": CHAT[4]["content"]},
        "openai names": {"conversations": CHAT},
    }
    want = show(tmp, model, lines(os.path.join(tmp, "want.jsonl"), [{"messages": CHAT}] * 3))
    for name, record in records.items():
        assert show(tmp, model, lines(os.path.join(tmp, "one.jsonl"), [record] * 3)) == want, name
    pair = {"prompt": CHAT[:-1], "completion": CHAT[-1:]}
    got = show(tmp, model, lines(os.path.join(tmp, "one.jsonl"), [pair]))[0]
    last = show(tmp, model, os.path.join(tmp, "want.jsonl"), data__train_on="last")[0]
    assert got["input_ids"] == want[0]["input_ids"] and got["labels"] == last["labels"] != want[0]["labels"]
    split = show(tmp, model, lines(os.path.join(tmp, "one.jsonl"),
                                   [{"instruction": "a", "input": "b", "output": "c"}, {"messages": [{"role": "user", "content": "a\nb"},
                                    {"role": "assistant", "content": "c"}]}][:1]))
    assert split[0]["input_ids"] == show(tmp, model, lines(os.path.join(tmp, "two.jsonl"), [
        {"messages": [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]}]))[0]["input_ids"]
    whole = open(os.path.join(tmp, "want.jsonl"), "rb").read()
    table = pa.Table.from_pylist([{"messages": CHAT}] * 3)
    path = lambda end: os.path.join(tmp, "x" + end)
    json.dump([{"messages": CHAT}] * 3, open(path(".json"), "w"), indent=1)
    gzip.open(path(".jsonl.gz"), "wb").write(whole)
    gzip.open(path(".json.gz"), "wb").write(open(path(".json"), "rb").read())
    with pa.CompressedOutputStream(path(".jsonl.zst"), "zstd") as f:
        f.write(whole)
    pa.parquet.write_table(table, path(".parquet"), row_group_size=2)
    with pa.ipc.new_stream(path(".arrow"), table.schema) as f:
        f.write_table(table, 2)
    with pa.ipc.new_file(path("-file.arrow"), table.schema) as f:
        f.write_table(table)
    for end in (".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".parquet", ".arrow", "-file.arrow"):
        assert show(tmp, model, path(end)) == want, end


def what_a_file_begins_with_tells_what_it_is(tmp):
    """Byte order marks, arrays and lines under each other's names, UTF-16; by both readers."""
    model, mark = model_of(tmp, "qwen2"), b"\xef\xbb\xbf"
    path = lambda name: os.path.join(tmp, name)
    for record, tokenizer in (({"messages": CHAT}, "model"), ({"prompt": "find", "completion": "the word"}, "byte"), ({"text": "find"}, "model")):
        lined = b"".join(json.dumps(record).encode() + b"\n" for _ in range(3))
        array = json.dumps([record] * 3, indent=1).encode()
        open(path("want.jsonl"), "wb").write(lined)
        want = show(tmp, model, path("want.jsonl"), data__tokenizer=tokenizer)
        for name, text in (("a.json", mark + array), ("l.jsonl", mark + lined), ("lines.json", lined), ("array.jsonl", array), ("x.json", b"\n" + lined),
                           ("y.jsonl", mark + b" \n" + array)):
            open(path(name), "wb").write(text)
            assert show(tmp, model, path(name), data__tokenizer=tokenizer) == want, (name, tokenizer)
    assert "lines.json:2" in text_of(tmp, model, path("lines.json")) and "array.jsonl[1]" in text_of(tmp, model, path("array.jsonl"))
    open(path("object.json"), "w").write(json.dumps({"data": [record]}, indent=1))
    for tokenizer in ("model", "byte"):
        for name, code in (("wide.jsonl", "utf-16"), ("wide.json", "utf-16-be"), ("wide.csv", "utf-16"), ("wide.txt", "utf-16-le")):
            open(path(name), "wb").write(json.dumps(record).encode(code))
            fails(tmp, model, path(name), 3, f"{name} is UTF-16", "iconv", data__tokenizer=tokenizer)
        fails(tmp, model, path("object.json"), 3, "not a JSON array of samples, nor a JSON object a line", data__tokenizer=tokenizer)
        open(path("plain.txt"), "wb").write(b"find the word " * 9)
        want = show(tmp, model, path("plain.txt"), data__tokenizer=tokenizer, data__seq_len=128)
        open(path("marked.txt"), "wb").write(mark + b"find the word " * 9)
        assert show(tmp, model, path("marked.txt"), data__tokenizer=tokenizer, data__seq_len=128) == want


def columns_are_what_json_would_have(tmp):
    """Maps become objects; decimals numbers; dates and bytes text."""
    strings = pa.map_(pa.string(), pa.string())
    table = pa.table({"map": pa.array([[("a", "1")], []], strings), "deep": pa.array([[{"x": [("q", "r")]}], None], pa.list_(pa.struct([("x", strings)]))),
                      "decimal": pa.array([decimal.Decimal("3.50"), decimal.Decimal("4.00")]), "bytes": pa.array([b"hi", None]),
                      "time": pa.array([datetime.datetime(2020, 1, 2), None])})
    pa.parquet.write_table(table, os.path.join(tmp, "kinds.parquet"))
    (chunk, _), = sources.chunks(os.path.join(tmp, "kinds.parquet"))
    assert [r for _, r in sources.records(chunk)[0]] == [
        {"map": {"a": "1"}, "deep": [{"x": {"q": "r"}}], "decimal": 3.5, "bytes": "hi", "time": "2020-01-02T00:00:00"}, {"map": {}, "decimal": 4}]


def extensions_have_any_case_and_tables_a_header(tmp):
    model = model_of(tmp, "qwen2")
    want = show(tmp, model, lines(os.path.join(tmp, "want.jsonl"), [
        {"instruction": "find\nthe \"word\"", "input": "", "output": f"one, {i}"} for i in range(3)]))
    for name in ("upper.JSONL", "upper.Jsonl"):
        shutil.copy(os.path.join(tmp, "want.jsonl"), os.path.join(tmp, name))
        assert show(tmp, model, os.path.join(tmp, name)) == want, name
    rows = [["instruction", "input", "output"], *(["find\nthe \"word\"", "", f"one, {i}"] for i in range(3))]
    for name, separator in (("t.csv", ","), ("t.TSV", "\t"), ("t.csv.gz", ",")):
        path = os.path.join(tmp, name)
        with (gzip.open if name.endswith("gz") else open)(path, "wt", encoding="utf-8-sig", newline="") as f:
            csv.writer(f, delimiter=separator).writerows(rows)
        assert show(tmp, model, path) == want, name
        assert f"{name}:4" in text_of(tmp, model, path), name  # the line at which the second row begins
    open(os.path.join(tmp, "bad.csv"), "w").write("prompt,completion\na,b\n\nc,d,e\n")
    fails(tmp, model, os.path.join(tmp, "bad.csv"), 3, "bad.csv:4: 3 fields", "2 columns")
    open(os.path.join(tmp, "odd.csv"), "w").write("question,answer\na,b\n")
    fails(tmp, model, os.path.join(tmp, "odd.csv"), 3, "odd.csv:2", '"question", "answer"', "messages", "data.format")
    shutil.copy(os.path.join(tmp, "want.jsonl"), os.path.join(tmp, "looks.txt"))
    for tokenizer in ("model", "byte"):
        said = megatrain("data", "prepare", ini_of(tmp, model, os.path.join(tmp, "looks.txt"), data__tokenizer=tokenizer,
                                                   data__seq_len=128)).stderr
        assert "looks.txt: taken as plain text" in said and ".jsonl" in said, said


def columns_that_a_row_does_not_have_are_absent(tmp):
    """Arrow gives every message all keys: those without a value must not reach the template."""
    model = model_of(tmp, "qwen3")
    call = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    rows = [{"messages": CHAT}, {"messages": CHAT[:2] + [{"role": "assistant", "content": None, "tool_calls": call},
                                                         {"role": "tool", "content": "hot"}, CHAT[-1]]}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), os.path.join(tmp, "holes.parquet"))
    want = show(tmp, model, lines(os.path.join(tmp, "holes.jsonl"), rows))
    assert show(tmp, model, os.path.join(tmp, "holes.parquet")) == want
    assert "<tool_call>" in text_of(tmp, model, os.path.join(tmp, "holes.parquet"))


def columns_have_the_names_that_files_give_them(tmp):
    model = model_of(tmp, "qwen2")
    ours = lines(os.path.join(tmp, "ours.jsonl"), [{"prompt": "find", "completion": "the word"}] * 3)
    records = [{"question": "find", "completion": "noise", "answer": "the word", "id": 7}] * 3
    theirs = lines(os.path.join(tmp, "theirs.jsonl"), records)
    array, table = os.path.join(tmp, "theirs.json"), os.path.join(tmp, "theirs.csv")
    json.dump(records, open(array, "w"))
    open(table, "w").write("question,answer\n" + "find,the word\n" * 3)
    columns = "prompt:question, completion:answer"
    for tokenizer in ("model", "byte"):
        want = show(tmp, model, ours, data__tokenizer=tokenizer)
        for path in (theirs, array, table):
            assert show(tmp, model, path, data__tokenizer=tokenizer, data__columns=columns) == want, (tokenizer, path)
        turned = lines(os.path.join(tmp, "turned.jsonl"), [{"prompt": "the word", "completion": "find"}] * 3)
        assert show(tmp, model, turned, data__tokenizer=tokenizer, data__columns="prompt:completion, completion:prompt") == want
        assert show(tmp, model, turned, data__tokenizer=tokenizer) != want
    chat = lines(os.path.join(tmp, "chat.jsonl"), [{"talk": CHAT}] * 3)
    same = lines(os.path.join(tmp, "same.jsonl"), [{"messages": CHAT}] * 3)
    assert show(tmp, model, chat, data__columns="messages:talk") == show(tmp, model, same)
    fails(tmp, model, theirs, 2, '"promt" is no field', "completion", data__columns="promt:question")
    fails(tmp, model, theirs, 2, '"question" is not FIELD:COLUMN', data__columns="question")
    fails(tmp, model, theirs, 2, "the same twice", data__columns="prompt:question, completion:question")


def a_quick_try_takes_the_first_samples_of_each_file(tmp):
    model = model_of(tmp, "qwen2")
    talk = lambda i: {"messages": [{"role": "user", "content": "find"}, {"role": "assistant", "content": "the word " + "is hot " * i}]}
    none = {"messages": [{"role": "user", "content": "find"}]}
    chats = [talk(0), none, *map(talk, range(1, 40))]
    texts = [{"prompt": "a" * i, "completion": "b" * (i + 1)} for i in range(1, 40)]
    pairs = [{"prompt": "find", "chosen": "c" * i, "rejected": ("d" if i % 10 != 3 else "c") * i} for i in range(1, 40)]
    for name, records, more in (("chat", chats, {}), ("text", texts, {"data__tokenizer": "byte"}),
                                ("pairs", pairs, {"data__tokenizer": "byte", "preference__loss": "sigmoid", "train__batch_size": 2})):
        stats = lambda path, **o: {k: v for k, v in json.loads(megatrain("-q", "data", "stats", ini_of(
            tmp, model, path, data__max_untrained=5, **more, **o), "--json").stdout).items() if k not in ("sources", "notes")}
        path = lines(os.path.join(tmp, name + ".jsonl"), records)
        array = os.path.join(tmp, name + ".json")
        json.dump(records, open(array, "w"))
        few = lines(os.path.join(tmp, name + "-few.jsonl"), records[:5] if name == "text" else records[:6])
        want = stats(few)
        assert want["samples"] == 5, want
        assert stats(path, data__max_samples=5) == want, (stats(path, data__max_samples=5), want)
        assert stats(array, data__max_samples=5) == want
        assert stats(path, data__max_samples=1000) == stats(path) != want
        if name == "pairs":  # the third is of equal answers, and so are more beyond the fifth
            assert want["equal_pairs"] == 1 and stats(path)["equal_pairs"] == 4, (want, stats(path))
    odd = lambda i: {"messages": [{"role": "developer", "content": f"Answer in rhymes, {i}."}, *talk(i)["messages"]]}
    some = lines(os.path.join(tmp, "some.jsonl"), [talk(1), odd(1), talk(2), odd(2), talk(3), odd(3), odd(4)])
    said = megatrain("data", "stats", ini_of(tmp, model_of(tmp, "qwen3"), some, data__max_samples=4)).stderr
    assert "some.jsonl:2" in said and "1 more sample:" in said, said
    packed = os.path.join(tmp, "packed.jsonl.gz")  # by the helper, whatever the format
    with gzip.open(packed, "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in pairs)
    assert stats(packed, data__max_samples=5) == want


def stats_are_printed_whatever_a_run_would_refuse(tmp):
    model = model_of(tmp, "qwen2")
    long = {"messages": [{"role": "user", "content": "find the word " * 100}, {"role": "assistant", "content": "hot"}]}
    cut = lines(os.path.join(tmp, "cut.jsonl"), [long] * 4)
    pairs = lines(os.path.join(tmp, "pairs.jsonl"), [{"prompt": "find", "chosen": "c" * i, "rejected": "d" * i} for i in range(1, 60)])
    answers = {"data__tokenizer": "byte", "preference__loss": "sigmoid", "train__batch_size": 2}
    stats = lambda path, **o: megatrain("data", "stats", ini_of(tmp, model, path, **o), "--json")
    for overlong in ("error", "truncate", "drop"):
        p = stats(cut, data__seq_len=128, data__overlong=overlong)
        d = json.loads(p.stdout)
        assert d["samples"] == 4 and d["longest"] > 128 and d["p50"] == d["longest"] and "figures are of whole samples" in p.stderr, (d, p.stderr)
    d = json.loads(stats(pairs, data__seq_len=64, **answers).stdout)
    assert 0 < d["samples"] < 59 and d["samples"] + d["overlong"] == 59 and d["longest"] > 64, d
    none = lines(os.path.join(tmp, "none.jsonl"), [{"messages": [{"role": "user", "content": "find"}]}] * 4)
    fails(tmp, model, none, 3, "no sample has a token to train on", "data.train_on", command="stats", data__seq_len=128)


def long_rows_of_a_table_come_a_few_at_once(tmp):
    """Books: what a worker is given at once is of about a MiB, however many rows the file has in a group."""
    rows = [{"text": f"{i} " + "word " * 40000} for i in range(40)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), os.path.join(tmp, "books.parquet"))
    with pa.ipc.new_file(os.path.join(tmp, "books.arrow"), pa.Table.from_pylist(rows).schema) as f:
        f.write_table(pa.Table.from_pylist(rows))
    for name in ("books.parquet", "books.arrow"):
        chunks = [c for c, _ in sources.chunks(os.path.join(tmp, name))]
        assert max(len(c[1]) for c in chunks) < 2 << 20 and len(chunks) == 8, [len(c[1]) for c in chunks]
        assert [r for c in chunks for _, r in sources.records(c)[0]] == rows


def any_number_of_processes_gives_the_same_shard(tmp):
    model = model_of(tmp, "qwen3")
    records = [json.loads(l) for l in open(os.path.join(FIXTURES, "qwen3", "cases.jsonl"))] * 120
    data, got = lines(os.path.join(tmp, "many.jsonl"), records), []
    gzip.open(data + ".gz", "wb").write(open(data, "rb").read())
    for path in (data, data + ".gz"):
        for n in (1, 3):
            cache = os.path.join(tmp, f"cache-{n}")
            megatrain("-q", "data", "prepare", ini_of(tmp, model, path, data__cache_dir=cache, device__cpu_threads=n))
            shard, = [f for f in os.listdir(cache) if f.endswith(".tokens")]
            raw = open(os.path.join(cache, shard), "rb").read()
            got.append(raw[:40] + raw[48:72] + raw[80:3368] + raw[3376:])  # not the source's hash and size, nor the header's sum
            shutil.rmtree(cache)
    assert len(got[0]) > 1 << 20 and all(g == got[0] for g in got)


def the_cache_follows_contents_and_settings(tmp):
    model = model_of(tmp, "qwen2")
    data, cache = lines(os.path.join(tmp, "key.jsonl"), [{"messages": CHAT}]), os.path.join(tmp, "cache-key")
    shards = lambda: sorted(f for f in os.listdir(cache) if f.endswith(".tokens"))
    said = lambda **over: megatrain("data", "prepare", ini_of(tmp, model, data, data__cache_dir=cache, **over))
    assert "making tokens of 1 data file" in said().stderr
    again = said(data__seq_len=512)
    assert "(cached)" in again.stdout and "making" not in again.stderr and len(shards()) == 1
    said(data__train_on="last")
    said(data__template="llama3")
    template = os.path.join(tmp, "key.jinja")
    shutil.copy(os.path.join(ROOT, "scripts/megatrain_data/templates/chatml.jinja"), template)
    said(data__template=template)
    open(template, "a").write("\n")
    said(data__template=template)
    lines(data, [{"messages": CHAT}, {"messages": CHAT}])
    said()
    settings = os.path.join(model, "tokenizer_config.json")
    text = open(settings).read()
    open(settings, "w").write(text.replace("<|im_start|>", "<|im_start|>"[::1]) + " ")
    said()
    open(settings, "w").write(text)
    assert len(shards()) == 7
    open(os.path.join(cache, "0000.tokens.99.tmp.mask"), "w").close()  # left by one that was killed
    os.truncate(os.path.join(cache, shards()[0]), 5000)
    for f in shards():
        os.truncate(os.path.join(cache, f), os.path.getsize(os.path.join(cache, f)) - 8)
    assert "making tokens" in said().stderr and not [f for f in os.listdir(cache) if ".tmp" in f]


def a_run_goes_on_although_the_helper_has_changed(tmp):
    """The tokens say whether the data are the same, not the code that made them."""
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "go.jsonl"), [{"messages": CHAT[:2] + [{"role": "assistant", "content": f"word {i}"}]} for i in range(30)])
    over = {"data__seq_len": 128, "train__steps": 4, "train__batch_size": 2, "model__init": "random"}
    ini = ini_of(tmp, model, data, **over)
    megatrain("-q", "run", ini)
    whole = losses(os.path.join(tmp, "out"))
    megatrain("-q", "run", ini, "--max-steps", "2", "--force")
    scripts = os.path.join(tmp, "scripts")
    shutil.copytree(os.path.join(ROOT, "scripts", "megatrain_data"), os.path.join(scripts, "megatrain_data"))
    shutil.copy(os.path.join(ROOT, "scripts", "prepare_data.py"), scripts)
    open(os.path.join(scripts, "megatrain_data", "encode.py"), "a").write("# changed\n")
    said = megatrain("run", ini, "--resume", env={"MEGATRAIN_DATA_HELPER": os.path.join(scripts, "prepare_data.py")}).stderr
    assert "making tokens" in said and losses(os.path.join(tmp, "out")) == whole, said
    lines(data, [{"messages": CHAT}] * 30)
    p = megatrain("-q", "run", ini, "--resume=" + os.path.join(tmp, "out", "checkpoint-2"), "--out", os.path.join(tmp, "o2"), expect=2)
    assert "not those that" in p.stderr and "token cache" not in p.stderr, p.stderr


def a_preparation_that_is_killed_leaves_nothing_half_done(tmp):
    model = model_of(tmp, "qwen3")
    records = [json.loads(l) for l in open(os.path.join(FIXTURES, "qwen3", "cases.jsonl"))] * 250
    data, cache = lines(os.path.join(tmp, "kill.jsonl"), records), os.path.join(tmp, "cache-kill")
    ini = ini_of(tmp, model, data, data__cache_dir=cache, device__cpu_threads=2)
    p = subprocess.Popen([BINARY, "-q", "data", "prepare", ini], env={**os.environ, "MEGATRAIN_PYTHON": ""})
    deadline = time.time() + patience(60)
    while not (os.path.isdir(cache) and any(f.endswith(".tmp") for f in os.listdir(cache))):
        assert time.time() < deadline and p.poll() is None
        time.sleep(0.01)
    p.kill()
    p.wait()
    assert not [f for f in os.listdir(cache) if f.endswith(".tokens")]
    megatrain("-q", "data", "prepare", ini)
    assert len([f for f in os.listdir(cache) if f.endswith(".tokens")]) == 1 and not [f for f in os.listdir(cache) if ".tmp" in f]


def data_sets_of_the_hub_cache_have_addresses(tmp):
    """The training files of what `hf download` has fetched; where it has several sets, one is named."""
    model, cache = model_of(tmp, "qwen2"), os.path.join(tmp, "hub")
    env = {**os.environ, "HF_HUB_CACHE": cache}

    def fetched(name, files):
        """A snapshot of links to blobs, as the cache has them."""
        top = os.path.join(cache, "datasets--" + name.replace("/", "--"))
        for path, records in files.items():
            blob, link = os.path.join(top, "blobs", path.replace("/", "-")), os.path.join(top, "snapshots", "c0ffee", path)
            for folder in blob, link:
                os.makedirs(os.path.dirname(folder), exist_ok=True)
            if path.endswith(".parquet"):
                pa.parquet.write_table(pa.Table.from_pylist(records), blob)
            else:
                lines(blob, records)
            os.symlink(os.path.relpath(blob, os.path.dirname(link)), link)
        os.makedirs(os.path.join(top, "refs"))
        with open(os.path.join(top, "refs", "main"), "w") as f:
            f.write("c0ffee")

    def texts(address, **over):
        return [s["input_ids"] for s in show(tmp, model, address, env=env, **over)]

    part = [[{"text": f"{k} {i}"} for i in range(2)] for k in ("one", "two", "three")]
    shards = {f"data/train-0000{k}-of-00002-1a2b.parquet": part[k] for k in range(2)}
    fetched("a/shards", {**shards, "data/test-00000-of-00001.parquet": part[2], "README.md": part[2], "dataset_infos.json": part[2]})
    fetched("a/alone", {"alone.jsonl": part[2], "alone.py": part[0], "test.jsonl": part[0]})
    fetched("a/sets", {"main/train-00000-of-00001.parquet": part[0], "more/train.jsonl": part[1]})
    fetched("a/thrice", {f"train-0000{k}-of-00002.{end}": part[0] for k in range(2) for end in ("csv", "jsonl", "tsv")})
    assert len(texts("hf://datasets/a/shards")) == 4 and len(texts("hf://datasets/a/shards:2, hf://datasets/a/alone")) == 6
    assert texts("hf://datasets/a/alone") == texts("hf://datasets/a/shards/data/test-*") != texts("hf://datasets/a/sets/main/*")
    assert texts("hf://datasets/a/sets/more/train.jsonl") == texts(lines(os.path.join(tmp, "two.jsonl"), part[1]))
    fails(tmp, model, "hf://datasets/a/sets", 2, "hf://datasets/a/sets/main/train-*.parquet, hf://datasets/a/sets/more/train.jsonl", env=env)
    fails(tmp, model, "hf://datasets/a/thrice", 2, ", ".join(f"hf://datasets/a/thrice/train-*.{end}" for end in ("csv", "jsonl", "tsv")) + "\n", env=env)
    for address, code in (("hf://datasets/a/none", 3), ("hf://datasets/a/sets", 2), ("hf://datasets/a/sets/x*", 3), ("hf://datasets/a", 2)):
        fails(tmp, model, "hf://datasets/a/alone", code, "data.eval: ", address.rsplit("/", 1)[1], env=env, data__eval=address)
    fails(tmp, model, "hf://datasets/a/none", 3, "hf download --repo-type dataset a/none", env=env)
    fails(tmp, model, "hf://datasets/a/alone/x*", 3, "no file matches", env=env)
    fails(tmp, model, "hf://models/a/alone", 2, "hf://datasets/ORG/NAME", env=env)
    fails(tmp, model, "a/alone", 3, "no file matches", "hf://datasets/ORG/NAME", env=env)
    out = megatrain("-q", "data", "stats", ini_of(tmp, model, "hf://datasets/a/shards", data__eval="hf://datasets/a/alone"), env=env).stdout
    assert "held out" not in out, out


def weights_and_dataset_info_choose_what_an_epoch_has(tmp):
    model = model_of(tmp, "qwen2")
    os.makedirs(os.path.join(tmp, "sets"), exist_ok=True)
    lines(os.path.join(tmp, "sets", "a.jsonl"), [{"messages": CHAT}] * 10)
    lines(os.path.join(tmp, "sets", "b.jsonl"), [{"q": "find", "more": "the word", "a": "word", "h": [], "sys": ""}] * 10)
    lines(os.path.join(tmp, "sets", "c.jsonl"), [{"talk": [{"who": "U", "says": "find"}, {"who": "A", "says": "the word"}]}] * 10)
    info = {"a": {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
                  "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}},
            "b": {"file_name": "b.jsonl", "columns": {"prompt": "q", "query": "more", "response": "a", "history": "h", "system": "sys"}, "num_samples": 4},
            "c": {"file_name": "c.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"},
                  "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}},
            "far": {"hf_hub_url": "someone/something"}}
    path = os.path.join(tmp, "sets", "dataset_info.json")
    json.dump(info, open(path, "w"))
    plain = show(tmp, model, os.path.join(tmp, "sets", "a.jsonl"))
    both = show(tmp, model, f"{path}#a, {path}#b, {path}#c")
    assert both[:10] == [dict(s, sample=i) for i, s in enumerate(plain)] and len(both) == 24
    text = text_of(tmp, model, f"{path}#b")
    assert "find\nthe word<|im_end|>" in text and "⟦word<|im_end|>⟧" in text
    assert "⟦the word<|im_end|>⟧" in text_of(tmp, model, f"{path}#c")
    fails(tmp, model, path, 3, '"far"', "file_name")
    fails(tmp, model, path + "#none", 3, 'no entry "none"')
    count = lambda data: json.loads(megatrain("-q", "data", "stats", ini_of(tmp, model, data, data__packing="off"), "--json").stdout)
    a, c = os.path.join(tmp, "sets", "a.jsonl"), f"{path}#c"
    assert count(f"{a}, {c}")["steps_per_epoch"] == 20
    assert count(f"{a}:2, {c}:0.5")["steps_per_epoch"] == 25
    fails(tmp, model, f"{a}:0", 2, "a weight must be above 0")
    fails(tmp, model, f"{path}#c", 3, "images", data__train=write_images(tmp))


def folders_and_other_formats_are_named_by_what_would_do(tmp):
    model, folder = model_of(tmp, "qwen2"), os.path.join(tmp, "saved")
    os.makedirs(os.path.join(folder, "empty"))
    with pa.ipc.new_stream(os.path.join(folder, "data-00000-of-00001.arrow"), (table := pa.Table.from_pylist([{"messages": CHAT}] * 3)).schema) as f:
        f.write_table(table)
    json.dump({"features": {"messages": [{"role": {"dtype": "string"}}]}, "splits": {}}, open(os.path.join(folder, "dataset_info.json"), "w"))
    json.dump({"_data_files": []}, open(os.path.join(folder, "state.json"), "w"))
    lines(os.path.join(folder, "empty", "x.md"), [])
    fails(tmp, model, folder, 3, f"data.train: {folder} is a folder: name its files, {folder}/*.arrow")
    fails(tmp, model, os.path.join(folder, "empty"), 3, "is a folder, without data files")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):  # a data set's, copied from the hub
        os.makedirs(os.path.join(tmp, "set", "data"), exist_ok=True)
        open(os.path.join(tmp, "set", "data", name + ".parquet"), "w").close()
    for of in (os.path.join(tmp, "set"), os.path.join(tmp, "set", "data")):
        fails(tmp, model, of, 3, f"is a folder: name its files, {tmp}/set/data/train-*.parquet")
    fails(tmp, model, os.path.join(folder, "dataset_info.json"), 3, "lists no files", f"{folder}/*.arrow")
    os.rename(os.path.join(folder, "empty"), os.path.join(tmp, "elsewhere"))
    assert len(show(tmp, model, folder + "/*")) == 3
    pair = {"prompt": "find", "messages": CHAT, "chosen": CHAT, "rejected": CHAT[:-1] + [dict(CHAT[-1], content="two")]}
    fails(tmp, model, lines(os.path.join(tmp, "both.jsonl"), [pair]), 2, "both.jsonl: set data.format = messages", "preference")
    assert len(show(tmp, model, os.path.join(tmp, "both.jsonl"), data__format="messages")) == 1
    fails(tmp, model, lines(os.path.join(tmp, "label.jsonl"), [{"prompt": "find", "completion": "it", "label": True}]), 2, "data.format = prompt_completion")
    plain = os.path.join(tmp, "plain.jinja")  # whose end is no token of the tokenizer
    open(plain, "w").write("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|zzz|>{% endfor %}")
    said = megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, "end.jsonl"), [{"messages": CHAT}]), data__template=plain)).stderr
    assert "ends turns with <|zzz|>, which is no token of the tokenizer, but" in said, said
    settings = json.load(open(os.path.join(model, "tokenizer_config.json")))
    json.dump({"chat_template": settings.pop("chat_template")}, open(os.path.join(model, "chat_template.json"), "w"))
    want = show(tmp, model, os.path.join(tmp, "end.jsonl"))
    json.dump(settings, open(os.path.join(model, "tokenizer_config.json"), "w"))
    assert show(tmp, model, os.path.join(tmp, "end.jsonl")) == want
    assert "trained, and so in 1 more sample" in megatrain("data", "prepare", ini_of(tmp, model_of(tmp, "llama3"), lines(
        os.path.join(tmp, "wiki.jsonl"), [{"text": "find"}, {"text": ""}, {"text": ""}]))).stderr


def write_images(tmp):
    os.makedirs(os.path.join(tmp, "images"), exist_ok=True)
    lines(os.path.join(tmp, "images", "a.jsonl"), [{"messages": CHAT}])
    path = os.path.join(tmp, "images", "dataset_info.json")
    json.dump({"a": {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": {"images": "pictures"}}}, open(path, "w"))
    return path


def samples_show_in_colour_in_brackets_and_as_a_page(tmp):
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "show.jsonl"), [{"messages": [{"role": "user", "content": "a <b> \x1b[31m \x9b \u202e– \u2069"}, {"role": "assistant", "content": "&"}]}] * 4)
    ini = ini_of(tmp, model, data)
    plain = megatrain("-q", "data", "show", ini).stdout
    assert "⟦&<|im_end|>⟧" in plain and "a <b> \\x1b[31m \\x9b \\u202e– \\u2069" in plain and "show.jsonl:2" in plain
    colour = megatrain("-q", "--color=always", "data", "show", ini, "--samples", "1", "--first", "2").stdout
    assert "\x1b[30;42m&<|im_end|>\x1b[0m" in colour and "show.jsonl:3" in colour and "show.jsonl:4" not in colour
    page = os.path.join(tmp, "page.html")
    megatrain("-q", "data", "show", ini, "--html", page)
    html = open(page).read()
    assert "<mark>&#38;&#60;|im_end|&#62;</mark>" in html and "a &#60;b&#62; \\x1b[31m \\x9b \\u202e– \\u2069" in html and html.count("<pre>") == html.count("</pre>") == 3
    stats = megatrain("-q", "data", "stats", ini).stdout
    assert "3 samples (75.00%) have the tokens of another" in stats and "#" in stats and "Packing" in stats
    bars = stats.split("Length in tokens       samples\n")[1].split("\n\n")[0].splitlines()
    assert bars[0].endswith("#") and not bars[0].startswith("       0 -"), stats  # no empty ones before the shortest sample


def on_a_terminal(*args, env):
    """What comes out of a terminal of 60 columns, and the exit code. Little comes: a terminal's buffer holds it."""
    ours, theirs = pty.openpty()
    try:
        p = subprocess.run([BINARY, *args], stdin=theirs, stdout=theirs, stderr=theirs,
                           env={**os.environ, "TERM": "xterm", "COLUMNS": "60", **env})
        said = b""
        # our side of it stays open: a terminal that nobody has open may lose its last words
        while select.select([ours], [], [], 0.3)[0]:
            said += os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    return said.decode(), p.returncode


def progress_is_one_line_on_a_terminal_and_rare_elsewhere(tmp):
    model = model_of(tmp, "qwen2")
    ini = ini_of(tmp, model, lines(os.path.join(tmp, "slow.jsonl"), [{"messages": CHAT}]), name="slow")
    slow = os.path.join(tmp, "slow.py")
    open(slow, "w").write("""import json, time
def say(**event):
    print(json.dumps(event), flush=True)
for share in (0.25, 0.75):
    say(event="progress", path="/a/slow.jsonl", file=1, files=2, samples=1000 * share, tokens=4e6, share=share,
        tokens_per_second=1e6, eta=100)
say(event="error", kind="input", message="it went wrong")
""")
    env = {"MEGATRAIN_DATA_HELPER": slow}
    said, code = on_a_terminal("data", "prepare", ini, env=env)
    assert code == 3 and said.count("eta 1m40s") == 2, said
    assert "\r25%, 250 samples, 4.00M tokens, 1000k tokens/s, eta 1m40s (\x1b[K\r75%" in said, said
    assert "\r\x1b[Kmegatrain: it went wrong" in said and "slow.jsonl)" not in said, said
    for args in (["--no-progress"], ["-q"], ["--set", "log.progress=off"]):
        assert "eta" not in on_a_terminal(*args, "data", "prepare", ini, env=env)[0], args
    assert "eta" not in megatrain("data", "prepare", ini, env=env, expect=3).stderr


def errors_name_the_place_and_the_mend(tmp):
    model = model_of(tmp, "qwen2")
    good = json.dumps({"messages": CHAT}) + "\n"

    def bad(text, code, *words, name="bad.jsonl", **over):
        path = os.path.join(tmp, name)
        with open(path, "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        fails(tmp, over.pop("model", model), path, code, *words, **over)

    bad(good * 3 + '{"messages": [1,}\n', 3, "bad.jsonl:4:", "not valid JSON")
    bad(good * 2000 + '{"messages": [1,}\n' + good * 2000, 3, "bad.jsonl:2001:17", "not valid JSON")
    bad('[' + good + ',\n  {"messages": [1,}\n]', 3, "bad.json:3:", "not valid JSON", name="bad.json")
    bad('[' + good, 3, "does not end", name="bad.json")
    bad(good + good[:30].rstrip("\n") + "\n", 3, "bad.jsonl:2:")
    bad(good + '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}\n', 3, "bad.jsonl:2", "surrogate")
    bad(good.encode() + b'{"messages": [{"role": "user", "content": "\xff"}]}\n', 3, "bad.jsonl:2:44", "UTF-8")
    bad(good + '{"messages": []}\n', 3, "bad.jsonl:2", "missing or empty")
    bad(good + '{"messages": [{"content": "a"}]}\n', 3, "bad.jsonl:2", '"role"')
    bad(good + '[1]\n', 3, "bad.jsonl:2", "must be a JSON object")
    bad(good + '{"text": "a"}\n', 3, "bad.jsonl:2", "missing or empty")
    bad('{"prompt": "a", "completion": "b"}\n' + good, 3, "bad.jsonl:2", 'no "prompt"', "format of the first one")
    bad('{"instruction": "a", "response": "b"}\n', 3, "bad.jsonl:1", 'no "output"', "data.columns = output:")
    for tokenizer in ("model", "byte"):
        bad('{"stuff": 1, "more": 2}\n', 3, "bad.jsonl:1", '"stuff", "more"', "instruction", "data.columns = instruction:", "or prompt:", data__tokenizer=tokenizer)
    bad(good.replace('"content": "one"', '"content": "one", "train": 1'), 3, "bad.jsonl:1", "true or false")
    bad('{"conversations": [{"from": "narrator", "value": "a"}]}\n', 3, "bad.jsonl:1", '"narrator"', "human")
    bad('{"messages": [{"role": "user", "content": "a"}]}\n' + good * 200, 0)
    bad(('{"messages": [{"role": "user", "content": "a"}]}\n' + good) * 10, 3, "10 of 20", "bad.jsonl:1", "data.max_untrained", "data.train_on")
    bad('{"messages": [{"role": "user", "content": "a"}]}\n', 3, "no sample has a token to train on", "bad.jsonl:1")
    bad("", 3, "no samples")
    bad(b"x", 3, "cannot read", "bad.jsonl.gz", name="bad.jsonl.gz")
    bad(gzip.compress(good.encode() * 500)[:-9], 3, "cannot read", name="bad.jsonl.gz")
    bad(b"x", 3, "cannot read", "bad.parquet", name="bad.parquet")
    mistral = model_of(tmp, "mistral")
    twice = json.dumps({"messages": CHAT[:2] + CHAT[1:]}) + "\n"
    bad(good + twice, 3, "bad.jsonl:2", "the chat template of", "roles must alternate", model=mistral)
    raising = os.path.join(tmp, "raise.jinja")
    open(raising, "w").write("{% for m in messages %}{% if m.content == 'one' %}{{ raise_exception('no ones here') }}{% endif %}"
                             "{{ m.role + ': ' + m.content }}\n{% endfor %}")
    bad(good, 3, "bad.jsonl:1", "raise.jinja says: no ones here", data__template=raising)
    open(raising, "w").write("{% for m in messages %}{{ m.role + 1 }}{% endfor %}")
    bad(good, 3, "raise.jinja", data__template=raising)
    open(raising, "w").write("{% for m in messages %}\n{{ m.role }\n{% endfor %}")
    bad(good, 3, "raise.jinja, line 2", data__template=raising)
    bad(good, 2, 'data.template = llama4', "chatml", data__template="llama4")
    bad('{"input_ids": [1, 700]}\n', 3, "bad.jsonl:1", "700", "vocab_size")
    small = os.path.join(tmp, "small")
    shutil.copytree(os.path.join(FIXTURES, "qwen2"), small, dirs_exist_ok=True)
    write_model(small, config("llama", vocab_size=300))
    bad(good, 3, "bad.jsonl:1", "vocab_size of 300", "the tokenizer of", model=small)
    bare = write_model(os.path.join(tmp, "bare"), config("llama", vocab_size=700))
    bad(good, 3, "tokenizer.json", "data.tokenizer", model=bare)
    shutil.copy(os.path.join(FIXTURES, "qwen2", "tokenizer.json"), bare)
    bad(good, 2, "no chat template", "data.template", model=bare)
    open(os.path.join(bare, "tokenizer.json"), "w").write("{}")
    bad(good, 3, "cannot read", "tokenizer.json", model=bare)
    fails(tmp, model, lines(os.path.join(tmp, "env.jsonl"), [{"messages": CHAT}] * 7), 1, "scripts/setup --data", env={"MEGATRAIN_PYTHON": "/nowhere/python"})
    fails(tmp, model, os.path.join(tmp, "env.jsonl"), 1, "scripts/setup --data", env={"MEGATRAIN_PYTHON": "/usr/bin/python3", "PYTHONNOUSERSITE": "1"})
    fails(tmp, model, os.path.join(tmp, "env.jsonl"), 1, "MEGATRAIN_DATA_HELPER", env={"MEGATRAIN_DATA_HELPER": "/nowhere/x.py"})
    broken = os.path.join(tmp, "broken.py")
    open(broken, "w").write("import sys\nsys.exit('Traceback: it broke')\n")
    fails(tmp, model, os.path.join(tmp, "env.jsonl"), 1, "it broke", env={"MEGATRAIN_DATA_HELPER": broken})
    open(broken, "w").write("import os\nos.kill(os.getpid(), 9)\n")
    fails(tmp, model, os.path.join(tmp, "env.jsonl"), 1, "signal 9", env={"MEGATRAIN_DATA_HELPER": broken})


def check_and_run_prepare_what_is_missing(tmp):
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "run.jsonl"), [{"messages": CHAT}] * 30)
    over = {"data__seq_len": 128, "train__steps": 2, "train__batch_size": 2, "data__cache_dir": os.path.join(tmp, "cache-run")}
    p = megatrain("check", ini_of(tmp, model, data, model__init="random", **over))
    assert "making tokens of 1 data file" in p.stderr and p.stdout.endswith("ok\n"), p.stderr
    p = megatrain("run", ini_of(tmp, model, data, model__init="random", **over))
    assert "(cached)" in p.stderr and "step 2/2" in p.stderr
    said = megatrain("-q", "sample", "--model", os.path.join(tmp, "out", "latest"), "--prompt", "find", "--max-tokens", "5", "--temperature", "0")
    assert said.stdout.startswith("find"), said.stdout
    bare = os.path.join(tmp, "bare.jinja")
    open(bare, "w").write("{{ messages[0]['content'] }}")  # the turn alone is the prompt
    say = lambda *args: megatrain("-q", "sample", *args, "--model", os.path.join(tmp, "out", "latest"), "--prompt", "find", "--max-tokens", "5",
                                  "--temperature", "0").stdout
    assert "find" + say("--chat", "--template", bare) == say() != "find" + say("--chat")
    prompts = lines(os.path.join(tmp, "prompts.jsonl"), [{"messages": CHAT[:1]}, {"prompt": "find"}])
    got = [json.loads(line) for line in megatrain("-q", "sample", "--model", os.path.join(tmp, "out", "latest"), "--prompts", prompts, "--max-tokens", 5,
                                                  "--temperature", 0).stdout.splitlines()]
    assert got[0]["messages"] == CHAT[:1] and said.stdout == "find" + got[1]["completion"] + "\n", (got, said.stdout)
    whole = got[1]["completion"]
    cut = megatrain("-q", "sample", "--model", os.path.join(tmp, "out", "latest"), "--prompt", "find", "--max-tokens", 5, "--temperature", 0, "--stop", whole[1:3])
    assert cut.stdout == "find" + whole[:whole.index(whole[1:3])] + "\n", (cut.stdout, whole)


run_tests([formats_and_files_of_one_conversation_agree, what_a_file_begins_with_tells_what_it_is, columns_are_what_json_would_have, extensions_have_any_case_and_tables_a_header,
           columns_that_a_row_does_not_have_are_absent, columns_have_the_names_that_files_give_them,
           a_quick_try_takes_the_first_samples_of_each_file, stats_are_printed_whatever_a_run_would_refuse,
           long_rows_of_a_table_come_a_few_at_once, any_number_of_processes_gives_the_same_shard,
           the_cache_follows_contents_and_settings, a_run_goes_on_although_the_helper_has_changed,
           a_preparation_that_is_killed_leaves_nothing_half_done, data_sets_of_the_hub_cache_have_addresses,
           weights_and_dataset_info_choose_what_an_epoch_has, folders_and_other_formats_are_named_by_what_would_do,
           samples_show_in_colour_in_brackets_and_as_a_page, progress_is_one_line_on_a_terminal_and_rare_elsewhere,
           errors_name_the_place_and_the_mend, check_and_run_prepare_what_is_missing],
          first=[formats_and_files_of_one_conversation_agree, columns_have_the_names_that_files_give_them,
                 the_cache_follows_contents_and_settings, weights_and_dataset_info_choose_what_an_epoch_has])
