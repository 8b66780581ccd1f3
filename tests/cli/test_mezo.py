# SPDX-License-Identifier: Apache-2.0
"""Steps by losses of perturbed weights: one result wherever weights are, also after a kill; no memory for gradients, records and
states, as planned; what does not go with them is refused."""
import os
import signal
import subprocess
import sys
import tempfile
import time

from same_bits import DRIVE, LORA, PIECES, POISON, Same
from tiny import BINARY, base, losses, megatrain, metrics, patience, planes, write_ini

STEPS = 4
PLACES = {
    "halves": ({**POISON, "MEGATRAIN_ADAM_ISA": "scalar"}, {"memory__unit": "half", "memory__slots": 2}),
    "signs of some layers": (POISON, {
        "mezo__noise": "sign", "mezo__layers": 0.4, "mezo__samples": 2, "device__cpu_threads": 1, "memory__slots": 3}),
    "a drive": (PIECES, {**DRIVE, "memory__verify": "all", "memory__slots": 2}),
    "a drive, saves": (PIECES, {**DRIVE, "eval__every": 1, "checkpoint__every": 1}),
    "small weights": (POISON, {"mezo__small": 0.6, "checkpoint__every": 1, "memory__slots": 2}),
    "experts apart": (POISON, {"memory__expert_group": 2, "memory__embedding": "host"}),
}
RESIDENT = (POISON, {"memory__adapters": "resident", "memory__slots": 2})
MODELS = {
    "mixture": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, False),
    "tied": ("qwen2", {"num_hidden_layers": 3, "tie_word_embeddings": True, "hidden_size": 40, "num_attention_heads": 5,
                       "num_key_value_heads": 1, "intermediate_size": 22}, False),
    "adapters": ("qwen2", {"num_hidden_layers": 3}, True),
}
#: of each kind, what all its runs have: seven rows make a last micro-batch of one
KEYS = {"mixture": {}, "tied": {"model__dtype": "bf16", "train__batch_size": 7},
        "adapters": {**LORA, "model__dtype": "bf16", "model__base_dtype": "nf4"}}


def same_of(tmp, kind):
    return Same(tmp, kind, {"optimizer__type": "mezo", "train__grad_clip": 0, "train__steps": STEPS, **KEYS[kind]}, models=MODELS)


def check_kill(same, over):
    """In the middle of steps; a slow link makes these long."""
    want, _, states = same.reference(over)
    out = f"{same.tmp}/killed"
    ini = write_ini(out + ".ini", base(same.model, same.data, out, **same.keys({
        **DRIVE, **over, "checkpoint__every": 1, "device__link_gbps": 0.02})))
    p = subprocess.Popen([BINARY, "-q", "run", ini], env={**os.environ, **PIECES}, stderr=subprocess.DEVNULL)
    end = time.time() + patience(60)
    while not os.path.isdir(f"{out}/checkpoint-1") and time.time() < end and p.poll() is None:
        time.sleep(0.002)
    time.sleep(0.03)
    p.send_signal(signal.SIGKILL)
    p.wait()
    megatrain("-q", "run", ini, "--resume", "--set", "device.link_gbps=0")
    rows = dict((m["step"], (m["loss"], m["grad_norm"])) for m in metrics(out) if "loss" in m)
    assert rows == {s: (l, g) for s, l, g in want} and planes(f"{out}/checkpoint-{STEPS}") == states
    if over: # limits are of the weights that the run began with
        p = megatrain("run", ini, f"--resume={out}/checkpoint-1", "--force", "--set", "mezo.small=0.5", expect=2)
        assert "limits of another mezo.small" in p.stderr, p.stderr


def check_memory(same):
    """Masters of 32 bits are all that there is of a weight; the same run with SGD has gradients and records beside them."""
    tables = []
    for over in {}, {"optimizer__type": "sgd"}:
        ini = write_ini(f"{same.tmp}/plan.ini", base(same.model, same.data, f"{same.tmp}/plan", **same.keys(over)))
        tables.append(megatrain("plan", ini).stdout)
    both = [[f" {use} " in t for use in ("weights (hi)", "weights (lo)", "gradients")] for t in tables]
    assert both == [[True, True, False], [True, True, True]] and "activations  " not in tables[0].split("Memory  ")[1], both


def check_refusals(same):
    for over, *words in (
            ({"train__grad_clip": 1}, "train.grad_clip", "set it to 0"), ({"train__clip": "unit"}, "train.clip"),
            ({"train__groups": 2}, "train.groups"), ({"train__chunk": 32, "train__micro_batch": 1}, "train.chunk"),
            ({"memory__update": "backward"}, "memory.update = backward"),
            ({"model__share_layers": 2}, "model.share_layers"), ({"device__gpus": 2}, "device.gpus"), ({"optimizer__beta1": 0.9}, "optimizer.beta1"),
            ({"optimizer__state_dtype": "bf16"}, "optimizer.state_dtype"),
            ({"optimizer__type": "sgd", "mezo__eps": 1e-2}, "[mezo]", "optimizer.type = sgd")):
        same.refused(over, *words)
    if same.kind == "adapters":
        same.refused({"adapter__dropout": 0.1}, "adapter.dropout")
        same.refused({"adapter__merge_aware": "nf4"}, "adapter.merge_aware")
        same.refused({"mezo__small": 0.5}, "mezo.small with adapters")
    if same.kind == "mixture":
        same.refused({"train__router_aux_loss": 0.01}, "train.router_aux_loss")


with tempfile.TemporaryDirectory() as tmp_:
    same_ = same_of(tmp_, sys.argv[1])
    adapters = sys.argv[1] == "adapters"
    same_.check({k: v for k, v in PLACES.items() if not adapters or k != "small weights"} | ({"resident": RESIDENT} if adapters else {}))
    check_refusals(same_)
    if sys.argv[1] != "mixture":
        check_kill(same_, {} if adapters else {"mezo__small": 0.6})
        check_memory(same_)
