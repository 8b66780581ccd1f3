# SPDX-License-Identifier: Apache-2.0
"""What random combinations draw of each family: keys of config.json, the names of its linear layers and norms."""
from tiny import config

VOCAB = 96
ROPES = [None, {"rope_type": "linear", "factor": 2.0},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
         {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}]
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def some(r, likely=0.4):
    return r.random() < likely


def kinds(r, n):
    return [r.choice([SLIDING, FULL]) for _ in range(n)]


def gemma(r, n):
    return dict(head_dim=r.choice([8, 16, 24]), query_pre_attn_scalar=r.choice([8, 20]), sliding_window=9, layer_types=kinds(r, n),
                hidden_activation="gelu_pytorch_tanh")


def delta(r, n):
    """Layers with the gated delta rule, and at least one with attention."""
    return dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=r.choice([2, 4]), linear_key_head_dim=r.choice([8, 16]),
                linear_value_head_dim=r.choice([8, 24]), linear_conv_kernel_dim=r.choice([2, 4]), attn_output_gate=True,
                layer_types=[r.choice([FULL, LINEAR]) for _ in range(n - 1)] + [FULL])


def branches(r):
    """Layers of one branch each, in any order: Mamba 2, attention, a mixture, perhaps an MLP. transformers never ties them."""
    letters = ["M", "*", "E"] + r.choice([[], ["-"]])
    r.shuffle(letters)
    return dict(hybrid_override_pattern="".join(letters), num_hidden_layers=len(letters), tie_word_embeddings=False)


def granite_hybrid(r, n):
    return dict(attention_bias=some(r), embedding_multiplier=r.choice([1.0, 6.0]),
                residual_multiplier=r.choice([1.0, 0.22]), attention_multiplier=r.choice([0.05, 0.3]),
                logits_scaling=r.choice([1.0, 3.0]), position_embedding_type=r.choice([None, "nope", "rope"]),
                layer_types=[r.choice(["attention", FULL, "mamba", "linear_attention"]) for _ in range(n - 1)] + [FULL],
                shared_intermediate_size=r.choice([24, 40]), mamba_d_head=r.choice([8, 16]), mamba_d_conv=r.choice([2, 4]),
                mamba_n_groups=r.choice([1, 2]), mamba_d_state=r.choice([8, 16]), mamba_conv_bias=some(r, 0.7))


