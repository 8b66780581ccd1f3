/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of loss rows: given before the step or computed from its losses, and what they do to the gradient. */
#include <math.h>
#include <string.h>

#include <xxhash.h>

#include "../checkpoint/made_model.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "test.h"

enum { TOKENS = 24, DOC = 9, MICRO = 2, BUDGET = 1 << 20 };

static struct made_model model;
static struct mt_batch micro[MICRO];
static struct mt_step_data data;
static double factor = 1;           /* of weights */
static float seen[MICRO][TOKENS];   /* losses from which weights were computed */

static void make_data(void)
{
    uint32_t ids[TOKENS];
    data = (struct mt_step_data){.micro = micro, .cap = MICRO, .n = MICRO};
    for (int m = 0; m < MICRO; m++) {
        assert_int_equal(mt_batch_init(&micro[m], TOKENS, 2, NULL), 0);
        for (uint32_t i = 0; i < TOKENS; i++)
            ids[i] = (i * 7 + (uint32_t)m * 3) % 40;
        assert_int_equal(mt_batch_add(&micro[m], ids, NULL, DOC, 2 * m, NULL), 0);
        assert_int_equal(mt_batch_add(&micro[m], ids + DOC, NULL, TOKENS - DOC - (size_t)m, 2 * m + 1, NULL), 0);
        mt_batch_seal(&micro[m]);
        data.n_tokens += micro[m].n_tokens;
        data.n_loss += micro[m].n_loss;
    }
}

static void alike(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *weight)
{
    if (loss)
        memcpy(seen[b->sample[0] / 2], loss, b->n_loss * sizeof(float));
    for (size_t i = 0; i < b->n_loss; i++)
        weight[i] = (float)(factor / (double)s->n_loss);
}

static void second_document(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *weight)
{
    alike(s, b, loss, weight);
    for (size_t i = 0; i < b->n_loss; i++)
        weight[i] *= b->loss_rows[i] >= b->cu_seqlens[1];
}

static void measure(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    (void)s;
    assert_true(!seen[m->batch->sample[0] / 2][0] || !memcmp(seen[m->batch->sample[0] / 2], m->loss, m->batch->n_loss * sizeof(float)));
    for (size_t i = 0; i < m->batch->n_loss; i++) {
        mt_measure_add(&sum[0], (double)m->loss[i]);
        mt_measure_add(&sum[1], 0.1);
    }
}

#define OBJECTIVE(late, function) {.name = "made", .needs_losses = late, .n_measures = 2, .measures = {"loss", "one"}, \
                                   .weights = function, .measure = measure}
static const struct mt_objective early = OBJECTIVE(false, alike), late = OBJECTIVE(true, alike);
static const struct mt_objective half = OBJECTIVE(true, second_document);

struct outcome {
    uint64_t hash;
    double norm;
    struct mt_measure measures[2];
};

/* Two steps from the same state. */
static struct outcome run(const struct mt_objective *o, enum mt_dtype dtype, int64_t chunk, int64_t piece)
{
    struct outcome out = {0};
    struct mt_step_result res;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    MT_CLOSED_BY(mt_engine_destroy) mt_engine *e = NULL;
    struct mt_device_params dp = {.kind = "cpu", .budget_bytes = BUDGET, .n_threads = 1};
    made_fill(&model, 5);
    for (size_t u = 0; u < model.layout->n_units; u++)
        for (int k = 0; k < mt_adamw.n_states; k++)
            memset(mt_plane(model.planes, u, MT_PLANE_STATE + k), 0, mt_plane_elems(model.planes, u, MT_PLANE_STATE) * 4);
    memset(seen, 0, sizeof(seen));
    assert_int_equal(mt_device_create(&dev, &dp, NULL), 0);
    struct mt_engine_params p = {
        .dev = dev, .layout = model.layout, .planes = model.planes, .numerics.dtype = dtype,
        .numerics.grad_dtype = MT_BF16, .max_tokens = TOKENS, .max_docs = 2, .max_len = TOKENS, .max_micro = MICRO,
        .numerics.logits_chunk = chunk, .numerics.logits_piece = piece, .train = true, .placement.slots = 2,
        .placement.activations = MT_ACT_RECOMPUTE, .numerics.optimizer = &mt_adamw,
        .numerics.optimizer_keys = {0.9, 0.999, 1e-8, 0.1}, .isa = MT_ISA_SCALAR, .placement.threads = 1,
        .numerics.objective = o};
    assert_int_equal(mt_engine_create(&e, &p, NULL), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(mt_engine_step(e, &(struct mt_learner_step){&data, 1e-2}, &res, NULL), 0);
        out.norm = i ? out.norm : res.grad_norm;
    }
    assert_int_equal(mt_engine_flush(e, NULL), 0);
    for (size_t u = 0; u < model.layout->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++) {
            const struct mt_plane_desc *d = mt_plane_desc_of(model.planes, (enum mt_plane_kind)k);
            size_t bytes = mt_plane_desc_bytes(d, mt_plane_elems(model.planes, u, k));
            if (bytes && d->role != MT_ROLE_GRADIENT)
                out.hash = XXH3_64bits_withSeed(mt_plane(model.planes, u, k), bytes, out.hash);
        }
    memcpy(out.measures, res.measures, sizeof(out.measures));
    return out;
}

