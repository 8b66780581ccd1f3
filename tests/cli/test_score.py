# SPDX-License-Identifier: Apache-2.0
"""Scores of given completions: the sums of eval, whatever the placement; per token; a call that was killed is gone on
from, without computing a step twice; what was begun otherwise is refused. Numbers are compared with transformers' in
parity/test_score.py."""
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time

from tiny import BINARY, base, fixture, megatrain, write_ini


def write_samples(path, n=300, seed=5):
    r = random.Random(seed)
    with open(path, "w") as f:
        for _ in range(n):
            ids = [r.randrange(96) for _ in range(r.randrange(3, 40))]
            first = r.randrange(1, len(ids))
            f.write(json.dumps({"input_ids": ids, "labels": [-100] * first + ids[first:]}) + "\n")
    return path


def read(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def score(tmp, name, ini, *args, expect=0):
    out = f"{tmp}/{name}.jsonl"
    return megatrain("score", ini, "--out", out, *args, expect=expect), out


def sums_are_those_of_eval(ini, data, got):
    said = megatrain("eval", ini, "--per-sample", "--json", "--set", f"data.eval={data}").stdout.splitlines()
    want = {o["sample"]: o["loss_sum"] for o in map(json.loads, said) if "sample" in o}
    assert [g["sample"] for g in got] == list(range(len(want))) and [g["line"] for g in got] == list(range(1, len(want) + 1))
    rows = read(data)
    for g in got:
        trained = [l for l in rows[g["sample"]]["labels"] if l != -100]
        assert g["logprob"] == -want[g["sample"]] and g["tokens"] == len(trained) == len(g["token_logprobs"]), g
        assert abs(sum(g["token_logprobs"]) - g["logprob"]) < 1e-6 and g["is_greedy"] == (g["greedy_hits"] == g["tokens"])


def killed_calls_are_gone_on_from(tmp, ini, data, want):
    out = f"{tmp}/killed.jsonl"
    part = out + ".part"
    p = subprocess.Popen([BINARY, "-q", "score", ini, "--data", data, "--out", out])
    while p.poll() is None and (not os.path.exists(part) or os.path.getsize(part) < 2000):
        time.sleep(0.001)
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not os.path.exists(out) and os.path.getsize(part) >= 2000, "it was not killed in time"
    with open(part, "rb+") as f:  # and the last block is torn
        f.truncate(os.path.getsize(part) - 3)
    kept = os.path.getsize(part)
    refused = megatrain("score", ini, "--data", data, "--out", out, "--set", "data.seq_len=128", expect=2).stderr
    assert "--force" in refused and os.path.getsize(part) == kept, refused
    said = megatrain("score", ini, "--data", data, "--out", out).stderr
    assert " of 300 samples are in " in said, said
    assert not os.path.exists(part)
    assert open(out).read() == want
    megatrain("score", ini, "--data", data, "--out", out, "--force")
    assert open(out).read() == want


def answers_have_scores_of_their_own(tmp, model):
    """Of pairs and of rated answers, whatever the loss trains: those of the same tokens as plain samples."""
    r = random.Random(8)
    ids = lambda: [r.randrange(96) for _ in range(r.randrange(1, 12))]
    pairs = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(30)]
    rated = [{"prompt_ids": p["prompt_ids"], "completion_ids": p["chosen_ids"], "label": i % 3 == 0} for i, p in enumerate(pairs)]
    both = [(p["prompt_ids"], p[k]) for p in pairs for k in ("chosen_ids", "rejected_ids")]
    files = {"pairs": pairs, "rated": rated,
             "plain": [{"input_ids": p + a, "labels": [-100] * len(p) + a} for p, a in both]}
    for name, rows in files.items():
        with open(f"{tmp}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    got = {}
    for loss, name in (("off", "plain"), ("sigmoid", "pairs"), ("orpo", "pairs"), ("kto", "rated")):
        data = f"{tmp}/{name}.jsonl"
        ini = write_ini(f"{tmp}/{loss}.ini", base(model, data, f"{tmp}/out", data__eval="", model__dtype="f32", model__init="weights",
                                                  preference__loss=loss, preference__sft_tokens="all" if loss == "orpo" else "answer"))
        _, out = score(tmp, f"of-{loss}", ini, "--data", data)
        got[loss] = read(out)
    plain = got["off"]
    for loss in ("sigmoid", "orpo"):
        assert [(g["sample"], g["chosen"]) for g in got[loss]] == [(i, c) for i in range(30) for c in (True, False)]
    same = [(a, b) for loss in ("sigmoid", "orpo") for a, b in zip(got[loss], plain)]
    same += list(zip(got["kto"], plain[::2]))
    assert [(g["line"], g["chosen"]) for g in got["kto"]] == [(i + 1, i % 3 == 0) for i in range(30)]
    for a, b in same:
        assert a["tokens"] == b["tokens"] and abs(a["logprob"] - b["logprob"]) <= 1e-5 * abs(b["logprob"]), (a, b)


def the_likeliest_of_choices_is_told(tmp, model):
    """Of multiple choices or drawn samples; where one prompt is asked again after another one, it is another question."""
    r = random.Random(11)
    ids = lambda n: [r.randrange(96) for _ in range(n)]
    first, same = ids(4), ids(3)
    sizes, rows = [4, 3, 1, 4, 2], []
    for k, (prompt, n) in enumerate(zip([first, ids(4), first, ids(2), ids(9)], sizes)):
        for c in range(n):
            end = same if k == 4 else ids(r.randrange(1, 9))  # two equal completions: the first is the best
            rows.append({"input_ids": prompt + end, "labels": [-100] * len(prompt) + end})
    data = f"{tmp}/choices.jsonl"
    with open(data, "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    ini = write_ini(f"{tmp}/choices.ini", base(model, data, f"{tmp}/out", data__eval="", model__dtype="f32", model__init="weights",
                                               data__packing="off", train__batch_size=1, train__micro_batch=1))
    got = read(score(tmp, "choices", ini, "--data", data, "--choices")[1])
    assert [g["question"] for g in got] == [q for q, n in enumerate(sizes) for _ in range(n)]
    differ = 0
    for q in range(len(sizes)):
        of = [g for g in got if g["question"] == q]
        by = [g["logprob"] for g in of], [g["logprob"] / g["tokens"] for g in of]
        for key, values in zip(("best", "best_mean"), by):
            assert [g[key] for g in of] == [i == values.index(max(values)) for i in range(len(of))], (q, key, of)
        differ += by[0].index(max(by[0])) != by[1].index(max(by[1]))
    assert differ, "the two rules never differ here"


