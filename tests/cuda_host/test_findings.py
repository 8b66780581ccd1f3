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


def run(tmp, name, *more, env=None):
    out = os.path.join(tmp, name)
    ini = out + ".ini"
    if not os.path.exists(ini):
        write_ini(ini, base(os.path.join(tmp, "model"), os.path.join(tmp, "data.jsonl"), out, model__dtype="bf16",
                            train__steps=4, checkpoint__every=2))
    return megatrain("run", ini, *more, env=env).stderr


def end(tmp, name):
    return planes(os.path.join(tmp, name, "checkpoint-4"))


def a_resumed_run_goes_by_what_was_found(tmp):
    assert "is wrong" not in run(tmp, "right")
    assert "attention's backward" in run(tmp, "whole", env=WRONG)
    state = json.load(open(os.path.join(tmp, "whole", "checkpoint-2", "megatrain", "state.json")))
    assert "backward ragged 16 tiles" in state["device_findings"], state["device_findings"]
    run(tmp, "parts", "--max-steps", 2, env=WRONG)
    text = run(tmp, "parts", "--resume")  # another machine, where the library is right: the same bits all the same
    assert "is wrong" not in text, text
    assert end(tmp, "parts") == end(tmp, "whole")
    assert end(tmp, "right") != end(tmp, "whole")


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
    assert lines["0"] != lines["1"] and "1.9" in lines["0"] and "1.4" in lines["1"], lines


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
    another_library_is_warned_of(tmp)
    the_budget_leaves_a_reserve(tmp)
    what_a_step_needs_is_loaded_before_it(tmp)
