/* SPDX-License-Identifier: Apache-2.0 */
/* A router that is F32 in files of bf16 is multiplied with in FP32 in bf16 compute: Hunyuan. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kinds/kinds.h"
#include "model/moe.h"
#include "model/packing.h"
#include "model/part.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/weights.h"

enum { TOKENS = 24, HIDDEN = 64, EXPERTS = 8, TOP_K = 2 };

static const char config[] =
    "{\"architectures\":[\"HunYuanMoEV1ForCausalLM\"],\"model_type\":\"hunyuan_v1_moe\",\"hidden_size\":64,"
    "\"intermediate_size\":48,\"num_hidden_layers\":1,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,"
    "\"vocab_size\":96,\"max_position_embeddings\":256,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
    "\"initializer_range\":0.3,\"tie_word_embeddings\":false,\"hidden_act\":\"silu\",\"num_experts\":8,\"moe_topk\":2,"
    "\"num_shared_expert\":1,\"torch_dtype\":\"bfloat16\"}";

static void sound(int rc, const struct mt_err *err)
{
    if (rc)
        fail_msg("%s", err->msg);
}

static void *take(mt_device *dev, size_t bytes)
{
    struct mt_err err = {0};
    void *p = NULL;
    sound(mt_device_alloc(dev, bytes, "test", &p, &err), &err);
    return p;
}

/* The unit's buffer as loads leave it, and the router's masters. */
static void *fill_slot(mt_device *dev, const struct mt_layout *l, mt_plane_set *planes, size_t unit, float *router)
{
    struct mt_err err = {0};
    const struct mt_unit *u = &l->units[unit];
    char *slot = take(dev, mt_unit_slot_bytes(l, unit, MT_BF16));
    const struct mt_tensor *f32 = mt_unit_f32_tensor(l, unit, MT_BF16);
    memset(slot, 0, mt_unit_slot_bytes(l, unit, MT_BF16));
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        float *w = mt_calloc(t->n, sizeof(*w));
        sound(mt_tensor_read_masters(planes, t, 0, t->n, w, &err), &err);
        for (size_t k = 0; k < t->n; k++)
            ((uint16_t *)(void *)slot)[t->first + k] = mt_f32_to_bf16(w[k]);
        if (t == f32) {
            memcpy(slot + mt_unit_f32_at(l, unit, MT_BF16), w, t->n * sizeof(*w));
            memcpy(router, w, t->n * sizeof(*w));
        }
        free(w);
    }
    return slot;
}

/* The largest two of a row's logits, and the first's share of both. */
static double share_by_hand(size_t ids[TOP_K], const uint16_t *n, const float *w, bool rounded)
{
    double logit[EXPERTS];
    for (size_t e = 0; e < EXPERTS; e++) {
        logit[e] = 0;
        for (size_t c = 0; c < HIDDEN; c++) {
            float x = w[e * HIDDEN + c];
            logit[e] += (double)mt_bf16_to_f32(n[c]) * (double)(rounded ? mt_bf16_to_f32(mt_f32_to_bf16(x)) : x);
        }
    }
    ids[0] = ids[1] = SIZE_MAX;
    for (int k = 0; k < TOP_K; k++)
        for (size_t e = 0; e < EXPERTS; e++)
            if (e != ids[0] && (ids[k] == SIZE_MAX || logit[e] > logit[ids[k]]))
                ids[k] = e;
    return 1 / (1 + exp(logit[ids[1]] - logit[ids[0]]));
}

