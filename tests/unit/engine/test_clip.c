/* SPDX-License-Identifier: Apache-2.0 */
/* What a step does with gradients that are large or not finite, of the whole model or of a block by
 * itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../model/planes_of.h"
#include "base/mem.h"
#include "base/philox.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/weights.h"

enum { TOKENS = 24, MOST = 64 };

static const char config[] = "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 16, "
                             "\"intermediate_size\": 24, \"head_dim\": 8, "
                             "\"num_hidden_layers\": 3, \"num_attention_heads\": 2, "
                             "\"num_key_value_heads\": 1, \"vocab_size\": 40}";

struct rig {
    struct mt_layout *layout;
    mt_device *dev;
    mt_plane_set *planes;
    mt_engine *engine;
    struct mt_batch micro;
    struct mt_step_data data;
};

static void begin(struct rig *r, bool halves, enum mt_clip clip, double grad_clip)
{
    static struct mt_hf_config cfg;
    uint32_t ids[TOKENS];
    double slots[MT_OPTIMIZER_SLOTS];
    *r = (struct rig){0};
    for (int i = 0; i < MT_OPTIMIZER_SLOTS; i++)
        slots[i] = MT_AUTO;
    const struct mt_optimizer *sgd =
        mt_optimizer_find("sgd", MT_STATE_F32, slots); /* its steps are of the gradient's size */
    assert_int_equal(mt_hf_config_parse(&cfg, config, strlen(config), "config.json", NULL), 0);
    const struct mt_layout_params lp = {.cut = halves ? mt_cut_half : mt_cut_layer};
    assert_int_equal(mt_layout_create(&r->layout, &cfg, &lp, NULL), 0);
    assert_int_equal(mt_device_create(&r->dev,
                                      &(struct mt_device_params){
                                          .kind = "cpu", .n_threads = 1, .budget_bytes = 8 << 20},
                                      NULL),
                     0);
    r->planes = planes_of(r->layout, sgd, MT_F32);
    assert_int_equal(mt_weights_init_random(r->layout, r->planes, 1, 1, NULL), 0);
    for (size_t i = 0; i < TOKENS; i++)
        ids[i] = (uint32_t)(mt_philox_uniform(4, 0, i) * 40);
    assert_int_equal(mt_batch_init(&r->micro, TOKENS, 1, NULL), 0);
    assert_int_equal(mt_batch_add(&r->micro, ids, NULL, TOKENS, 0, NULL), 0);
    mt_batch_seal(&r->micro);
    r->data = (struct mt_step_data){.micro = &r->micro,
                                    .cap = 1,
                                    .n = 1,
                                    .n_tokens = r->micro.n_tokens,
                                    .n_loss = r->micro.n_loss};
    struct mt_engine_params p = {.dev = r->dev,
                                 .layout = r->layout,
                                 .planes = r->planes,
                                 .numerics.dtype = MT_F32,
                                 .numerics.grad_dtype = MT_F32,
                                 .numerics.optimizer = sgd,
                                 .numerics.clip = clip,
                                 .numerics.grad_clip = grad_clip,
                                 .numerics.logits_chunk = 64,
                                 .max_tokens = TOKENS,
                                 .max_docs = 1,
                                 .max_len = TOKENS,
                                 .max_micro = 1,
                                 .train = true,
                                 .placement.slots = 2,
                                 .placement.activations = MT_ACT_RECOMPUTE,
                                 .placement.threads = 1,
                                 .host_bytes = UINT64_MAX};
    MUST(mt_engine_create, &r->engine, &p);
}

static void end(struct rig *r)
{
    mt_engine_destroy(&r->engine);
    mt_plane_set_destroy(&r->planes);
    mt_device_destroy(&r->dev);
    mt_layout_destroy(&r->layout);
    mt_batch_finish(&r->micro);
}

static float *masters(const struct rig *r, size_t tensor)
{
    const struct mt_tensor *t = &r->layout->tensors[tensor];
    float *w = mt_calloc(t->n, sizeof(*w));
    assert_int_equal(mt_tensor_read_masters(r->planes, t, 0, t->n, w, NULL), 0);
    return w;
}

static void scale(const struct rig *r, const char *name, float by)
{
    const struct mt_tensor *t = mt_layout_find(r->layout, name);
    MT_FREED float *w = masters(r, (size_t)(t - r->layout->tensors));
    for (size_t i = 0; i < t->n; i++)
        w[i] *= by;
    assert_int_equal(mt_tensor_write_masters(r->planes, t, 0, t->n, w, NULL), 0);
}

