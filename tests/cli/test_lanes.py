# SPDX-License-Identifier: Apache-2.0
"""Several devices that take the layers in turn (device.gpus) give the bits of one."""
import json
import os
import re
import sys
import tempfile

from same_bits import DRIVE, LORA, PIECES, POISON, RECOMPUTE, Same
from tiny import base, drawn, megatrain, write_ini

COMMON = {"train__steps": 5, "train__batch_size": 5}
#: of each kind of model: environment, changes of the configuration
CASES = {
    "dense": {
        "kept": (POISON, {"device__gpus": 2, "memory__activations": "keep"}),
        "recomputed": (POISON, {"device__gpus": 3, **RECOMPUTE, "memory__slots": 2}),
        "records that leave": (POISON, {"device__gpus": 2, **RECOMPUTE, "memory__keep_layers": 1, "memory__offload_layers": 2}),
        "halves of layers": (POISON, {"device__gpus": 2, "memory__unit": "half", "memory__slots": 2, **RECOMPUTE}),
        "rows gathered on the host": (POISON, {"device__gpus": 3, "memory__embedding": "host", **RECOMPUTE}),
        "more devices than layers": (POISON, {"device__gpus": 6, "eval__every": 2, "eval__at_start": "on"}),
        "states on a drive, no rows gathered": (PIECES, {"device__gpus": 2, **DRIVE, "memory__embedding": "host"}),
        "all on a drive": (PIECES, {"device__gpus": 3, **DRIVE, "memory__activations": "disk", "memory__host_budget": "{host}"}),
    },
    "tied": {
        "bf16": (POISON, {"device__gpus": 2, "model__dtype": "bf16", **RECOMPUTE}),
        "f32": (POISON, {"device__gpus": 3, "memory__activations": "offload"}),
    },
    "mixture": {
        "few slots": (POISON, {"device__gpus": 2, "memory__expert_group": 3, "memory__slots": 2, **RECOMPUTE}),
        "on a drive": (PIECES, {"device__gpus": 2, **DRIVE, "memory__activations": "offload", "memory__expert_group": 2}),
        "three": (POISON, {"device__gpus": 3, "memory__expert_group": 8, "memory__activations": "keep"}),
    },
    "adapters": {
        "streamed": (POISON, {"device__gpus": 2, **LORA, **RECOMPUTE}),
        "resident": (POISON, {"device__gpus": 3, **LORA, "memory__adapters": "resident", "memory__unit": "half", **RECOMPUTE}),
        "base in files": (POISON, {"device__gpus": 2, **LORA, "memory__base": "files"}),
        "packed base": (POISON, {"device__gpus": 2, **LORA, "model__base_dtype": "nf4", "model__dtype": "bf16", **RECOMPUTE}),
    },
}


def check_resume(tmp):
    """1, then 3, then 2 devices, with an update pending at each stop."""
    same = Same(tmp, "dense", COMMON)
    want = same.reference({})
    same.run("parts", RECOMPUTE, "--max-steps", 2, env=POISON)
    same.run("parts", {**RECOMPUTE, "device__gpus": 3}, "--resume", "--max-steps", 1, env=POISON)
    got = same.result(same.run("parts", {**RECOMPUTE, "device__gpus": 2}, "--resume", env=POISON))
    assert (got[0], got[2]) == (want[0], want[2]), (got[0], want[0])  # evaluations are at the end of each part, too


def check_report(tmp):
    """The progress line has the memory of each device; trace and report have its queues, each with spans."""
    same = Same(tmp, "dense", {"train__steps": 3, "device__gpus": 3, **RECOMPUTE})
    out, trace = os.path.join(tmp, "run"), os.path.join(tmp, "run", "trace.json")
    ini = write_ini(out + ".ini", base(same.model, same.data, out, **same.common))
    said = megatrain("run", ini, "--trace", os.path.join(tmp, "trace.json")).stderr
    used = re.search(r"step 3/3 .* \| dev ([^/|]+)/", said).group(1).split(", ")
    assert len(used) == 3 and all(u.endswith("iB") for u in used), said
    assert "of them, device 3" in said, said
    os.rename(os.path.join(tmp, "trace.json"), trace)
    events = json.load(open(trace))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ran = {names[e["tid"]] for e in events if e["ph"] == "X"}
    want = {f"{q} of GPU {n}" for q in ("compute", "H2D link", "D2H link") for n in (2, 3)}
    assert want <= ran, ran
    pictures = drawn(out, html=os.path.join(tmp, "report.html"))
    if not pictures:
        return
    rows = pictures["timeline"]
    assert all(f">{name}</text>" in rows for name in want), rows[:2000]
    assert "disk reads" not in rows and "of GPU 4" not in rows
    spans = rows.count("<rect")
    assert spans >= sum(e["ph"] == "X" and e.get("dur", 0) > 0 for e in events) // 2, spans


def check_refusals(tmp):
    same = Same(tmp, "mixture", COMMON)
    for over, words in (({"device__gpus": 9}, ("device.gpus", "8")),
                        ({"device__gpus": 0}, ("device.gpus", "1")),
                        ({"device__gpus": 2, "train__router_aux_loss": 0.01}, ("device.gpus = 2", "router_aux_loss", "at least 2")),
                        ({"device__gpus": 2, "train__router_aux_loss": 0.01, "train__groups": 2, "device__map": "units"},
                         ("router_aux_loss", "device.map = data"))):
        same.refused(over, *words)


def main():
    case = sys.argv[1]
    with tempfile.TemporaryDirectory() as tmp:
        if case in CASES:
            Same(tmp, case, COMMON).check(CASES[case])
        else:
            {"resume": check_resume, "refusals": check_refusals, "report": check_report}[case](tmp)


main()
