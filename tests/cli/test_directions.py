# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose direction is made on the device: one result wherever weights, states and updates are, also after a kill
or an interruption; what does not go with them is refused."""
import os
import signal
import subprocess
import sys
import tempfile
import time

from tiny import BINARY, base, config, losses, megatrain, metrics, patience, planes, read_safetensors, write_data, write_ini, write_model

STEPS = 4
POISON = {"MEGATRAIN_POISON": "1"}
PIECES = {"MEGATRAIN_DISK_PIECE": "2048", **POISON}
BACKWARD = {"memory__update": "backward"}
DRIVE = {"memory__states": "disk", "memory__nvme_paths": "{drive}"}
PLACES = {
    "halves": (POISON, {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"}),
    "backward, one thread": ({**POISON, "MEGATRAIN_ADAM_ISA": "scalar"}, {**BACKWARD, "device__cpu_threads": 1}),
    "a drive": (PIECES, {**DRIVE, "memory__verify": "all"}),
    "a drive, backward, saves": (PIECES, {**DRIVE, **BACKWARD, "memory__update_pending": 0, "eval__every": 1,
                                          "checkpoint__every": 1}),
    "two devices": (POISON, {"device__gpus": 2, "memory__expert_group": 2}),
}
KEYS = {"galore": {"optimizer__rank": 8, "optimizer__projection_gap": 3}}  # projections are found in the first step and the last
MODELS = {
    "mixture": ("f32", "qwen3_moe", {"mlp_only_layers": [1]}),
    "tied": ("bf16", "qwen2", {"tie_word_embeddings": True, "hidden_size": 40, "num_attention_heads": 5,
                               "num_key_value_heads": 1, "intermediate_size": 22}),
}


def sections(tmp, name, kind, over):
    dtype, family, more = MODELS[kind]
    model = write_model(f"{tmp}/{kind}", config(family, num_hidden_layers=3, **more))
    data = write_data(f"{tmp}/data.jsonl")
    states = {"optimizer__state_dtype": "bf16"} if (sys.argv[1], kind) == ("muon", "tied") else {}
    keys = KEYS.get(over.get("optimizer__type", sys.argv[1]), {})
    over = {"optimizer__type": sys.argv[1], **keys, **states, "train__grad_clip": 0, "train__steps": STEPS, "model__dtype": dtype, **over}
    os.makedirs(f"{tmp}/drive", exist_ok=True)
    return base(model, data, f"{tmp}/{name}", **{k: str(v).replace("{drive}", f"{tmp}/drive") for k, v in over.items()})


def run(tmp, name, kind, over, env=None):
    megatrain("-q", "run", write_ini(f"{tmp}/{name}.ini", sections(tmp, name, kind, over)), env=env)
    return result(f"{tmp}/{name}")


def result(out):
    return losses(out), planes(f"{out}/checkpoint-{STEPS}")


def check_places(tmp, kind):
    want = run(tmp, f"{kind} here", kind, {})
    for place, (env, over) in PLACES.items():
        assert run(tmp, f"{kind} {place}", kind, over, env) == want, f"{kind}, {place}: other bits"
    return want


def check_stops(tmp, want):
    """Killed and interrupted in the middle of steps; slow drives and links make these long."""
    for how, over in (signal.SIGKILL, BACKWARD), (signal.SIGINT, {}), (signal.SIGINT, BACKWARD):
        out = f"{tmp}/stopped-{how}-{len(over)}"
        ini = write_ini(out + ".ini", sections(tmp, os.path.basename(out), "mixture", {
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
        assert rows == {s: (l, g) for s, l, g in want[0]} and planes(f"{out}/checkpoint-{STEPS}") == want[1], how


def check_states(tmp):
    """Every trained tensor has its states in the checkpoint, and they have moved."""
    t = read_safetensors(f"{tmp}/mixture here/checkpoint-{STEPS}/megatrain/state-00001.safetensors")
    masters = [n[:-len(".master")] for n in t if n.endswith(".master")]
    for name in masters:
        states = [n for n in t if n.startswith(name + ".") and not n.endswith(".master")]
        assert states and all(any(t[n][2]) for n in states), (name, states)


def check_matrices(tmp):
    """Of which tensors the momentum is; all others have AdamW's moments. Routers, norms and embeddings are no matrices."""
    def have(out):
        folder, t = f"{out}/checkpoint-{STEPS}", {}
        for name in planes(folder):
            t.update(read_safetensors(f"{folder}/megatrain/{name}"))
        momentum, moments = ({n.rsplit(".", 1)[0] for n in t if n.endswith(end)} for end in (".momentum_buffer", ".exp_avg"))
        assert not momentum & moments and momentum | moments == {n[:-len(".master")] for n in t if n.endswith(".master")}
        return momentum
    usual = have(f"{tmp}/mixture here")
    assert usual and all("_proj." in n for n in usual) and any(".experts.7.down_proj" in n for n in usual), usual
    run(tmp, "some", "mixture", {"optimizer__matrices": "*.q_proj.weight, lm_head.weight"})
    few = {n.split(".")[-2] for n in have(f"{tmp}/some")}
    assert few == {"q_proj", "lm_head"}, few
    ini = write_ini(f"{tmp}/no.ini", sections(tmp, "no", "mixture", {"optimizer__matrices": "*.nothing"}))
    assert '"*.nothing" matches no matrix' in megatrain("run", "--dry-run", ini, expect=2).stderr
    ini = write_ini(f"{tmp}/no.ini", sections(tmp, "no", "mixture", {"optimizer__matrices": "*", "optimizer__type": "adafactor"}))
    assert "optimizer.matrices is set" in megatrain("run", "--dry-run", ini, expect=2).stderr


def check_refusals(tmp):
    for over, words in (({"train__grad_clip": 1}, ("train.grad_clip", "set it to 0")),
                        ({"adapter__kind": "lora"}, ("adapters", "optimizer.type = "))):
        ini = write_ini(f"{tmp}/no.ini", sections(tmp, "no", "tied", over))
        said = megatrain("run", "--dry-run", ini, expect=2).stderr
        assert all(w in said for w in words), said
    ini = write_ini(f"{tmp}/other.ini", sections(tmp, "other", "mixture", {"optimizer__type": "adamw"}))
    said = megatrain("run", ini, f"--resume={tmp}/mixture here/checkpoint-{STEPS}", expect=None)
    assert said.returncode and "optimizer.type" in said.stderr, said.stderr


with tempfile.TemporaryDirectory() as tmp_:
    check_stops(tmp_, check_places(tmp_, "mixture"))
    check_places(tmp_, "tied")
    check_states(tmp_)
    if sys.argv[1] == "muon":
        check_matrices(tmp_)
    check_refusals(tmp_)
