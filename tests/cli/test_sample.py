# SPDX-License-Identifier: Apache-2.0
"""What `sample` draws from: temperature, the likeliest tokens (--top-k, --top-p), and prompts from standard input."""
import collections
import json
import os
import subprocess
import tempfile

from tiny import BINARY, base, config, megatrain, write_ini, write_model

N = 30


def drawn(model, *args, prompt="ab", stdin=None):
    """The byte that comes after the prompt; None: the text ends."""
    p = subprocess.run([BINARY, "-q", "sample", "--model", model, "--prompt", prompt, "--max-tokens", "1", *map(str, args)],
                       input=stdin, capture_output=True, check=True)
    return p.stdout


def only_the_likeliest_are_drawn(model):
    greedy = drawn(model, "--temperature", 0)
    for few in (("--top-k", 1), ("--top-p", 0), ("--top-p", 1e-9)):
        assert drawn(model, *few, "--temperature", 100, "--seed", 5) == greedy, few
    count = lambda *args: collections.Counter(drawn(model, *args, "--temperature", 100, "--seed", s) for s in range(N))
    everything, two = count(), count("--top-k", 2)
    # at this temperature all are about equally likely; seeds are fixed, so are the draws
    assert len(everything) > N // 2 and len(two) == 2 and greedy in two and min(two.values()) > 4, (everything, two)
    both = count("--top-k", 2, "--top-p", 0.9)
    assert both == two, (both, two)  # two of about 0.5 each: both are needed for 0.9
    assert set(count("--top-k", 2, "--top-p", 0.4)) == {greedy}
    assert 5 < len(count("--top-p", 10 / 257)) <= 12
    plain = drawn(model, "--seed", 3)
    assert drawn(model, "--seed", 3, "--top-k", 0, "--top-p", 1) == plain


def prompts_come_from_standard_input(model):
    want = drawn(model, "--temperature", 0)
    assert drawn(model, "--temperature", 0, prompt="-", stdin=b"ab") == want
    assert drawn(model, "--temperature", 0, prompt="-", stdin=b"") == drawn(model, "--temperature", 0, prompt="")
    p = subprocess.run([BINARY, "sample", "--model", model, "--prompt", "-"], input=b"ab\xff", capture_output=True)
    assert p.returncode == 2 and b"UTF-8" in p.stderr
    p = subprocess.run([BINARY, "sample", "--model", model, "--prompt", "-"], input=b"ab\0cd", capture_output=True)
    assert p.returncode == 2 and b"zero byte" in p.stderr
    assert "--prompt -" in megatrain("sample", "--model", model, "--chat", expect=2).stderr
    assert "give one of them" in megatrain("sample", model, "--model", model, expect=2).stderr
    said = [subprocess.run([BINARY, "sample", *of, "--prompt", "ab", "--max-tokens", "1", "--temperature", "0"], capture_output=True, check=True).stdout
            for of in ([model], ["--model", model])]
    assert said[0] == said[1] and said[0].startswith(b"ab"), said
    megatrain("sample", "--model", model, "--top-p", "1.5", expect=2)


def shown(text):
    """Bytes as they are in JSON."""
    try:
        if 0 not in text:
            return text.decode()
    except UnicodeDecodeError:
        pass
    return "".join(chr(c) if 0 < c < 128 else f"\\x{c:02x}" for c in text)


def alone(model, record, *args):
    said = subprocess.run([BINARY, "-q", "sample", "--model", model, "--prompt", record["prompt"], "--max-tokens", "12", *args],
                          capture_output=True, check=True).stdout
    assert said.startswith(record["prompt"].encode()) and said.endswith(b"\n")
    return shown(said[len(record["prompt"]):-1])


def completions(model, path, *args):
    return [json.loads(line) for line in megatrain("-q", "sample", "--model", model, "--prompts", path, "--max-tokens", 12, *args).stdout.splitlines()]


def a_file_of_prompts_is_continued_as_each_alone(tmp, model):
    path = os.path.join(tmp, "prompts.jsonl")
    prompts = ["ab", "cdefg", "h", "abcabcabc", "gh"]
    with open(path, "w") as f:
        f.write("\n".join(json.dumps({"prompt": p, "id": i}) for i, p in enumerate(prompts)) + "\n\n")
    together = completions(model, path, "--temperature", 0)
    assert [(r["prompt"], r["id"]) for r in together] == [(p, i) for i, p in enumerate(prompts)] and "place" not in together[0]
    for i, r in enumerate(together):
        assert r["finish_reason"] in ("stop", "length") and (i % 2 or alone(model, r, "--temperature", "0") == r["completion"]), r
        assert r["completion_tokens"] == 12 or r["finish_reason"] == "stop"
    drawn = completions(model, path, "--seed", 3, "--temperature", 3)
    assert drawn != together
    assert all(completions(model, path, "--seed", 3, "--temperature", 3, "--batch", n) == drawn for n in (1, 2))
    p = subprocess.run([BINARY, "-q", "sample", "--model", model, "--prompts", "-", "--max-tokens", "12", "--seed", "3", "--temperature", "3"],
                       input=open(path, "rb").read(), capture_output=True, check=True)
    assert [json.loads(line) for line in p.stdout.splitlines()] == drawn
    for text, words in (('{"prompt": 3}\n', ":1: a prompt is"), ("[]\n", ":1: a prompt is"), ("{\n", ":1"), ("\n", "no prompt")):
        with open(path + ".bad", "w") as f:
            f.write(text)
        assert words in megatrain("sample", "--model", model, "--prompts", path + ".bad", expect=3).stderr, text
    megatrain("sample", "--model", model, "--prompts", path, "--prompt", "a", expect=2)
    return path, together


def texts_end_before_a_stop_string(model, path, whole):
    assert "ef" in whole[0]["completion"], whole  # it has learnt that much
    stop = "ef"
    cut = completions(model, path, "--temperature", 0, "--stop", "never there", "--stop", stop)
    for was, now in zip(whole, cut):
        assert now["completion"] == was["completion"].split(stop)[0], (stop, was, now)
        assert now["finish_reason"] == "stop" if stop in was["completion"] else now == was
        assert now["completion_tokens"] <= len(was["completion"].split(stop)[0]) + len(stop), now  # it is looked for at each byte
    assert alone(model, whole[0], "--temperature", "0", "--stop", stop) == cut[0]["completion"]
    assert "--stop" in megatrain("sample", "--model", model, "--prompt", "a", "--stop=", expect=2).stderr


with tempfile.TemporaryDirectory() as tmp:
    folder, data = os.path.join(tmp, "m"), os.path.join(tmp, "d.txt")
    write_model(folder, config("qwen3", num_hidden_layers=1))
    with open(data, "w") as f:
        f.write("abcdefgh" * 400)
    megatrain("-q", "run", write_ini(os.path.join(tmp, "a.ini"), base(folder, data, os.path.join(tmp, "o"), train__steps=1, data__tokenizer="byte")))
    latest = os.path.join(tmp, "o", "latest")
    megatrain("-q", "run", write_ini(os.path.join(tmp, "b.ini"), base(folder, data, os.path.join(tmp, "learnt"), train__steps=40, data__tokenizer="byte",
                                                                      data__eval="", train__learning_rate="1e-2", checkpoint__every=0)))
    learnt = os.path.join(tmp, "learnt", "latest")
    only_the_likeliest_are_drawn(latest)
    prompts_come_from_standard_input(latest)
    texts_end_before_a_stop_string(learnt, *a_file_of_prompts_is_continued_as_each_alone(tmp, learnt))
