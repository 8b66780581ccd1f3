# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/parity: tiny models of each family, ragged data, and the results of 20 steps
with transformers and torch.optim.AdamW. Run by hand when a family changes; the tests need no torch.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/parity_fixtures.py [NAME]...
"""
import copy
import hashlib
import json
import os
import sys

import torch
import transformers

from parity import (CHOOSING, LR, ROWS, STEPS, double_throughout, load, record_routers, rel, release_state, specify,
                    tokens_on_a_line, train_torch)
import parity_mixtures
import sums  # of tests/parity
from seeded import PARITY as ROOT, fixture
from tiny import config, write_data

MIXTURES = [*parity_mixtures.CASES, *parity_mixtures.MORE, *parity_mixtures.PACKED]
SMALL = dict(num_hidden_layers=2, vocab_size=96, intermediate_size=40, bos_token_id=1, eos_token_id=2)

# seven query heads to a key head; llama3, linear and yarn scaling; windows; biases; tied and untied
CASES = {
    "llama": ("llama", dict(num_attention_heads=7, num_key_value_heads=1, hidden_size=56, head_dim=8,
        rope_scaling={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 32})),
    "mistral": ("mistral", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        sliding_window=9, rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "qwen2": ("qwen2", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, head_dim=8,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})),
    "qwen3": ("qwen3", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    # sandwich norms of 1 + w, scaled embeddings, two rotary tables of which one is scaled, capped logits
    "gemma3_text": ("gemma3_text", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, head_dim=16,
        num_hidden_layers=3, sliding_window=9, final_logit_softcapping=4.0, query_pre_attn_scalar=20, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "gemma2": ("gemma2", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, num_hidden_layers=3,
        sliding_window=9, query_pre_attn_scalar=20, attn_logit_softcapping=2.5, final_logit_softcapping=4.0,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", pad_token_id=None)),
    "olmo2": ("olmo2", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, pad_token_id=None, num_hidden_layers=3)),
    "olmo3": ("olmo3", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, sliding_window=9, pad_token_id=None,
        num_hidden_layers=4, layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                                            "original_max_position_embeddings": 32, "attention_factor": 1.2},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}})),
    "granite": ("granite", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, embedding_multiplier=6.0,
        residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=3.0, tie_word_embeddings=True, pad_token_id=None)),
    # without positions; a width of the MLP that is not intermediate_size
    "granitemoehybrid": ("granitemoehybrid", dict(num_attention_heads=3, num_key_value_heads=1, hidden_size=48, intermediate_size=8,
        shared_intermediate_size=40, layer_types=["attention", "attention"], mamba_n_heads=8, num_experts_per_tok=0, attention_bias=True, embedding_multiplier=6.0,
        residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=3.0, tie_word_embeddings=True, pad_token_id=None)),
    "phi3": ("phi3", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, sliding_window=20, pad_token_id=None,
        tie_word_embeddings=True, original_max_position_embeddings=16, partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 1.5, 3.0, 7.0]})),
    "exaone4": ("exaone4", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, sliding_window=9,
        sliding_window_pattern=2, num_hidden_layers=3, pad_token_id=None, rope_scaling={"rope_type": "llama3", "factor": 16.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "seed_oss": ("seed_oss", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        attention_bias=True, attention_out_bias=False, attention_dropout=0.0, residual_dropout=0.0, pad_token_id=None)),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        pad_token_id=None, rope_scaling={"type": "dynamic", "alpha": 10.0, "factor": 1.0})),
    "ernie4_5": ("ernie4_5", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, head_dim=8, use_bias=True,
        tie_word_embeddings=True, pad_token_id=None)),
    "smollm3": ("smollm3", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3,
        no_rope_layers=[1, 0, 1], tie_word_embeddings=True, pad_token_id=None)),
    "cwm": ("cwm", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, sliding_window=9,
        num_hidden_layers=3, pad_token_id=None, rope_scaling={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32})),
    "ministral": ("ministral", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, sliding_window=9,
        layer_types=["full_attention", "sliding_attention"], pad_token_id=None)),
    # queries that grow with each eighth position
    "ministral3": ("ministral3", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, head_dim=8, sliding_window=None,
        pad_token_id=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3})),
    # an MLP without a gate
    "arcee": ("arcee", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=8, mlp_bias=True,
        attention_bias=True, pad_token_id=None, rope_scaling={"rope_type": "yarn", "factor": 20.0,
            "original_max_position_embeddings": 64})),
    # LayerNorm with a bias, of weights less one; rotary embedding of half a head
    "nemotron": ("nemotron", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        partial_rotary_factor=0.5, norm_eps=1e-5, num_hidden_layers=3, pad_token_id=None)),
    # LayerNorm with a bias, biases of all products, a window in all layers
    "starcoder2": ("starcoder2", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, sliding_window=9,
        norm_epsilon=1e-5, tie_word_embeddings=True, pad_token_id=None)),
    "internlm3": ("internlm3", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, head_dim=8, pad_token_id=None,
        qkv_bias=True, bias=True, rope_scaling={"rope_type": "dynamic", "factor": 6.0})),
    "iquestcoder": ("iquestcoder", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, pad_token_id=None)),
    # latents in a dense model
    "youtu": ("youtu", dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=40, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, tie_word_embeddings=True, pad_token_id=None)),
    # an activation with trained numbers
    "apertus": ("apertus", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, pad_token_id=None,
        rms_norm_eps=1e-5, rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32})),
    # both branches of a layer read one norm, without a bias; pairs of dimensions are rotated, of layers with a window alone
    "cohere": ("cohere", dict(num_attention_heads=5, num_key_value_heads=1, hidden_size=40, attention_bias=True, logit_scale=0.6,
        layer_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=None, use_qk_norm=False)),
    "cohere2": ("cohere2", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, num_hidden_layers=3, sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], logit_scale=0.5, layer_norm_eps=1e-5,
        tie_word_embeddings=True, pad_token_id=None)),
    "glm": ("glm", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=24, pad_token_id=None,
        attention_bias=True)),
    "glm4": ("glm4", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16, pad_token_id=None,
        attention_bias=True)),
    # experts: in some layers, an odd number of them; in all layers
    "qwen3_moe": ("qwen3_moe", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, head_dim=16,
        num_hidden_layers=3, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1])),
    "qwen2_moe": ("qwen2_moe", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=32)),
    "mixtral": ("mixtral", dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=8,
        num_local_experts=6, num_experts_per_tok=2)),
}

# a decoder in a model of several kinds of input: its tensors' names, and others that are copied
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=8)
NESTED = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", ("qwen3", "qwen3_vl_text"), dict(num_attention_heads=4,
        num_key_value_heads=2, hidden_size=40, head_dim=16, num_hidden_layers=2,
        rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}),
        dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=40,
             num_position_embeddings=16, deepstack_visual_indexes=[0]), False),
    "mistral3": ("Mistral3ForConditionalGeneration", ("mistral", "mistral"), dict(num_attention_heads=4, num_key_value_heads=2,
        hidden_size=40, head_dim=16, sliding_window=None), VISION, False),
    "gemma3": ("Gemma3ForConditionalGeneration", ("gemma3_text", "gemma3_text"), dict(num_attention_heads=5,
        num_key_value_heads=1, hidden_size=40, head_dim=16, sliding_window=9, pad_token_id=None, final_logit_softcapping=None,
        layer_types=["sliding_attention", "full_attention"]), VISION, True),
    # heads of 24 without a window, of 8 with one; values of their own
    "gemma4": ("Gemma4ForConditionalGeneration", ("gemma4_text", "gemma4_text"), dict(num_attention_heads=5, num_key_value_heads=1,
        hidden_size=40, head_dim=8, global_head_dim=24, sliding_window=9, pad_token_id=103, final_logit_softcapping=4.0,
        layer_types=["sliding_attention", "full_attention"]), dict(VISION, num_key_value_heads=2, head_dim=8,
        position_embedding_size=16), True),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", ("gemma4_text", "gemma4_unified_text"), dict(num_attention_heads=4,
        num_key_value_heads=2, hidden_size=40, head_dim=8, global_head_dim=24, attention_k_eq_v=True, sliding_window=9,
        pad_token_id=103, final_logit_softcapping=4.0, layer_types=["sliding_attention", "full_attention"]),
        dict(mm_embed_dim=40, mm_posemb_size=4, patch_size=2, pooling_kernel_size=2, output_proj_dims=40), True),
    # embeddings with a norm, queries and keys with one without a weight, gates of their own, another eps after branches
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", ("muse_glimmer_text", "muse_glimmer_text"), dict(num_attention_heads=5,
        num_key_value_heads=1, hidden_size=40, head_dim=16, num_hidden_layers=3, sliding_window=9, qk_scale_factor=1.7,
        output_multiplier=0.5, final_logit_softcapping=3.0, post_norm_eps=1e-4, layer_rope_theta=[1e4, 0, 1e4], pad_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=2, pos_emb_height=4,
             pos_emb_width=4), False),  # and TOP
    # latents and experts
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", ("deepseek_v3", "deepseek_v3"), dict(num_attention_heads=3,
        num_key_value_heads=3, hidden_size=40, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=8,
        n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True, pad_token_id=None),
        dict(VISION, patch_size=2, pos_emb_height=4, pos_emb_width=4, pos_emb_time=2), False),
}


#: further keys at the top
TOP = {"muse_glimmer": dict(out_hidden_size=64, projector_hidden_size=16)}


#: not compared: what is never trained, and what is copied
COPIED = (*CHOOSING, ".indexer.", "visual.", "vision_tower.", "multi_modal_projector.", "vision_adapter.", "vision_projection.",
          "mm_projector.", "embed_vision.", "vision_embedder.")


def config_of(name):
    if name in MIXTURES:
        return parity_mixtures.config_of(name)
    if name not in NESTED:
        family, over = CASES[name]
        return config(family, **{**SMALL, **over})
    arch, (family, text_type), over, vision, tied = NESTED[name]
    text = config(family, **{**SMALL, **over, "vocab_size": 104, "model_type": text_type})
    return {"architectures": [arch], "model_type": name, "text_config": {**text, "tie_word_embeddings": not tied},
            "vision_config": vision, "tie_word_embeddings": tied, "image_token_id": 100, "image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102, "torch_dtype": "bfloat16",
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, **TOP.get(name, {})}


#: where with 1 a gradient is 0 but for rounding, whose sign AdamW makes a step of, bf16 chooses other experts (glm_moe_dsa), or
#: adapters are badly conditioned (the last two)
SEEDS = {"gpt_oss": 2, "glm_moe_dsa": 2, "qwen3_5_text": 2, "ernie4_5_moe": 2}
#: whose weights are kept: of six seeds, none leaves the gradients' singular vectors and projections far enough from degenerate ones for
#: all limits of optimizers/
STORED = ("qwen2_moe",)
AUX = {"qwen2_moe": 0.05}  # coefficient of the loss that balances experts


def packed_experts(name, t):
    """Codes and scales in place of the experts of gpt-oss, as it is released."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, cols, rows = t.shape
        return {name + "_blocks": ("U8", [experts, rows, cols // 32, 16], "uniform(0,256)"),
                name + "_scales": ("U8", [experts, rows, cols // 32], "uniform(120,124)")}


def write_decoded(name):
    """What transformers decodes packed experts to, as digests of their bf16."""
    state = load(fixture(name), torch.bfloat16).state_dict()
    digests = {k: hashlib.sha256(v.contiguous().view(torch.int16).numpy().tobytes()).hexdigest() for k, v in state.items()
               if k.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    with open(os.path.join(ROOT, name, "decoded.json"), "w") as f:
        f.write(json.dumps(digests, indent=1) + "\n")


def make(name, samples):
    d, packed = os.path.join(ROOT, name), name in parity_mixtures.PACKED
    mixture = name in MIXTURES
    if name not in STORED:
        specify(d, config_of(name), router=0.25 if mixture else 0.5, kept=parity_mixtures.KEPT_F32.get(name, ()),
                packed=packed_experts if packed else None, seed=SEEDS.get(name, 1))
    if packed:
        write_decoded(name)
    model = load(fixture(name))
    double, bf16, aux = copy.deepcopy(model).double(), copy.deepcopy(model), AUX.get(name, 0.0)
    routed = record_routers(double, samples)
    assert routed == record_routers(model, samples), "a choice depends on rounding: take another seed"
    with double_throughout(model.config):
        losses, norms, *balance = train_torch(double, samples, "f64", aux=aux)
    l32, n32, *_ = train_torch(model, samples, "f32", aux=aux)
    l16, *_ = train_torch(bf16, samples, "bf16", aux=aux)
    trained = release_state(double.float())
    sums.write(os.path.join(d, "trained.sums"), {k: v for k, v in trained.items() if not any(w in k for w in COPIED)})
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
                "steps": STEPS, "rows": ROWS, "learning_rate": LR, "losses": losses, "norms": norms,
                "torch_f32": {"losses": l32, "norms": n32}, "torch_bf16": {"losses": l16}}
    if aux:
        expected.update(router_aux_loss=aux, aux_losses=balance[0])
    if routed:
        expected["experts"] = routed
    with open(os.path.join(d, "expected.json"), "w") as f:
        f.write(tokens_on_a_line(json.dumps(expected, indent=1)) + "\n")
    print(name, sum(p.numel() for p in model.parameters()), losses[0], losses[-1], norms[0], norms[-1],
          f"torch f32 {max(map(rel, l32, losses)):.1e} {max(map(rel, n32, norms)):.1e}", flush=True)


def main():
    torch.set_num_threads(1)  # products are too small for more threads
    transformers.utils.logging.disable_progress_bar()
    data = write_data(os.path.join(ROOT, "data.jsonl"), n=STEPS * ROWS, seed=11, longest=32, vocab=96)
    samples = [json.loads(l) for l in open(data)]
    failed = []
    for name in sys.argv[1:] or [*CASES, *NESTED, *MIXTURES]:
        try:
            make(name, samples)
        except Exception as e:  # the other families
            print("FAIL", name, type(e).__name__, str(e)[:600], flush=True)
            failed.append(name)
    sys.exit(f"failed: {failed}" if failed else 0)


main()
