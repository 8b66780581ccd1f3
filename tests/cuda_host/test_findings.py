# SPDX-License-Identifier: Apache-2.0
"""What a run finds out about fused attention goes with its checkpoints, and what lives outside the budget has its share
of the GPU: on the emulated one."""
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, planes, write_data, write_ini, write_model

WRONG = {"MT_EMU_FUSED_FAULT": "backward ragged fixed off"}


def run(tmp, name, *more, env=None, data="data.jsonl"):
    out = os.path.join(tmp, name)
    ini = out + ".ini"
    if not os.path.exists(ini):
        write_ini(ini, base(os.path.join(tmp, "model"), os.path.join(tmp, data), out, model__dtype="bf16",
                            train__steps=4, checkpoint__every=2))
    return megatrain("run", ini, *more, env=env).stderr


def end(tmp, name):
    return planes(os.path.join(tmp, name, "checkpoint-4"))


def a_resumed_run_goes_by_what_was_found(tmp):
    assert "is wrong" not in run(tmp, "right")
    assert "attention's backward" in run(tmp, "whole", env=WRONG)
    state = json.load(open(os.path.join(tmp, "whole", "checkpoint-2", "megatrain", "state.json")))
    assert "backward ragged 16 of " in state["device_findings"], state["device_findings"]
    run(tmp, "parts", "--max-steps", 2, env=WRONG)
    text = run(tmp, "parts", "--resume")  # another machine, where the library is right: the same bits all the same
    assert "is wrong" not in text, text
    assert end(tmp, "parts") == end(tmp, "whole")
    assert end(tmp, "right") != end(tmp, "whole")


def records(tmp, name):
    return [r for r in map(json.loads, open(os.path.join(tmp, name, "metrics.jsonl"))) if "grad_norm" in r]


def a_gradient_that_is_not_finite_is_computed_in_another_way(tmp):
    with open(os.path.join(tmp, "even.jsonl"), "w") as f:  # of one length: one kind of call
        for i in range(40):
            f.write(json.dumps({"input_ids": [(7 * i + k * k) % 270 for k in range(64)]}) + "\n")
    late, even = {"MT_EMU_FUSED_FAULT": "backward fixed nan after 8"}, {"data": "even.jsonl"}
    run(tmp, "never", **even)
    text = run(tmp, "late", env=late, **even)
    assert "with attention computed in another way it is" in text and "skipped" not in text, text
    steps = records(tmp, "late")
    said = [r["step"] for r in steps if r.get("other_attention")]
    assert said == [2] and len(steps) == 4, steps
    state = json.load(open(os.path.join(tmp, "late", "checkpoint-4", "megatrain", "state.json")))
    found = state["device_findings"].split(": ", 1)[1].split("; ")
    for way in "fixed", "ragged", "own":  # nor does the next way take the place of the one that was wrong
        mine = [f for f in found if f.startswith(f"backward {way} ")]
        assert mine and all(f.endswith(" tiles") for f in mine), found
    run(tmp, "early", "--max-steps", 2, env=late, **even)
    run(tmp, "early", "--resume", **even)  # another machine, where the library is right: the same bits all the same
    assert end(tmp, "early") == end(tmp, "late") != end(tmp, "never")
    # both ways: skipped as ever, and what was in use stays
    wild = write_model(os.path.join(tmp, "wild"), config(num_hidden_layers=2, initializer_range=1.8e18))
    out = os.path.join(tmp, "skips")
    text = megatrain("run", write_ini(out + ".ini", base(wild, os.path.join(tmp, "data.jsonl"), out, model__dtype="bf16",
                                                         train__steps=2)), expect=6).stderr
    steps = records(tmp, "skips")
    assert "another way" not in text and [r["skipped"] for r in steps] == [True, True], text


def our_own_attention_is_first_where_it_was_written_for(tmp):
    model = write_model(os.path.join(tmp, "wide"), config(num_hidden_layers=2, head_dim=64))
    libraries = set()
    for capability, first in ("89", "own 64 of "), ("90", "ragged 64 of "):
        out = os.path.join(tmp, "first-" + capability)
        ini = write_ini(out + ".ini", base(model, os.path.join(tmp, "data.jsonl"), out, model__dtype="bf16", train__steps=1))
        megatrain("run", ini, env={"MT_EMU_CAPABILITY": capability})
        found = json.load(open(os.path.join(out, "checkpoint-1", "megatrain", "state.json")))["device_findings"]
        assert f"sm_{capability}, 2 multiprocessors: " in found and f"forward {first}" in found and "tiles" not in found, found
        libraries.add(found[:found.index(", sm_")])
    assert len(libraries) == 1, libraries  # the fused one does what our own do not take


