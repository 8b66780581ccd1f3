# SPDX-License-Identifier: Apache-2.0
"""Folders of export --quantize are those that transformers has read: served.json, of make_served.py, has their sums, and the
log-probabilities that transformers computed in f32 of what compressed-tensors decodes, in bf16. They train, too."""
import hashlib
import json
import os
import random
import tempfile

from test_packed import bf16_bytes, write_decoded
from tiny import BINARY, base, config, megatrain, write_ini, write_model, write_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
FORMATS = ["nvfp4", "mxfp4", "int4", "fp8"]
DECODED = {"fp8": "F32"}  # by transformers itself
IDS = random.Random(3).choices(range(256), k=48)


def write_source(path):
    """A model of two layers whose weights this code alone makes."""
    r, c = random.Random(11), config(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=64)
    shapes = {"model.embed_tokens.weight": [272, 128], "lm_head.weight": [272, 128], "model.norm.weight": [128]}
    for layer in range(2):
        shapes.update({f"model.layers.{layer}.{n}.weight": s for n, s in {
            "self_attn.q_proj": [256, 128], "self_attn.k_proj": [128, 128], "self_attn.v_proj": [128, 128],
            "self_attn.o_proj": [128, 256], "self_attn.q_norm": [64], "self_attn.k_norm": [64], "mlp.gate_proj": [256, 128],
            "mlp.up_proj": [256, 128], "mlp.down_proj": [128, 256], "input_layernorm": [128],
            "post_attention_layernorm": [128]}.items()})
    tensors = {}
    for name, shape in shapes.items():
        n = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        draw = (lambda: r.uniform(-0.2, 0.2) * r.random()) if len(shape) == 2 else (lambda: r.uniform(0.8, 1.2))
        tensors[name] = "BF16", shape, b"".join(bf16_bytes(draw()) for _ in range(n))
    write_safetensors(os.path.join(write_model(path, c), "model.safetensors"), tensors)
    return path


def export(tmp, form):
    out = os.path.join(tmp, form)
    megatrain("-q", "export", os.path.join(tmp, "source"), out, "--quantize", form)
    with open(os.path.join(out, "model.safetensors"), "rb") as f:
        return out, hashlib.sha256(f.read()).hexdigest()


def check(tmp, form, want, data):
    folder, got = export(tmp, form)
    assert got == want["sha256"], form + ": other bytes than transformers has read: see make_served.py"
    with open(os.path.join(folder, "config.json")) as f:
        assert json.load(f)["quantization_config"] == want["quantization_config"], form
    ini = write_ini(f"{folder}.ini", base(folder, data, folder + "-out", model__init="weights", data__eval=data, train__steps=1,
                                          adapter__kind="lora"))
    decoded = write_decoded(folder + "-decoded", folder, DECODED.get(form, "BF16"))
    megatrain("score", ini, "--model", decoded, "--data", data, "--tokens", "--out", folder + ".jsonl")
    with open(folder + ".jsonl") as f:
        logprobs = json.loads(f.readline())["token_logprobs"]
    worst = max(abs(a - b) for a, b in zip(logprobs, want["logprobs"], strict=True))
    assert worst < 1e-5, f"{form}: transformers' log-probabilities differ by {worst}"
    megatrain("run", ini)


def losses_are_compared(tmp, data):
    """export --eval: the losses that eval has."""
    ini = write_ini(f"{tmp}/eval.ini", base("nowhere", data, f"{tmp}/eval", data__eval=data))
    loss = lambda model: json.loads(megatrain("eval", ini, "--json", "--model", model, "--set", "model.init=weights").stdout)["loss"]
    said = megatrain("export", f"{tmp}/source", f"{tmp}/int4-again", "--quantize", "int4", "--eval", ini).stdout
    assert f"loss {loss(f'{tmp}/source'):.6f} before, {loss(f'{tmp}/int4'):.6f} after" in said, said


def main():
    with open(os.path.join(HERE, "served.json")) as f:
        wanted = json.load(f)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        write_source(os.path.join(tmp, "source"))
        data = os.path.join(tmp, "data.jsonl")
        with open(data, "w") as f:
            f.write(json.dumps({"input_ids": IDS, "labels": [-100] + IDS[1:]}) + "\n")
        for form in FORMATS:
            check(tmp, form, wanted[form], data)
        losses_are_compared(tmp, data)
        megatrain("export", f"{tmp}/source", f"{tmp}/no", "--quantize", "int3", expect=2)
    print("ok")


if __name__ == "__main__":
    main()
