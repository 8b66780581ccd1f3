# SPDX-License-Identifier: Apache-2.0
"""Samples to tokens through the binary: chat templates, masks, cuts, turns of a conversation. Runs in .venv-data."""
import json
import os
import pty
import shutil
import subprocess
import sys

import data_env

data_env.enter("pyarrow")
ROOT = data_env.ROOT
sys.path.insert(0, os.path.join(ROOT, "scripts"))

from megatrain_data import answers, formats, prepare
from megatrain_data.encode import Encoder
from megatrain_data.formats import Chat
from corpus import CHAT, FIXTURES, fails, ini_of, lines, model_of, run_tests, show, text_of
from families import EPOCH
from tiny import BINARY, base, config, megatrain, write_ini, write_model


def tokens_and_masks_are_those_of_transformers(tmp):
    for style in sorted(os.listdir(FIXTURES)):
        model = model_of(tmp, style)
        cases = os.path.join(FIXTURES, style, "cases.jsonl")
        want = [json.loads(l) for l in open(cases)]
        got = show(tmp, model, cases, env={"SOURCE_DATE_EPOCH": EPOCH})
        assert len(got) == len(want) > 10
        for k, (g, w) in enumerate(zip(got, want)):
            assert g["input_ids"] == w["ids"], (style, k)
            mask = "0" + w["mask"][1:]
            assert "".join("01"[l != -100] for l in g["labels"]) == mask, (style, k, w["messages"])
            assert "1" in mask


def parts_of_type_text_are_joined_and_others_refused(tmp):
    model = model_of(tmp, "qwen3")
    parts = [dict(m, content=[{"type": "text", "text": m["content"][:4]}, {"type": "text", "text": m["content"][4:]}]) for m in CHAT]
    path = lambda messages: lines(os.path.join(tmp, "parts.jsonl"), [{"messages": CHAT}, {"messages": messages}])
    whole, joined = show(tmp, model, path(parts))
    assert dict(joined, sample=0) == whole
    image = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    fails(tmp, model, path([{"role": "user", "content": image}, CHAT[-1]]), 3, "parts.jsonl:2", "image_url", "message 0")
    fails(tmp, model, path([{"role": "user", "content": 7}, CHAT[-1]]), 3, "parts.jsonl:2", "message 0", "string")


def a_message_that_the_template_drops_is_warned_of(tmp):
    model = model_of(tmp, "qwen3")
    said = lambda name, records: megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, name), records))).stderr
    thoughts = [CHAT[1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n one "}, CHAT[3], CHAT[4]]
    tool = [CHAT[1], dict(CHAT[2], content="", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
            {"role": "tool", "content": '{"a": "\u00e4\\n"}'}, CHAT[4]]
    assert "is not in the text" not in said("whole.jsonl", [{"messages": CHAT}, {"messages": thoughts}, {"messages": tool}])
    lost = [dict(CHAT[0], role="developer", content="Answer in rhymes."), *CHAT[1:]]
    few = said("lost.jsonl", [{"messages": CHAT}, {"messages": lost}, {"messages": lost}, {"messages": lost}])
    assert 'lost.jsonl:2: what message 0 (role "developer") says' in few and "2 more samples" in few, few


def special_tokens_in_messages_are_counted(tmp):
    """Also from the cache; not those of the template, nor where the tokenizer splits them."""
    model = model_of(tmp, "qwen3")
    odd = [dict(CHAT[1], content="what does <|im_end|> do?"), *CHAT[2:]]
    ini = ini_of(tmp, model, lines(os.path.join(tmp, "odd.jsonl"), [{"messages": CHAT}, {"messages": odd}, {"messages": odd}]))
    said = megatrain("data", "stats", ini)
    assert "odd.jsonl:2: message 0 writes <|im_end|> out" in said.stderr and "in 1 more sample:" in said.stderr, said.stderr
    assert "Special     2 samples" in said.stdout and "Special     2" in megatrain("data", "stats", ini).stdout, said.stdout
    assert json.loads(megatrain("data", "stats", ini, "--json").stdout)["special"] == 2
    path = os.path.join(model, "tokenizer_config.json")
    conf = json.load(open(path))
    json.dump({**conf, "split_special_tokens": True}, open(path, "w"))
    assert "Special" not in megatrain("data", "stats", ini).stdout
    json.dump(conf, open(path, "w"))


CALL = {"type": "function", "id": "c1", "function": {"name": "multiply", "arguments": {"a": 6, "b": "seven"}}}
TOOL = {"type": "function", "function": {"name": "tide", "description": "How high", "parameters": {"type": "object", "properties": {}}}}


def what_has_no_effect_is_told_as_long_as_that_is_so(tmp):
    """With a template that prints contents alone; by each command, with the tokens made or found; not where the template prints it."""
    model, user = model_of(tmp, "qwen2"), {"role": "user", "content": "please multiply 6 and 7"}
    says = lambda words, **more: {"role": "assistant", "content": words, **more}
    records = [
        {"messages": [user, says("", tool_calls=[CALL])]},
        {"messages": [user, says("Three.")], "tools": [TOOL]},
        {"messages": [user, says("Three.", reasoning_content="a deep thought")]},
        {"messages": [user, says("Three.")], "chat_template_kwargs": {"nonsense": 1}},
        {"messages": [dict(user, speaker="Ann"), says("Three.")], "images": ["a.png"]},
        {"messages": [user, says("")], "documents": [{"title": "a"}]},
        {"messages": [user, says("Three.", thinking="first"), user, says("Four.")]}]
    data = lines(os.path.join(tmp, "fields.jsonl"), records)
    told = ["fields.jsonl:1: the call of \"multiply\" in message 1 (tool_calls)", "fields.jsonl:2: the tool \"tide\" (tools)",
            "fields.jsonl:3: what message 1 thinks (reasoning_content)", "fields.jsonl:4: the template argument \"nonsense\"",
            "fields.jsonl:5: \"speaker\" of message 0", "fields.jsonl:5: \"images\" of a sample", "fields.jsonl:6: the template argument \"documents\"",
            "fields.jsonl:1: nothing but the end of an answer, or of a text, is trained, and so in 1 more sample:", "in 1 more sample: set data.template"]
    ini = lambda **over: ini_of(tmp, model, data, data__template="chatml", model__init="random", **over)
    for command in (("check",), ("data", "show"), ("data", "stats", "--json")):
        said = megatrain(*command[:2], ini(), *command[2:])
        assert all(w in said.stderr for w in told), (command, said.stderr)
    assert len(json.loads(said.stdout)["notes"]) == said.stderr.count("warning") >= 8, said.stdout
    for field, record in (("weight", {"messages": CHAT}), ("completion_mask", {"prompt": "find", "completion": "the word"}),
                          ("margin", {"prompt": "find", "chosen": "the word", "rejected": "a word"}), ("sample_weight", {"text": "find"})):
        more = {"preference__loss": "sigmoid"} if "chosen" in record else {}
        said = megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, field + ".jsonl"), [record | {field: 0}]), **more)).stderr
        assert f'{field}.jsonl:1: "{field}" of a sample has no effect' in said, said
    tokens = {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}
    for tokenizer in ("model", "byte"):
        fails(tmp, model, lines(os.path.join(tmp, "ids.jsonl"), [tokens]), 3, "ids.jsonl:1", '"completion_mask" is not read', "labels", data__tokenizer=tokenizer)
        assert show(tmp, model, lines(os.path.join(tmp, "ids.jsonl"), [tokens | {"labels": [-100, -100, 7]}]), data__tokenizer=tokenizer)
    said = megatrain("data", "prepare", ini_of(tmp, model_of(tmp, "qwen3"), data)).stderr
    assert not [w for w in told[:3] if w.split(": ")[1] in said] and "leaves out what message 1 thinks" in said, said
    assert "fields.jsonl:4: the template" in said, said


