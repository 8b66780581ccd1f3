# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/parity for further mixtures of experts, as parity_fixtures.py does for other families: tiny
models in the layout of the releases, and the results of 20 steps with transformers and torch.optim.AdamW. Routers are
scaled up so that no choice is a near-tie, biases for choosing experts are not zero, and the experts that the first
step's tokens are sent to are recorded. Run by hand when a family changes; the tests need no torch.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/moe_fixtures.py [case...]

gpt_oss_mxfp4 has its experts packed as in the release, and in another file as decoded by transformers.
    ... scripts/reference/moe_fixtures.py --check FOLDER...
compares exported models with such experts with transformers: it loads them, decodes them to the
bits of the same folder exported in bf16, and computes the same logits from both.
"""
import copy
import json
import os
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parity import LR, ROWS, STEPS, double_throughout, from_config, record_routers, tokens_on_a_line, train_torch
import sums  # of tests/parity
from tiny import write_model

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity")
SMALL = dict(hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=96, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=10000.0, initializer_range=0.05,
             tie_word_embeddings=False, hidden_act="silu", pad_token_id=None, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16")
YARN = dict(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=64)

DELTA = dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=24, linear_conv_kernel_dim=4, attn_output_gate=True)

#: heads of 24 without windows, of 16 with one; the keys of the former are their values, too
GEMMA4 = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=16, global_head_dim=24, num_global_key_value_heads=2,
              attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=9, hidden_activation="gelu_pytorch_tanh",
              rope_parameters=dict(full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
                                   sliding_attention=dict(rope_type="default", rope_theta=1e4)), tie_word_embeddings=True)

#: twelve value heads of one key head: a job of eight, and one of four
MAMBA = dict(hidden_size=48, mamba_n_heads=12, mamba_n_groups=1, mamba_d_state=16, mamba_d_head=8, mamba_d_conv=4, mamba_expand=2,
             num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope",
             shared_intermediate_size=40, embedding_multiplier=6.0, residual_multiplier=0.22, attention_multiplier=0.3,
             logits_scaling=3.0, tie_word_embeddings=True, num_key_value_heads=1, num_attention_heads=3)

#: where a case is not named by it
MODEL_TYPES = {"granite4": "granitemoehybrid", "granite4_moe": "granitemoehybrid"}

#: family: architecture, keys over SMALL
CASES = {
    "olmoe": ("OlmoeForCausalLM", dict(num_attention_heads=5, num_key_value_heads=5, num_experts=16,
              num_experts_per_tok=4, intermediate_size=24)),
    "granitemoe": ("GraniteMoeForCausalLM", dict(num_attention_heads=5, num_key_value_heads=1, num_local_experts=7,
                   num_experts_per_tok=3, intermediate_size=24, embedding_multiplier=6.0, residual_multiplier=0.22,
                   attention_multiplier=0.3, logits_scaling=3.0, tie_word_embeddings=True)),
    "granite4": ("GraniteMoeHybridForCausalLM", dict(MAMBA, num_local_experts=0, num_experts_per_tok=0, intermediate_size=8)),
    "granite4_moe": ("GraniteMoeHybridForCausalLM", dict(MAMBA, mamba_n_groups=2, num_hidden_layers=2, layer_types=["linear_attention",
                     "full_attention"], num_local_experts=7, num_experts_per_tok=3, intermediate_size=24)),
    # a layer is one branch: Mamba 2, attention without positions, an MLP without a gate, or a mixture of such MLPs
    "nemotron_h": ("NemotronHForCausalLM", dict(hybrid_override_pattern="M-*EM", num_hidden_layers=5, mamba_num_heads=10, n_groups=1,
                   ssm_state_size=16, mamba_head_dim=8, conv_kernel=4, time_step_min=0.4, layer_norm_epsilon=1e-5, head_dim=16,
                   mlp_hidden_act="relu2", intermediate_size=56, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1,
                   moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, routed_scaling_factor=2.5, norm_topk_prob=True)),
    "gpt_oss": ("GptOssForCausalLM", dict(head_dim=16, num_local_experts=8, num_experts_per_tok=2, intermediate_size=24,
                sliding_window=9, layer_types=["sliding_attention", "full_attention"], rope_scaling=YARN,
                attention_bias=True, swiglu_limit=0.6)),
    "glm4_moe": ("Glm4MoeForCausalLM", dict(num_hidden_layers=3, head_dim=16, n_routed_experts=16, num_experts_per_tok=4,
                 n_group=4, topk_group=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1,
                 routed_scaling_factor=1.5, norm_topk_prob=True, attention_bias=True, use_qk_norm=True,
                 partial_rotary_factor=0.5)),
    "minimax_m2": ("MiniMaxM2ForCausalLM", dict(head_dim=16, rotary_dim=8, num_local_experts=12, num_experts_per_tok=2,
                   intermediate_size=24)),
    "dots1": ("Dots1ForCausalLM", dict(hidden_size=32, head_dim=8, n_routed_experts=8, num_experts_per_tok=2,
              moe_intermediate_size=16, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
              norm_topk_prob=True, sliding_window=None)),
    "solar_open": ("SolarOpenForCausalLM", dict(hidden_size=32, head_dim=8, n_routed_experts=8, num_experts_per_tok=3,
                   moe_intermediate_size=16, n_shared_experts=1)),
    "hy_v3": ("HYV3ForCausalLM", dict(hidden_size=32, head_dim=8, num_experts=8, num_experts_per_tok=2,
              moe_intermediate_size=16, num_shared_experts=1, router_scaling_factor=1.7)),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", dict(num_attention_heads=5, num_key_value_heads=1, moe_num_experts=8,
                     moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=2, tie_word_embeddings=True)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", dict(num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5,
                    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
                    n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=16,
                    n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True,
                    rope_scaling=dict(YARN, truncate=True, mscale=1.0, mscale_all_dim=0.7))),
    "deepseek_v2": ("DeepseekV2ForCausalLM", dict(num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=None,
                    kv_lora_rank=24, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=8,
                    num_experts_per_tok=2, n_group=4, topk_group=2, topk_method="group_limited_greedy",
                    moe_intermediate_size=16, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.0,
                    norm_topk_prob=False)),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", dict(num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5,
                      q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=32,
                      n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
                      attention_bias=True, routed_scaling_factor=1.8)),
    # more keys and sinks in layers with a window, whose rotary embedding is another; values narrower than keys, and scaled
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=1, head_dim=24,
                      v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
                      attention_bias=True, sliding_window=9, attention_value_scale=0.7, layer_types=["full_attention", "sliding_attention",
                      "sliding_attention"], mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5),
                               sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.334)))),
    "exaone_moe": ("ExaoneMoeForCausalLM", dict(num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1, head_dim=16, num_experts=8,
                   num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, num_shared_experts=1, first_k_dense_replace=1,
                   routed_scaling_factor=1.5, norm_topk_prob=True, sliding_window=9, sliding_window_pattern="LG",
                   layer_types=["sliding_attention", "full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse", "sparse"])),
    # a norm after the mixture's sum; gates of their own
    "afmoe": ("AfmoeForCausalLM", dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=8,
              num_experts_per_tok=3, num_dense_layers=1, num_shared_experts=2, moe_intermediate_size=16, route_scale=1.7, sliding_window=9,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"], mup_enabled=True)),
    # queries that grow with each eighth position; experts fused in files
    "mistral4": ("Mistral4ForCausalLM", dict(num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=24,
                 kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2,
                 n_group=4, topk_group=2, moe_intermediate_size=16, n_shared_experts=2, first_k_dense_replace=1,
                 routed_scaling_factor=1.5, norm_topk_prob=True, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=8.0,
                 original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                 llama_4_scaling_beta=0.3, partial_rotary_factor=0.25))),
    # documents shorter than index_topk: the indexer chooses all their tokens
    "deepseek_v32": ("DeepseekV32ForCausalLM", dict(num_hidden_layers=2, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16,
                     qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
                     topk_group=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5,
                     norm_topk_prob=True, index_topk=64, index_head_dim=16, index_n_heads=2,
                     rope_scaling=dict(YARN, truncate=True, mscale=1.0, mscale_all_dim=0.7))),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", dict(num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=16,
                    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
                    moe_intermediate_size=16, n_shared_experts=1, routed_scaling_factor=1.8, index_topk=64, index_head_dim=16,
                    index_n_heads=2, mlp_layer_types=["sparse", "dense", "sparse"], indexer_types=["full", "shared", "full"])),
    # the gated delta rule: more value heads than key heads, of another width; in the last layer attention with gates
    "qwen3_5_text": ("Qwen3_5ForCausalLM", dict(DELTA, num_hidden_layers=3,
                     layer_types=["linear_attention", "linear_attention", "full_attention"],
                     rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5,
                                          mrope_section=[2, 1, 1], mrope_interleaved=True))),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", dict(DELTA, linear_num_key_heads=1, linear_num_value_heads=3, num_experts=8,
                         num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
                         layer_types=["linear_attention", "full_attention"])),
    "qwen3_next": ("Qwen3NextForCausalLM", dict(DELTA, linear_value_head_dim=8, num_experts=8, num_experts_per_tok=3,
                   moe_intermediate_size=16, shared_expert_intermediate_size=24, norm_topk_prob=True,
                   layer_types=["linear_attention", "full_attention"])),
    "gemma4_text": ("Gemma4ForCausalLM", dict(GEMMA4, num_hidden_layers=3, final_logit_softcapping=4.0,
                    layer_types=["full_attention", "sliding_attention", "full_attention"])),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", dict(head_dim=16, num_experts=8, moe_topk=2, intermediate_size=24,
                       rope_scaling=dict(type="dynamic", alpha=10.0, factor=1.0))),
}
#: of the families above, with other keys
MORE = {
    "gemma4_moe": ("gemma4_text", dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
                   enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24)),
    # experts that take and give fewer dimensions
    "nemotron_super": ("nemotron_h", dict(hybrid_override_pattern="ME*E", num_hidden_layers=4, moe_latent_size=24)),
}
#: the same with experts in MXFP4
PACKED = {
    "gpt_oss_mxfp4": ("gpt_oss", dict(hidden_size=64, intermediate_size=32, num_local_experts=4)),
}
QUANTIZATION = dict(modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                            "lm_head"], quant_method="mxfp4")
#: kept in FP32 in a file of bf16, by what their names contain
KEPT_F32 = {"mimo_v2_flash": ("mlp.gate.weight",), "ernie4_5_moe": ("mlp.gate.weight",), "hunyuan_v1_moe": ("mlp.gate.wg.weight",)}
CHOOSING = ("e_score_correction_bias", "expert_bias")


def looks_trained(model, seed):
    """As parity.looks_trained, with decided routers."""
    g = torch.Generator().manual_seed(seed)

    def normal(p, std):
        p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float32) * std)

    with torch.no_grad():
        for name, p in list(model.named_parameters()) + list(model.named_buffers()):
            if "inv_freq" in name or "embed_scale" in name:
                continue
            if any(w in name for w in CHOOSING):
                normal(p, 0.2)
                continue
            if hasattr(model.config, "linear_num_key_heads") and "norm" in name:  # of 1 + w but for the outputs
                p.copy_(torch.rand(p.shape, generator=g) * 0.6 + (0.7 if "linear_attn.norm" in name else -0.3))
            elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                p.copy_(0.6 + torch.rand(p.shape, generator=g) * 0.6)
            elif name.endswith("router.proj.weight"):  # of a norm's output, over sqrt(hidden_size)
                normal(p, 1.6)
            elif ("q_norm" in name or "k_norm" in name) and "Gemma4" in type(model).__name__:  # scores are not scaled
                p.copy_(0.25 + torch.rand(p.shape, generator=g) * 0.4)
            elif "q_norm" in name or "k_norm" in name or "query_layernorm" in name or "key_layernorm" in name:
                p.copy_(0.5 + torch.rand(p.shape, generator=g) * 0.8)
            elif "norm" in name:
                p.copy_(0.5 + torch.rand(p.shape, generator=g) * 2)
            elif name.endswith("A_log"):
                p.copy_(torch.rand(p.shape, generator=g) * 2 - 1.5)
            elif name.endswith(".D"):
                p.copy_(0.5 + torch.rand(p.shape, generator=g))
            elif "in_proj" in name:
                normal(p, 0.2)
            elif name.endswith("conv1d.weight"):
                normal(p, 0.3)
                p[..., -1] += 0.7
            elif name.endswith("bias") or "sinks" in name:
                normal(p, 0.3)
            else:
                is_router = name.endswith((".gate.weight", ".router.weight", ".gate.wg.weight", ".router.layer.weight"))
                normal(p, 0.25 if is_router else 0.06)
                if p.dim() >= 2 and not is_router:
                    p[..., 3] *= 4
            p.copy_(p.to(torch.bfloat16).to(p.dtype))


def pack_experts(model, seed):
    """Random codes and scales; the model gets them as decoded by transformers. Returns the tensors of the release."""
    g, packed = torch.Generator().manual_seed(seed), {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            experts, cols, rows = p.shape
            blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(120, 124, (experts, rows, cols // 32), generator=g, dtype=torch.uint8)
            p.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
            packed.update({name + "_blocks": blocks, name + "_scales": scales})
    return packed


def load_decoded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True),
                                                dtype=torch.bfloat16, attn_implementation="eager")


def write_packed(folder, cfg, state, packed):
    """config.json and model.safetensors as in the release; decoded.safetensors as decoded by transformers."""
    write_model(folder, {**cfg, "quantization_config": QUANTIZATION})
    decoded = {k: state[k[:-len("_blocks")]] for k in packed if k.endswith("_blocks")}
    decoded = {k[:-len("_blocks")]: v for k, v in decoded.items()}
    state = {k: v for k, v in state.items() if k not in decoded}
    save_file({**state, **packed}, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    save_file(decoded, os.path.join(folder, "decoded.safetensors"), metadata={"format": "pt"})
    loaded = load_decoded(folder).state_dict()
    for name, want in decoded.items():
        assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name], want), name


def check_exported(folder, samples):
    """A folder with packed experts, and FOLDER-bf16, which has them decoded."""
    a, b = load_decoded(folder), AutoModelForCausalLM.from_pretrained(folder + "-bf16", dtype=torch.bfloat16,
                                                                      attn_implementation="eager")
    other = b.state_dict()
    for name, t in a.state_dict().items():
        assert torch.equal(t, other[name]), name
    ids = torch.tensor([samples[0]["input_ids"]])
    with torch.no_grad():
        assert torch.equal(a(input_ids=ids).logits, b(input_ids=ids).logits)
    print(folder, "is what transformers decodes", len(other), "tensors", flush=True)


def release_state(model):
    """Tensors as save_pretrained writes them: the layout of the releases."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        return load_file(os.path.join(tmp, "model.safetensors"))