#: what a family has beside the keys that all have; n: layers
DENSE = {
    "llama": lambda r, n: dict(attention_bias=some(r), mlp_bias=some(r), head_dim=8),
    "mistral": lambda r, n: dict(head_dim=8, sliding_window=r.choice([None, 9])),
    "qwen2": lambda r, n: {},
    "qwen3": lambda r, n: dict(head_dim=16),
    "qwen3_5_text": delta,
    "gemma2": lambda r, n: dict(gemma(r, n), attn_logit_softcapping=r.choice([None, 2.5]), final_logit_softcapping=r.choice([None, 4.0])),
    "gemma3_text": lambda r, n: dict(gemma(r, n), final_logit_softcapping=r.choice([None, 4.0]), rope_theta=1e5,
                                     rope_local_base_freq=r.choice([500.0, 10000.0])),
    "olmo2": lambda r, n: dict(attention_bias=some(r)),
    "olmo3": lambda r, n: dict(sliding_window=9, layer_types=kinds(r, n)),
    "granite": lambda r, n: dict(attention_bias=some(r), mlp_bias=some(r), embedding_multiplier=r.choice([1.0, 6.0]),
                                 residual_multiplier=r.choice([1.0, 0.22]), attention_multiplier=r.choice([0.05, 0.3]),
                                 logits_scaling=r.choice([1.0, 3.0])),
    "granitemoehybrid": granite_hybrid,
    "phi3": lambda r, n: dict(sliding_window=r.choice([None, 9])),
    "exaone4": lambda r, n: (dict(sliding_window=9, sliding_window_pattern=2) if some(r) else
                             dict(sliding_window=None, layer_types=[FULL] * n)),
    "seed_oss": lambda r, n: dict(head_dim=16, attention_bias=some(r), attention_out_bias=some(r), mlp_bias=some(r), attention_dropout=0.0,
                                  residual_dropout=0.0),
    "hunyuan_v1_dense": lambda r, n: dict(head_dim=16, attention_bias=some(r)),
    "ernie4_5": lambda r, n: dict(head_dim=8, use_bias=some(r)),
    "smollm3": lambda r, n: dict(no_rope_layers=[r.choice([0, 1]) for _ in range(n)], attention_bias=some(r), mlp_bias=some(r)),
    "cwm": lambda r, n: dict(head_dim=16, sliding_window=9, layer_types=kinds(r, n), rope_scaling=ROPES[3]),
    "ministral": lambda r, n: dict(head_dim=16, sliding_window=9, layer_types=kinds(r, n)),
    "arcee": lambda r, n: dict(attention_bias=some(r), mlp_bias=some(r)),
    "nemotron": lambda r, n: dict(head_dim=r.choice([16, 24]), attention_bias=some(r), mlp_bias=some(r)),
    "starcoder2": lambda r, n: dict(use_bias=some(r), sliding_window=r.choice([None, 9])),
    "apertus": lambda r, n: dict(head_dim=r.choice([16, 24]), attention_bias=some(r), rope_scaling=ROPES[3]),
    "internlm3": lambda r, n: dict(head_dim=r.choice([8, 16]), qkv_bias=False, bias=False),
    "iquestcoder": lambda r, n: dict(head_dim=r.choice([8, 16]), attention_bias=some(r), mlp_bias=some(r)),
    "youtu": lambda r, n: dict(latents(r), rope_interleave=True),
    "ministral3": lambda r, n: dict(head_dim=8, sliding_window=r.choice([None, 9]), rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8, "llama_4_scaling_beta": r.choice([0.1, 0.3])}),
    "gemma4_text": lambda r, n: dict(head_dim=r.choice([8, 16]), global_head_dim=r.choice([16, 24]), sliding_window=9,
                                     layer_types=kinds(r, n - 1) + [FULL], attention_k_eq_v=some(r), num_global_key_value_heads=1,
                                     num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=r.choice([None, 4.0])),
    "muse_glimmer_text": lambda r, n: dict(head_dim=r.choice([8, 16]), sliding_window=9, layer_types=kinds(r, n), qk_scale_factor=r.choice([1.5, 3.0]),
                                           output_multiplier=r.choice([0.2, 0.7]), final_logit_softcapping=r.choice([3.0, 20.0]),
                                           post_norm_eps=r.choice([1e-8, 1e-4]), layer_rope_theta=[r.choice([0, 1e4]) for _ in range(n)]),
    "cohere": lambda r, n: dict(attention_bias=some(r), logit_scale=r.choice([0.0625, 0.5])),
    "cohere2": lambda r, n: dict(attention_bias=some(r), logit_scale=r.choice([0.25, 1.5]), sliding_window=9, layer_types=kinds(r, n)),
    "glm": lambda r, n: dict(head_dim=r.choice([16, 24]), attention_bias=some(r)),
    "glm4": lambda r, n: dict(head_dim=r.choice([16, 24]), attention_bias=some(r)),
}
INDEXED = dict(index_topk=64, index_head_dim=16, index_n_heads=2)  # all tokens of the documents
LATENT = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
MIXTURES = {
    "qwen3_moe": lambda r, n: dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16),
    "qwen2_moe": lambda r, n: dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=32),
    "granitemoe": lambda r, n: dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=24, attention_bias=some(r),
                                    embedding_multiplier=6.0, residual_multiplier=r.choice([1.0, 0.22]), attention_multiplier=r.choice([0.05, 0.3]),
                                    logits_scaling=r.choice([1.0, 3.0])),
    "granite4_moe": lambda r, n: dict(granite_hybrid(r, n), num_local_experts=5, num_experts_per_tok=2),
    "qwen3_next": lambda r, n: dict(delta(r, n), num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
                                    shared_expert_intermediate_size=r.choice([16, 32]), decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen3_5_moe_text": lambda r, n: dict(delta(r, n), num_experts=r.choice([4, 6]), num_experts_per_tok=r.choice([1, 2]), moe_intermediate_size=24,
                                          shared_expert_intermediate_size=r.choice([16, 32])),
    "nemotron_h": lambda r, n: dict(branches(r), head_dim=r.choice([8, 16, 24]), mamba_num_heads=r.choice([4, 6]), mamba_head_dim=r.choice([8, 16]),
                                    n_groups=r.choice([1, 2]), ssm_state_size=r.choice([8, 16]), conv_kernel=r.choice([2, 4]),
                                    use_conv_bias=some(r, 0.7), n_routed_experts=8, num_experts_per_tok=r.choice([2, 3]), **r.choice([dict(n_group=1), dict(n_group=4, topk_group=2)]),
                                    moe_intermediate_size=r.choice([16, 24]), moe_shared_expert_intermediate_size=r.choice([16, 40]),
                                    moe_latent_size=r.choice([None, 8, 24]), routed_scaling_factor=r.choice([1.0, 2.5]),
                                    norm_topk_prob=some(r, 0.7)),
    "mixtral": lambda r, n: dict(num_local_experts=6, num_experts_per_tok=2, head_dim=8),
    "deepseek_v3": lambda r, n: dict(LATENT, **latents(r), n_group=4, topk_group=2, n_shared_experts=r.choice([1, 2]), norm_topk_prob=True,
                                     first_k_dense_replace=r.choice([0, 1]), routed_scaling_factor=1.5),
    "deepseek_v2": lambda r, n: dict(LATENT, **latents(r), n_group=4, topk_group=2, topk_method=r.choice(["group_limited_greedy", "greedy"]),
                                     n_shared_experts=2, first_k_dense_replace=r.choice([0, 1]), routed_scaling_factor=2.0,
                                     norm_topk_prob=False),
    "deepseek_v32": lambda r, n: dict(LATENT, **latents(r, (16,)), **INDEXED, n_group=4, topk_group=2, n_shared_experts=1,
                                      first_k_dense_replace=r.choice([0, 1]), routed_scaling_factor=1.5, norm_topk_prob=True),
    "glm_moe_dsa": lambda r, n: dict(LATENT, **latents(r, (16,)), **INDEXED, n_shared_experts=1, routed_scaling_factor=1.8,
                                     mlp_layer_types=[r.choice(["dense", "sparse"]) for _ in range(n)], indexer_types=["full"] * n),
    "mimo_v2_flash": lambda r, n: dict(LATENT, head_dim=r.choice([24, 48]), v_head_dim=r.choice([8, 24]), num_attention_heads=8, num_key_value_heads=r.choice([1, 2]),
                                       attention_bias=some(r), sliding_window=9, attention_value_scale=r.choice([None, 0.7]),
                                       layer_types=kinds(r, n), mlp_layer_types=[r.choice(["dense", "sparse"]) for _ in range(n)],
                                       rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5),
                               sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.334))),
    "exaone_moe": lambda r, n: dict(head_dim=r.choice([16, 24]), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_group=r.choice([1, 4]),
                                    topk_group=1, num_shared_experts=r.choice([1, 2]), sliding_window=9, sliding_window_pattern=2,
                                    layer_types=kinds(r, n - 1) + [SLIDING], routed_scaling_factor=1.5, norm_topk_prob=True,
                                    mlp_layer_types=[r.choice(["dense", "sparse"]) for _ in range(n)]),
    "afmoe": lambda r, n: dict(head_dim=r.choice([16, 24]), num_experts=6, num_experts_per_tok=r.choice([2, 3]), moe_intermediate_size=24,
                               num_dense_layers=r.choice([0, 1]), num_shared_experts=r.choice([1, 2]), route_scale=r.choice([1.0, 1.7]),
                               sliding_window=9, layer_types=kinds(r, n), mup_enabled=some(r)),
    "mistral4": lambda r, n: dict(LATENT, **latents(r), n_group=r.choice([1, 4]), topk_group=1, n_shared_experts=r.choice([1, 2]),
                                  first_k_dense_replace=r.choice([0, 1]), routed_scaling_factor=r.choice([1.0, 1.5]), norm_topk_prob=True,
                                  rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
                                                   "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": r.choice([0.5, 1.0]),
                                                   "llama_4_scaling_beta": r.choice([0.1, 0.3])}),
    "glm4_moe_lite": lambda r, n: dict(LATENT, **latents(r, (16,)), n_shared_experts=1, routed_scaling_factor=1.8,
                                       mlp_layer_types=[r.choice(["dense", "sparse"]) for _ in range(n)]),
}
#: a decoder in a model of several kinds of input: architecture, family of the decoder, other keys, vision_config
SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=8)
NESTED = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3", "qwen3_vl_text", dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2,
                 patch_size=4, num_position_embeddings=16, deepstack_visual_indexes=[0])),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "mistral", SMALL),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "gemma3_text", SMALL),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", "gemma4_text", "gemma4_unified_text",
                       dict(patch_size=2, pooling_kernel_size=2, mm_posemb_size=4)),
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", "muse_glimmer_text", "muse_glimmer_text", dict(SMALL, patch_size=2, pos_emb_height=4,
                     pos_emb_width=4)),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "deepseek_v3", "deepseek_v3", dict(SMALL, patch_size=2, pos_emb_height=4,
                 pos_emb_width=4, pos_emb_time=2)),
}
#: those that read no other rope_scaling than their own
OWN_ROPE = {"qwen3_5_text", "apertus", "muse_glimmer", "gemma4_text", "gemma4_unified", "ministral3", "phi3", "hunyuan_v1_dense", "cwm", "deepseek_v2", "qwen3_vl", "ernie4_5", "olmo3", "gemma3", "gemma3_text"}
FUSED = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "glm": ATTENTION + ["gate_up_proj", "down_proj"],
         "glm4": ATTENTION + ["gate_up_proj", "down_proj"]}