static const struct {
    enum mt_dtype dtype;
    int64_t chunk, piece;
} cases[] = {{MT_F32, 64, 0}, {MT_BF16, 64, 0}, {MT_F32, 16, 0}, {MT_BF16, 16, 8}, {MT_F32, 64, 8}};

TEST(equal_weights_change_no_bit)
{
    factor = 1;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct outcome plain = run(NULL, cases[i].dtype, cases[i].chunk, cases[i].piece);
        struct outcome before = run(&early, cases[i].dtype, cases[i].chunk, cases[i].piece);
        struct outcome after = run(&late, cases[i].dtype, cases[i].chunk, cases[i].piece);
        assert_true(plain.hash == before.hash && plain.hash == after.hash);
        assert_true(plain.norm == before.norm && plain.norm == after.norm);
        assert_true(seen[0][0] > 0 && seen[1][0] > 0);
        assert_true(mt_measure_mean(&after.measures[1]) == 0.1); /* a mean of equal values is that value */
        assert_true(fabs(mt_measure_mean(&after.measures[0]) - mt_measure_mean(&plain.measures[0])) < 1e-9);
    }
}

/* Of the first step: the factors are powers of two, and a sign, so the norm follows exactly. */
TEST(the_gradient_follows_the_weights)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct outcome of[3];
        for (int k = 0; k < 3; k++) {
            factor = (double[]){1, -1, 4}[k];
            of[k] = run(&half, cases[i].dtype, cases[i].chunk, cases[i].piece);
        }
        factor = 1;
        struct outcome all = run(&late, cases[i].dtype, cases[i].chunk, cases[i].piece);
        assert_true(of[0].norm > 0 && of[0].norm != all.norm && of[0].hash != all.hash);
        assert_true(of[1].norm == of[0].norm && of[1].hash != of[0].hash);
        assert_true(of[2].norm == 4 * of[0].norm);
    }
}

TEST(a_measure_of_a_set_has_its_whole_name)
{
    assert_string_equal(mt_measure_of_set("code_loss", "code", 4), "loss");
    assert_string_equal(mt_measure_of_set("far-off_2_accuracy", "far-off_2:file", 9), MT_EVAL_ACCURACY);
    const char *const neither[] = {"code", "code_", "loss", "code_nll_loss", "codes_loss", "cod_loss", "code_losses"};
    for (size_t i = 0; i < sizeof(neither) / sizeof(*neither); i++)
        assert_null(mt_measure_of_set(neither[i], "code", 4));
    assert_true(mt_measure_more_is_better("code_accuracy") && !mt_measure_more_is_better("code_loss"));
}

static int set_up(void **)
{
    make_data();
    return made_model_init(&model);
}

static int tear_down(void **)
{
    for (int m = 0; m < MICRO; m++)
        mt_batch_finish(&micro[m]);
    made_model_finish(&model);
    return 0;
}

TEST_GROUP(set_up, tear_down)
