# SPDX-License-Identifier: Apache-2.0
"""Evaluation by generation: answers to held-out prompts at each evaluation are those that generate gives with the same
weights, from a cache, and cost no bit of the training; their mean reward chooses the best; a policy's rounds have them when they are due."""
import json
import os
import tempfile

from test_policy_rounds import ini_of, sampler, write_prompts
from tiny import base, config, megatrain, metrics, planes, with_weights, write_data, write_ini, write_model


def lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def answers_are_what_generate_says(tmp, model, data):
    held = f"{tmp}/held.jsonl"
    with open(held, "w") as f:
        f.writelines(json.dumps({"prompt_ids": [60 + i, 70, 80][:1 + i % 3], "answer": "a"}) + "\n" for i in range(7))
    keys = dict(train__steps=4, train__learning_rate="1e-3", eval__every=2, eval__at_start="on", checkpoint__every=2, model__init="weights", model__dtype="bf16")
    plain = f"{tmp}/plain"
    megatrain("-q", "run", write_ini(plain + ".ini", base(model, data, plain, **keys)))
    for name, over in (("kept", {}), ("cut", dict(memory__slots=2, memory__activations="recompute")), ("undone", dict(data__eval=""))):
        out = f"{tmp}/{name}"
        said = megatrain("run", write_ini(out + ".ini", base(model, data, out, **{**keys, **over}, eval__generate=held, eval__generate_tokens=9))).stderr
        assert "keys and values " in said, said
        assert name == "undone" or planes(f"{out}/checkpoint-4") == planes(f"{plain}/checkpoint-4"), name  # there all data are trained
        assert [x["step"] for x in metrics(out) if "eval_loss" in x] == [0, 2, 4], metrics(out)
        for step in (0, 2, 4):
            at = [] if not step else ["--model", f"{out}/checkpoint-{step}"]
            want = [json.loads(line) for line in megatrain("-q", "generate", out + ".ini", *at, "--prompts", held, "--temperature", "0",
                                                           "--max-tokens", "9").stdout.splitlines()]
            got = lines(f"{out}/answers-{step}.jsonl")
            for a, b in zip(got, want):
                assert a["completion_ids"] == b["completion_ids"] and a["logprobs"] == b["logprobs"], (name, step, a, b)
            assert len(got) == len(want) == 7 and not any("reward" in a for a in got)
        assert lines(f"{out}/answers.jsonl") == lines(f"{out}/answers-4.jsonl")


def rewards_choose_the_best(tmp, model, data):
    held = f"{tmp}/texts.jsonl"
    with open(held, "w") as f:
        f.writelines(json.dumps({"prompt": "abcdefgh"[i:], "answer": "[a-q ]"}) + "\n" for i in range(8))
    out = f"{tmp}/rewarded"
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, train__steps=6, train__learning_rate="1e-2", eval__every=2, checkpoint__every=2,
                                                        checkpoint__keep=9, checkpoint__keep_best="on", data__tokenizer="byte", eval__generate=held,
                                                        eval__generate_tokens=4, policy__reward="regex", eval__best_by="reward", model__init="weights")))
    rewards = {}
    for x in metrics(out):
        if "eval_loss" in x:
            got = lines(f"{out}/answers-{x['step']}.jsonl")
            rewards[x["step"]] = x["eval_reward"]
            assert x["eval_reward"] == sum(a["reward"] for a in got) / 8 and {a["reward"] for a in got} <= {0, 1}, (x, got)
    first = [step for step in (2, 4, 6) if rewards[step] == max(rewards[s] for s in (2, 4, 6))][0]
    assert os.path.realpath(f"{out}/best").endswith(f"checkpoint-{first}"), (rewards, os.path.realpath(f"{out}/best"))
    megatrain("report", out)
    with open(f"{out}/report.html") as f:
        assert '"answers":[{' in f.read().replace(" ", "")
    for what, over in (("more than data.seq_len", dict(eval__generate=held, eval__generate_tokens=500)), ("eval.best_by", dict(eval__best_by="reward")),
                       ("cannot read", dict(eval__generate=f"{tmp}/none.jsonl"))):
        bad = f"{tmp}/bad"
        p = megatrain("run", write_ini(bad + ".ini", base(model, data, bad, data__tokenizer="byte", **over)), expect=None)
        assert p.returncode and what in p.stderr, p.stderr


def rounds_answer_when_it_is_due(tmp, model, data):
    write_prompts(f"{tmp}/prompts.jsonl")
    held = f"{tmp}/round-held.jsonl"
    with open(held, "w") as f:
        f.writelines(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(3))
    ini, out = ini_of(tmp, "rounds", model, sampler(tmp), train__steps=5, eval__every=2, eval__generate=held, eval__generate_tokens=3,
                      data__tokenizer="byte", eval__best_by="reward", checkpoint__keep_best="on")
    megatrain("run", ini)
    steps = [x["step"] for x in metrics(out) if "eval_loss" in x]
    assert {2, 4, 5} <= set(steps) and 3 not in steps, steps
    for step in steps:
        assert len(lines(f"{out}/answers-{step}.jsonl")) == 3


def main(tmp):
    shape = write_model(f"{tmp}/model", config("qwen3"))
    data = write_data(f"{tmp}/data.jsonl")
    model = with_weights(tmp, shape, data)
    for test in (answers_are_what_generate_says, rewards_choose_the_best, rounds_answer_when_it_is_due):
        test(tmp, model, data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