#: layers with attention, and layers with Mamba 2
HYBRID = dict.fromkeys(("granitemoehybrid", "granite4_moe"), ["shared_mlp.input_linear", "shared_mlp.output_linear"])
MAMBA = ["in_proj", "out_proj"]
#: layers with the gated delta rule
DELTA = {"qwen3_5_text": ["in_proj_qkv", "in_proj_z", "linear_attn.out_proj"],
         "qwen3_5_moe_text": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "linear_attn.out_proj"], "qwen3_next": ["in_proj_qkvz", "linear_attn.out_proj"]}
#: MLPs without a gate
UNGATED = {"apertus": ["up_proj", "down_proj"], "arcee": ["up_proj", "down_proj"], "nemotron": ["up_proj", "down_proj"], "starcoder2": ["c_fc", "c_proj"]}
AFTER = ("olmo2", "olmo3", "exaone4")


def latents(r, q=(16, None)):
    return dict(q_lora_rank=r.choice(q), kv_lora_rank=r.choice([16, 24]), qk_nope_head_dim=r.choice([8, 16]),
                qk_rope_head_dim=r.choice([8, 16]), v_head_dim=r.choice([8, 24]))


def linear(family, over):
    """Names of the layers that adapters are drawn from; in mixtures, those of attention."""
    if "kv_lora_rank" in over:
        return (["q_a_proj", "q_b_proj"] if over["q_lora_rank"] else ["q_proj"]) + ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    if family in UNGATED:
        return ATTENTION + UNGATED[family]
    if family == "nemotron_h":
        return ATTENTION + ["in_proj"] + (["fc1_latent_proj", "fc2_latent_proj"] if over["moe_latent_size"] else [])
    if family in DELTA:
        return ATTENTION + (DELTA[family] if LINEAR in over["layer_types"] else []) + ([] if family in MIXTURES else MLP)
    if family in HYBRID:
        mixers = [MAMBA if t in ("mamba", "linear_attention") else ATTENTION for t in over["layer_types"]]
        return sum((m for m in (MAMBA, ATTENTION) if m in mixers), []) + HYBRID[family]
    return ATTENTION if family in MIXTURES else FUSED.get(family, ATTENTION + MLP)


