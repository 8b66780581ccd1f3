/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adapters of several learners on one streamed base: each has the bits of a run of its own, whatever the others do,
 * also if one of them takes no part in a step.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../model/planes_of.h"
#include "made_batch.h"
#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/peft.h"
#include "weights/weights.h"

enum { TOKENS = 24, MICRO = 2, STEPS = 4, LEARNERS = 3, MOST_TENSORS = 64, DEVICE_BYTES = 4 << 20 };

static const char model_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 32, \"intermediate_size\": 40,\n"
    " \"num_hidden_layers\": 3, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 16,\n"
    " \"vocab_size\": 96, \"tie_word_embeddings\": false, \"torch_dtype\": \"float32\"}\n";

/* What sets learners apart: all that a learner has of its own. */
static const struct kind {
    const char *targets[2];
    int64_t rank;
    bool dora;
    double dropout, lr, beta1, clip, decay;
    uint64_t seed, first_step; /* first_step: where its data begin */
    int steps;                 /* it ends after so many */
    size_t n_micro;
} kinds[LEARNERS] = {
    {{MT_ALL_LINEAR, NULL}, 4, false, 0.1, 1e-2, 0.9, 0.5, 0.1, 11, 0, STEPS, 2},
    {{"q_proj", "down_proj"}, 2, true, 0, 3e-3, 0.8, 0, 0, 12, 7, STEPS - 2, 1},
    {{"*.1.mlp.*", "lm_head"}, 3, false, 0.3, 1e-1, 0.9, 0.01, 0, 13, 3, STEPS, 2},
};

static struct mt_hf_config cfg;
static enum mt_clip clip; /* of runs that begin later */
static enum mt_state_type state_type; /* the same; in bf16 all but the second round by chance */
static char root[64];