TEST(weights_are_those_of_the_masters)
{
    struct mt_err err = {0};
    struct mt_hf_config cfg;
    struct mt_layout *l = NULL;
    struct mt_plane_set_params pp;
    mt_plane_set *planes = NULL;
    mt_device *dev = NULL;
    mt_model *m = NULL;
    struct mt_batch batch;
    uint32_t tokens[TOKENS];
    float router[EXPERTS * HIDDEN];
    sound(mt_hf_config_parse(&cfg, config, sizeof(config) - 1, "test", &err), &err);
    sound(mt_layout_create(&l, &cfg, &(struct mt_layout_params){.cut = mt_cut_layer}, &err), &err);
    sound(mt_layout_plane_params(&pp, l, NULL, MT_F32, &err), &err);
    sound(mt_plane_set_create(&planes, &pp, &err), &err);
    free(pp.elems);
    sound(mt_weights_init_random(l, planes, 1, 1, &err), &err);
    sound(mt_batch_init(&batch, TOKENS, 1, &err), &err);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i * 5 % 96;
    sound(mt_batch_add(&batch, tokens, NULL, TOKENS, 0, &err), &err);
    mt_batch_seal(&batch);
    sound(mt_device_create(&dev, &(struct mt_device_params){.kind = "cpu", .budget_bytes = 64 << 20, .n_threads = 1}, &err), &err);
    struct mt_model_params mp = {.layout = l, .dtype = MT_BF16, .max_tokens = TOKENS, .max_docs = 1, .max_len = TOKENS,
                                 .max_micro = 1, .logits_chunk = 16};
    sound(mt_model_create(&m, dev, &mp, &err), &err);
    sound(mt_model_upload(m, &(struct mt_model_step){.micro = &batch, .n = 1}, &err), &err);
    void *x = take(dev, mt_model_boundary_bytes(m));
    static const enum mt_role of_step[] = {MT_ROLE_ROWS, MT_ROLE_SUM, MT_ROLE_ROUTING};
    struct mt_unit_run run = {0};
    for (size_t i = 0; i < MT_ARRAY_LEN(of_step); i++)
        run.at[of_step[i]] = take(dev, mt_layout_value_bytes(l, of_step[i], MT_BF16, TOKENS, TOKENS));
    for (run.unit = 0; run.unit < 2; run.unit++) {
        void *slot = fill_slot(dev, l, planes, run.unit, router);
        run.at[run.unit ? MT_ROLE_WEIGHTS : MT_ROLE_TABLE] = slot;
        run.at[MT_ROLE_X] = run.unit ? x : NULL;
        run.at[MT_ROLE_Y] = run.unit ? NULL : x;
        sound(mt_model_forward(m, &run, &err), &err);
        sound(mt_device_sync(dev, &err), &err);
        mt_device_free(dev, slot);
    }
    assert_true(l->f32_routers && l->units[1].f32_tensor != MT_NO_TENSOR && l->units[0].f32_tensor == MT_NO_TENSOR);
    struct mt_routing t;
    double farthest = 0, rounded = 0;
    mt_routing_layout(&t, &cfg.moe, TOKENS, run.at[MT_ROLE_ROUTING]);
    for (size_t i = 0; i < TOKENS; i++) {
        size_t ids[TOP_K], other[TOP_K];
        const uint16_t *n = (const uint16_t *)run.at[MT_ROLE_ROWS] + i * HIDDEN;
        double share = share_by_hand(ids, n, router, false);
        assert_true(t.ids[i * TOP_K] == ids[0] && t.ids[i * TOP_K + 1] == ids[1]);
        farthest = fmax(farthest, fabs((double)t.weights[i * TOP_K] - share));
        rounded = fmax(rounded, fabs(share_by_hand(other, n, router, true) - share));
    }
    /* FP32 sums of 64 products; with weights rounded to bf16 they are far from it */
    print_message("  weights %.1e from those of the masters; of rounded ones %.1e\n", farthest, rounded);
    assert_true(farthest < 1e-6 && rounded > 1e-4);
    mt_model_destroy(&m);
    mt_device_destroy(&dev);
    mt_plane_set_destroy(&planes);
    mt_layout_destroy(&l);
    mt_batch_finish(&batch);
}

/* lo of the router's unit is loaded in bf16, too, and of no other; in f32 all is, and nothing lies beside it. */
TEST(its_unit_alone_has_lo_loaded)
{
    struct mt_err err = {0};
    struct mt_hf_config cfg;
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = NULL;
    sound(mt_hf_config_parse(&cfg, config, sizeof(config) - 1, "test", &err), &err);
    sound(mt_layout_create(&l, &cfg, &(struct mt_layout_params){.cut = mt_cut_layer}, &err), &err);
    const mt_plane_bits lo = (mt_plane_bits)1 << MT_PLANE_LO;
    for (size_t u = 0; u < l->n_units; u++) {
        bool router = u == 1;
        size_t plain = l->units[u].n_elems * 2, more = router ? MT_JOIN_BLOCK * 4 : 0;
        assert_int_equal((mt_unit_loaded_planes(l, u, MT_BF16) & lo) != 0, router);
        assert_true(mt_unit_slot_bytes(l, u, MT_BF16) == plain + more);
        assert_true(mt_unit_loaded_planes(l, u, MT_F32) == mt_loaded_planes(MT_F32));
        assert_true(mt_unit_slot_bytes(l, u, MT_F32) == 2 * plain);
    }
    assert_true(mt_layout_loaded_planes(l, MT_BF16) & lo);
}