def calls_are_the_same_however_clients_write_them(tmp):
    model, user = model_of(tmp, "qwen3"), {"role": "user", "content": "find"}
    call = lambda **f: {"type": "function", "function": {"name": "tide", **f}}
    talk = lambda *calls, **more: {"messages": [user, {"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {}), **more}, *CHAT[3:]]}
    turns = lambda said: {"conversations": [{"from": "human", "value": "find"}, {"from": "function_call", "value": said},
                                            *({"from": "human gpt".split()[m["role"] != "user"], "value": m["content"]} for m in CHAT[3:])]}
    given, text = {"hour": 12}, '{"hour":12}'
    for same in ([talk(call(arguments=given)), talk(call(arguments=text)), talk(tool_calls=json.dumps([call(arguments=text)])),
                  talk(tool_calls=call(arguments=given)), talk(function_call={"name": "tide", "arguments": text}),
                  talk(function_call=json.dumps({"name": "tide", "arguments": given}))],
                 [talk(call(arguments={})), talk(call()), talk(call(arguments=None)), talk(call(arguments=""))],
                 [talk(), talk(tool_calls=[]), talk(tool_calls=None), talk(tool_calls="[]")],
                 [turns(json.dumps({"name": "tide", "arguments": given})), turns(json.dumps({"name": "tide", "arguments": text}))]):
        made = show(tmp, model, lines(os.path.join(tmp, "calls.jsonl"), same))
        assert len(made) == len(same) and all(m["input_ids"] == made[0]["input_ids"] and m["labels"] == made[0]["labels"] for m in made), same
    assert {"messages": [user]}["messages"] == formats.chat(json.dumps([user]), {}).messages  # as tables of text have it
    for wrong, words in (({"messages": "hello"}, "is a string that is not JSON"), ({"messages": 7}, "a list of turns"), (talk(7), "a call is an object"),
                         ({"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"tools": [TOOL]}}, "given twice")):
        fails(tmp, model, lines(os.path.join(tmp, "calls.jsonl"), [{"messages": CHAT}, wrong]), 3, "calls.jsonl:2", words)
    given = [{"messages": CHAT, "tools": [TOOL]}, {"messages": CHAT, "chat_template_kwargs": {"tools": [TOOL]}}]
    made = show(tmp, model, lines(os.path.join(tmp, "tools.jsonl"), given))
    assert made[0]["input_ids"] == made[1]["input_ids"]


def a_token_beyond_the_embedding_is_refused_only_where_it_is_used(tmp):
    model = model_of(tmp, "qwen2")
    path = os.path.join(model, "tokenizer.json")
    tokens = json.load(open(path))
    at = max(t["id"] for t in tokens["added_tokens"]) + 1
    tokens["added_tokens"].append({**tokens["added_tokens"][-1], "id": at, "content": "<image_soft_token>"})
    json.dump(tokens, open(path, "w"))
    write_model(model, config("llama", vocab_size=at, num_hidden_layers=1, max_position_embeddings=8192))
    write = {"messages": [dict(CHAT[1], content="a <image_soft_token>"), CHAT[2]]}
    data = lines(os.path.join(tmp, "beyond.jsonl"), [{"messages": CHAT}])
    assert len(show(tmp, model, data)) == 1
    ini = ini_of(tmp, model, data, name="run", model__init="random", train__steps=1)
    megatrain("-q", "run", ini)
    fails(tmp, model, lines(os.path.join(tmp, "written.jsonl"), [{"messages": CHAT}, write]), 3, "written.jsonl:2", f"token {at} ('<image_soft_token>')",
          f"vocab_size of {at}", f"ids up to {at}")
    trained = os.path.join(tmp, "out", "latest")
    sample = lambda text, **more: megatrain("-q", "sample", "--model", trained, "--prompt", text, "--max-tokens", 2, **more)
    assert sample("find").stdout.startswith("find")
    assert f"token {at}" in sample("find <image_soft_token>", expect=3).stderr
    requests = lambda text: lines(os.path.join(tmp, "requests.jsonl"), [{"context": "find", "continuation": text}])
    score = lambda text, **more: megatrain("-q", "score", ini, "--set", f"model.path={trained}", "--data", requests(text), "--out", os.path.join(tmp, text.strip() + ".jsonl"), **more)
    score(" the")
    assert "requests.jsonl:1: token" in score(" <image_soft_token>", expect=3).stderr


def tokens_and_names_beside_the_tokenizer_are_those_of_transformers(tmp):
    """Named special tokens, lists of further ones, added_tokens.json; ids of transformers 5.24."""
    model, conf = model_of(tmp, "qwen2"), os.path.join(model_of(tmp, "qwen2"), "tokenizer_config.json")
    own = json.load(open(conf))
    own.pop("added_tokens_decoder", None)
    with open(os.path.join(model, "chat_template.jinja"), "w") as f:
        f.write("{%- for m in messages %}{{ m.content }}{{ eot_token }}{{ image_token }}{%- endfor %}")

    def ids(text, files=(), **more):
        json.dump({**own, **more}, open(conf, "w"))
        for name, content in dict(files).items():
            json.dump(content, open(os.path.join(model, name), "w"))
        e = Encoder({"model_dir": model, "tokenizer": "model", "vocab": 1000})
        text, _ = e.chat_text(Chat([{"role": "user", "content": text}], None, {}, [None], ()))
        for name in dict(files):
            os.unlink(os.path.join(model, name))
        return text, list(e.tok.encode([text])[0])

    end, first = "<|im_end|>", Encoder({"model_dir": model, "tokenizer": "model", "vocab": 1000}).tok.max_id + 1
    for more in ({"eot_token": end}, {"eot_token": {"__type": "AddedToken", "content": end}}, {"extra_special_tokens": {"eot_token": end}}):
        assert ids("", **more)[0] == end, more
    assert ids("", eot_token={"content": end})[0] == ""  # but the map's objects need no type
    for token in (end, {"content": end, "lstrip": False}):
        assert ids("", {"special_tokens_map.json": {"eot_token": token}})[0] == end, token
    assert ids("", {"special_tokens_map.json": {"eot_token": end}}, added_tokens_decoder={})[0] == ""
    assert ids("<y><x>", extra_special_tokens=["<x>", "<y>"])[1] == [first + 1, first] == ids("<y><x>", additional_special_tokens=["<x>", "<y>"])[1]
    assert ids("<x><y>", {"added_tokens.json": {"<y>": first, "<x>": first + 1}})[1] == [first + 1, first]
    assert ids("<x><y>", {"added_tokens.json": {"<y>": first}}, pad_token="<x>")[1] == [first + 1, first]
    said = megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, "eot.jsonl"), [{"messages": CHAT}]), data__train_on="all")).stderr
    assert "prints {{ eot_token }}, to which nothing gives a value" in said, said


def a_text_that_begins_with_its_first_token_gets_no_second_one(tmp):
    """One rule for what is trained, compared, sampled from and scored."""
    model = model_of(tmp, "llama3")
    e = Encoder({"model_dir": model, "tokenizer": "model", "vocab": 1000})
    begin = e.tok.special["bos_token"]
    for text in ("find", begin + "find"):
        made = [prepare.ids_of(e, {"prompt": text}, False), e.around(e.tok.encode([text])[0], None)[0], e.request(text, " the")[0],
                answers.encode(e, answers.Answers(text, [" a", " b"]))[0][0]]
        assert all(list(ids[:2]) == [e.tok.bos, e.tok.encode(["find"])[0][0]] for ids in made), (text, made)


def what_the_helper_reads_is_bounded(tmp):
    """Nothing nested too deep, and no tokenizer that takes all memory, ends in more than one line."""
    model, deep = model_of(tmp, "qwen2"), "[" * 100000 + "]" * 100000
    data = lines(os.path.join(tmp, "deep.jsonl"), [{"messages": CHAT}])
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"):
        path = os.path.join(model, name)
        before = open(path).read() if os.path.exists(path) else None
        for wrong, words in (('{"a": ' + deep + "}", "nested too deep"), ("[]", "must be a JSON object")):
            open(path, "w").write(wrong)
            settings = os.path.join(model, "tokenizer_config.json")
            held = json.load(open(settings)) if name != "tokenizer_config.json" else {}
            if "added_tokens_decoder" in held and name in ("special_tokens_map.json", "added_tokens.json"):
                break  # not read then
            fails(tmp, model, data, 3, name, words)
        os.unlink(path) if before is None else open(path, "w").write(before)
    for record in ({"messages": CHAT, "tools": deep}, {"messages": deep}, {"messages": [CHAT[1], {"role": "assistant", "tool_calls": deep}]},
                   {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": deep}]}):
        fails(tmp, model, lines(os.path.join(tmp, "nested.jsonl"), [record]), 3, "nested.jsonl:1", "nested too deep")
    for name, text in (("nested.jsonl", json.dumps({"messages": CHAT}) + "\n" + '{"messages": ' + deep + "}\n"), ("nested.json", '[{"messages": ' + deep + "}]")):
        open(os.path.join(tmp, name), "w").write(text)
        fails(tmp, model, os.path.join(tmp, name), 3, name)
    path = os.path.join(model, "tokenizer.json")
    tokens = json.load(open(path))
    tokens["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 12}
    json.dump(tokens, open(path, "w"))
    small = os.path.join(tmp, "small.py")  # the helper with less memory
    open(small, "w").write(f"import runpy, sys\nsys.path.insert(0, {os.path.join(ROOT, 'scripts')!r})\nfrom megatrain_data import limits\n"
                           f"limits.MEMORY = 100 << 20\nrunpy.run_path({os.path.join(ROOT, 'scripts', 'prepare_data.py')!r}, run_name='__main__')\n")
    env = {"MEGATRAIN_DATA_HELPER": small}
    fails(tmp, model, data, 3, "opening the tokenizer of", "more memory", env=env)
    p = megatrain("-q", "sample", "--model", model, "--prompt", "find", expect=3, env=env)
    assert p.stderr.count("\n") == 1 and "opening the tokenizer of" in p.stderr, p.stderr


def a_template_is_a_file_only_if_its_name_is_not_built_in(tmp):
    """What lies in the working folder under the name of a template, or of the default, is not looked at."""
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "names.jsonl"), [{"messages": CHAT}])
    here = os.path.join(tmp, "here")
    names = ["model", "chatml", "llama3", "mistral", "gemma", "qwen3", "zephyr", "alpaca"]
    assert sorted(n[:-6] for n in os.listdir(os.path.join(ROOT, "scripts/megatrain_data/templates"))) == sorted(names[1:])
    for name in [None, *names]:
        over = {"data__template": name} if name else {}
        want = megatrain("-q", "data", "show", ini_of(tmp, model, data, **over), "--json", "--samples", 9, expect=None)
        for make in (os.makedirs, lambda path: open(path, "w").write("{{ nothing")):
            shutil.rmtree(here, ignore_errors=True)
            os.makedirs(here)
            make(os.path.join(here, name or "model"))
            ini = ini_of(tmp, model, data, data__cache_dir=os.path.join(tmp, "cache-here"), **over)
            got = megatrain("-q", "data", "show", ini, "--json", "--samples", 9, expect=None, cwd=here)
            assert (got.returncode, got.stdout) == (want.returncode, want.stdout), (name, got.stderr)


def what_is_trained_can_be_chosen(tmp):
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "train.jsonl"), [{"messages": CHAT}])
    assert "⟦the word is hot<|im_end|>⟧" in text_of(tmp, model, data) and "⟦one<|im_end|>⟧" in text_of(tmp, model, data)
    last = text_of(tmp, model, data, data__train_on="last")
    assert "⟦one<|im_end|>⟧" in last and last.count("⟦") == 1
    whole = show(tmp, model, data, data__train_on="all")[0]
    assert whole["labels"][1:] == whole["input_ids"][1:]
    flagged = [dict(m) for m in CHAT]
    flagged[2]["train"] = False
    flagged[3]["train"] = True
    data = lines(os.path.join(tmp, "flags.jsonl"), [{"messages": flagged}])
    text = text_of(tmp, model, data)
    assert text.count("⟦") == 2 and "and the number?" in text.split("⟦")[1] and "⟦one<|im_end|>⟧" in text, text
    marked = lambda **mark: [dict(m, **mark) if m["content"] == "one" else m for m in CHAT]
    marks = [{"weight": 0}, *({name: no} for name in ("loss", "trainable", "loss_mask", "training") for no in (False, 0))]
    turn = lambda m: {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"], **{k: v for k, v in m.items() if k not in ("role", "content")}}
    text = text_of(tmp, model, lines(os.path.join(tmp, "flags.jsonl"), [{"messages": marked(**m)} for m in marks]))
    assert text.count("⟦the word is hot<|im_end|>⟧") == text.count("⟦") == len(marks), text
    text = text_of(tmp, model, lines(os.path.join(tmp, "flags.jsonl"), [{"conversations": [*map(turn, marked(**m))]} for m in marks]))
    assert text.count("⟦the word is hot<|im_end|>⟧") == text.count("⟦") == len(marks), text
    fails(tmp, model, lines(os.path.join(tmp, "flags.jsonl"), [{"messages": marked(loss=False, train=True)}]), 3, "flags.jsonl:1", '"loss": false')
    said = megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, "flags.jsonl"), [{"messages": marked(loss=2.5)}]))).stderr
    assert '"loss" of message 4 has no effect' in said, said


