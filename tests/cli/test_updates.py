# SPDX-License-Identifier: Apache-2.0
"""Updates under backward (memory.update = backward) give the bits of updates under the next forward, and less traffic."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from same_bits import DRIVE, LORA, PIECES, POISON, RECOMPUTE, Same
from tiny import BINARY, base, config, least_host, losses, megatrain, metrics, patience, planes, read_safetensors, write_ini, \
    write_model, write_safetensors

STEPS = 5
UNIT = {"train__clip": "unit", "train__grad_clip": 0.02}
MODELS = {"clipped": ("qwen2", {"num_hidden_layers": 3, "tie_word_embeddings": True}, False),
          "masters": ("qwen2", {"num_hidden_layers": 3}, False)}
#: of each kind of model: what forward and backward share, and what differs in the run with updates under backward
CASES = {
    "dense": ({}, {
        "few slots": (POISON, {"memory__slots": 2, **RECOMPUTE}),
        "many slots, kept": (POISON, {"memory__slots": 5, "memory__activations": "keep", "memory__update_pending": 0}),
        "halves, two pending": (POISON, {"memory__unit": "half", "memory__update_pending": 2, **RECOMPUTE}),
        "rows gathered on the host": (POISON, {"memory__embedding": "host", **RECOMPUTE}),
        "eval and save at every step": (POISON, {"eval__every": 1, "checkpoint__every": 1}),
        "scalar, one thread": ({"MEGATRAIN_ADAM_ISA": "scalar"}, {"device__cpu_threads": 1}),
        "states on a drive": (PIECES, DRIVE),
        "all on a drive": (PIECES, {**DRIVE, "memory__activations": "disk", "memory__host_budget": "{host}"}),
        "on three devices": (POISON, {"device__gpus": 3, **RECOMPUTE}),
        "on devices and a drive": (PIECES, {"device__gpus": 2, **DRIVE}),
    }),
    "masters": ({"optimizer__master": "24bit", "model__dtype": "bf16", "optimizer__state_dtype": "8bit", **UNIT}, {
        "halves": (POISON, {"memory__unit": "half", **RECOMPUTE}),
        "a drive": (PIECES, DRIVE),
    }),
    "clipped": (UNIT, {
        "halves": (POISON, {"memory__unit": "half", **RECOMPUTE}),
        "a drive": (PIECES, {**DRIVE, "memory__unit": "half"}),
        "states checked": (POISON, {"memory__verify": "all"}),
        "8 bits forward": (POISON, {"memory__update": "forward"}),
    }),
    "mixture": ({"optimizer__state_dtype": "8bit", **UNIT}, {
        "groups of experts": (POISON, {"memory__expert_group": 3, "memory__slots": 2, **RECOMPUTE}),
        "one expert a unit": (POISON, {"memory__expert_group": 1, "memory__update_pending": 0}),
        "on a drive": (PIECES, {**DRIVE, "memory__expert_group": 2, "memory__activations": "offload"}),
        "on two devices": (POISON, {"device__gpus": 2, "memory__expert_group": 2}),
    }),
    "adapters": (LORA, {
        "streamed": (POISON, RECOMPUTE),
        "resident": (POISON, {"memory__adapters": "resident", "memory__unit": "half", **RECOMPUTE}),
        "some layers": (POISON, {"memory__base": "files"}),
        "on a drive": (PIECES, DRIVE),
    }),
}


def same_of(tmp, kind, **common):
    """Runs with updates under backward, and plain ones with updates under forward."""
    return Same(tmp, kind, {"train__steps": STEPS, "train__batch_size": 5, "train__grad_clip": 0, "memory__update": "backward", **common},
                plain={"memory__update": "forward"}, models=MODELS)


def check_bits(tmp, kind):
    common, variants = CASES[kind]

    def traffic(name, out, over):
        written = last_step(out).get("disk_write", {})
        assert (sum(written.values()) > 0) == ("memory__states" in over), name
        if "memory__states" in over:
            assert written["states"] > 0 and written["gradients"] == 0, (name, written)

    same_of(tmp, kind, **common).check(variants, traffic)


def last_step(out):
    return [m for m in metrics(out) if "loss" in m][-1]


def bytes_written():
    """Of this process and those that it has waited for."""
    with open("/proc/self/io") as f:
        return int(dict(line.split(": ") for line in f)["write_bytes"])


def check_traffic(tmp):
    """A step writes to drives what the plan says; under backward no gradients, and with the same memory less of all."""
    same = same_of(tmp, "dense", **DRIVE, **RECOMPUTE, checkpoint__save="weights")
    same.model = write_model(os.path.join(tmp, "larger"), config("qwen2", num_hidden_layers=6, intermediate_size=352))
    os.environ.update(PIECES)
    least = least_host(tmp, same.model, same.data, same.keys({}), more=0)
    planned = {}
    for order in "forward", "backward":
        over = {"memory__update": order, "memory__host_budget": least}
        total, step = {}, {}
        for steps in 4, 14:
            before = bytes_written()
            out = same.run(f"{order} {steps}", {**over, "train__steps": steps})
            total[steps] = bytes_written() - before
            step[steps] = sum(last_step(out)["disk_write"].values())
        assert step[4] == step[14] > 0
        planned[order] = last_step(out)["disk_write"]
        each = (total[14] - total[4]) / 10
        if not total[4]:
            print("this file system does not count what is written")
            return
        assert abs(each - step[4]) < 0.02 * step[4] + 8192, (order, each, step)
        print(f"{order}: {step[4]} bytes a step by the plan, {each:.0f} by /proc/self/io")
    assert planned["forward"]["gradients"] > 0 and planned["backward"]["gradients"] == 0, planned


def check_resume(tmp):
    """From one order to the other and back, with updates pending at each stop; killed in the middle; interrupted."""
    same, forward = same_of(tmp, "dense"), {"memory__update": "forward"}
    want, evals, states = same.reference({})
    same.run("parts", forward, "--max-steps", 2, env=POISON)
    same.run("parts", RECOMPUTE, "--resume", "--max-steps", 1, env=POISON)
    got = same.result(same.run("parts", forward, "--resume", env=POISON))
    assert got[0] == want and got[2] == states and set(evals) <= set(got[1]) # evaluations are at the end of each part, too
    for how in signal.SIGKILL, signal.SIGINT:
        out = os.path.join(tmp, f"stopped-{how}")
        ini = write_ini(out + ".ini", base(same.model, same.data, out, **same.keys({**RECOMPUTE, **DRIVE, "checkpoint__every": 1})))
        env = {**os.environ, **PIECES, "MEGATRAIN_IO_FAULT": "any:delay:1:0"}
        p = subprocess.Popen([BINARY, "-q", "run", ini], env=env, stderr=subprocess.DEVNULL)
        end = time.time() + patience(60)
        while not os.path.isdir(os.path.join(out, "checkpoint-1")) and time.time() < end and p.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05)
        p.send_signal(how)
        p.wait()
        megatrain("-q", "run", ini, "--resume")
        rows = dict((m["step"], (m["loss"], m["grad_norm"])) for m in metrics(out) if "loss" in m)
        assert rows == {s: (l, g) for s, l, g in want} and planes(os.path.join(out, f"checkpoint-{STEPS}")) == states, how


def spoil(path):
    """Multiplies a norm's weight by 2^80 and divides what it feeds by it: squares of these gradients overflow."""
    def scale(data, shift):  # bf16
        out = bytearray(data)
        for i in range(0, len(out), 2):
            u = out[i] | out[i + 1] << 8
            u += shift << 7 if u & 0x7f80 else 0
            out[i], out[i + 1] = u & 255, u >> 8
        return bytes(out)
    shutil.rmtree(os.path.join(path, "megatrain"))  # which has checksums
    file = os.path.join(path, "model.safetensors")
    t = read_safetensors(file)
    for name, shift in ("post_attention_layernorm.weight", 80), ("mlp.gate_proj.weight", -80), ("mlp.up_proj.weight", -80):
        name = "model.layers.1." + name
        dtype, shape, data = t[name]
        assert dtype == "BF16"
        t[name] = (dtype, shape, scale(data, shift))
    write_safetensors(file, t)


