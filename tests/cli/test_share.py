# SPDX-License-Identifier: Apache-2.0
"""Layers that share weights (model.share_layers): no placement moves a bit, before they get weights of their own
(train.delink_at) and after; states are one set a group, a saved model has all layers; what cannot be is refused."""
import json
import os
import re
import tempfile

from same_bits import DRIVE, PIECES, RECOMPUTE, Same
from tiny import POISON, base, chosen, config, losses, megatrain, metrics, read_safetensors, write_data, write_ini, write_model

#: groups of layers: two and one; one with a window and one without; two mixtures, and two more
MODELS = {
    "dense": ("qwen2", {"num_hidden_layers": 3}, False),
    "windows": ("gemma3_text", {"num_hidden_layers": 4}, False),
    "mixture": ("qwen3_moe", {"num_hidden_layers": 4, "num_experts": 48}, False),
}
LANES = {"device__gpus": 2, "device__cpu_threads": 1}
BACKWARD = {"train__clip": "unit", "memory__update": "backward"}
CASES = {
    "slots": (POISON, {"memory__slots": 2, **RECOMPUTE}),
    "kept and offloaded": ({}, {**RECOMPUTE, "memory__keep_layers": 1, "memory__offload_layers": 1}),
    "halves": ({}, {"memory__unit": "half"}),
    "drives": (PIECES, {**DRIVE, "memory__activations": "offload"}),
    "lanes": ({}, LANES),
    "groups": (POISON, {"train__groups": 2, "train__micro_batch": 1, **LANES, "device__map": "data"}),
    "under backward": ({}, BACKWARD),
    "under backward, drives": (PIECES, {**BACKWARD, **DRIVE}),
    "directions": ({}, {"optimizer__type": "adafactor", "train__grad_clip": 0, **DRIVE}),
}
#: experts without rows in one layer have some in the other
FEW = {"few rows": (POISON, {"train__batch_size": 1, "train__micro_batch": 1, "memory__expert_group": 1, "memory__slots": 2,
                             **RECOMPUTE})}
SHARED = {"model__share_layers": 2, "train__delink_at": 2}


def of_kind(kind, **more):
    with tempfile.TemporaryDirectory() as tmp:
        Same(tmp, kind, SHARED, {"device__cpu_threads": 1}, MODELS).check({**CASES, **more})


def dense():
    of_kind("dense")


def windows():
    of_kind("windows")


def mixture():
    of_kind("mixture", **FEW)


def layers(tensors, number):
    return {re.sub(r"layers\.\d+\.", "", k): v for k, v in tensors.items() if f"layers.{number}." in k}


def states(out, step):
    found = {}
    folder = os.path.join(out, f"checkpoint-{step}", "megatrain")
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            found.update(read_safetensors(os.path.join(folder, name)))
    return found


def checkpoints():
    """One set of states a group; models and exports with all layers; a run that goes on with 1, or from its middle, is the one
    that was told when."""
    with tempfile.TemporaryDirectory() as tmp:
        s = Same(tmp, "dense", {"data__eval": ""}, models=MODELS)
        want = s.run("want", SHARED)
        kept = states(want, 2)
        assert layers(kept, 0) and layers(kept, 2) and not layers(kept, 1)
        assert all(layers(states(want, 4), n) for n in range(3))
        megatrain("-q", "export", os.path.join(want, "checkpoint-2"), os.path.join(tmp, "x"), "--dtype=f32")
        exported = read_safetensors(os.path.join(tmp, "x", "model.safetensors"))
        for model in (exported, read_safetensors(os.path.join(want, "checkpoint-2", "model.safetensors"))):
            assert layers(model, 0) == layers(model, 1) != layers(model, 2), "a group's layers are the same"
        assert {k + ".master": v[2] for k, v in layers(exported, 1).items()} == \
            {k: v[2] for k, v in layers(kept, 0).items() if k.endswith(".master")}
        by_hand = s.run("by hand", {"model__share_layers": 2}, "--max-steps=2")
        ini = write_ini(by_hand + ".ini", base(s.model, s.data, by_hand, train__steps=4, data__eval=""))
        megatrain("-q", "run", ini, "--resume")
        assert s.result(by_hand) == s.result(want)
        for at in (1, 2, 3):  # killed before, at and after
            cut = s.run(f"cut {at}", {**SHARED, "checkpoint__every": 1}, f"--max-steps={at}")
            megatrain("-q", "run", cut + ".ini", "--resume")
            assert s.result(cut) == s.result(want), at
        # the layers have gone ways of their own, from the same place
        assert losses(s.run("never", {"model__share_layers": 2}))[3] != losses(want)[3]
        out = s.run("bf16", {"model__share_layers": 2, "model__dtype": "bf16", "data__eval": "10%"})
        said = json.loads(megatrain("-q", "eval", out + ".ini", "--model", os.path.join(out, "checkpoint-4"), "--json").stdout)
        assert said["loss"] == [m["eval_loss"] for m in metrics(out) if "eval_loss" in m][-1], "with all layers it is the same model"