def text_that_looks_like_a_turn_is_not_trained(tmp):
    model = model_of(tmp, "qwen2")
    fake = [{"role": "user", "content": "<|im_start|>assistant\nthis is a lie<|im_end|>"}, {"role": "assistant", "content": "no"}]
    text = text_of(tmp, model, lines(os.path.join(tmp, "fake.jsonl"), [{"messages": fake}]))
    assert "⟦no<|im_end|>⟧" in text and text.count("⟦") == 1, text
    indexed = os.path.join(tmp, "indexed.jinja")  # the loop does not show its messages: found by headers and ends
    open(indexed, "w").write("{% for i in range(messages|length) %}{{ '<|im_start|>' + messages[i].role + '\\n' + messages[i].content + "
                             "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    assert text_of(tmp, model, os.path.join(tmp, "fake.jsonl"), data__template=indexed) == text


def a_text_has_one_bos_and_a_trained_eos(tmp):
    model = model_of(tmp, "llama3")
    ids = {t["content"]: t["id"] for t in json.load(open(os.path.join(model, "tokenizer.json")))["added_tokens"]}
    settings = json.load(open(os.path.join(model, "tokenizer_config.json")))
    assert settings["pad_token"] == settings["eos_token"]
    bos, eos = ids[settings["bos_token"]], ids[settings["eos_token"]]
    for record in ({"text": "find the word"}, {"text": settings["bos_token"] + "find the word" + settings["eos_token"]},
                   {"prompt": "find ", "completion": "the word"}):
        s = show(tmp, model, lines(os.path.join(tmp, "text.jsonl"), [record]))[0]
        assert s["input_ids"].count(bos) == 1 and s["input_ids"][0] == bos, record
        assert s["input_ids"].count(eos) == 1 and s["labels"][-1] == eos, record
        assert (s["labels"][1] == -100) == ("prompt" in record)
    chat = show(tmp, model, lines(os.path.join(tmp, "chat.jsonl"), [{"messages": CHAT}]))[0]
    assert chat["input_ids"].count(bos) == 1 and chat["labels"][-1] == eos


def plain_text_is_cut_into_rows(tmp):
    model = model_of(tmp, "qwen2")
    data = os.path.join(tmp, "plain.txt")
    open(data, "w").write("find the word\n\nand the number?\n" * 14000)
    rows = show(tmp, model, data, data__seq_len=512, device__cpu_threads=2)
    assert all(len(r["input_ids"]) == 512 for r in rows[:-1]) and len(rows) > 100
    whole = show(tmp, model, lines(os.path.join(tmp, "plain.jsonl"), [{"text": open(data).read()}]), data__seq_len="8Mi")[0]["input_ids"]
    assert len(whole) > 100000
    rows = show(tmp, model, data, 10**6, data__seq_len="8Mi")
    assert rows[0]["input_ids"] == whole[:-1], "cut in the middle of a piece"  # the text has its end of text


def bytes_take_chats_with_a_built_in_template(tmp):
    model = write_model(os.path.join(tmp, "bytes"), config("llama", num_hidden_layers=1, max_position_embeddings=8192))
    data = lines(os.path.join(tmp, "chat.jsonl"), [{"messages": CHAT}])
    s = show(tmp, model, data, data__tokenizer="byte", data__template="chatml")[0]
    text = bytes(i for i in s["input_ids"] if i < 256).decode()
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and s["input_ids"][0] == 256 and s["labels"][-1] == 257
    assert bytes(l for l in s["labels"] if 0 <= l < 256).decode() == "the word is hot<|im_end|>one<|im_end|>"
    with open(os.path.join(tmp, "bare.jinja"), "w") as f:
        f.write("{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}")
    hollow = lines(os.path.join(tmp, "hollow.jsonl"), [{"messages": [CHAT[1], dict(CHAT[2], content="")]}])
    for path, template, is_hollow in (data, "chatml", False), (hollow, f.name, True):
        said = megatrain("data", "prepare", ini_of(tmp, model, path, data__tokenizer="byte", data__template=template)).stderr
        assert ("nothing but the end" in said) == is_hollow, said
    fails(tmp, model, data, 2, "no chat template", "chatml", data__tokenizer="byte")


def overlong_samples_are_cut_as_asked_without_new_tokens(tmp):
    model = model_of(tmp, "qwen2")
    long = [{"role": "user", "content": "find " * 10}, {"role": "assistant", "content": "the word " * 100}]
    data = lines(os.path.join(tmp, "long.jsonl"), [{"messages": CHAT}, {"messages": long}, {"messages": CHAT}])
    full = show(tmp, model, data)
    fails(tmp, model, data, 3, "1 sample is longer", f"the longest has {len(full[1]['input_ids'])} tokens", "long.jsonl:2",
          "data.overlong", data__seq_len=128)
    cache = sorted(os.listdir(os.path.join(tmp, "cache")))
    cut = show(tmp, model, data, data__seq_len=128, data__overlong="truncate")
    assert [s["input_ids"] for s in cut] == [s["input_ids"][:128] for s in full]
    drop = show(tmp, model, data, data__seq_len=128, data__overlong="drop")
    assert [s["input_ids"] for s in drop] == [full[0]["input_ids"], full[2]["input_ids"]]
    split = show(tmp, model, data, data__seq_len=128, data__overlong="split")
    assert sum((s["input_ids"] for s in split[1:-1]), []) == full[1]["input_ids"]
    assert sorted(os.listdir(os.path.join(tmp, "cache"))) == cache
    stats = json.loads(megatrain("-q", "data", "stats", ini_of(tmp, model, data, data__seq_len=128), "--json").stdout)
    only, = stats["sources"]
    assert only["overlong"] == 1 and only["duplicates"] == 1
    assert stats["overlong"] == 1 and stats["longest"] == len(full[1]["input_ids"])


def data_that_do_not_fill_a_step_are_warned_of(tmp):
    model = model_of(tmp, "qwen2")
    data = lines(os.path.join(tmp, "small.jsonl"), [{"messages": CHAT}] * 8)
    said = lambda **over: megatrain("check", ini_of(tmp, model, data, model__init="random", data__packing="off", **over)).stderr
    few = said(train__batch_size=16)
    assert "fill 8 of a step's 16 sequences" in few and "lower train.batch_size" in few, few
    assert "of a step's" not in said(train__batch_size=8)
    plain = lambda n, **over: said(train__steps=0, train__epochs=n, **over)
    assert "has 20 updates" in (few := plain(10, train__batch_size=4)) and "set train.batch_size = 1 for 80" in few, few
    assert "set train.tokens_per_step = 4096 for 104" in (few := plain(12.5, train__batch_size=0, train__tokens_per_step=32768)), few
    assert "set train.tokens_per_step = 8192 for 100" in (few := plain(25, train__batch_size=0, train__tokens_per_step=65536)), few
    assert "updates" not in plain(25, train__batch_size=4) and "updates" not in said(train__batch_size=4)


def a_few_samples_without_trained_tokens_are_left_out(tmp):
    model, good, none = model_of(tmp, "qwen2"), {"messages": CHAT}, {"messages": CHAT[1:2]}
    long = {"messages": [{"role": "user", "content": "find " * 300}, CHAT[-1]]}
    prepare = lambda name, records, **over: megatrain("data", "prepare", ini_of(tmp, model, lines(os.path.join(tmp, name), records), **over))
    assert "49 samples" in prepare("one.jsonl", [good] * 49 + [none]).stdout
    fails(tmp, model, lines(os.path.join(tmp, "two.jsonl"), [good] * 8 + [none]), 3, "1 of 9", "two.jsonl:9", "data.max_untrained")
    assert "8 samples" in prepare("two.jsonl", [good] * 8 + [none], data__max_untrained=1).stdout
    assert "8 samples" in prepare("two.jsonl", [good] * 8 + [none], data__max_untrained="20%").stdout
    cut = lines(os.path.join(tmp, "cut.jsonl"), [good, long])
    over = {"data__seq_len": 128, "data__overlong": "truncate"}
    fails(tmp, model, cut, 3, "1 of 2", "cut.jsonl:2", "data.seq_len = 128 cuts 1 of them", **over)
    stats = json.loads(megatrain("-q", "data", "stats", ini_of(tmp, model, cut, **over), "--json").stdout)
    assert stats["untrained"] == 1 and stats["longest"] > 300, stats
    model_says = {"messages": [*CHAT[1:2], {"role": "model", "content": "hot"}]}
    fails(tmp, model, lines(os.path.join(tmp, "model.jsonl"), [model_says] * 9), 3, 'roles are "user", "model"', 'have the role "assistant"')
    twice = {"messages": CHAT[:2] + CHAT[1:]}
    refused = lines(os.path.join(tmp, "refused.jsonl"), [*[good] * 19, twice])
    for _ in range(2):
        p = megatrain("data", "prepare", ini_of(tmp, model_of(tmp, "mistral"), refused))
        assert "19 samples" in p.stdout and "refused.jsonl:20: the chat template of" in p.stderr and "such samples are left out" in p.stderr, p.stderr
    off = {"messages": [dict(m, weight=0) if m["role"] == "assistant" else m for m in CHAT]}
    fails(tmp, model, lines(os.path.join(tmp, "off.jsonl"), [off] * 9), 3, "no sample has a token", "9 samples", "off.jsonl:1", '"weight"')


def a_zero_in_a_text_is_shown_or_refused(tmp):
    data = lines(os.path.join(tmp, "zero.jsonl"), [{"prompt": "a\0b", "completion": "c\\u0000d"}])
    assert "a\u2400b\u27e6c\\u0000d" in text_of(tmp, model_of(tmp, "qwen2"), data)
    fails(tmp, model_of(tmp, "qwen2"), data, 3, "zero.jsonl:1", "\\u0000", data__tokenizer="byte")
    data = lines(os.path.join(tmp, "zero.jsonl"), [{"prompt": "ab", "completion": "c\\u0000d"}])  # a backslash and letters
    assert "ab\u27e6c\\u0000d" in text_of(tmp, model_of(tmp, "qwen2"), data, data__tokenizer="byte")


def the_template_of_a_run_goes_along(tmp):
    """Where the model has none, or another one (with a warning), its checkpoints, adapters and exports have data.template, and
    `sample --chat` of them needs no --template."""
    bare, own = model_of(tmp, "qwen2"), shutil.copytree(model_of(tmp, "qwen2"), os.path.join(tmp, "own"))
    settings = lambda folder: json.load(open(os.path.join(folder, "tokenizer_config.json")))
    without = settings(bare)
    at_first = without.pop("chat_template")
    with open(os.path.join(bare, "tokenizer_config.json"), "w") as f:
        json.dump(without, f)
    data, template = lines(os.path.join(tmp, "t.jsonl"), [{"messages": CHAT}] * 4), os.path.join(tmp, "mine.jinja")
    with open(template, "w") as f:
        f.write("{% for m in messages %}#{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}#assistant: {% endif %}")

    def run(name, model, which, **more):
        out = os.path.join(tmp, name)
        p = megatrain("run", write_ini(out + ".ini", base(model, data, out, **{
            "data__eval": "", "data__seq_len": 512, "data__template": which, "data__cache_dir": os.path.join(tmp, "cache"), "train__steps": 1,
            "train__batch_size": 1, **more})))
        return os.path.join(out, "latest"), "another chat template" in p.stderr

    def carried(folder):
        path = os.path.join(folder, "chat_template.jinja")
        return open(path).read() if os.path.exists(path) else None

    mine = open(template).read()
    chatml = open(os.path.join(ROOT, "scripts/megatrain_data/templates/chatml.jinja")).read()
    say = lambda *args: megatrain("-q", "sample", *args, "--chat", "--prompt", "find", "--max-tokens", 8, "--temperature", 0).stdout
    built_in, warned = run("built-in", bare, "chatml", model__init="random")
    assert carried(built_in) == chatml and not warned
    assert say("--model", built_in) == say("--model", built_in, "--template", "chatml")
    assert say("--model", built_in, "--template", template) != say("--model", built_in)  # which one matters
    megatrain("-q", "export", built_in, os.path.join(tmp, "exported"))
    assert carried(os.path.join(tmp, "exported")) == chatml
    megatrain("verify", os.path.join(tmp, "exported"))
    # a model's own stays as it is, and another one is said
    kept, warned = run("kept", own, "model", model__init="random")
    assert carried(kept) is None and settings(kept)["chat_template"] == at_first and not warned
    with open(os.path.join(tmp, "same.jinja"), "w") as f:
        f.write(at_first)
    same, warned = run("same", own, os.path.join(tmp, "same.jinja"), model__init="random")
    assert carried(same) is None and settings(same) == settings(own) and not warned
    other, warned = run("other", own, template, model__init="random")
    assert carried(other) == mine and settings(other) == without and warned
    assert say("--model", other) == say("--model", other, "--template", template) != say("--model", other, "--template", "chatml")
    # adapters have it in their own folder, and --merge takes it from there
    adapters, warned = run("adapters", kept, template, model__init="weights", adapter__kind="lora", adapter__rank=4, adapter__targets="q_proj",
                           train__learning_rate=0.1)
    assert carried(adapters) == mine and warned
    assert say("--model", adapters) == say("--model", adapters, "--template", template) != say("--model", adapters, "--template", "chatml")
    for args in (), ("--merge",):
        to = os.path.join(tmp, "adapters-exported" + "".join(args))
        p = megatrain("export", adapters, to, *args)
        assert carried(to) == mine and ("another chat template" in p.stderr) == bool(args), (args, p.stderr)
    assert settings(os.path.join(tmp, "adapters-exported--merge")) == without
    # bytes have no template of their own
    plain = os.path.join(tmp, "plain")
    write_model(plain, config("llama", vocab_size=700, num_hidden_layers=1))
    of_bytes, _ = run("of-bytes", plain, "chatml", model__init="random", data__tokenizer="byte")
    asked = [BINARY, "-q", "sample", "--model", of_bytes, "--chat", "--prompt", "find", "--max-tokens", "8", "--temperature", "0"]
    said = [subprocess.run([*asked, *more], capture_output=True, check=True).stdout for more in ([], ["--template", "chatml"], ["--template", template])]
    assert carried(of_bytes) == chatml and said[0] == said[1] != said[2], said


def what_lies_beside_the_weights_goes_along(tmp):
    """Templates beside the default one, the code that auto_map names, ranks of other names: to checkpoints, also those that are amended, adapters,
    exports and merged models. Another template leaves out all of the model's."""
    model = shutil.copytree(model_of(tmp, "qwen2"), os.path.join(tmp, "beside"))
    os.mkdir(os.path.join(model, "additional_chat_templates"))
    files = {"additional_chat_templates/tool_use.jinja": "{{ tools }}", "additional_chat_templates/rag.jinja": "{{ documents }}",
             "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}", "modeling_of_its_own.py": "A = 1\n", "hy.tiktoken": "IQ== 0\n"}
    for name, text in files.items():
        with open(os.path.join(model, name), "w") as f:
            f.write(text)
    data = lines(os.path.join(tmp, "b.jsonl"), [{"messages": CHAT}] * 4)
    found = lambda folder: {n for n in files if os.path.exists(os.path.join(folder, n)) and open(os.path.join(folder, n)).read() == files[n]}

    def run(name, model, **more):
        out = os.path.join(tmp, name)
        megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **{"data__eval": data, "data__seq_len": 512, "train__steps": 1,
                                                                                 "data__template": "chatml", "train__batch_size": 1, **more})))
        megatrain("verify", os.path.join(out, "latest"))
        return os.path.join(out, "latest")

    whole = run("beside-whole", model, data__template="model")
    adapters = run("beside-lora", whole, data__template="model", model__init="weights", adapter__kind="lora", adapter__rank=4, adapter__targets="q_proj")
    assert found(whole) == found(adapters) == set(files), (found(whole), found(adapters))
    for args in ([whole], [adapters], ["--merge", adapters]):
        to = os.path.join(tmp, f"beside-exported{len(args)}-{os.path.basename(os.path.dirname(args[-1]))}")
        megatrain("-q", "export", *args, to)
        megatrain("verify", to)
        assert found(to) == set(files), (args, found(to))
    assert found(run("beside-other", model)) == {"modeling_of_its_own.py", "hy.tiktoken"}


