# SPDX-License-Identifier: Apache-2.0
"""Preferences are learned: a model that names right and wrong colours alike comes to prefer the right ones, for numbers
that it has not seen, and the right answers do not become unlikely."""
import json
import os
import random
import tempfile

from tiny import SLOW, base, config, megatrain, write_ini, write_model

RIGHT = {"sky": "blue", "grass": "green", "blood": "red", "snow": "white", "coal": "black", "sun": "yellow"}
STEPS = 60


def write(path, records):
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)
    return path


def pairs(n, seed):
    r = random.Random(seed)
    for _ in range(n):
        thing = r.choice(list(RIGHT))
        wrong = r.choice([c for c in RIGHT.values() if c != RIGHT[thing]])
        yield {"prompt": f"{thing} {r.randrange(100000)} is", "chosen": f" {RIGHT[thing]}", "rejected": f" {wrong}"}


def rated(items):
    for p in items:
        for key in ("chosen", "rejected"):
            yield {"prompt": p["prompt"], "completion": p[key], "label": key == "chosen"}


def run(tmp, name, model, data, **over):
    out = f"{tmp}/{name}"
    keys = {"data__tokenizer": "byte", "train__steps": STEPS, "train__batch_size": 8, "train__micro_batch": 8, "train__grad_clip": 1,
            "data__eval": "", "checkpoint__save": "weights", "optimizer__weight_decay": 0, **over}
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **keys)))
    return f"{out}/checkpoint-{STEPS}"


def scores(tmp, name, model, file):
    """Log-probabilities of the answers of a file of prompts and completions."""
    out = f"{tmp}/{name}.scores"
    ini = write_ini(f"{out}.ini", base(model, file, f"{tmp}/none", data__tokenizer="byte", data__eval="", model__init="weights"))
    megatrain("-q", "score", ini, "--data", file, "--out", out)
    with open(out) as f:
        return [json.loads(line)["logprob"] for line in f]


def preferred(before, after):
    """The share of pairs whose right answer has gained more than the wrong one."""
    gain = [a - b for a, b in zip(after, before)]
    return sum(c > r for c, r in zip(gain[::2], gain[1::2])) / (len(gain) // 2)


# loss, learning rate, items a step, weight of the right answers' token loss, held-out pairs to be preferred. Nothing but that weight
# holds SimPO's right answers up, which has no reference: without it they fall by 37% here, and TRL adds it, too, unless told not to
CASES = [("sigmoid", "3e-4", 8, "auto", 0.95), ("simpo", "3e-4", 32, 0.2, 0.9), ("orpo", "1e-3", 8, "auto", 0.9), ("kto", "3e-4", 32, "auto", 0.9)]
MOST_FALL = 0.2

with tempfile.TemporaryDirectory() as tmp:
    items, r = list(pairs(500, 2)), random.Random(4)
    data = {"pairs": write(f"{tmp}/pairs.jsonl", items), "rated": write(f"{tmp}/rated.jsonl", rated(items))}
    any_colour = write(f"{tmp}/any.jsonl", [{"prompt": p["prompt"], "completion": " " + r.choice(list(RIGHT.values()))} for p in items])
    fresh = write_model(f"{tmp}/model", config(num_hidden_layers=2))
    model = run(tmp, "tuned", fresh, any_colour, train__learning_rate="3e-3")
    held_out = write(f"{tmp}/held-out.jsonl", [{k: v for k, v in o.items() if k != "label"} for o in rated(pairs(200, 3))])
    before = scores(tmp, "tuned", model, held_out)
    assert 0.3 < sum(c > r for c, r in zip(before[::2], before[1::2])) / 200 < 0.7, "it knows the right colours already"
    for loss, rate, batch, sft, least in CASES[:1] if SLOW else CASES:
        of = run(tmp, loss, model, data["rated" if loss == "kto" else "pairs"], preference__loss=loss, preference__beta=2, preference__sft=sft, model__init="weights",
                 train__learning_rate=rate, train__batch_size=batch)
        after = scores(tmp, loss, of, held_out)
        share, fall = preferred(before, after), sum(after[::2]) / sum(before[::2]) - 1
        print(f"{loss}: {share:.1%} of held-out pairs preferred, right answers' log-probability falls by {fall:.1%}")
        assert share >= least, (loss, share)
        assert fall <= MOST_FALL, (loss, fall)
