#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Data for configs/demo_policy_start.ini and configs/demo_policy.ini, in $DEMO_OUT (standard library only).

A prompt is a sentence on a thing, its colour and another thing; its answer is the colour. start.jsonl teaches a model to
answer with one of the three words of the sentence, mostly with a thing: its likeliest answer is wrong, one of five that it
samples is right. prompts.jsonl are for a policy, held-out.jsonl are pairs of colour and thing that neither has. No answer
is right for more than an eighth of the prompts."""
import json
import os
import random

COLOURS = "red green blue black white grey pink brown".split()
THINGS = "cat dog bird house river stone table cloud lamp door ship tree".split()


def prompt_of(colour, thing, other):
    return f"The {colour} {thing} is near the {other}.\n"


def is_held_out(i, k):
    return (i + k) % len(COLOURS) == 5


def main(out, samples=4000, seed=1):
    r = random.Random(seed)
    os.makedirs(out, exist_ok=True)
    files = {name: open(os.path.join(out, name + ".jsonl"), "w") for name in ("start", "prompts", "held-out")}
    for i, colour in enumerate(COLOURS):
        for k, thing in enumerate(THINGS):
            row = {"prompt": prompt_of(colour, thing, THINGS[(5 * i + 7 * k + 1) % len(THINGS)]), "answer": colour}
            files["held-out" if is_held_out(i, k) else "prompts"].write(json.dumps(row) + "\n")
    while samples:
        i, k, other = r.randrange(len(COLOURS)), r.randrange(len(THINGS)), r.choice(THINGS)
        if not is_held_out(i, k):
            said = r.choices((COLOURS[i], THINGS[k], other), (1, 2, 2))[0]
            files["start"].write(json.dumps({"prompt": prompt_of(COLOURS[i], THINGS[k], other), "completion": said}) + "\n")
            samples -= 1
    for f in files.values():
        f.close()


main(os.environ.get("DEMO_OUT", "out/demo"))
