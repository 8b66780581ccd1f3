/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "model/layout.h"
#include "model/part.h"
#include "model/ranges.h"
#include "param_of.h"
#include "test.h"

static struct mt_hf_config cfg;

static int lay_out(struct mt_layout **l, const char *const *freeze, size_t n_freeze, struct mt_cut cut,
                   struct mt_err *err)
{
    return mt_layout_create(
        l, &cfg, &(struct mt_layout_params){freeze, n_freeze, .decay_embeddings = true, .cut = cut}, err);
}

static struct mt_layout *layout_of(const char *json, bool decay)
{
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    if (mt_hf_config_parse(&cfg, json, strlen(json), "config.json", &err) ||
        mt_layout_create(&l, &cfg, &(struct mt_layout_params){.decay_embeddings = decay, .cut = mt_cut_layer}, &err))
        fail_msg("%s", err.msg);
    return l;
}

#define SMALL(arch, more)                                                                          \
    "{\"architectures\": [\"" arch "\"], \"hidden_size\": 24, \"intermediate_size\": 40, "         \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"num_key_value_heads\": 1, "           \
    "\"head_dim\": 16, \"vocab_size\": 50" more "}"

static const struct {
    const char *json;
    uint64_t n_params; /* as their cards and transformers say */
} published[] = {
    {"{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 14336, "
     "\"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"vocab_size\": 128256}",
     UINT64_C(8030261248)},
    {"{\"architectures\": [\"MistralForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 14336, "
     "\"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"vocab_size\": 32000}",
     UINT64_C(7241732096)},
    {"{\"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 3584, \"intermediate_size\": 18944, "
     "\"num_hidden_layers\": 28, \"num_attention_heads\": 28, \"num_key_value_heads\": 4, \"vocab_size\": 152064}",
     UINT64_C(7615616512)},
    {"{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": 1024, \"intermediate_size\": 3072, "
     "\"num_hidden_layers\": 28, \"num_attention_heads\": 16, \"num_key_value_heads\": 8, \"head_dim\": 128, "
     "\"vocab_size\": 151936, \"tie_word_embeddings\": true}",
     UINT64_C(596049920)},
};

TEST(published_models_have_their_parameter_counts)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(published); i++) {
        struct mt_layout *l = layout_of(published[i].json, true);
        uint64_t sum = 0;
        for (size_t t = 0; t < l->n_tensors; t++)
            sum += l->tensors[t].n;
        assert_true(l->n_params == published[i].n_params && sum == published[i].n_params);
        mt_layout_destroy(&l);
    }
}

static const char *const variants[] = {
    SMALL("LlamaForCausalLM", ""),
    SMALL("LlamaForCausalLM", ", \"attention_bias\": true, \"mlp_bias\": true, \"tie_word_embeddings\": true"),
    SMALL("MistralForCausalLM", ""),
    SMALL("Qwen2ForCausalLM", ", \"tie_word_embeddings\": true"),
    SMALL("Qwen3ForCausalLM", ", \"attention_bias\": true"),
    SMALL("ArceeForCausalLM", ", \"mlp_bias\": true"),
    SMALL("NemotronForCausalLM", ""),
    SMALL("Starcoder2ForCausalLM", ""),
    SMALL("GraniteMoeHybridForCausalLM", ", \"num_local_experts\": 0, \"shared_intermediate_size\": 40, \"layer_types\": "
                                         "[\"attention\", \"attention\"]"),
};

/* Of a norm's parameter, whose bias follows its weight. */
#define NORM(n) ((n) * (cfg.norm.biased ? 2 : 1))

static void check_param(const struct mt_layout *l, size_t unit, const char *part, int role, size_t want)
{
    const struct mt_unit *u = &l->units[unit];
    struct mt_param p = param_of(l, unit, part, role);
    size_t at = p.at;
    assert_int_equal(p.n, want);
    if (!p.n)
        return;
    assert_int_equal(p.at % 64, 0);
    assert_true(p.at + p.n <= u->n_elems);
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) /* its tensors lie end to end */
        if (l->tensors[i].first == at && at < p.at + p.n)
            at += l->tensors[i].n;
    assert_int_equal(at, p.at + p.n);
}

