# SPDX-License-Identifier: Apache-2.0
"""A policy trained on rollouts: what data are refused and by which line; measures as computed here; the same bits for every
placement and after kills; temperature. Losses are compared with formulas in unit/objective."""
import glob
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time

from tiny import BINARY, SLOW, base, chosen, config, drawn, losses, megatrain, metrics, planes, write_ini, write_model

STEPS = 6
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "dro", "opd")


def rollouts(groups=10, per=4, seed=3, vocab=270):
    r = random.Random(seed)
    rows = []
    for g in range(groups):
        prompt = [r.randrange(vocab) for _ in range(r.randrange(1, 9))]
        for _ in range(per):
            ids = [r.randrange(vocab) for _ in range(r.randrange(2, 15))]
            lp = [-5.6 + r.gauss(0, 0.3) for _ in ids]
            rows.append({"prompt_ids": prompt, "completion_ids": ids, "logprobs": lp, "ref_logprobs": [x + r.gauss(0, 0.1) for x in lp],
                         "old_logprobs": [x + r.gauss(0, 0.1) for x in lp], "reward": round(r.random(), 3), "group": f"q{g}"})
    return rows


def write(path, rows):
    with open(path, "w") as f:
        f.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return path


def run(tmp, name, model, data, *args, loss="dapo", expect=0, **over):
    out = f"{tmp}/{name}"
    keys = {"policy__loss": loss, "policy__max_tokens": 16, "train__steps": STEPS, "train__warmup": 0, "data__eval": "", **over}
    return megatrain("run", write_ini(out + ".ini", base(model, data, out, **keys)), *args, expect=expect), out