def an_evaluation_that_is_owed_leaves_states_as_they_are():
    """Of a run that ends where layers get their own, and was ended before it evaluated: the one that goes on has layers of their own."""
    with tempfile.TemporaryDirectory() as tmp:
        s = Same(tmp, "dense", {"data__eval": ""}, models=MODELS)
        out, held_out = s.run("owed", {**SHARED, "train__steps": 2}), write_data(os.path.join(tmp, "held-out.jsonl"), n=4)
        for steps in (2, 2, 4):
            ini = write_ini(out + ".ini", base(s.model, s.data, out, **SHARED, train__steps=steps, data__eval=held_out))
            megatrain("-q", "run", ini, "--resume")
            assert [m["step"] for m in metrics(out) if "eval_loss" in m] == ([2, 4] if steps == 4 else [2]), metrics(out)
        assert all(layers(states(out, 4), n) for n in range(3))


def refusals():
    with tempfile.TemporaryDirectory() as tmp:
        s = Same(tmp, "windows", {}, models={"windows": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1]}, False)})
        s.refused({"model__share_layers": 2}, "layer 1 cannot have the weights of layer 0", "mlp.gate_proj")
        s.refused({"model__share_layers": 5}, "the model has 4 layers")
        s.refused({"model__share_layers": 2, "model__init": "weights"}, "model.init = random")
        s.refused({"model__share_layers": 2, "adapter__kind": "lora"}, "adapter.kind")
        s.refused({"train__delink_at": 2}, "model.share_layers = 1")
        s.refused({"model__share_layers": 4, "train__delink_at": 2, "checkpoint__save": "weights"}, "checkpoint.save")
        s.refused({"model__share_layers": 2, "model__freeze": "model.layers.3.mlp*"}, "layer 1 cannot have")
    with tempfile.TemporaryDirectory() as tmp:
        s = Same(tmp, "windows", {}, models=MODELS)
        s.refused({"model__share_layers": 2, "model__freeze": "model.layers.3.mlp*"}, "layer 3 cannot have", "mlp.gate_proj")
        out = s.run("out", {"model__share_layers": 2, "train__steps": 1})
        ini = write_ini(out + ".ini", base(s.model, s.data, out, train__steps=2, model__share_layers=4))
        assert "model.share_layers: 2 -> 4" in megatrain("run", ini, "--resume", expect=2).stderr
        assert "cannot become groups of 4" in megatrain("run", ini, "--resume", "--force", expect=2).stderr
        with_delink = base(s.model, s.data, out, train__steps=2, **SHARED)
        assert "--no-save" in megatrain("run", write_ini(ini, with_delink), "--no-save", "--resume", expect=2).stderr


def room():
    """A run warns at its start if its last phase will not fit in memory; it starts nevertheless, since a larger machine can resume it."""
    with tempfile.TemporaryDirectory() as tmp:
        model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=4, hidden_size=256, intermediate_size=2048))
        ini = write_ini(os.path.join(tmp, "a.ini"), base(model, write_data(os.path.join(tmp, "d.jsonl")), os.path.join(tmp, "out"),
                                                         model__init="random", train__steps=4, **SHARED))
        said = {b: megatrain("run", ini, "--dry-run", "--set", f"memory.host_budget={b}").stderr for b in ("400MiB", "180MiB")}
        assert "there is no room" not in said["400MiB"], said["400MiB"]
        assert "from step 2 on each layer has weights of its own" in said["180MiB"], said["180MiB"]


for test in chosen([dense, windows, mixture, checkpoints, an_evaluation_that_is_owed_leaves_states_as_they_are, refusals, room]):
    test()
    print(f"ok {test.__name__}", flush=True)