def make(family, samples):
    like, more = {**MORE, **PACKED}.get(family, (family, {}))
    architecture, over = CASES[like]
    cfg = {"architectures": [architecture], "model_type": MODEL_TYPES.get(like, like), **SMALL, **over, **more}
    d = os.path.join(ROOT, family)
    write_model(d, cfg)
    hf = AutoConfig.from_pretrained(d)
    model = from_config(cfg, hf, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    looks_trained(model, 1)
    packed = pack_experts(model, 1) if family in PACKED else {}
    kept = CHOOSING + KEPT_F32.get(family, ())
    state = {k: (v if any(w in k for w in kept) else v.to(torch.bfloat16)).contiguous().clone()
             for k, v in release_state(model).items()}
    if packed:
        write_packed(d, cfg, state, packed)
    else:
        save_file(state, os.path.join(d, "model.safetensors"), metadata={"format": "pt"})
    double, bf16 = copy.deepcopy(model).double(), copy.deepcopy(model)
    routed, routed32 = record_routers(double, samples), record_routers(model, samples)
    assert routed == routed32, "a choice depends on rounding: take another seed"
    with double_throughout(hf):
        losses, norms = train_torch(double, samples, "f64")
    l32, n32 = train_torch(model, samples, "f32")
    l16, _ = train_torch(bf16, samples, "bf16")
    trained = release_state(double.float())
    sums.write(os.path.join(d, "trained.sums"), {k: v for k, v in trained.items() if not any(w in k for w in (*CHOOSING, ".indexer."))})
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
                "steps": STEPS, "rows": ROWS, "learning_rate": LR, "losses": losses, "norms": norms,
                "torch_f32": {"losses": l32, "norms": n32}, "torch_bf16": {"losses": l16}, "experts": routed}
    with open(os.path.join(d, "expected.json"), "w") as f:
        f.write(tokens_on_a_line(json.dumps(expected, indent=1)) + "\n")
    worst = max(abs(a / b - 1) for a, b in zip(l32, losses))
    print(family, sum(p.numel() for p in model.parameters()), losses[0], losses[-1], norms[0], norms[-1],
          f"torch f32 {worst:.1e} {max(abs(a / b - 1) for a, b in zip(n32, norms)):.1e}", flush=True)


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    samples = [json.loads(l) for l in open(os.path.join(ROOT, "data.jsonl"))]
    if sys.argv[1:2] == ["--check"]:
        for folder in sys.argv[2:]:
            check_exported(folder, samples)
        return
    for family in sys.argv[1:] or [*CASES, *MORE, *PACKED]:
        make(family, samples)


main()