def a_conversation_on_a_terminal_knows_its_turns(tmp):
    """Its answers are those to the whole of it, as far as --context holds it."""
    model, asked = os.path.join(tmp, "out", "latest"), ["how?", "and so?"]
    base_model = model_of(tmp, "qwen3")
    megatrain("-q", "run", ini_of(tmp, base_model, lines(os.path.join(tmp, "t.jsonl"), [{"messages": CHAT}] * 4), model__init="random",
                                  train__steps=1, data__overlong="truncate"))
    args = ("sample", "--model", model, "--temperature", "0", "--max-tokens", "6")
    answer = lambda messages: json.loads(megatrain(*args, "--prompts", lines(os.path.join(tmp, "turns.jsonl"), [{"messages": messages}])).stdout)["completion"]
    turn = lambda text: [{"role": "user", "content": text}]
    first = answer(turn(asked[0]))
    whole = turn(asked[0]) + [{"role": "assistant", "content": first}] + turn(asked[1])
    for context, second, forgets in ((2048, whole, 0), (100, whole, 0), (30, turn(asked[1]), 1)):
        mine, theirs = pty.openpty()
        refuses = context < 2048  # a turn that is too long alone; nothing is forgotten for it
        os.write(mine, ("\n".join([asked[0], *["long " * 200] * refuses, asked[1]]) + "\n\x04").encode())
        p = subprocess.run([BINARY, *args, "--chat", "--context", str(context)], stdin=theirs, capture_output=True, text=True)
        os.close(mine), os.close(theirs)
        assert p.returncode == 0 and p.stdout == f"> {first}\n> {'> ' * refuses}{answer(second)}\n> \n", (context, p.stdout, p.stderr, first)
        assert p.stderr.count("first turn is forgotten") == forgets and p.stderr.count("it is not taken") == refuses, (context, p.stderr)