def plain(rows):
    """The same with one list of tokens and a mask."""
    pad = lambda row, key: [None] * len(row["prompt_ids"]) + row[key]
    return [{"token_ids": row["prompt_ids"] + row["completion_ids"], "mask": [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"]),
             **{k: pad(row, k) for k in ("logprobs", "old_logprobs", "ref_logprobs")}, "reward": row["reward"], "group": row["group"]}
            for row in rows]


def bad_data_are_refused_by_their_line(tmp, model):
    good = plain(rollouts(3))
    n = len(good[5]["token_ids"])
    first = good[5]["mask"].index(1)

    def changed(**over):
        row = {**good[5], **over}
        return {k: v for k, v in row.items() if v is not None}

    at = lambda key, i, value: {key: good[5][key][:i] + [value] + good[5][key][i + 1:]}
    cases = {
        "mask is missing": (changed(mask=None), '"mask" is missing'),
        "mask of another length": (changed(mask=[1]), f'"mask" has 1 values, the rollout {n} tokens'),
        "mask of two": (changed(**at("mask", 1, 2)), "mask[1] must be 0 or 1"),
        "no logprobs": (changed(logprobs=None, old_logprobs=None), 'the rollout has no "logprobs"'),
        "short": (changed(logprobs=good[5]["logprobs"][1:]), f'"logprobs" has {n - 1} values'),
        "positive": (changed(**at("old_logprobs", n - 1, 0.25)), f"old_logprobs[{n - 1}] = 0.25: a log-probability is at most 0"),
        "null": (changed(**at("logprobs", first, None)), f"logprobs[{first}] is no number"),
        "NaN": (json.dumps(changed(**at("logprobs", n - 1, math.nan))), "not valid JSON"),
        "token": (changed(**at("token_ids", 0, 272)), "token_ids[0] = 272 is no token id"),
        "no reward": (changed(reward=None), 'an "advantage", or a "reward" and a "group"'),
        "text as reward": (changed(reward="good"), '"reward" must be a number'),
        "no group": (changed(group=None), 'an "advantage", or a "reward" and a "group"'),
        "a group of one": (changed(group="alone"), "is the only rollout of its group"),
        "temperature": (changed(temperature=0.5), "was sampled at temperature 0.5, policy.temperature is 1"),
        "truncated": (changed(truncated=1), '"truncated" must be true or false'),
        "text": ({"prompt": "a", "completion": "b", "reward": 1, "group": 1}, "keep those of text in a file of their own"),
        "no reference": (changed(ref_logprobs=None), 'no "ref_logprobs"'),
    }
    for name, (row, what) in cases.items():
        data = write(f"{tmp}/bad.jsonl", good[:5] + [row] + good[6:])
        p, _ = run(tmp, "bad", model, data, expect=None, policy__old="file", policy__kl_weight=0.1)
        assert p.returncode in (2, 3) and "bad.jsonl:6" in p.stderr and what in p.stderr, (name, p.returncode, p.stderr)
    data = write(f"{tmp}/good.jsonl", good)
    for what, over in (("no \"old_logprobs\"", {"policy__mismatch": "row", "policy__old": "file"}),
                       ("set one of them to off", {"preference__loss": "sigmoid"}), ("policy.dual_clip", {"policy__dual_clip": 0.5}),
                       ("policy.max_tokens", {"loss": "dr_grpo", "policy__max_tokens": 0}), ("adapter.dropout", {"adapter__kind": "lora", "adapter__dropout": 0.1}),
                       ("which [policy] loss trains on", {"loss": "off"}), ("eval.best_by", {"eval__best_by": "entropy"})):
        rows = [{k: v for k, v in row.items() if k != "old_logprobs"} for row in good] if "old_logprobs" in what else good
        p, _ = run(tmp, "refused", model, write(data, rows), expect=None, **over)
        assert p.returncode in (2, 3) and what in p.stderr, (what, p.returncode, p.stderr)
    p, _ = run(tmp, "pairs", model, write(f"{tmp}/ids.jsonl", [{"input_ids": [1, 2, 3]}] * 9), expect=2)
    assert "policy.loss trains on rollouts" in p.stderr, p.stderr


def forms_of_data_are_the_same(tmp, model):
    """Tokens in one list or two; columns of other names; advantages instead of rewards; a mask with holes."""
    rows = rollouts()
    of = lambda g: [r["reward"] for r in rows if r["group"] == g]
    given = [{**{k: v for k, v in r.items() if k not in ("reward", "group")},
              "advantage": (r["reward"] - statistics.fmean(of(r["group"]))) / (statistics.stdev(of(r["group"])) + 1e-4)} for r in rows]
    names = {"completion_ids": "output", "logprobs": "completion_logprobs", "reward": "score"}
    other = [{names.get(k, k): v for k, v in r.items()} for r in rows]
    cases = {"two": (rows, {}), "one": (plain(rows), {}), "given": (given, {}),
             "columns": (other, {"data__columns": ", ".join(f"{k}:{v}" for k, v in names.items()), "data__format": "rollouts"})}
    got = {}
    for name, (of_case, over) in cases.items():
        _, out = run(tmp, f"form-{name}", model, write(f"{tmp}/form-{name}.jsonl", of_case), policy__old="file", policy__kl_weight=0.05,
                     **{"eval__best_by": "reward", **over})
        got[name] = [m["loss"] for m in metrics(out) if "loss" in m]
    assert got["one"] == got["two"] == got["columns"], got
    assert all(abs(a - b) < 1e-6 for a, b in zip(got["given"], got["two"])), got  # advantages in f32
    # results of tools between turns are not trained
    tools = [dict(r, mask=[m if i % 3 else 0 for i, m in enumerate(r["mask"])]) for r in plain(rows)]
    tools = [r for r in tools if any(r["mask"][1:])]
    _, out = run(tmp, "tools", model, write(f"{tmp}/tools.jsonl", tools), data__shuffle="off", train__steps=1, train__batch_size=1000)
    assert metrics(out)[0]["loss_tokens"] == sum(sum(r["mask"][1:]) for r in tools)


def rollouts_of_text_are_those_of_their_tokens(tmp, model):
    """Conversations with tools, and texts, train as the tokens that the template and the tokenizer make of them, which are made
    here; lines without what a rollout needs are refused."""
    ask, call, told, say = ({"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "sum it"), ("tool", "4"), ("assistant", "it is 4")))
    end, reward = "<|im_end|>", lambda k: {"reward": [1, 0, 0.5, 0.25, 1, 0][k], "group": {"of": "a"}}
    head = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    after = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    turns = [(head, 0), ("sum it" + end, 1), (after, 0), ("it is 4" + end, 1), ("\n", 0)]
    cases = [({"messages": [ask, call, told, say]}, turns), ({"prompt": [ask], "completion": [call, told, say]}, turns),
             ({"prompt": [ask, call, told], "completion": say, "truncated": True}, [(head + "sum it" + end + after, 0), *turns[3:]]),
             ({"messages": [ask], "completion": "sum it"}, [*turns[:2], ("\n", 0)]), ({"prompt": "2+2?", "completion": [call]}, [*turns[:2], ("\n", 0)]),
             ({"prompt": "2+2=", "completion": "4", "truncated": True}, [("2+2=", 0), ("4", 1)])]
    texts = [{**row, **reward(k)} for k, (row, _) in enumerate(cases)]
    tokens = []
    for k, (row, parts) in enumerate(cases):
        cut = row.get("truncated", False)
        ids, mask = [256], [0]
        for text, m in [*parts, *([] if cut else [(None, 1)])]:
            ids += [257] if text is None else list(text.encode())
            mask += [m] * (1 if text is None else len(text.encode()))
        tokens.append({"token_ids": ids, "mask": mask, **reward(k), "truncated": cut})
    keys = {"data__tokenizer": "byte", "data__template": "chatml", "data__seq_len": 256, "policy__truncated": "keep", "train__learning_rate": "1e-2"}
    got = [run(tmp, name, model, write(f"{tmp}/{name}.jsonl", rows), **keys)[1] for name, rows in (("texts", texts), ("tokens", tokens))]
    of = [[(m["loss"], m["entropy"], m["loss_tokens"]) for m in metrics(out) if "loss" in m] for out in got]
    assert of[0] == of[1] and len(set(of[0])) > 2, of
    assert planes(f"{got[0]}/checkpoint-{STEPS}") == planes(f"{got[1]}/checkpoint-{STEPS}")
    for what, row, over in (
            ('an "advantage", or a "reward" and a "group"', {"reward": None}, {}), ('"reward" of a rollout of text must be a number', {"reward": True}, {}),
            ("must be a number", {"reward": math.nan}, {}), ("is the only rollout of its group", {"group": "alone"}, {}), ("no turn of the completion is the assistant's", {"messages": [ask]}, {}),
            ('each a text or messages', {"messages": 5}, {}), ("keep them apart", {"completion_ids": [1]}, {}), ('"advantage" of a rollout of text must', {"advantage": [1]}, {}),
            ('has no "logprobs", which policy.old = file', {"advantage": 1}, {"policy__old": "file"})):
        data = write(f"{tmp}/bad-texts.jsonl", [{**texts[0], **row}] if over.get("policy__old") else [texts[0], {**texts[0], **row}, texts[1]])
        p, _ = run(tmp, "bad-texts", model, data, expect=None, **{**keys, **over})
        line = 1 if over.get("policy__old") else 2
        assert f"bad-texts.jsonl:{line}" in p.stderr and what in p.stderr, (what, p.returncode, p.stderr)


def measures_are_as_computed_here(tmp, model):
    rows = rollouts()
    for g in range(0, 8, 4):  # groups without a signal
        for r in rows[4 * g:4 * g + 4]:
            r["reward"] = 1.0
    for i, r in enumerate(rows):
        r["truncated"] = i % 5 == 0
    data = write(f"{tmp}/measured.jsonl", rows)
    group = lambda g: [r["reward"] for r in rows if r["group"] == g]
    whole = dict(train__steps=1, train__batch_size=1000, data__shuffle="off", train__learning_rate=0)
    p, out = run(tmp, "measured", model, data, policy__kl_weight=0.1, policy__mismatch="token", policy__mismatch_max=1.2, log__csv="on", log__tensorboard="on",
                 **{**whole, "train__steps": 3})
    m = metrics(out)[0]
    want = {"reward": statistics.fmean(r["reward"] for r in rows), "reward_std": statistics.fmean(statistics.stdev(group(r["group"])) for r in rows),
            "frac_reward_zero_std": 0.2, "completions/mean_length": statistics.fmean(len(r["completion_ids"]) for r in rows),
            "completions/clipped_ratio": 0.2, "clip_ratio/region_mean": 0}
    for k, v in want.items():
        assert abs(m[k] - v) < 1e-6, (k, m[k], v)
    assert m["kl"] > 0 and 0 < m["sampling/importance_sampling_ratio/mean"] <= 1.2, m
    assert "reward" in open(f"{out}/metrics.csv").readline()
    pictures = drawn(out, html=f"{out}.html")
    assert not pictures or {"reward", "signal", "entropy", "length"} <= set(pictures)
    assert "| reward " in p.stderr, p.stderr
    events = b"".join(open(f, "rb").read() for f in glob.glob(f"{out}/**/events.*", recursive=True))
    assert all(name.encode() in events for name in want), out
    # clipped shares: the ratio to logprobs that are far away
    for far, k, a in ((-3, "high", 1.0), (3, "low", -1.0)):
        moved = [{**{n: v for n, v in r.items() if n not in ("reward", "group", "old_logprobs")}, "advantage": a,
                  "logprobs": [-5.6 + far] * len(r["completion_ids"])} for r in rows]
        _, out = run(tmp, f"clip-{k}", model, write(f"{tmp}/far.jsonl", moved), policy__old="file", **whole)
        m = metrics(out)[0]
        assert m[f"clip_ratio/{k}_mean"] > 0.99 and m["grad_norm"] < 0.2, m
        assert "reward" not in m
    # what is cut off
    lengths = {}
    for what in ("keep", "mask", "drop"):
        _, out = run(tmp, f"cut-{what}", model, data, policy__truncated=what, **whole)
        lengths[what] = metrics(out)[0]
    assert lengths["keep"]["loss"] != lengths["mask"]["loss"] != lengths["drop"]["loss"]
    kept = [r for r in rows if not r["truncated"]]
    assert abs(lengths["drop"]["reward"] - statistics.fmean(r["reward"] for r in kept)) < 1e-6 and abs(lengths["mask"]["reward"] - want["reward"]) < 1e-6
    alone = [{**r, "truncated": True} for r in rows]
    _, out = run(tmp, "all-cut", model, write(f"{tmp}/all-cut.jsonl", alone), policy__truncated="mask", **whole)
    assert metrics(out)[0]["loss"] == 0 and metrics(out)[0]["grad_norm"] == 0


def eval_has_the_runs_loss(tmp, model):
    """It is no mean of the tokens' losses, so that it has no perplexity."""
    data, keys = write(f"{tmp}/held-out.jsonl", rollouts()), {"data__eval": "20%", "model__dtype": "bf16", "policy__old": "file"}
    _, out = run(tmp, "held-out", model, data, **keys)
    told = json.loads(megatrain("-q", "eval", out + ".ini", "--json", "--model", f"{out}/checkpoint-{STEPS}", "--set", "model.init=weights").stdout)
    last = metrics(out)[-1]
    assert told == {k: last["eval_" + k] for k in ("loss", "accuracy", "tokens")} and "eval_ppl" not in last, (told, last)


def the_old_policy_is_the_batchs_or_the_files(tmp, model):
    """With log-probabilities that the policy itself has, old = file is old = batch up to their rounding."""
    rows = plain(rollouts())
    for r in rows:
        r.pop("old_logprobs")
    data = write(f"{tmp}/own.jsonl", rows)
    _, saved = run(tmp, "start", model, data, train__learning_rate=0, train__steps=1, checkpoint__save="weights")
    start = f"{saved}/checkpoint-1"
    ini = write_ini(f"{tmp}/score.ini", base(start, data, f"{tmp}/none", model__init="weights", policy__loss="dapo", data__eval=""))
    megatrain("score", ini, "--data", data, "--out", f"{tmp}/own.scores", "--tokens")
    scores = {}
    with open(f"{tmp}/own.scores") as f:
        for line in map(json.loads, f):
            scores[line["line"]] = line["token_logprobs"]
    for i, r in enumerate(rows):
        own = iter(scores[i + 1])
        r["logprobs"] = [next(own) if m and k else None for k, m in enumerate(r["mask"])]
    write(data, rows)
    for loss in LOSSES[:3] if SLOW else LOSSES[:-1]:
        got = {}
        for old in ("batch", "file"):
            _, out = run(tmp, f"old-{loss}-{old}", start, data, loss=loss, policy__old=old, model__init="weights", train__steps=1)
            got[old] = metrics(out)[0]
        for k in ("loss", "grad_norm"):
            assert abs(got["file"][k] - got["batch"][k]) <= 2e-5 * max(1, abs(got["batch"][k])), (loss, k, got)


def temperature_divides_logits(tmp):
    """As a model does whose own logits are divided by as much."""
    rows = rollouts()
    data = write(f"{tmp}/warm.jsonl", rows)
    got = {}
    for name, scale, t in (("model", 16.0, 1), ("key", 8.0, 2), ("other", 8.0, 1)):
        model = write_model(f"{tmp}/granite-{name}", config("granite", logits_scaling=scale, embedding_multiplier=12.0, residual_multiplier=0.22,
                                                             attention_multiplier=0.0156))
        for old in ("batch", "file"):
            _, out = run(tmp, f"warm-{name}", model, data, "--force", loss="cispo", policy__temperature=t, policy__old=old)
            got[name, old] = losses(out), planes(f"{out}/checkpoint-{STEPS}")
    for old in ("batch", "file"):
        assert got["key", old] == got["model", old] != got["other", old]


def gradients_go_through_cap_and_temperature(tmp):
    """A small step of SGD changes the loss by the square of the gradient's norm."""
    rows = [{"token_ids": r["token_ids"], "mask": r["mask"], "advantage": 1} for r in plain(rollouts())]
    data = write(f"{tmp}/capped.jsonl", rows)
    model = write_model(f"{tmp}/gemma", config("gemma2", head_dim=16, query_pre_attn_scalar=24, sliding_window=12, attn_logit_softcapping=50.0,
                                                final_logit_softcapping=0.4, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True))
    rate = 3e-3
    _, out = run(tmp, "capped", model, data, loss="cispo", policy__temperature=2, optimizer__type="sgd", optimizer__momentum=0, train__steps=2,
                 train__learning_rate=rate, train__schedule="constant", train__batch_size=1000, data__shuffle="off", optimizer__weight_decay=0,
                 train__grad_clip=0, optimizer__grad_dtype="f32")
    first, second = metrics(out)
    fall = (first["loss"] - second["loss"]) / (rate * first["grad_norm"] ** 2)
    assert abs(fall - 1) < 0.03, (fall, first, second)


def placement_changes_no_bit(tmp, model):
    data, drive = write(f"{tmp}/placed.jsonl", rollouts()), f"{tmp}/drive"
    os.mkdir(drive)
    groups = {"train__groups": 2, "train__micro_batch": 1}
    cases = {"plain": {}, "slots": {"memory__slots": 2, "memory__activations": "recompute", "memory__unit": "half"},
             "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "memory__activations": "offload"},
             "thread": {"device__cpu_threads": 1}, "lanes": {"device__gpus": 2, "device__map": "data"}}
    late = {"policy__old": "file", "policy__kl_weight": 0.1, "policy__mismatch": "row", "policy__temperature": 1.5}
    for loss, keys in (("gspo", late), ("dapo", {}), ("opd", {})):
        got = {}
        for name, over in cases.items():
            _, out = run(tmp, f"{loss}-{name}", model, data, loss=loss, **{**groups, **keys, **over})
            measured = [[v for k, v in m.items() if "/" in k or k in ("loss", "kl", "reward", "entropy")] for m in metrics(out)]
            got[name] = losses(out), measured, planes(f"{out}/checkpoint-{STEPS}")
        assert all(g == got["plain"] for g in got.values()), (loss, [n for n, g in got.items() if g != got["plain"]])


def kills_change_no_bit(tmp, model):
    data = write(f"{tmp}/killed.jsonl", rollouts())
    keys = {"policy__old": "file", "policy__kl_weight": 0.1, "checkpoint__every": 2}
    _, whole = run(tmp, "whole", model, data, **keys)
    out = f"{tmp}/killed"
    ini = write_ini(out + ".ini", base(model, data, out, policy__loss="dapo", train__steps=STEPS, train__warmup=0, data__eval="", **keys))
    for at in (0, 2, 4):
        p = subprocess.Popen([BINARY, "-q", "run", ini, "--resume"])
        while at and not os.path.isdir(f"{out}/checkpoint-{at}") and p.poll() is None:
            time.sleep(0.002)
        time.sleep(0 if at else 0.05)
        p.kill()
        p.wait()
    megatrain("run", ini, "--resume")
    assert planes(f"{out}/checkpoint-{STEPS}") == planes(f"{whole}/checkpoint-{STEPS}")


def main(tmp):
    model = write_model(f"{tmp}/model", config("qwen3"))
    tests = (bad_data_are_refused_by_their_line, forms_of_data_are_the_same, rollouts_of_text_are_those_of_their_tokens, measures_are_as_computed_here,
             eval_has_the_runs_loss, the_old_policy_is_the_batchs_or_the_files, temperature_divides_logits, gradients_go_through_cap_and_temperature,
             placement_changes_no_bit, kills_change_no_bit)
    for test in chosen(tests, first=(bad_data_are_refused_by_their_line, measures_are_as_computed_here)):
        test(*[tmp, model][:test.__code__.co_argcount])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