TEST(tensors_tile_their_units)
{
    for (size_t v = 0; v < MT_ARRAY_LEN(variants); v++) {
        struct mt_layout *l = layout_of(variants[v], true);
        size_t next = 0;
        assert_int_equal(l->n_units, 4);
        for (size_t u = 0; u < l->n_units; u++) {
            const struct mt_unit *unit = &l->units[u];
            size_t end = 0;
            assert_int_equal(unit->first_tensor, next);
            assert_int_equal(unit->n_elems % MT_JOIN_BLOCK, 0);
            for (size_t i = next; i < next + unit->n_tensors; i++) {
                const struct mt_tensor *t = &l->tensors[i];
                size_t n = 1;
                for (int d = 0; d < t->n_dims; d++)
                    n *= (size_t)t->shape[d];
                assert_true(t->first >= end && t->first - end < 64);
                assert_int_equal(t->n, n);
                assert_int_equal(t->unit, u);
                assert_ptr_equal(mt_layout_find(l, t->name), t);
                end = t->first + t->n;
            }
            assert_true(end <= unit->n_elems);
            next += unit->n_tensors;
        }
        assert_int_equal(next, l->n_tensors);
        check_param(l, 1, "attention", MT_ATTENTION_NORM, NORM(24));
        check_param(l, 1, "attention", MT_ATTENTION_QKV, 5 * 16 * 24);
        check_param(l, 1, "attention", MT_ATTENTION_QKV_BIAS, mt_layer_of(&cfg, 0)->qkv_bias ? 5 * 16 : 0);
        check_param(l, 1, "attention", MT_ATTENTION_Q_NORM, mt_layer_of(&cfg, 0)->qk_norm ? 16 : 0);
        check_param(l, 1, "attention", MT_ATTENTION_K_NORM, mt_layer_of(&cfg, 0)->qk_norm ? 16 : 0);
        check_param(l, 1, "attention", MT_ATTENTION_OUT, 24 * 48);
        check_param(l, 1, "attention", MT_ATTENTION_OUT_BIAS, mt_layer_of(&cfg, 0)->o_bias ? 24 : 0);
        check_param(l, 1, "mlp", MT_MLP_NORM, NORM(24));
        size_t width = mt_layer_of(&cfg, 0)->ungated ? 40 : 80;
        check_param(l, 1, "mlp", MT_MLP_GATE_UP, width * 24);
        check_param(l, 1, "mlp", MT_MLP_GATE_UP_BIAS, mt_layer_of(&cfg, 0)->mlp_bias ? width : 0);
        check_param(l, 1, "mlp", MT_MLP_DOWN, 24 * 40);
        check_param(l, 1, "mlp", MT_MLP_DOWN_BIAS, mt_layer_of(&cfg, 0)->mlp_bias ? 24 : 0);
        check_param(l, 0, "embed", MT_EMBED_TABLE, 50 * 24);
        check_param(l, 3, "head", MT_HEAD_TABLE, cfg.tied ? 0 : 50 * 24);
        check_param(l, 3, "head", MT_HEAD_NORM, NORM(24));
        assert_int_equal(mt_layout_find(l, "lm_head.weight") != NULL, !cfg.tied);
        mt_layout_destroy(&l);
        assert_null(l);
    }
}

/* Cut or not: the same tensors in the same order, each in the block that names its file of a checkpoint. */
TEST(halves_are_the_same_model)
{
    for (size_t v = 0; v < MT_ARRAY_LEN(variants); v++) {
        struct mt_layout *whole = layout_of(variants[v], true), *l = NULL;
        assert_int_equal(lay_out(&l, NULL, 0, mt_cut_half, NULL), 0);
        assert_int_equal(l->n_units, 6);
        assert_int_equal(l->n_tensors, whole->n_tensors);
        assert_true(l->n_params == whole->n_params);
        for (size_t t = 0; t < l->n_tensors; t++) {
            const struct mt_tensor *a = &whole->tensors[t], *b = &l->tensors[t];
            const struct mt_unit *u = &l->units[b->unit];
            assert_string_equal(a->name, b->name);
            assert_int_equal(a->n, b->n);
            assert_int_equal(whole->units[a->unit].block, u->block);
            if (u->kind == MT_UNIT_LAYER)
                assert_string_equal(l->parts[u->first_part].kind->name,
                                    strstr(a->name, "mlp") || strstr(a->name, "post_attention") ? "mlp" : "attention");
        }
        assert_string_equal(l->units[1].name, "layer 0 attention");
        assert_string_equal(l->units[4].name, "layer 1 mlp");
        check_param(l, 1, "attention", MT_ATTENTION_OUT, 24 * 48);
        check_param(l, 1, "mlp", MT_MLP_DOWN, 0);
        check_param(l, 2, "mlp", MT_MLP_NORM, NORM(24));
        check_param(l, 2, "attention", MT_ATTENTION_QKV, 0);
        mt_layout_destroy(&whole);
        mt_layout_destroy(&l);
    }
}