static int set_up(void **state)
{
    char path[96];
    (void)state;
    alarm(300);
    snprintf(root, sizeof(root), "/tmp/mt-learners-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    snprintf(path, sizeof(path), "%s/config.json", root);
    return mt_write_file(path, model_config, strlen(model_config), NULL) || mt_hf_config_read(&cfg, root, NULL);
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

static struct mt_adapter_spec spec_of(const struct kind *k)
{
    struct mt_adapter_spec s = {.on = true, .rank = k->rank, .alpha = 8, .dora = k->dora, .dropout = k->dropout,
                                .lr_ratio_b = 2};
    for (size_t i = 0; i < MT_ARRAY_LEN(k->targets) && k->targets[i]; i++)
        assert_true(mt_adapter_list_add(&s.targets, k->targets[i], 0));
    return s;
}

/* The layout of learners [first, first + n). */
static struct mt_layout *lay_out(size_t first, size_t n, const struct mt_cut *cut)
{
    struct mt_adapter_spec s[LEARNERS];
    struct mt_layout *l = NULL;
    for (size_t i = 0; i < n; i++)
        s[i] = spec_of(&kinds[first + i]);
    struct mt_layout_params p = {.cut = *cut, .adapter = s, .n_learners = n};
    MUST(mt_layout_create, &l, &cfg, &p);
    for (size_t i = 0; i < n; i++)
        mt_adapter_spec_finish(&s[i]);
    return l;
}

static const struct mt_optimizer *optimizer(void)
{
    return mt_optimizer_find("adamw", state_type, NULL);
}

static struct mt_numerics numerics_of(const struct kind *k)
{
    bool by_chance = state_type == MT_STATE_BF16 && k != &kinds[1];
    return (struct mt_numerics){.dtype = MT_F32, .grad_dtype = MT_F32, .logits_chunk = 64, .optimizer = optimizer(),
                                .optimizer_keys = {k->beta1, 0.99, 1e-8, k->decay}, .grad_clip = k->clip, .clip = clip,
                                .rounding = by_chance ? MT_ROUND_STOCHASTIC : MT_ROUND_NEAREST, .seed = k->seed};
}

/* A run of learners [first, first + n). */
struct run {
    size_t first, n;
    struct mt_layout *layout, *own[LEARNERS]; /* own: each learner's alone, in the places of the shared one */
    mt_device *dev;
    mt_plane_set *planes;
    mt_engine *engine;
    struct mt_numerics numerics[LEARNERS];
    size_t ruined; /* the learner whose rate is too high */
};

static void make_planes(struct run *r, struct mt_err *err)
{
    r->planes = planes_of(r->layout, optimizer(), MT_F32);
    assert_int_equal(mt_weights_init_random(r->layout, r->planes, 1, 1, err), 0);
    for (size_t i = 0; i < r->n; i++) {
        r->own[i] = lay_out(r->first + i, 1, &r->layout->cut);
        if (mt_layout_share(r->own[i], r->layout, (int)i, err) ||
            mt_adapter_init(r->own[i], r->planes, kinds[r->first + i].seed, err))
            fail_msg("%s", err->msg);
    }
}

static void begin(struct run *r, size_t first, size_t n, const struct mt_cut *cut, const struct mt_placement *placement)
{
    struct mt_err err = {0};
    struct mt_device_params dp = {.kind = "cpu", .n_threads = 2, .budget_bytes = DEVICE_BYTES};
    *r = (struct run){.first = first, .n = n, .layout = lay_out(first, n, cut), .ruined = LEARNERS};
    assert_int_equal(mt_device_create(&r->dev, &dp, NULL), 0);
    make_planes(r, &err);
    for (size_t i = 0; i < n; i++)
        r->numerics[i] = numerics_of(&kinds[first + i]);
    struct mt_engine_params p = {
        .dev = r->dev, .layout = r->layout, .planes = r->planes, .numerics = r->numerics[0], .learner = r->numerics,
        .n_learners = n, .placement = *placement, .max_tokens = TOKENS, .max_docs = 2, .max_len = TOKENS,
        .max_micro = n * MICRO, .train = true, .host_bytes = UINT64_MAX};
    MUST(mt_engine_create, &r->engine, &p);
}

static void end(struct run *r)
{
    mt_engine_destroy(&r->engine);
    mt_plane_set_destroy(&r->planes);
    mt_device_destroy(&r->dev);
    mt_layout_destroy(&r->layout);
    for (size_t i = 0; i < r->n; i++)
        mt_layout_destroy(&r->own[i]);
}

static void make_step(struct mt_step_data *d, struct mt_batch *micro, const struct kind *k, uint64_t step)
{
    *d = (struct mt_step_data){.micro = micro, .cap = MICRO, .n = k->n_micro, .step = step};
    for (size_t m = 0; m < k->n_micro; m++) {
        uint32_t ids[TOKENS];
        size_t n = TOKENS - (k->first_step + step + m) % 5, cut = 6 + (step + m) % 7;
        for (size_t i = 0; i < n; i++)
            ids[i] = (uint32_t)(mt_philox_uniform(k->first_step + step, m, i) * 96);
        made_batch(d, &micro[m], TOKENS, ids, n, cut);
    }
}

/* What a learner's run results in. */
struct outcome {
    double loss[STEPS], norm[STEPS], eval;
    uint64_t updates;
    size_t n;
    struct {
        char name[MT_TENSOR_NAME];
        float *masters;
        size_t n;
    } tensor[MOST_TENSORS];
};

static void read_tensors(struct outcome *o, const struct run *r, size_t learner)
{
    const struct mt_layout *l = r->own[learner];
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (!t->adapter)
            continue;
        assert_true(o->n < MOST_TENSORS);
        snprintf(o->tensor[o->n].name, sizeof(o->tensor[o->n].name), "%s", t->name);
        o->tensor[o->n].n = t->n;
        o->tensor[o->n].masters = mt_calloc(t->n, sizeof(float));
        assert_int_equal(mt_tensor_read_masters(r->planes, t, 0, t->n, o->tensor[o->n].masters, NULL), 0);
        o->n++;
    }
}

static void evaluate(struct outcome *o, const struct run *r, size_t learner)
{
    struct mt_batch micro[MICRO];
    struct mt_step_data d;
    struct mt_eval_result res = {0};
    make_step(&d, micro, &kinds[r->first + learner], 40);
    assert_int_equal(mt_engine_eval(r->engine, (int)learner, &d, &res, NULL), 0);
    o->eval = res.loss_sum;
    for (size_t m = 0; m < d.n; m++)
        mt_batch_finish(&micro[m]);
}

static void step(struct run *r, uint64_t i, struct outcome *o)
{
    struct mt_learner_step of[LEARNERS] = {{NULL, 0}};
    struct mt_step_data data[LEARNERS];
    struct mt_batch micro[LEARNERS][MICRO];
    struct mt_step_result res[LEARNERS];
    for (size_t k = 0; k < r->n && k < LEARNERS; k++) {
        const struct kind *kind = &kinds[r->first + k];
        if (i >= (uint64_t)kind->steps)
            continue;
        make_step(&data[k], micro[k], kind, i);
        of[k] = (struct mt_learner_step){&data[k], k == r->ruined ? 1e39 : kind->lr};
        if (mt_engine_check_learner(r->engine, k, NULL))
            of[k].data = NULL;
    }
    MUST(mt_engine_step, r->engine, of, res);
    for (size_t k = 0; k < r->n && k < LEARNERS; k++) {
        if (of[k].data) {
            o[k].loss[i] = res[k].loss;
            o[k].norm[i] = res[k].grad_norm;
        }
        for (size_t m = 0; i < (uint64_t)kinds[r->first + k].steps && m < data[k].n; m++)
            mt_batch_finish(&micro[k][m]);
    }
}

/* Trains learners [first, first + n); o: [n]. */
static void train(struct outcome *o, size_t first, size_t n, const struct mt_cut *cut, const struct mt_placement *p)
{
    struct run r;
    int steps = 0;
    memset(o, 0, n * sizeof(*o));
    begin(&r, first, n, cut, p);
    for (size_t k = 0; k < n; k++)
        steps = MT_MAX(steps, kinds[first + k].steps);
    for (int i = 0; i < steps; i++)
        step(&r, (uint64_t)i, o);
    assert_int_equal(mt_engine_flush(r.engine, NULL), 0);
    for (size_t k = 0; k < n; k++) {
        o[k].updates = mt_engine_updates(r.engine, k);
        evaluate(&o[k], &r, k);
        read_tensors(&o[k], &r, k);
    }
    end(&r);
}

static void finish(struct outcome *o)
{
    for (size_t i = 0; i < o->n; i++)
        free(o->tensor[i].masters);
}

static void assert_equal(const struct outcome *a, const struct outcome *b)
{
    assert_memory_equal(a->loss, b->loss, sizeof(a->loss));
    assert_memory_equal(a->norm, b->norm, sizeof(a->norm));
    assert_true(a->eval == b->eval && a->updates == b->updates && a->n == b->n);
    for (size_t i = 0; i < a->n; i++) {
        assert_string_equal(a->tensor[i].name, b->tensor[i].name);
        assert_int_equal(a->tensor[i].n, b->tensor[i].n);
        assert_memory_equal(a->tensor[i].masters, b->tensor[i].masters, a->tensor[i].n * sizeof(float));
    }
}

static const struct mt_placement plain = {.slots = 2, .activations = MT_ACT_RECOMPUTE, .poison = true, .threads = 2};
static const struct mt_placement other = {.slots = 4, .activations = MT_ACT_KEEP, .poison = true, .threads = 1,
                                          .adapters = MT_ADAPTERS_RESIDENT};

TEST(learners_have_the_bits_of_runs_alone)
{
    struct outcome alone[LEARNERS], together[LEARNERS];
    for (size_t k = 0; k < LEARNERS; k++) {
        train(&alone[k], k, 1, &mt_cut_layer, &plain);
        assert_true(alone[k].n > 0 && alone[k].updates == (uint64_t)kinds[k].steps);
        for (int i = 0; i < kinds[k].steps; i++)
            assert_true(alone[k].loss[i] > 0 && alone[k].norm[i] > 0 && isfinite(alone[k].norm[i]));
    }
    for (int turn = 0; turn < 2; turn++) {
        train(together, 0, LEARNERS, turn ? &mt_cut_half : &mt_cut_layer, turn ? &other : &plain);
        for (size_t k = 0; k < LEARNERS; k++) {
            assert_equal(&alone[k], &together[k]);
            finish(&together[k]);
        }
    }
    for (size_t k = 0; k < LEARNERS; k++)
        finish(&alone[k]);
}

/* The third trains adapters of the head and of one layer alone; the second ends early. */
TEST(updates_under_backward_have_the_bits_of_runs_alone)
{
    struct outcome alone[LEARNERS], together[LEARNERS];
    clip = MT_CLIP_UNIT;
    for (size_t k = 0; k < LEARNERS; k++)
        train(&alone[k], k, 1, &mt_cut_layer, &plain);
    for (int turn = 0; turn < 3; turn++) {
        struct mt_placement p = turn ? other : plain;
        p.update = MT_UPDATE_BACKWARD;
        p.update_pending = turn;
        train(together, 0, LEARNERS, turn ? &mt_cut_half : &mt_cut_layer, &p);
        for (size_t k = 0; k < LEARNERS; k++) {
            assert_equal(&alone[k], &together[k]);
            finish(&together[k]);
        }
    }
    for (size_t k = 0; k < LEARNERS; k++)
        finish(&alone[k]);
    clip = MT_CLIP_GLOBAL;
}

/* Numbers are drawn by tensor, of which a run alone has fewer; and how a learner rounds is its own. */
TEST(states_rounded_by_chance_have_the_bits_of_runs_alone)
{
    state_type = MT_STATE_BF16;
    learners_have_the_bits_of_runs_alone(state);
    state_type = MT_STATE_F32;
}

TEST(a_learner_whose_weights_burst_leaves_the_others)
{
    struct outcome alone, o[LEARNERS] = {0};
    struct run r;
    struct mt_err err = {0};
    begin(&r, 0, LEARNERS, &mt_cut_layer, &plain);
    r.ruined = 1;
    for (int i = 0; i < STEPS; i++)
        step(&r, (uint64_t)i, o);
    assert_int_equal(mt_engine_flush(r.engine, NULL), 0);
    assert_int_equal(mt_engine_check_learner(r.engine, 1, &err), -EDOM);
    assert_non_null(strstr(err.msg, "not finite"));
    for (size_t k = 0; k < LEARNERS; k += 2) {
        assert_int_equal(mt_engine_check_learner(r.engine, k, NULL), 0);
        o[k].updates = mt_engine_updates(r.engine, k);
        evaluate(&o[k], &r, k);
        read_tensors(&o[k], &r, k);
        train(&alone, k, 1, &mt_cut_layer, &plain);
        assert_equal(&alone, &o[k]);
        finish(&alone);
        finish(&o[k]);
    }
    end(&r);
}

TEST(learners_that_share_too_much_are_refused)
{
    struct mt_adapter_spec s[2] = {spec_of(&kinds[0]), spec_of(&kinds[1])};
    struct mt_layout_params p = {.cut = mt_cut_layer, .adapter = s, .n_learners = 2};
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    assert_true(mt_adapter_list_add(&s[1].train_also, "lm_head", 0));
    assert_int_equal(mt_layout_create(&l, &cfg, &p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "adapter.train_also with several adapters"));
    s[0].on = s[1].on = false;
    for (int i = 0; i < 2; i++)
        mt_adapter_spec_finish(&s[i]);
}

TEST_GROUP(set_up, tear_down)
