# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose direction is made on the device: one result wherever weights, states and updates are, also after a kill
or an interruption; what does not go with them is refused."""
import os
import signal
import subprocess
import sys
import tempfile
import time

from same_bits import DRIVE, PIECES, POISON, Same
from tiny import BINARY, base, losses, megatrain, metrics, patience, planes, read_safetensors, write_ini

STEPS = 4
BACKWARD = {"memory__update": "backward"}
PLACES = {
    "halves": (POISON, {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"}),
    "backward, one thread": ({**POISON, "MEGATRAIN_ADAM_ISA": "scalar"}, {**BACKWARD, "device__cpu_threads": 1}),
    "a drive": (PIECES, {**DRIVE, "memory__verify": "all"}),
    "a drive, backward, saves": (PIECES, {**DRIVE, **BACKWARD, "memory__update_pending": 0, "eval__every": 1,
                                          "checkpoint__every": 1}),
    "two devices": (POISON, {"device__gpus": 2, "memory__expert_group": 2}),
    "experts without rows": (POISON, {"memory__slots": 2, "memory__expert_group": 1, "data__packing": "off",
                                      "train__batch_size": 1, "train__micro_batch": 1}),
    "a device without rows": (POISON, {"memory__slots": 2, "device__gpus": 2, "train__groups": 2, "train__batch_size": 6,
                                       "data__max_samples": 40}),
}
KEYS = {"galore": {"optimizer__rank": 8, "optimizer__projection_gap": 3}}  # projections are found in the first step and the last
MODELS = {
    "mixture": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, False),
    "tied": ("qwen2", {"num_hidden_layers": 3, "tie_word_embeddings": True, "hidden_size": 40, "num_attention_heads": 5,
                       "num_key_value_heads": 1, "intermediate_size": 22}, False),
}
DTYPES = {"mixture": "f32", "tied": "bf16"}


def same_of(tmp, kind):
    states = {"optimizer__state_dtype": "bf16"} if (sys.argv[1], kind) == ("muon", "tied") else {}
    return Same(tmp, kind, {"optimizer__type": sys.argv[1], **KEYS.get(sys.argv[1], {}), **states, "train__grad_clip": 0,
                            "train__steps": STEPS, "model__dtype": DTYPES[kind]}, models=MODELS)


def sections(same, name, over):
    return base(same.model, same.data, f"{same.tmp}/{name}", **same.keys(over))


def check_stops(same):
    """Killed and interrupted in the middle of steps; slow drives and links make these long."""
    want, _, states = same.reference({})
    for how, over in (signal.SIGKILL, BACKWARD), (signal.SIGINT, {}), (signal.SIGINT, BACKWARD):
        out = f"{same.tmp}/stopped-{how}-{len(over)}"
        ini = write_ini(out + ".ini", sections(same, os.path.basename(out), {
            **DRIVE, **over, "checkpoint__every": 1, "device__link_gbps": 0.02}))
        p = subprocess.Popen([BINARY, "-q", "run", ini], env={**os.environ, **PIECES}, stderr=subprocess.DEVNULL)
        end = time.time() + patience(60)
        while not os.path.isdir(f"{out}/checkpoint-1") and time.time() < end and p.poll() is None:
            time.sleep(0.002)
        time.sleep(0.03)
        p.send_signal(how)
        p.wait()
        megatrain("-q", "run", ini, "--resume", "--set", "device.link_gbps=0")
        rows = dict((m["step"], (m["loss"], m["grad_norm"])) for m in metrics(out) if "loss" in m)
        assert rows == {s: (l, g) for s, l, g in want} and planes(f"{out}/checkpoint-{STEPS}") == states, how


def check_states(tmp):
    """Every trained tensor has its states in the checkpoint, and they have moved."""
    t = read_safetensors(f"{tmp}/plain-0/checkpoint-{STEPS}/megatrain/state-00001.safetensors")
    masters = [n[:-len(".master")] for n in t if n.endswith(".master")]
    for name in masters:
        states = [n for n in t if n.startswith(name + ".") and not n.endswith(".master")]
        assert states and all(any(t[n][2]) for n in states), (name, states)


def check_matrices(tmp, same):
    """Of which tensors the momentum is; all others have AdamW's moments. Routers, norms and embeddings are no matrices."""
    def have(out):
        folder, t = f"{out}/checkpoint-{STEPS}", {}
        for name in planes(folder):
            t.update(read_safetensors(f"{folder}/megatrain/{name}"))
        momentum, moments = ({n.rsplit(".", 1)[0] for n in t if n.endswith(end)} for end in (".momentum_buffer", ".exp_avg"))
        assert not momentum & moments and momentum | moments == {n[:-len(".master")] for n in t if n.endswith(".master")}
        return momentum
    usual = have(f"{tmp}/plain-0")
    assert usual and all("_proj." in n for n in usual) and any(".experts.7.down_proj" in n for n in usual), usual
    few = {n.split(".")[-2] for n in have(same.run("some", {"optimizer__matrices": "*.q_proj.weight, lm_head.weight"}))}
    assert few == {"q_proj", "lm_head"}, few
    same.refused({"optimizer__matrices": "*.nothing"}, '"*.nothing" matches no matrix')
    same.refused({"optimizer__matrices": "*", "optimizer__type": "adafactor"}, "optimizer.matrices is set")


def check_refusals(tmp, same):
    same.refused({"train__grad_clip": 1}, "train.grad_clip", "set it to 0")
    same.refused({"adapter__kind": "lora"}, "adapters", "optimizer.type = ")
    other = {k: v for k, v in same.keys({"optimizer__type": "adamw"}).items() if k not in KEYS.get(sys.argv[1], {})}
    ini = write_ini(f"{tmp}/other.ini", base(same.model, same.data, f"{tmp}/other", **other))
    said = megatrain("run", ini, f"--resume={tmp}/plain-0/checkpoint-{STEPS}", expect=None)
    assert said.returncode and "optimizer.type" in said.stderr, said.stderr


with tempfile.TemporaryDirectory() as tmp_:
    for kind in "mixture", "tied":
        folder = os.path.join(tmp_, kind)
        os.makedirs(folder)
        same = same_of(folder, kind)
        same.check(PLACES)
        if kind == "mixture":
            check_stops(same)
            check_states(folder)
            if sys.argv[1] == "muon":
                check_matrices(folder, same)
        check_refusals(folder, same)
