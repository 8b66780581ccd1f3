/* SPDX-License-Identifier: Apache-2.0 */
/* A gradient that is cast in place is, with its sums of squares, to the bit what it is beside it. */
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "kinds/kinds.h"
#include "model/model.h"
#include "test.h"

/* Tensors of less than a block, of a block and a bit, and of many; odd ones that end within a block. */
#define MODEL(hidden, ffn, more)                                                                   \
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": " #hidden                        \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": 1, \"num_attention_heads\": 2, "    \
    "\"num_key_value_heads\": 1, \"head_dim\": 16, \"vocab_size\": 5003" more "}"
static const char *const models[] = {MODEL(24, 40, ""), MODEL(136, 130, ", \"attention_bias\": true"),
                                     MODEL(264, 1000, ", \"tie_word_embeddings\": true")};

struct fixture {
    struct mt_layout *layout;
    mt_device *dev;
    mt_model *model;
    float *g;
    uint16_t *beside;
};

static void setup(struct fixture *f, const char *json, const struct mt_layout_params *lp)
{
    static struct mt_hf_config cfg;
    struct mt_device_params dp = {.kind = "cpu", .budget_bytes = 64 << 20, .n_threads = 2};
    void *g, *beside;
    size_t most = 0;
    struct mt_err err = {0};
    if (mt_hf_config_parse(&cfg, json, strlen(json), "config.json", &err) ||
        mt_layout_create(&f->layout, &cfg, lp, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(mt_device_create(&f->dev, &dp, NULL), 0);
    struct mt_model_params p = {.layout = f->layout, .dtype = MT_BF16, .max_tokens = 8, .max_docs = 1,
                                .max_len = 8, .max_micro = 1, .logits_chunk = 64, .backward = true};
    assert_int_equal(mt_model_create(&f->model, f->dev, &p, NULL), 0);
    for (size_t u = 0; u < f->layout->n_units; u++)
        most = MT_MAX(most, f->layout->units[u].n_elems);
    assert_int_equal(mt_device_alloc(f->dev, most * 4, "gradients", &g, NULL), 0);
    assert_int_equal(mt_device_alloc(f->dev, most * 2, "casts", &beside, NULL), 0);
    f->g = g;
    f->beside = beside;
}

static void teardown(struct fixture *f)
{
    mt_model_destroy(&f->model);
    mt_device_free(f->dev, f->g);
    mt_device_free(f->dev, f->beside);
    mt_device_destroy(&f->dev);
    mt_layout_destroy(&f->layout);
}

static void make_gradient(float *g, size_t n)
{
    for (size_t i = 0; i < n; i++)
        g[i] = (float)((double)((i * 2654435761u) % 100003) / 50001.5 - 1) * (i % 97 ? 1e-3f : 7);
}

/* Partial sums of all the unit's tensors, one behind the other; how many. */
static size_t sums(struct fixture *f, size_t unit, float *out)
{
    const struct mt_unit *u = &f->layout->units[unit];
    size_t total = 0;
    assert_int_equal(mt_model_fetch_stats(f->model, 1, true, f->layout->n_tensors, NULL), 0);
    assert_int_equal(mt_device_sync(f->dev, NULL), 0);
    for (size_t t = u->first_tensor; t < u->first_tensor + u->n_tensors; t++) {
        size_t n;
        const float *p = mt_model_partials(f->model, t, &n);
        if (f->layout->tensors[t].trainable)
            memcpy(out + total, p, n * sizeof(float));
        total += f->layout->tensors[t].trainable ? n : 0;
    }
    return total;
}

static void check_unit(struct fixture *f, size_t unit)
{
    float want[512], got[512];
    const struct mt_unit *u = &f->layout->units[unit];
    make_gradient(f->g, u->n_elems);
    assert_int_equal(mt_model_grad_cast(f->model, unit, f->g, f->beside, MT_BF16, NULL), 0);
    assert_int_equal(mt_device_sync(f->dev, NULL), 0);
    size_t n = sums(f, unit, want);
    assert_true(n > 0 && n <= MT_ARRAY_LEN(want));
    assert_int_equal(mt_model_grad_cast(f->model, unit, f->g, f->g, MT_BF16, NULL), 0);
    assert_int_equal(mt_device_sync(f->dev, NULL), 0);
    assert_int_equal(sums(f, unit, got), n);
    assert_memory_equal(want, got, n * sizeof(float));
    for (size_t t = u->first_tensor; t < u->first_tensor + u->n_tensors; t++) {
        const struct mt_tensor *ten = &f->layout->tensors[t];
        if (ten->trainable)
            assert_memory_equal((const uint16_t *)(const void *)f->g + ten->first, f->beside + ten->first, 2 * ten->n);
    }
}

TEST(a_cast_in_place_is_the_cast)
{
    const char *const globs[] = {"*.k_proj.weight", "*.up_proj.weight"};
    for (size_t i = 0; i < 4 * MT_ARRAY_LEN(models); i++) {
        struct fixture f;
        setup(&f, models[i / 4],
              &(struct mt_layout_params){.freeze = globs, .n_freeze = i & 1 ? 2 : 0, .decay_embeddings = true,
                                         .cut = i & 2 ? mt_cut_half : mt_cut_layer});
        for (size_t u = 0; u < f.layout->n_units; u++)
            check_unit(&f, u);
        teardown(&f);
    }
}
