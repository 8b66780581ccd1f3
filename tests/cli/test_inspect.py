# SPDX-License-Identifier: Apache-2.0
"""What a layer computes, as text: the operations of papers, every weight of the model's files once, and FLOP that follow from them."""
import json
import math
import os

from tiny import fixture, megatrain, read_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
PARITY, MODELS = os.path.join(HERE, "..", "parity"), os.path.join(HERE, "..", "..", "configs", "models")

#: operations of a layer in their order, and what is kept of them
PAPERS = {
    (os.path.join(MODELS, "DeepSeek-V3.json"), 3): [
        "h = norm(x) {eps 1e-06}",
        "latents = linear(h)  keep latents  <- self_attn.q_a_proj.weight [1536, 7168], self_attn.kv_a_proj_with_mqa.weight [576, 7168]",
        "cq = head norm(latents[0..1536]) {eps 1e-06}",
        "q = linear(cq)  <- self_attn.q_b_proj.weight [24576, 1536]",
        "c = head norm(latents[1536..2048]) {eps 1e-06}",
        "kv = linear(c)  <- self_attn.kv_b_proj.weight [32768, 512]",
        "q[128 x 64 of 192 at 128], k[128 x 64 of 192 at 128] = rope(q[128 x 64 of 192 at 128], latents[2048..2112]) {theta 10000, 64 of a head, pairs}",
        "k[128 x 128 of 192 at 0] = copy(kv[128 x 128 of 256 at 0])",
        "o[128 x 128] = attend(q[128 x 192], k[128 x 192], kv[128 x 128 of 256 at 128])  keep out",
        "y = linear(o[128 x 128]) + x  <- self_attn.o_proj.weight [7168, 16384]",
        "experts: 8 of 256 for a token"],
    (fixture("gemma3"), 0): [
        "h = norm(x) {eps 1e-06, 1 + w}  <- input_layernorm.weight [40]", "head norm(qkv[5 x 16 of 16 at 0], qkv[80..96]) {eps 1e-06, 1 + w}  keep qkv",
        "{theta 10000, 16 of a head}", "{window 9}", "normed = norm(out) {eps 1e-06, 1 + w}  <- post_attention_layernorm.weight [40]",
        "y = sum(x, normed)", "act = glu(gate_up) {gelu_tanh}", "normed = norm(out) {eps 1e-06, 1 + w}  <- post_feedforward_layernorm.weight [40]"],
    ("Qwen/Qwen3.5-35B-A3B", 0): [
        "short_conv(rows[16 x 128 of 128 at 0], rows[16 x 128 of 128 at 2048], rows[16 x 256 of 256 at 4096])", "= delta_gates(",
        "delta_rule(conv[16 x 128 of 128 at 0], conv[16 x 128 of 128 at 2048], conv[32 x 128 of 128 at 4096], beta, g)  keep out",
        "= gated_norm(o[32 x 128], rows[16 x 256 of 256 at 8192])  <- linear_attn.norm.weight [128]"],
}

for (model, layer), lines in PAPERS.items():
    said = megatrain("inspect", model, "--layer", layer).stdout
    at = [said.find(line) for line in lines]
    assert -1 not in at and at == sorted(at), [line for line, i in zip(lines, at) if i < 0] or said

for name in ("gemma3", "deepseek_v3", "qwen3_next", "gpt_oss", "glm4_moe", "cohere", "granitemoe"):
    folder = fixture(name)
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    config = config.get("text_config", config)
    files = {k: math.prod(v[1]) for k, v in read_safetensors(os.path.join(folder, "model.safetensors")).items()}
    for layer in range(config["num_hidden_layers"]):
        told = json.loads(megatrain("inspect", folder, "--layer", layer, "--json").stdout)
        there = sum(n for k, n in files.items() if f"layers.{layer}." in k and "vision" not in k)
        assert there == sum(o["parameters"] for o in told) > 0, (name, layer, there, told)
        for o in told:
            if " = linear(" in o["operation"] and ".bias" not in o["tensors"]:
                assert o["flop"] == 2 * o["parameters"] and o["bytes"] == 2 * o["elements"] > 0, o

assert "has layers 0 to 60" in megatrain("inspect", os.path.join(MODELS, "DeepSeek-V3.json"), "--layer", 61, expect=2).stderr
assert "no stored model's name" in megatrain("inspect", "no/model", "--layer", 0, expect=3).stderr