TEST(decay_spares_biases_norms_and_perhaps_embeddings)
{
    for (int embeddings = 0; embeddings < 2; embeddings++) {
        struct mt_layout *l = layout_of(variants[4], embeddings);
        for (size_t i = 0; i < l->n_tensors; i++) {
            const char *name = l->tensors[i].name;
            bool none = strstr(name, "bias") || strstr(name, "norm");
            bool table = strstr(name, "embed_tokens") || strstr(name, "lm_head");
            assert_int_equal(l->tensors[i].decay, !none && (!table || embeddings));
        }
        mt_layout_destroy(&l);
    }
}

TEST(globs_freeze_tensors_and_whole_units)
{
    const char *const globs[] = {"model.embed_tokens.*", "model.layers.0.*", "*.q_proj.weight"};
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = layout_of(variants[0], true);
    mt_layout_destroy(&l);
    assert_int_equal(lay_out(&l, globs, 3, mt_cut_layer, NULL), 0);
    assert_true(!l->units[0].trainable && !l->units[1].trainable && l->units[2].trainable && l->units[3].trainable);
    assert_false(mt_layout_find(l, "model.layers.1.self_attn.q_proj.weight")->trainable);
    assert_true(mt_layout_find(l, "model.layers.1.self_attn.k_proj.weight")->trainable);
    assert_true(param_of(l, 2, "attention", MT_ATTENTION_QKV).trainable); /* a part of it is */
    assert_false(param_of(l, 1, "attention", MT_ATTENTION_QKV).trainable);
    mt_layout_destroy(&l);
    struct mt_err err = {0};
    const char *const nothing[] = {"model.layers.7.*"}, *const all[] = {"*"};
    assert_int_equal(lay_out(&l, nothing, 1, mt_cut_layer, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "matches no tensor"));
    assert_null(l);
    assert_int_equal(lay_out(&l, all, 1, mt_cut_layer, &err), 0); /* as an evaluation lays it out */
    assert_true(!l->n_trained && !l->units[2].trainable);
}

static size_t elems_of(const struct mt_layout *l, const struct mt_unit *u, enum mt_range_kind kind)
{
    size_t n = 0;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++)
        n += l->tensors[i].kind == kind ? l->tensors[i].n : 0;
    return n;
}

/* Every tensor lies in a range of its kind, and in its planes behind the tensors before it. */
static void check_ranges(const struct mt_layout *l, const struct mt_unit *u)
{
    size_t end[MT_N_RANGE_KINDS] = {0}, grad = 0, r = u->first_range;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        while (t->first >= l->ranges[r].first + l->ranges[r].n)
            assert_true(++r < u->first_range + u->n_ranges);
        const struct mt_range *range = &l->ranges[r];
        assert_int_equal(t->kind, range->kind);
        assert_true(t->first >= range->first && t->first + t->n <= range->first + range->n);
        assert_int_equal(t->at - range->at, t->first - range->first);
        assert_true(t->at >= end[t->kind] && t->at % 64 == t->first % 64);
        end[t->kind] = t->at + t->n;
        if (t->trainable) {
            assert_int_equal(t->grad - range->grad, t->first - range->first);
            assert_true(t->grad >= grad && t->grad >= t->at);
            grad = t->grad + t->n;
        }
    }
    for (int k = 0; k < MT_N_RANGE_KINDS; k++)
        assert_true(end[k] <= u->n_in_planes[k]);
    assert_true(grad <= u->n_grad && u->n_grad <= u->n_elems);
    assert_int_equal(r, u->first_range + u->n_ranges - 1);
}

