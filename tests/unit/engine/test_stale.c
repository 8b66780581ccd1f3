/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No operation reads scratch that another layer, part or product left: every family, trained in every way, has the same
 * bits when all scratch becomes NaN as soon as it is of no further use (mt_placement.poison), with units cut and records
 * made again. Run with the folder of the families' configurations and that of the names of their adapters.
 */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../model/planes_of.h"
#include "made_batch.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/philox.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/peft.h"
#include "weights/weights.h"

enum { TOKENS = 20, MICRO = 2, STEPS = 2, DEVICE_BYTES = 16 << 20, MAX_NAMES = 64 };

static const char *fixtures;

/* How a model is trained. */
static const struct kind {
    const char *name;
    bool adapters, dora, named; /* named: on all that the family can have adapters of; else on "all-linear" */
    double dropout;
    bool fp8;
    bool refused; /* of some families */
} kinds[] = {
    {.name = "all parameters"},
    {.name = "all parameters, FP8", .fp8 = true},
    {.name = "LoRA", .adapters = true, .named = true},
    {.name = "LoRA, FP8", .adapters = true, .named = true, .fp8 = true},
    {.name = "LoRA with dropout", .adapters = true, .dropout = 0.2},
    {.name = "DoRA", .adapters = true, .dora = true, .refused = true},
};

/* What a run results in. */
struct outcome {
    double loss[STEPS], norm[STEPS], eval;
    float *masters; /* of all that was trained */
    size_t n;
};

static void sound(int rc, const char *family, const struct kind *k, const struct mt_err *err)
{
    if (rc)
        fail_msg("%s, %s: %s", family, k->name, err->msg);
}

/* Names of a list of PEFT's; expressions of nested models are left out. */
static void add_names(struct mt_adapter_list *to, const cJSON *list)
{
    const cJSON *item;
    char name[128];
    cJSON_ArrayForEach(item, list)
    {
        size_t n = strlen(item->valuestring), ending = strlen(".weight");
        bool weight = n > ending && !strcmp(item->valuestring + n - ending, ".weight");
        snprintf(name, sizeof(name), "%.*s", (int)(weight ? n - ending : n), item->valuestring);
        assert_true(mt_adapter_list_add(to, name, 0));
    }
}

static struct mt_adapter_spec spec_of(const char *family, const struct kind *k)
{
    struct mt_adapter_spec s = {.on = true, .rank = 3, .alpha = 6, .dora = k->dora, .dropout = k->dropout, .lr_ratio_b = 1};
    char path[512];
    MT_JSON_FREED cJSON *doc = NULL;
    snprintf(path, sizeof(path), "%s/families/%s.json", fixtures, family);
    if (k->named && !mt_json_read_file(&doc, path, MT_ERR_RUNTIME, NULL))
        add_names(&s.targets, mt_json_get(mt_json_get(doc, "adapter"), "target_modules"));
    if (!s.targets.n)
        assert_true(mt_adapter_list_add(&s.targets, MT_ALL_LINEAR, 0));
    add_names(&s.targets, mt_json_get(mt_json_get(doc, "adapter"), "target_parameters"));
    return s;
}

/* NULL: the family cannot be trained so. */
static struct mt_layout *lay_out(const struct mt_hf_config *cfg, const char *family, const struct kind *k, bool poison)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = k->adapters ? spec_of(family, k) : (struct mt_adapter_spec){0};
    struct mt_layout_params p = {.cut = poison ? mt_cut_half : mt_cut_layer, .adapter = k->adapters ? &s : NULL};
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    p.cut.expert_group = poison ? 3 : 0;
    int rc = mt_layout_create(&l, cfg, &p, &err);
    if (!k->refused || rc != -EINVAL)
        sound(rc, family, k, &err);
    return l;
}

static mt_plane_set *make_planes(const struct mt_layout *l)
{
    mt_plane_set *planes = planes_of(l, &mt_adamw, MT_F32);
    assert_int_equal(mt_weights_init_random(l, planes, 1, 1, NULL), 0);
    assert_int_equal(mt_adapter_init(l, planes, 2, NULL), 0);
    return planes;
}

static void make_step(struct mt_step_data *d, struct mt_batch *micro, uint64_t step, int64_t vocab)
{
    *d = (struct mt_step_data){.micro = micro, .cap = MICRO, .n = MICRO, .step = step};
    for (size_t m = 0; m < MICRO; m++) {
        uint32_t ids[TOKENS];
        size_t n = TOKENS - m, cut = 5 + m;
        for (size_t i = 0; i < n; i++)
            ids[i] = (uint32_t)(mt_philox_uniform(step, m, i) * (double)MT_MIN(vocab, (int64_t)96));
        made_batch(d, &micro[m], TOKENS, ids, n, cut);
    }
}

static void read_masters(struct outcome *o, const struct mt_layout *l, mt_plane_set *planes)
{
    for (int fill = 0; fill < 2; fill++) {
        o->masters = fill ? mt_calloc(o->n + 1, sizeof(float)) : NULL;
        o->n = 0;
        for (size_t i = 0; i < l->n_tensors; i++) {
            const struct mt_tensor *t = &l->tensors[i];
            if (t->trainable && fill)
                assert_int_equal(mt_tensor_read_masters(planes, t, 0, t->n, o->masters + o->n, NULL), 0);
            o->n += t->trainable ? t->n : 0;
        }
    }
}