def what_reads_a_checkpoint_goes_by_what_its_run_found(tmp):
    wrong = {"MT_EMU_FUSED_FAULT": "forward ragged fixed off"}
    out = os.path.join(tmp, "judged")
    data = os.path.join(tmp, "data.jsonl")
    ini = write_ini(out + ".ini", base(os.path.join(tmp, "model"), data, out, model__dtype="bf16", train__steps=2,
                                       data__tokenizer="byte", eval__every=2))
    text = megatrain("run", ini, env=wrong).stderr
    assert "o differs" in text, text
    want, = (r["eval_loss"] for r in map(json.loads, open(os.path.join(out, "metrics.jsonl"))) if "eval_loss" in r)
    of = ("--model", os.path.join(out, "checkpoint-2"))
    # on another machine, where the library is right
    assert json.loads(megatrain("eval", ini, "--json", *of).stdout)["loss"] == want
    for args in (["score", ini, "--data", data, "--out", os.path.join(tmp, "scores")], ["sample", "--prompt", "one", "--max-tokens", 1]):
        text = megatrain("-v", "-v", *args, *of).stderr
        assert "libraries are used as " + of[1] in text, text


def another_library_is_warned_of(tmp):
    run(tmp, "moved", "--max-steps", 2)
    text = run(tmp, "moved", "--resume", env={"MT_EMU_CAPABILITY": "86"})
    assert "another library or GPU" in text, text


def the_budget_leaves_a_reserve(tmp):
    ini = os.path.join(tmp, "right.ini")
    env = {"MT_EMU_MEMORY": "3G", "MT_EMU_NAME": "NVIDIA H200"}
    lines = {}
    for display in "01":
        text = megatrain("run", ini, "--force", "--no-save", "--set", "memory.device_budget=auto", "--max-steps", 1,
                         env={**env, "MT_EMU_DISPLAY": display, "MT_EMU_PLAN": "100M"}).stderr
        lines[display] = next(l for l in text.splitlines() if l.startswith("Device "))
        assert "using tile" not in text, text
    assert lines["0"] != lines["1"] and "2.00 GiB" in lines["0"] and "1.50 GiB" in lines["1"], lines


def what_a_step_needs_is_loaded_before_it(tmp):
    ini = os.path.join(tmp, "right.ini")
    args = ("-v", "-v", "run", ini, "--force", "--no-save", "--max-steps", 1)
    text = megatrain(*args).stderr
    ran = re.search(r"ran (\d+) of (\d+) operations of a step once, and attention over (\d+) micro-batches", text)
    assert ran and int(ran[1]) == int(ran[2]) > 20 and ran.start() < text.index("step 1/"), text
    assert int(ran[3]) > 1, "documents of the first step, of uneven lengths"
    plans = [m.start() for m in re.finditer(" plan for .* documents of ", text)]
    assert len(plans) > 2 and " ragged documents of " in text and plans[-1] < ran.start(), "the first step makes none: " + text
    # and what finds no memory beside the budget says so at once
    tight = ("--set", "memory.device_budget=220MiB"), {"MT_EMU_MEMORY": "300M", "MT_EMU_PLAN": "100M"}
    uneven = (), {"MT_EMU_FUSED_FAULT": "backward ragged memory"}
    for more, env in (tight, uneven):
        text = megatrain(*args, *more, env=env).stderr
        assert 0 < text.find("using tiled attention for one kind") < text.index("operations of a step once"), text


with tempfile.TemporaryDirectory() as tmp:
    write_model(os.path.join(tmp, "model"), config(num_hidden_layers=2))
    write_data(os.path.join(tmp, "data.jsonl"))
    a_resumed_run_goes_by_what_was_found(tmp)
    a_gradient_that_is_not_finite_is_computed_in_another_way(tmp)
    our_own_attention_is_first_where_it_was_written_for(tmp)
    what_reads_a_checkpoint_goes_by_what_its_run_found(tmp)
    another_library_is_warned_of(tmp)
    the_budget_leaves_a_reserve(tmp)
    what_a_step_needs_is_loaded_before_it(tmp)