def generation_stops_at_the_models_eos_and_not_at_every_special_token(tmp):
    model = model_of(tmp, "qwen3", eos_token_id=2)
    job = {"mode": "encode", "model_dir": model, "tokenizer": "model", "template": "model", "vocab": 100000, "prompts": [{"prompt": "find"}]}
    ends = {}
    for chat in (False, True):
        p = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "prepare_data.py")],
                           input=json.dumps({**job, "chat": chat}), capture_output=True, text=True, check=True)
        ends[chat] = next(e["ends"] for e in map(json.loads, p.stdout.splitlines()) if e["event"] == "ids")
    with open(os.path.join(model, "tokenizer.json")) as f:
        special = {t["content"]: t["id"] for t in json.load(f)["added_tokens"] if t["special"]}
    assert len(special) > 2 and ends[False] == [2], (ends, special)
    assert ends[True] == sorted({2, special["<|im_end|>"]}), (ends, special)


run_tests([tokens_and_masks_are_those_of_transformers, parts_of_type_text_are_joined_and_others_refused,
           a_message_that_the_template_drops_is_warned_of, special_tokens_in_messages_are_counted,
           what_has_no_effect_is_told_as_long_as_that_is_so, calls_are_the_same_however_clients_write_them,
           a_token_beyond_the_embedding_is_refused_only_where_it_is_used, tokens_and_names_beside_the_tokenizer_are_those_of_transformers,
           a_text_that_begins_with_its_first_token_gets_no_second_one, what_the_helper_reads_is_bounded,
           a_template_is_a_file_only_if_its_name_is_not_built_in, what_is_trained_can_be_chosen,
           text_that_looks_like_a_turn_is_not_trained, a_text_has_one_bos_and_a_trained_eos,
           plain_text_is_cut_into_rows, bytes_take_chats_with_a_built_in_template,
           overlong_samples_are_cut_as_asked_without_new_tokens, data_that_do_not_fill_a_step_are_warned_of,
           a_few_samples_without_trained_tokens_are_left_out,
           the_template_of_a_run_goes_along, what_lies_beside_the_weights_goes_along,
           a_zero_in_a_text_is_shown_or_refused,
           a_conversation_on_a_terminal_knows_its_turns,
           generation_stops_at_the_models_eos_and_not_at_every_special_token],
          first=[tokens_and_masks_are_those_of_transformers, what_is_trained_can_be_chosen, plain_text_is_cut_into_rows,
                 overlong_samples_are_cut_as_asked_without_new_tokens, a_zero_in_a_text_is_shown_or_refused])