static void run_steps(struct outcome *o, mt_engine *e, const char *family, const struct kind *k, int64_t vocab)
{
    struct mt_err err = {0};
    struct mt_batch micro[MICRO];
    struct mt_step_data d;
    struct mt_eval_result eval = {0};
    for (int i = 0; i <= STEPS; i++) {
        struct mt_step_result res = {0};
        make_step(&d, micro, (uint64_t)i, vocab);
        const struct mt_learner_step of = {&d, 1e-2};
        if (i < STEPS) {
            sound(mt_engine_step(e, &of, &res, &err), family, k, &err);
            o->loss[i] = res.loss;
            o->norm[i] = res.grad_norm;
        } else {
            sound(mt_engine_flush(e, &err), family, k, &err);
            sound(mt_engine_eval(e, 0, &d, &eval, &err), family, k, &err);
            o->eval = eval.loss_sum;
        }
        for (size_t m = 0; m < MICRO; m++)
            mt_batch_finish(&micro[m]);
    }
}

/* false: the family cannot be trained so. */
static bool train(struct outcome *o, const struct mt_hf_config *cfg, const char *family, const struct kind *k, bool poison)
{
    struct mt_err err = {0};
    struct mt_device_params dp = {.kind = "cpu", .n_threads = 1, .budget_bytes = DEVICE_BYTES};
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out(cfg, family, k, poison);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    mt_engine *e = NULL;
    if (!l)
        return false;
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *planes = make_planes(l);
    assert_int_equal(mt_device_create(&dev, &dp, NULL), 0);
    struct mt_engine_params p = {
        .dev = dev, .layout = l, .planes = planes, .train = true, .host_bytes = UINT64_MAX, .max_tokens = TOKENS, .max_docs = 2,
        .max_len = TOKENS, .max_micro = MICRO,
        .numerics = {.dtype = k->fp8 ? MT_BF16 : MT_F32, .compute = k->fp8 ? MT_COMPUTE_FP8 : MT_COMPUTE_AUTO,
                     .grad_dtype = MT_F32, .logits_chunk = 16, .optimizer = &mt_adamw,
                     .optimizer_keys = {0.9, 0.99, 1e-8, 0.1}, .grad_clip = 1, .seed = 3, .micro_batch = 1,
                     .rows_per_step = poison ? MICRO : 1}, /* in FP8 the poisoned run encodes weights once a load */
        .placement = {.slots = poison ? 2 : 4, .threads = 1, .poison = poison,
                      .activations = poison ? MT_ACT_RECOMPUTE : MT_ACT_KEEP}};
    sound(mt_engine_create(&e, &p, &err), family, k, &err);
    run_steps(o, e, family, k, cfg->vocab);
    read_masters(o, l, planes);
    mt_engine_destroy(&e);
    return true;
}

/* Whether the family can be trained so. */
static bool compare(const struct mt_hf_config *cfg, const char *family, const struct kind *k)
{
    struct outcome usual = {0}, poisoned = {0};
    if (!train(&usual, cfg, family, k, false))
        return false;
    assert_true(train(&poisoned, cfg, family, k, true));
    for (int i = 0; i < STEPS; i++) {
        if (!(isfinite(usual.loss[i]) && usual.norm[i] > 0 && isfinite(usual.norm[i])))
            fail_msg("%s, %s: loss %g, norm %g", family, k->name, usual.loss[i], usual.norm[i]);
        if (usual.loss[i] != poisoned.loss[i] || usual.norm[i] != poisoned.norm[i])
            fail_msg("%s, %s, step %d: something reads dead scratch: loss %.17g, norm %.17g, else %.17g and %.17g", family,
                     k->name, i + 1, poisoned.loss[i], poisoned.norm[i], usual.loss[i], usual.norm[i]);
    }
    if (usual.eval != poisoned.eval || usual.n != poisoned.n ||
        memcmp(usual.masters, poisoned.masters, usual.n * sizeof(float)))
        fail_msg("%s, %s: weights differ where dead scratch is NaN", family, k->name);
    free(usual.masters);
    free(poisoned.masters);
    return true;
}

TEST(dead_scratch_changes_no_bit_of_any_family)
{
    DIR *d = opendir(fixtures);
    size_t n = 0, dora = 0;
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));) {
        static struct mt_hf_config cfg;
        char path[512];
        snprintf(path, sizeof(path), "%s/%.100s/config.json", fixtures, e->d_name);
        if (e->d_name[0] == '.' || access(path, R_OK))
            continue;
        *strrchr(path, '/') = 0;
        struct mt_err err = {0};
        sound(mt_hf_config_read(&cfg, path, &err), e->d_name, kinds, &err);
        for (size_t k = 0; k < MT_ARRAY_LEN(kinds); k++)
            dora += compare(&cfg, e->d_name, &kinds[k]) && kinds[k].dora;
        n++;
    }
    closedir(d);
    assert_true(n >= 60 && dora >= 50);
    print_message("%zu families, %zu of them with DoRA\n", n, dora);
}

int main(int argc, char **argv)
{
    fixtures = argc > 1 ? argv[1] : ".";
    return test_run();
}