/* The same function of the model, but the gradients of layer 1's MLP are so large that their
 * squares overflow. */
static void spoil(const struct rig *r)
{
    scale(r, "model.layers.1.post_attention_layernorm.weight", 0x1p80f);
    scale(r, "model.layers.1.mlp.gate_proj.weight", 0x1p-80f);
    scale(r, "model.layers.1.mlp.up_proj.weight", 0x1p-80f);
}

/* What an update at rate 1 takes from each tensor: [n_tensors], sums of squares; *res: the step's.
 */
static void run(double *moved, struct rig *r, struct mt_step_result *res)
{
    struct mt_err err = {0};
    float *before[MOST], *after;
    for (size_t i = 0; i < r->layout->n_tensors; i++)
        before[i] = masters(r, i);
    if (mt_engine_step(r->engine, &(struct mt_learner_step){&r->data, 1}, res, &err) ||
        mt_engine_flush(r->engine, &err))
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < r->layout->n_tensors; i++) {
        after = masters(r, i);
        moved[i] = 0;
        for (size_t k = 0; k < r->layout->tensors[i].n; k++)
            moved[i] += pow((double)after[k] - (double)before[i][k], 2);
        free(after);
        free(before[i]);
    }
}

static double norm_of_block(const struct rig *r, const double *moved, int block)
{
    double sum = 0;
    for (size_t i = 0; i < r->layout->n_tensors; i++)
        sum += r->layout->units[r->layout->tensors[i].unit].block == block ? moved[i] : 0;
    return sqrt(sum);
}

TEST(each_block_is_clipped_by_its_own_norm)
{
    double free_[MOST], clipped[MOST], cut[MOST], limit;
    struct mt_step_result res;
    struct rig r;
    begin(&r, false, MT_CLIP_UNIT, 0);
    run(free_, &r, &res);
    assert_true(res.clip == 1 && !res.n_skipped);
    double least = INFINITY, most = 0;
    for (int b = 0; b < 5; b++) {
        least = fmin(least, norm_of_block(&r, free_, b));
        most = fmax(most, norm_of_block(&r, free_, b));
    }
    end(&r);
    limit = sqrt(least * most);
    assert_true(least > 0 && least < 0.9 * limit);
    for (int halves = 0; halves < 2; halves++) {
        begin(&r, halves, MT_CLIP_UNIT, limit);
        run(halves ? cut : clipped, &r, &res);
        int above = 0;
        for (int b = 0; b < 5; b++) {
            double was = norm_of_block(&r, free_, b),
                   now = norm_of_block(&r, halves ? cut : clipped, b);
            assert_true(fabs(now / fmin(was, limit) - 1) < 1e-3);
            above += was > limit;
        }
        assert_true(above > 0 && above < 5);
        assert_true(fabs((double)res.clip * most / limit - 1) < 1e-3);
        end(&r);
    }
    assert_memory_equal(clipped, cut, sizeof(*cut) * 20); /* to the bit, however layers are cut */
}

TEST(a_gradient_that_is_not_finite_skips_its_block)
{
    static const struct {
        enum mt_clip clip;
        double grad_clip;
        bool alone; /* only its block */
    } v[] = {{MT_CLIP_GLOBAL, 0, true},
             {MT_CLIP_UNIT, 0, true},
             {MT_CLIP_UNIT, 1, true},
             {MT_CLIP_GLOBAL, 1, false}};
    for (size_t i = 0; i < 2 * MT_ARRAY_LEN(v); i++) {
        double moved[MOST];
        struct mt_step_result res;
        struct rig r;
        begin(&r, i % 2, v[i / 2].clip, v[i / 2].grad_clip);
        spoil(&r);
        run(moved, &r, &res);
        assert_true(res.loss == res.loss);
        assert_int_equal(res.skipped, !v[i / 2].alone);
        assert_int_equal(res.n_skipped, v[i / 2].alone ? 1 : 5);
        assert_string_equal(res.bad_tensor, "model.layers.1.mlp.gate_proj.weight");
        for (int b = 0; b < 5; b++)
            assert_int_equal(norm_of_block(&r, moved, b) > 0, v[i / 2].alone && b != 2);
        assert_int_equal(mt_engine_updates(r.engine, 0), v[i / 2].alone);
        end(&r);
    }
}
