/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "device/ops.h"
#include "base/mem.h"
#include "kinds/kinds.h"
#include "model/model.h"
#include "test.h"

enum { TOKENS = 8, VOCAB = 40 };

static const char config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 16, \"intermediate_size\": 24, "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"vocab_size\": 40}";

TEST(batches_that_do_not_fit_the_model_are_refused)
{
    static struct mt_hf_config cfg;
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    MT_CLOSED_BY(mt_model_destroy) mt_model *model = NULL;
    struct mt_batch b;
    struct mt_err err = {0};
    struct mt_device_params dp = {.kind = "cpu", .budget_bytes = 4 << 20, .n_threads = 1};
    assert_int_equal(mt_hf_config_parse(&cfg, config, strlen(config), "config.json", NULL), 0);
    struct mt_layout_params lp = {.decay_embeddings = true, .cut = mt_cut_layer};
    assert_int_equal(mt_layout_create(&layout, &cfg, &lp, NULL), 0);
    assert_int_equal(mt_device_create(&dev, &dp, NULL), 0);
    struct mt_model_params p = {.layout = layout, .dtype = MT_F32, .max_tokens = TOKENS, .max_docs = 2,
                                .max_len = TOKENS, .max_micro = 1, .logits_chunk = 64};
    assert_int_equal(mt_model_create(&model, dev, &p, NULL), 0);
    static const struct {
        uint32_t id;
        size_t n;
        int rc;
    } cases[] = {{0, 8, 0}, {VOCAB - 1, 8, 0}, {VOCAB, 8, -ERANGE}, {1u << 31, 8, -ERANGE},
                 {UINT32_MAX, 8, -ERANGE}, {0, 9, -EINVAL}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint32_t ids[9] = {1, 2, 3, cases[i].id, 5, 6, 7, 8, 9};
        assert_int_equal(mt_batch_init(&b, 16, 2, NULL), 0);
        assert_int_equal(mt_batch_add(&b, ids, NULL, cases[i].n, 0, NULL), 0);
        mt_batch_seal(&b);
        assert_int_equal(mt_model_upload(model, &(struct mt_model_step){.micro = &b, .n = 1, .learner = &(struct mt_model_learner){.loss_scale = 1}}, &err), cases[i].rc);
        assert_int_equal(mt_device_sync(dev, NULL), 0);
        mt_batch_finish(&b);
    }
}

/* The engine gathers rows of the embedding on the host (see engine/optimizer.c), or the device does. */
TEST(scaled_embeddings_have_the_same_bits_on_the_host)
{
    enum { C = 520 };
    static struct mt_hf_config cfg;
    static float table[C], out[C], row[C];
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    struct mt_device_params dp = {.kind = "cpu", .budget_bytes = 4 << 20, .n_threads = 1};
    assert_int_equal(mt_device_create(&dev, &dp, NULL), 0);
    for (int k = 0; k < 8; k++) {
        enum mt_dtype dtype = k % 2 ? MT_BF16 : MT_F32;
        int32_t id = 0;
        cfg.embed_scale = k < 2 ? 1 : 0.37 + 7.7 * k;
        for (size_t i = 0; i < C; i++) /* all signs, exponents near those of weights, and bf16 in both halves */
            table[i] = mt_f32_from_bits((uint32_t)(i * 2654435761u + (uint32_t)k) % 0x3f800000u | (uint32_t)(i % 2) << 31);
        memcpy(row, table, sizeof(row));
        struct mt_embedding a = {.n = 1, .vocab = 1, .c = C, .dtype = dtype, .scale = (float)cfg.embed_scale, .ids = &id,
                                 .table = table, .out = out};
        assert_int_equal(mt_op_embedding(dev, &a, NULL), 0);
        assert_int_equal(mt_device_sync(dev, NULL), 0);
        mt_embed_scale_row(&cfg, dtype, row, C);
        assert_memory_equal(row, out, C * mt_dtype_size(dtype));
        assert_true((k < 2) == !memcmp(row, table, C * mt_dtype_size(dtype)));
    }
}
