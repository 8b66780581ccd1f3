# SPDX-License-Identifier: Apache-2.0
"""Masters of 24 bits and of bf16: one result wherever they are, in their bytes, and nearly as good as those of 32 bits."""
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

from tiny import (BINARY, FULL, SLOW, base, config, fixture, losses, megatrain, metrics, planes, read_safetensors,
                  write_data, write_ini, write_model)

PIECES = {"MEGATRAIN_DISK_PIECE": "4096"}
ROUTERS = fixture("ernie4_5_moe")


def words(tensor):
    return [u for u, in struct.iter_unpack("<I", tensor[2])]


def kill_once(ini, env):
    """Kills the run after its first checkpoint."""
    with subprocess.Popen([BINARY, "-q", "run", ini], env={**os.environ, **env}) as p:
        out = ini[:-4]
        while p.poll() is None and not any(re.fullmatch(r"checkpoint-\d+", n) for n in os.listdir(out) if os.path.isdir(out)):
            time.sleep(0.01)
        p.send_signal(signal.SIGKILL)


def in_every_place(tmp, data, name, model, places, **over):
    """The run's folder, after runs in all places had the same bits."""
    got, said = {}, {}
    for place, (env, more) in places.items():
        out = os.path.join(tmp, f"{name}-{place}")
        os.makedirs(out)
        ini = write_ini(out + ".ini", base(model, data, out, **{"model__dtype": "bf16", "train__steps": 6, "train__grad_clip": 0,
                                                                "checkpoint__every": 2, **over, **more}))
        if place == "disk":
            kill_once(ini, env)
        said[place] = megatrain("run", ini, *(["--resume"] if place == "disk" else []), env=env).stderr
        got[place] = losses(out), planes(f"{out}/checkpoint-6")
    assert all(g == got["host"] for g in got.values()), f"{name}: places or a resume change bits"
    return os.path.join(tmp, f"{name}-host"), said["halves"]


def one_result_in_every_place(tmp, model, data):
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    on_disk = {"memory__states": "disk", "memory__nvme_paths": drive, "memory__device_budget": "8MiB"}
    places = {"host": ({}, {}), "disk": (PIECES, on_disk), "halves": ({"MEGATRAIN_ADAM_ISA": "scalar"}, {
        "memory__unit": "half", "memory__embedding": "host", "device__cpu_threads": 5, "memory__verify": "all"})}
    places["backward"] = PIECES, {**on_disk, "memory__update": "backward"}
    kinds = {"24bit": ("8bit", 0xff), "bf16": ("f32", 0xffff)}
    for master, (states, empty) in kinds.items():
        out, said = in_every_place(tmp, data, master, model, places, optimizer__master=master, optimizer__state_dtype=states)
        tensors = read_safetensors(f"{out}/checkpoint-6/megatrain/state-00001.safetensors")
        masters = {k: words(v) for k, v in tensors.items() if k.endswith(".master")}
        assert masters and all(tensors[k][0] == "F32" for k in masters)
        assert not any(u & empty for m in masters.values() for u in m), "more bits than the masters have"
        assert any(u & (empty + 1) for m in masters.values() for u in m), "fewer bits than the masters have"
        rows = {use: float(size) for use, size in re.findall(r"  (weights \(..\)|\w+ moments) +(\S+) KiB$", said, re.M)}
        assert rows.get("weights (lo)", 0) == {"24bit": rows["weights (hi)"] / 2, "bf16": 0}[master], said
        if master == "bf16":
            assert rows["first moments"] == 2 * rows["weights (hi)"], said
    router = {**places, "halves": (places["halves"][0], {"memory__embedding": "host"})}
    few = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    in_every_place(tmp, few, "router", ROUTERS, router, optimizer__master="24bit", model__init="weights", data__eval="")


