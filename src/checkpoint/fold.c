/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/fold.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "weights/peft.h"

#define END_B "." MT_LORA_B ".weight"

/* A tensor of the folder; a factor is padded. */
struct folded {
    const struct mt_st_tensor *t;
    bool a, b;
    float scale; /* that its elements are multiplied by: B's module had it */
};

struct mt_fold {
    const struct mt_st_model *weights;
    int64_t rank;
    struct folded *of; /* [weights->n_tensors] */
};

/* alpha over the rank of the module that B is of. */
static int find_scale(float *scale, struct mt_adapter_spec *s, const struct mt_st_tensor *t, struct mt_err *err)
{
    static const char prefix[] = "base_model.model.";
    char module[256]; /* mt_peft_read_spec() saw it */
    double rank = (double)t->shape[1];
    snprintf(module, sizeof(module), "%.*s", (int)(strlen(t->name) - strlen(prefix) - strlen(END_B)), t->name + strlen(prefix));
    const struct mt_adapter_item *alpha = mt_adapter_match(&s->alphas, module);
    if (!alpha)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "tensor \"%s\" has no " MT_LORA_A, t->name);
    *scale = (float)(alpha->value / (s->rslora ? sqrt(rank) : rank));
    return 0;
}

static int find_factors(struct mt_fold *f, struct mt_adapter_spec *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < f->weights->n_tensors && !rc; i++) {
        const struct mt_st_tensor *t = &f->weights->tensors[i];
        struct folded *of = &f->of[i];
        *of = (struct folded){t, mt_ends_with(t->name, "." MT_LORA_A ".weight"), mt_ends_with(t->name, END_B), 1};
        if ((of->a || of->b) && t->n_dims != 2)
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" must be a matrix", t->name);
        else if (of->b)
            rc = find_scale(&of->scale, s, t, err);
        else if (of->a)
            f->rank = MT_MAX(f->rank, t->shape[0]);
    }
    return rc;
}

/* All modules have the one rank, and the scale 1. */
static void set_rank(cJSON *o, const void *arg)
{
    static const char *const patterns[] = {"rank_pattern", "alpha_pattern"}, *const numbers[] = {"r", "lora_alpha"};
    const int64_t *rank = arg;
    for (size_t i = 0; i < MT_ARRAY_LEN(patterns); i++) {
        cJSON_DeleteItemFromObjectCaseSensitive(o, patterns[i]);
        cJSON_DeleteItemFromObjectCaseSensitive(o, numbers[i]);
        cJSON_AddObjectToObject(o, patterns[i]);
        cJSON_AddNumberToObject(o, numbers[i], (double)*rank);
    }
    cJSON_DeleteItemFromObjectCaseSensitive(o, "use_rslora");
    cJSON_AddBoolToObject(o, "use_rslora", false);
}

/* In an adapter of all experts PEFT has the rows of all of them in one factor. */
static int refuse_experts(const char *config, const char *dir, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = cJSON_Parse(config);
    bool any = cJSON_GetArraySize(mt_json_get(o, "target_parameters")) > 0;
    return any ? mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s has adapters of the parameters of all experts (target_parameters), which "
                         "cannot be folded, and which vLLM does not read: export --merge for it", dir)
               : 0;
}

int mt_fold_open(struct mt_fold **out, const char *dir, const struct mt_st_model *weights, char **config,
                 struct mt_err *err)
{
    struct mt_adapter_spec s = {.on = false};
    struct mt_fold *f = mt_calloc(1, sizeof(*f));
    int rc = f && (f->of = mt_calloc(weights->n_tensors, sizeof(*f->of)))
                 ? refuse_experts(*config, dir, err) : mt_fail_nomem(err, dir, weights->n_tensors * sizeof(*f->of));
    rc = rc ?: mt_peft_read_spec(&s, dir, err);
    if (!rc) {
        f->weights = weights;
        rc = find_factors(f, &s, err);
        mt_adapter_spec_finish(&s);
    }
    rc = rc ?: mt_json_edit(config, MT_PEFT_CONFIG, set_rank, &f->rank, MT_ERR_INPUT, err);
    if (rc)
        mt_fold_close(&f);
    else
        *out = f;
    return rc;
}

void mt_fold_close(struct mt_fold **f)
{
    if (*f)
        free((*f)->of);
    free(*f);
    *f = NULL;
}

/* The rows and columns that the factor has, scaled; zeros beyond. */
static int read_padded(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct mt_fold *f = s->ctx;
    const struct folded *of = s->of;
    const size_t own = (size_t)of->t->shape[1], all = (size_t)of->t->shape[0], width = (size_t)s->decl.shape[1];
    const size_t row = first / width, rows = (first + n - 1) / width + 1 - row;
    const size_t there = MT_MIN(rows, all - MT_MIN(all, row));
    MT_FREED float *from = mt_calloc(rows * own, sizeof(*from));
    float *to = dst;
    int rc = !from   ? mt_fail_nomem(err, of->t->name, rows * own * sizeof(*from))
             : there ? mt_st_read_f32(f->weights, of->t, row * own, there * own, from, err)
                     : 0;
    for (size_t k = 0; k < n && !rc; k++) {
        size_t at = first + k, column = at % width;
        to[k] = column < own ? from[(at / width - row) * own + column] * of->scale : 0;
    }
    return rc;
}

int mt_fold_list(struct mt_fold *f, struct mt_source_list *out, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < f->weights->n_tensors && !rc; i++) {
        const struct folded *of = &f->of[i];
        struct mt_source s = mt_source_f32(f->weights, of->t);
        if (of->a || of->b) {
            s = (struct mt_source){s.decl, read_padded, f, of, 0};
            s.decl.shape[of->a ? 0 : 1] = f->rank;
        }
        rc = mt_source_add(out, of->a || of->b ? s : mt_source_raw(f->weights, of->t), err);
    }
    return rc;
}
