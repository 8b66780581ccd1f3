# SPDX-License-Identifier: Apache-2.0
"""Several devices that take the layers in turn (device.gpus) give the bits of one."""
import json
import os
import re
import sys
import tempfile

from tiny import POISON, base, config, least_host, losses, megatrain, metrics, planes, run_in, with_weights, write_data, \
    write_ini, write_model

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
STEPS = 5
PIECES = {"MEGATRAIN_DISK_PIECE": "2048", **POISON}
DRIVE = {"memory__states": "disk", "memory__nvme_paths": "{drive}"}
LORA = {"model__init": "weights", "adapter__kind": "lora", "adapter__rank": 4}
RECOMPUTE = {"memory__activations": "recompute"}
#: of each kind of model: number of devices, environment, changes of the configuration
CASES = {
    "dense": {
        "kept": (2, POISON, {"memory__activations": "keep"}),
        "recomputed": (3, POISON, {**RECOMPUTE, "memory__slots": 2}),
        "records that leave": (2, POISON, {**RECOMPUTE, "memory__keep_layers": 1, "memory__offload_layers": 2}),
        "halves of layers": (2, POISON, {"memory__unit": "half", "memory__slots": 2, **RECOMPUTE}),
        "rows gathered on the host": (3, POISON, {"memory__embedding": "host", **RECOMPUTE}),
        "more devices than layers": (6, POISON, {"eval__every": 2, "eval__at_start": "on"}),
        "states on a drive": (2, PIECES, DRIVE),
        "all on a drive": (3, PIECES, {**DRIVE, "memory__activations": "disk", "memory__host_budget": "{host}"}),
    },
    "tied": {
        "bf16": (2, POISON, {"model__dtype": "bf16", **RECOMPUTE}),
        "f32": (3, POISON, {"memory__activations": "offload"}),
    },
    "mixture": {
        "few slots": (2, POISON, {"memory__expert_group": 3, "memory__slots": 2, **RECOMPUTE}),
        "on a drive": (2, PIECES, {**DRIVE, "memory__activations": "offload", "memory__expert_group": 2}),
        "three": (3, POISON, {"memory__expert_group": 8, "memory__activations": "keep"}),
    },
    "adapters": {
        "streamed": (2, POISON, {**LORA, **RECOMPUTE}),
        "resident": (3, POISON, {**LORA, "memory__adapters": "resident", "memory__unit": "half", **RECOMPUTE}),
        "base in files": (2, POISON, {**LORA, "memory__base": "files"}),
        "packed base": (2, POISON, {**LORA, "model__base_dtype": "nf4", "model__dtype": "bf16", **RECOMPUTE}),
    },
}


def inputs(tmp, kind):
    """A model's folder and data; adapters have a base with weights, matrices large enough for files."""
    cfg = config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]) if kind == "mixture" else \
        config("qwen2", num_hidden_layers=3, intermediate_size=8256 if kind == "adapters" else 88) if kind != "tied" else \
        config("qwen3", tie_word_embeddings=True)
    model = write_model(os.path.join(tmp, "model"), cfg)
    data = write_data(os.path.join(tmp, "data.jsonl"))
    if kind == "adapters":
        model = with_weights(tmp, model, data)
    return model, data


def run(tmp, name, model, data, env, over, *args):
    keys = {"train__steps": STEPS, "train__batch_size": 5, **over}
    return run_in(tmp, name, model, data, keys, *args, env=env)


def result(out):
    evals = [(m["step"], m["eval_loss"]) for m in metrics(out) if "eval_loss" in m]
    return losses(out), evals, planes(os.path.join(out, f"checkpoint-{STEPS}"))


def check_bits(tmp, kind):
    model, data = inputs(tmp, kind)
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive)
    for name, (gpus, env, over) in CASES[kind].items():
        over = {k: v.replace("{drive}", drive) if isinstance(v, str) else v for k, v in over.items()}
        several = {**over, "device__gpus": gpus}
        if over.get("memory__host_budget"):
            host = least_host(tmp, model, data, several)
            over["memory__host_budget"] = several["memory__host_budget"] = host
        one = result(run(tmp, name + " on one", model, data, env, over))
        assert result(run(tmp, name, model, data, env, several)) == one, f"{kind}, {name}: {gpus} devices moved bits"
        assert len(one[0]) == STEPS


def check_resume(tmp):
    """1, then 3, then 2 devices, with an update pending at each stop."""
    model, data = inputs(tmp, "dense")
    want = result(run(tmp, "whole", model, data, POISON, RECOMPUTE))
    run(tmp, "parts", model, data, POISON, RECOMPUTE, "--max-steps", 2)
    run(tmp, "parts", model, data, POISON, {**RECOMPUTE, "device__gpus": 3}, "--resume", "--max-steps", 1)
    got = result(run(tmp, "parts", model, data, POISON, {**RECOMPUTE, "device__gpus": 2}, "--resume"))
    assert (got[0], got[2]) == (want[0], want[2]), (got[0], want[0])  # evaluations are at the end of each part, too


def check_report(tmp):
    """The progress line has the memory of each device; trace and report have its queues, each with spans."""
    model, data = inputs(tmp, "dense")
    out, trace = os.path.join(tmp, "run"), os.path.join(tmp, "run", "trace.json")
    ini = write_ini(out + ".ini", base(model, data, out, **{"train__steps": 3, "device__gpus": 3, **RECOMPUTE}))
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
    html = os.path.join(tmp, "report.html")
    megatrain("-q", "report", out, "--html", html)
    text = open(html).read()
    rows = re.search(r"Time line of one step.*?</svg>", text, re.S).group(0)
    assert all(f">{name}</text>" in rows for name in want), rows[:2000]
    assert "disk reads" not in rows and "of GPU 4" not in rows
    drawn = len(re.findall("<rect", rows))
    assert drawn >= sum(e["ph"] == "X" and e.get("dur", 0) > 0 for e in events) // 2, drawn


def check_refusals(tmp):
    model, data = inputs(tmp, "mixture")
    out = os.path.join(tmp, "no")
    for over, words in (({"device__gpus": 9}, ("device.gpus", "8")),
                        ({"device__gpus": 0}, ("device.gpus", "1")),
                        ({"device__gpus": 2, "train__router_aux_loss": 0.01}, ("device.gpus = 2", "router_aux_loss", "at least 2")),
                        ({"device__gpus": 2, "train__router_aux_loss": 0.01, "train__groups": 2, "device__map": "units"},
                         ("router_aux_loss", "device.map = data"))):
        ini = write_ini(out + ".ini", base(model, data, out, **over))
        said = megatrain("run", "--dry-run", ini, expect=2).stderr
        assert all(w in said for w in words), said


def main():
    case = sys.argv[1]
    with tempfile.TemporaryDirectory() as tmp:
        if case in CASES:
            check_bits(tmp, case)
        else:
            {"resume": check_resume, "refusals": check_refusals, "report": check_report}[case](tmp)


main()
