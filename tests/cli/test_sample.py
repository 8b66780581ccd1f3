# SPDX-License-Identifier: Apache-2.0
"""What `sample` draws from: temperature, the likeliest tokens (--top-k, --top-p), and prompts from standard input."""
import collections
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
    megatrain("sample", "--model", model, "--top-p", "1.5", expect=2)


with tempfile.TemporaryDirectory() as tmp:
    folder, data = os.path.join(tmp, "m"), os.path.join(tmp, "d.txt")
    write_model(folder, config("qwen3", num_hidden_layers=1))
    with open(data, "w") as f:
        f.write("abcdefgh" * 400)
    megatrain("-q", "run", write_ini(os.path.join(tmp, "a.ini"), base(folder, data, os.path.join(tmp, "o"), train__steps=1, data__tokenizer="byte")))
    latest = os.path.join(tmp, "o", "latest")
    only_the_likeliest_are_drawn(latest)
    prompts_come_from_standard_input(latest)