def experts(family):
    """The parameters of all experts of a layer, as PEFT names them."""
    if family == "nemotron_h":
        return ["mixer.experts.up_proj", "mixer.experts.down_proj"]
    block = "block_sparse_moe" if family in ("granitemoe", "granite4_moe") else "mlp"
    return [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"]


def freezable(family):
    """Globs of tensors, each of some but not all."""
    if family == "nemotron_h":
        return ["*embeddings.*", "*.mixer.*_proj*", "*norm*", "*layers.0.*"]
    globs = ["*embed_tokens.*", "*.self_attn.*", "*norm*", "*layers.0.*"]
    return globs if family in MIXTURES else globs + ["*mlp.*"]


def norms(family):
    if family == "nemotron_h":
        return ["norm_f", "layers.0.norm"]
    first = "post_attention_layernorm" if family in AFTER else "input_layernorm"
    return ["model.norm", f"layers.0.{first}"] + (["q_norm"] if family in ("qwen3", "gemma3_text", *AFTER) else [])


def draw(r):
    """A family, its config.json, and the keys that count: those of the decoder."""
    of_nested_alone = {"muse_glimmer_text"}
    kind = r.choice(["dense"] * 5 + ["mixture"] * 3 + ["nested"])
    name = r.choice([f for f in {"dense": DENSE, "mixture": MIXTURES, "nested": NESTED}[kind] if f not in of_nested_alone])
    family = NESTED[name][1] if kind == "nested" else name
    group, kv = r.choice([(1, 2), (2, 2), (3, 1), (4, 1), (7, 1)])
    n = r.choice([1, 2, 3])
    over = dict(num_hidden_layers=n, vocab_size=VOCAB, hidden_size=kv * group * r.choice([8, 16]), num_key_value_heads=kv,
                num_attention_heads=kv * group, intermediate_size=r.choice([24, 40, 72]), bos_token_id=1, eos_token_id=2, pad_token_id=None,
                tie_word_embeddings=some(r))
    over.update((MIXTURES if family in MIXTURES else DENSE)[family](r, n))
    if name == "kimi_k25":
        over["q_lora_rank"] = 16  # transformers takes a q_proj for one of the vision tower
    if "kv_lora_rank" in over:
        over["num_key_value_heads"] = over["num_attention_heads"]
    if "mamba_d_head" in over:
        over["mamba_n_heads"] = 2 * over["hidden_size"] // over["mamba_d_head"]
    rope = None if family in MIXTURES or name in OWN_ROPE else r.choice(ROPES)
    if name == "phi3" and some(r):
        half = over["hidden_size"] // over["num_attention_heads"] // 4
        over.update(partial_rotary_factor=0.5, original_max_position_embeddings=16)
        rope = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [1.0 + i for i in range(half)]}
    if name == "hunyuan_v1_dense" and some(r):
        rope = {"type": "dynamic", "alpha": 10.0, "factor": 1.0}
    if name == "deepseek_v3" and some(r):
        rope = dict(ROPES[2], mscale=1.0, mscale_all_dim=0.7)
    if name == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    if rope:
        over["rope_scaling"] = rope
    cfg = nest(name, over) if kind == "nested" else config(family, **over)
    return name, family, cfg, over


def nest(name, over):
    arch, family, text_type, vision = NESTED[name]
    tied = over["tie_word_embeddings"]
    text = config(family, **{**over, "vocab_size": VOCAB + 8, "model_type": text_type, "tie_word_embeddings": not tied})
    if name == "qwen3_vl":
        vision = {**vision, "out_hidden_size": over["hidden_size"]}
    if name == "gemma4_unified":
        vision = {**vision, "mm_embed_dim": over["hidden_size"], "output_proj_dims": over["hidden_size"]}
        text["pad_token_id"] = VOCAB + 7  # which its class gives to what is not text
    if name == "gemma3":
        text["final_logit_softcapping"] = None
    return {"architectures": [arch], "model_type": name, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied,
            "image_token_id": 100, "image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102, "torch_dtype": "bfloat16",
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
            **(dict(out_hidden_size=64, projector_hidden_size=16) if name == "muse_glimmer" else {})}