def a_full_disk_is_named(tmp, ini, data):
    """A limit to the size of files is what fills up here."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))

    p = subprocess.run([BINARY, "score", ini, "--data", data, "--out", f"{tmp}/full.jsonl"], capture_output=True, text=True, preexec_fn=limit)
    assert p.returncode == 1 and f"cannot write {tmp}/full.jsonl.part: File too large" in p.stderr, p.stderr
    score(tmp, "full", ini, "--data", data)


with tempfile.TemporaryDirectory() as tmp:
    data = write_samples(f"{tmp}/data.jsonl")
    model = fixture("qwen3")
    ini = write_ini(f"{tmp}/a.ini", base(model, data, f"{tmp}/out", data__eval="", model__dtype="f32", model__init="weights", train__steps=0))
    _, out = score(tmp, "tokens", ini, "--data", data, "--tokens")
    sums_are_those_of_eval(ini, data, read(out))
    _, plain = score(tmp, "plain", ini, "--data", data)
    for placement in (["memory.slots=2", "memory.unit=half"], ["device.cpu_threads=1"]):
        sets = [a for s in placement for a in ("--set", s)]
        _, other = score(tmp, "other", ini, "--data", data, *sets)
        assert open(other).read() == open(plain).read(), placement
    killed_calls_are_gone_on_from(tmp, ini, data, open(plain).read())
    for args, what in (([], "--data"), (["--data", f"{tmp}/none.jsonl"], "none.jsonl")):
        p, _ = score(tmp, "refused", ini, *args, expect=None)
        assert p.returncode not in (0, -11) and what in p.stderr, p.stderr
    a_full_disk_is_named(tmp, ini, data)
    answers_have_scores_of_their_own(tmp, model)
    the_likeliest_of_choices_is_told(tmp, model)
    refused = megatrain("score", f"{tmp}/sigmoid.ini", "--data", f"{tmp}/pairs.jsonl", "--out", f"{tmp}/none", "--choices", expect=2).stderr
    assert "--choices" in refused, refused
    p = megatrain("score", ini, expect=2)
    assert "--out" in p.stderr
