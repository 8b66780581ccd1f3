# SPDX-License-Identifier: Apache-2.0
"""Configurations of the mixtures of experts of tests/parity, and of others whose layers are of several kinds (parity_fixtures.py)."""

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


def config_of(name):
    like, more = {**MORE, **PACKED}.get(name, (name, {}))
    architecture, over = CASES[like]
    return {"architectures": [architecture], "model_type": MODEL_TYPES.get(like, like), **SMALL, **over, **more,
            **({"quantization_config": QUANTIZATION} if name in PACKED else {})}