def check_skips(tmp):
    """A layer's gradient that is not finite skips that layer, in either order; steps with skips end the run."""
    same = same_of(tmp, "adapters")
    spoil(same.model)
    over = {"model__init": "weights", "model__dtype": "bf16", "train__max_skips": STEPS + 1}
    got = {}
    for order in "forward", "backward":
        out = same.run(order, {**over, "memory__update": order}, env=POISON)
        rows = [m for m in metrics(out) if "loss" in m]
        assert len(rows) == STEPS and all(m["skipped_blocks"] == 1 and not m["skipped"] for m in rows), rows
        assert {m["bad_tensor"] for m in rows} == {"model.layers.1.mlp.gate_proj.weight"}
        got[order] = planes(os.path.join(out, f"checkpoint-{STEPS}")), [m["loss"] for m in rows]
    assert got["forward"] == got["backward"]
    out = os.path.join(tmp, "ends")
    ini = write_ini(out + ".ini", base(same.model, same.data, out, **same.keys({**over, "train__max_skips": 2})))
    said = megatrain("run", ini, expect=None)
    assert said.returncode and "skipped 1 of 5 blocks" in said.stderr and "2 steps in a row" in said.stderr, said.stderr
    # by blocks, the last of which skips all its steps: what the first has learned is saved
    out = same.run("blocks", {**over, "train__blocks": "layers", "train__block_steps": STEPS - 1, "train__block_order": "ascending"})
    assert [m["skipped"] for m in metrics(out) if "loss" in m] == [False] * (STEPS - 1) + [True], metrics(out)
    assert os.path.isdir(os.path.join(out, f"checkpoint-{STEPS}"))


def check_refusals(tmp):
    same_of(tmp, "dense").refused({"train__grad_clip": 1}, "memory.update = backward", "train.clip = unit", "train.grad_clip = 0")


def main():
    case = sys.argv[1]
    with tempfile.TemporaryDirectory() as tmp:
        if case in CASES:
            check_bits(tmp, case)
        else:
            {"resume": check_resume, "refusals": check_refusals, "traffic": check_traffic, "skips": check_skips}[case](tmp)


main()