TEST(what_is_trained_lies_together_and_nothing_else_does)
{
    const char *const globs[] = {"*.q_proj.*", "*.mlp.gate_proj.*", "model.layers.0.*"};
    struct mt_layout *l;
    assert_int_equal(lay_out(&l, globs, 3, mt_cut_layer, NULL), 0);
    for (int stored = 0; stored < 2; stored++) {
        for (size_t i = 0; i < l->n_tensors; i++)
            l->tensors[i].is_bf16 = stored;
        assert_int_equal(mt_layout_set_ranges(l, NULL), 0);
        for (size_t u = 0; u < l->n_units; u++) {
            const struct mt_unit *unit = &l->units[u];
            const size_t *n = unit->n_in_planes;
            size_t n_trained = n[MT_RANGE_TRAINED], n_wide = n[MT_RANGE_FROZEN_WIDE], n_bf16 = n[MT_RANGE_FROZEN];
            size_t trained = elems_of(l, unit, MT_RANGE_TRAINED), wide = elems_of(l, unit, MT_RANGE_FROZEN_WIDE);
            check_ranges(l, unit);
            if (u == 1) { /* frozen as a whole */
                assert_int_equal(n_trained + unit->n_grad, 0);
                assert_int_equal(n_wide, stored ? 0 : unit->n_elems);
                assert_int_equal(n_bf16, stored ? unit->n_elems : 0);
            } else if (u == 2) { /* packed to a piece */
                assert_true(unit->n_ranges > 2 && n_trained < unit->n_elems);
                assert_true(n_trained < trained + 2048 + 64 * unit->n_tensors);
                assert_true(stored ? !wide && !n_wide && n_bf16 : n_wide >= wide && !n_bf16);
            } else { /* trained as a whole: laid out as the unit itself */
                assert_true(n_trained == unit->n_elems && !n_wide && !n_bf16 && unit->n_grad == unit->n_elems && unit->n_ranges == 1);
            }
        }
    }
    mt_layout_destroy(&l);
}

static size_t of_matrices(const struct mt_state_shape *t)
{
    return t->n_dims > 1 ? mt_div_up(t->n, (size_t)32) * 34 : 0;
}

static size_t of_vectors(const struct mt_state_shape *t)
{
    return t->n_dims > 1 ? 0 : t->n * 4;
}

/* Each state's bytes lie one after the other, and in the unit's plane. */
static void check_states(const struct mt_layout *l, const struct mt_unit *u, const struct mt_plane_desc *desc)
{
    size_t end[MT_N_PLANES] = {0}, held = 0;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++)
        for (int k = MT_PLANE_STATE; k < MT_PLANE_STATE + 2; k++) {
            const struct mt_tensor *t = &l->tensors[i];
            struct mt_tensor_span s = mt_tensor_span(t, &desc[k], (enum mt_plane_kind)k);
            const struct mt_state_shape shape = {.n_dims = t->n_dims, .n = t->n};
            size_t want = t->trainable ? desc[k].bytes(&shape) : 0;
            assert_int_equal(s.bytes, want);
            if (!s.bytes)
                continue;
            assert_true(s.at >= end[k]);
            end[k] = s.at + s.bytes;
            held++;
        }
    for (int k = MT_PLANE_STATE; k < MT_PLANE_STATE + 2; k++)
        assert_true(end[k] <= mt_plane_desc_bytes(&desc[k], mt_unit_n_elems(u, desc, (enum mt_plane_kind)k)));
    assert_true(held || !u->trainable);
}

/* Blocks are of one tensor each, wherever tensors begin in a parameter that several share. */
TEST(trained_tensors_begin_between_grains)
{
    const char *const globs[] = {"model.layers.1.mlp.gate_proj.weight"};
    for (size_t grain = 1; grain <= 2048; grain *= 2) {
        struct mt_optimizer o = {
            .grain = grain, .n_states = 2,
            .state = {{.name = "a", .block = 32, .block_bytes = 34, .bytes = of_matrices},
                      {.name = "b", .dtype = MT_F32, .block = 1, .block_bytes = 4, .bytes = of_vectors, .apart = true}}};
        const char *json = SMALL("Qwen2ForCausalLM", "");
        struct mt_plane_desc desc[MT_N_PLANES];
        struct mt_layout *l = NULL;
        size_t cuts = 0;
        assert_int_equal(mt_hf_config_parse(&cfg, json, strlen(json), "config.json", NULL), 0);
        assert_int_equal(mt_layout_create(&l, &cfg, &(struct mt_layout_params){globs, 1, .cut = mt_cut_layer,
                                                                               .optimizer = &o}, NULL), 0);
        mt_plane_descs(desc, &o, MT_MASTER_F32, MT_BF16);
        assert_int_equal(mt_piece_align(desc), 65536);
        for (size_t i = 0; i < l->n_tensors; i++)
            assert_true(!l->tensors[i].trainable || l->tensors[i].at % grain == 0);
        for (size_t u = 0; u < l->n_units; u++) {
            cuts += l->units[u].n_ranges;
            if (grain % 32 == 0)
                check_states(l, &l->units[u], desc);
        }
        assert_true(grain <= 8 ? cuts == l->n_units + 2 : grain < 32 || cuts > l->n_units + 2);
        mt_layout_destroy(&l);
    }
}