def the_files_have_what_is_trained(tmp, model, data):
    """The bf16 weights of a checkpoint are the upper halves of its masters, rounded once more; evaluating them is evaluating the run."""
    out = os.path.join(tmp, "saved")
    ini = write_ini(out + ".ini", base(model, data, out, model__dtype="bf16", train__steps=4, optimizer__master="24bit",
                                       eval__every=4))
    megatrain("-q", "run", ini)
    state = read_safetensors(f"{out}/checkpoint-4/megatrain/state-00001.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    hi = [h for h, in struct.iter_unpack("<H", read_safetensors(f"{out}/checkpoint-4/model.safetensors")[name][2])]
    assert hi == [((u >> 8) + 0x80) >> 8 & 0xffff for u in words(state[name + ".master"])]
    want = [m["eval_loss"] for m in metrics(out) if "eval_loss" in m][-1]
    again = json.loads(megatrain("-q", "eval", ini, "--json", "--model", f"{out}/checkpoint-4",
                                 "--set", "model.init=weights").stdout)["loss"]
    assert again == want, (again, want)


def others_are_refused(tmp, model, data):
    out = os.path.join(tmp, "refused")
    ini = write_ini(out + ".ini", base(model, data, out, model__dtype="bf16", train__steps=2, optimizer__master="24bit"))
    megatrain("-q", "run", ini)
    for other in "f32", "bf16":
        said = megatrain("-q", "run", ini, "--resume", "--set", f"optimizer.master={other}", "--set", "train.steps=4", expect=None)
        assert said.returncode and f"optimizer.master: 24bit -> {other}" in said.stderr, said.stderr
    said = megatrain("-q", "check", ini, "--set", "model.dtype=f32", expect=None)
    assert said.returncode and "optimizer.master = 24bit is for compute in bf16" in said.stderr, said.stderr


def write_chain(path, n, seed, like=1, vocab=64):
    """Samples of a chain of second order, which a model can learn."""
    r, then = random.Random(seed), random.Random(like)
    follow = {(a, b): then.sample(range(vocab), 4) for a in range(vocab) for b in range(4)}
    with open(path, "w") as f:
        for _ in range(n):
            ids = [r.randrange(vocab), r.randrange(vocab)]
            while len(ids) < 60:
                ids.append(r.choices(follow[ids[-1], ids[-2] % 4], (8, 4, 2, 1))[0])
            f.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return path


def final_loss(tmp, name, model, data, **over):
    out = os.path.join(tmp, name)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, model__dtype="bf16", eval__every=100000,
                                                        train__batch_size=16, train__micro_batch=16, **over)))
    return [m["eval_loss"] for m in metrics(out) if "eval_loss" in m][-1], out


def they_learn_as_well(tmp, model, data):
    """Pre-training, and fine-tuning at a rate below the resolution of bf16; final losses within 0.5% of those of FP32."""
    if not FULL:
        return
    chain = write_chain(os.path.join(tmp, "chain.jsonl"), 3000, 2)
    kinds = {"f32": {}, "bf16": {"state_dtype": "bf16", "rounding": "stochastic"}, "8bit": {"state_dtype": "8bit"},
             "24bit": {"master": "24bit"}, "8bit and 24bit": {"state_dtype": "8bit", "master": "24bit"},
             "bf16 master": {"master": "bf16"}}
    got = {}
    for name, keys in kinds.items():
        got[name], out = final_loss(tmp, f"learn-{name}".replace(" ", "-"), model, chain, train__steps=1000,
                                    train__learning_rate="2e-3", **{f"optimizer__{k}": v for k, v in keys.items()})
        print(f"pre-training, {name}: {got[name]:.5f} {100 * (got[name] / got['f32'] - 1):+.3f}%", flush=True)
        assert abs(got[name] / got["f32"] - 1) < 0.005, (name, got)
        first = out if name == "f32" else first
    other = write_chain(os.path.join(tmp, "other.jsonl"), 3000, 2, like=3)
    tuned = {name: final_loss(tmp, f"tune-{name}", f"{first}/checkpoint-1000", other, model__init="weights", train__steps=500,
                              train__learning_rate="1e-5", train__schedule="constant", optimizer__master=name)[0]
             for name in ("f32", "bf16")}
    print(f"fine-tuning: {tuned}: bf16 {100 * (tuned['bf16'] / tuned['f32'] - 1):+.3f}%", flush=True)
    assert abs(tuned["bf16"] / tuned["f32"] - 1) < 0.005, tuned


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=2 if SLOW else 3))
        data = write_data(os.path.join(tmp, "data.jsonl"))
        for test in (one_result_in_every_place, the_files_have_what_is_trained, others_are_refused, they_learn_as_well):
            if len(sys.argv) > 1 and test.__name__ not in sys.argv[1:]:
                continue
            t0 = time.time()
            test(tmp, model, data)
            print(f"ok {test.__name__} {time.time() - t0:.1f} s", flush=True)
