# SPDX-License-Identifier: Apache-2.0
"""What was trained is what is served: a merged folder has the loss of the run that was aware of the merge, in all bits,
wherever the base was; and what cannot be is refused by name."""
import json
import os
import shutil
import sys
import tempfile

import test_released as released
from tiny import POISON, SLOW, base, config, losses, megatrain, metrics, with_weights, write_data, write_ini, write_model

STEPS = 4
EXPERTS = {"adapter__targets": "q_proj, experts.gate_up_proj, experts.down_proj", "adapter__rslora": "on"}
#: model, format, more keys
CASES = {
    "lora": ("dense", "bf16", {}),
    "dora of nf4 in f32": ("dense", "nf4", {"adapter__kind": "dora", "model__dtype": "f32"}),
    "nf4": ("dense", "nf4", {}),
    "dora of fp8": ("dense", "fp8", {"adapter__kind": "dora"}),
    "fp8 recomputed": ("dense", "fp8", {"adapter__merge_scale": "recomputed"}),
    "experts of nf4": ("qwen3_moe", "nf4", {**EXPERTS}),
    "each expert of fp8": ("qwen3_moe", "fp8", {"adapter__targets": "all-linear, *.experts.*"}),
    "mxfp4": ("gpt_oss", "mxfp4", {**EXPERTS}),
    "mxfp4 recomputed": ("gpt_oss", "mxfp4", {**EXPERTS, "adapter__merge_scale": "recomputed"}),
    "experts of gpt-oss": ("gpt_oss", "bf16", {**EXPERTS}),
    "nf4 to bf16": ("of nf4", "bf16", {"adapter__kind": "dora"}),
    "nvfp4": ("of nvfp4", "nvfp4", {}),
    "nvfp4 made at the load": ("dense", "nvfp4", {"adapter__merge_scale": "recomputed"}),
    "int4": ("dense", "int4", {}),
    "int4 recomputed": ("dense", "int4", {"adapter__merge_scale": "recomputed"}),
    "mxfp4 of dense": ("dense", "mxfp4", {}),
    "each expert of int4": ("qwen3_moe", "int4", {"adapter__targets": "all-linear, *.experts.*"}),
    "nvfp4 recomputed": ("of nvfp4-modelopt", "nvfp4", {"adapter__merge_scale": "recomputed"}),
    "dora of rows of fp8": ("of fp8-rows", "fp8", {"adapter__kind": "dora"}),
    "files of nf4": ("of nf4", "nf4", {"adapter__targets": "q_proj, down_proj", "adapter__train_also": "model.norm"}),
}
PLACEMENTS = {
    "halves": {"memory__unit": "half", "memory__slots": 2, "memory__adapters": "resident", "memory__activations": "recompute"},
    "drive": {"memory__base": "disk", "memory__activations": "offload"},
    "files": {"memory__base": "files"},
    "lanes": {"device__gpus": "2", "device__map": "data", "train__groups": 2},
}


def run(tmp, name, model, data, form, more, expect=0):
    out = os.path.join(tmp, name.replace(" ", "-"))
    keys = {"model__init": "weights", "model__dtype": "bf16", "adapter__kind": "lora", "adapter__rank": 4, "train__steps": STEPS,
            "train__learning_rate": "1e-2", "eval__every": 2, "adapter__merge_aware": form, **more}
    p = megatrain("run", write_ini(out + ".ini", base(model, data, out, **keys)), env=POISON, expect=expect)
    return out, p.stderr


def evaluations(out):
    return [(m["eval_loss"], m["merged_share"]) for m in metrics(out) if "eval_loss" in m]


def models(tmp, data):
    size = {"hidden_size": 64, "intermediate_size": 96}
    out = {"dense": write_model(os.path.join(tmp, "dense"), config(**size))}
    for name in "qwen3_moe", "gpt_oss":
        out[name] = write_model(os.path.join(tmp, name), config(name, hidden_size=64, moe_intermediate_size=64, intermediate_size=64))
    out = {n: with_weights(tmp, m, data, n + "-seed") for n, m in out.items()}
    out["of nf4"] = os.path.join(tmp, "packed-nf4")
    megatrain("export", out["dense"], out["of nf4"], "--quantize", "nf4")
    for form in "nvfp4", "nvfp4-modelopt", "fp8-rows":
        released.write(os.path.join(tmp, "packed-" + form), out["dense"], form)
        out["of " + form] = os.path.join(tmp, "packed-" + form)
    return out


def check_merged(tmp, name, model, data, form, more):
    packs = {} if form == "bf16" or "packed-" in model else {"model__base_dtype": form}
    out, said = run(tmp, name, model, data, form, {**packs, **more})
    loss, share = evaluations(out)[-1]
    assert 0 < share <= 1 and "differ from the base" in said, said
    merged = out + "-merged"
    megatrain("export", "--merge", os.path.join(out, f"checkpoint-{STEPS}"), merged)
    megatrain("verify", merged)
    with open(os.path.join(merged, "config.json")) as f:
        assert ("quantization_config" in json.load(f)) == (form != "bf16"), name
    ini = write_ini(out + "-e.ini", base(merged, data, out + "-e", model__init="weights",
                                         model__dtype=more.get("model__dtype", "bf16")))
    got = json.loads(megatrain("-q", "eval", ini, "--json").stdout)["loss"]
    if "adapter__train_also" not in more or more.get("model__dtype") != "f32":
        assert got == loss, f"{name}: the merged model has loss {got!r}, the run {loss!r}"
    resumed = json.loads(megatrain("-q", "eval", out + ".ini", "--json", "--model", os.path.join(out, f"checkpoint-{STEPS}")).stdout)
    assert resumed["loss"] == loss, name
    return out, packs


def check_placements(tmp, model, data, form, more, packs):
    for name, place in PLACEMENTS.items():
        want, _ = run(tmp, name + " plain", model, data, form, {**packs, **more, **{k: v for k, v in place.items() if "train" in k}})
        got, _ = run(tmp, name, model, data, form, {**packs, **more, **place, "memory__nvme_paths": tmp})
        assert (losses(got), evaluations(got)) == (losses(want), evaluations(want)), f"{name}: another result"


def check_refusals(tmp, models, data):
    def refuse(word, form, more, model="dense"):
        said = run(tmp, "refused", models[model], data, form, more, expect=2)[1]
        assert word in said, said
        shutil.rmtree(os.path.join(tmp, "refused"), ignore_errors=True)
    refuse("model.base_dtype", "int4", {})
    refuse("is fp8: name that format", "nf4", {"model__base_dtype": "fp8"})
    refuse("adapter.dropout", "bf16", {"adapter__dropout": 0.1})
    refuse("mlp.gate.weight", "bf16", {"adapter__targets": "mlp.gate"}, "qwen3_moe")
    refuse("merge_scale", "nf4", {"adapter__merge_scale": "recomputed"}, "of nf4")
    refuse("adapter.merge_aware", "bf16", {"adapter__merge_every": 2})
    out, said = run(tmp, "nothing", models["dense"], data, "nf4", {"model__base_dtype": "nf4", "train__learning_rate": "1e-9"})
    assert "nothing was learned" in said and evaluations(out)[-1][1] == 0, said


def main():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        data = write_data(os.path.join(tmp, "train.jsonl"))
        found = models(tmp, data)
        for i, (name, (model, form, more)) in enumerate(CASES.items()):
            if not SLOW or i < 2:
                _, packs = check_merged(tmp, name, found[model], data, form, more)
            if name == "files of nf4":
                check_placements(tmp, found[model], data, form, {**more, "adapter__kind": "dora"}, packs)
        check_refusals(tmp, found, data)
    print("ok")


main()
