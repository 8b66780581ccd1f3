/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/fold.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "weights/peft.h"

enum part { OTHER, FACTOR_A, FACTOR_B };

struct folded {
    enum part part;
    float scale; /* of the module, in B */
};

struct mt_fold {
    const struct mt_st_model *weights;
    int64_t rank;
    struct folded *of; /* [weights->n_tensors] */
};

/* PREFIX MODULE.lora_A.weight: the part, and the length of what is before ".lora_A.weight". */
static enum part part_of(const char *name, size_t *len)
{
    static const char *const ends[] = {"", "." MT_LORA_A ".weight", "." MT_LORA_B ".weight"};
    size_t n = strlen(name);
    for (int p = FACTOR_A; p <= FACTOR_B; p++) {
        *len = n - MT_MIN(n, strlen(ends[p]));
        if (!strcmp(name + *len, ends[p]))
            return (enum part)p;
    }
    return OTHER;
}

/* alpha over the rank of the module whose name is in the first `len` characters of B's. */
static int find_scale(float *scale, struct mt_adapter_spec *s, const struct mt_st_tensor *t, size_t len,
                      struct mt_err *err)
{
    static const char prefix[] = "base_model.model.";
    char module[256];
    double rank = (double)t->shape[1];
    snprintf(module, sizeof(module), "%.*s", (int)(len - strlen(prefix)), t->name + strlen(prefix)); /* mt_peft_read_spec() saw it */
    const struct mt_adapter_item *alpha = mt_adapter_match(&s->alphas, module);
    if (!alpha)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "tensor \"%s\" has no " MT_LORA_A, t->name);
    *scale = (float)(alpha->value / (s->rslora ? sqrt(rank) : rank));
    return 0;
}

static int find_parts(struct mt_fold *f, struct mt_adapter_spec *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < f->weights->n_tensors && !rc; i++) {
        const struct mt_st_tensor *t = &f->weights->tensors[i];
        size_t len;
        f->of[i].part = part_of(t->name, &len);
        if (f->of[i].part != OTHER && t->n_dims != 2)
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" must be a matrix", t->name);
        else if (f->of[i].part == FACTOR_B)
            rc = find_scale(&f->of[i].scale, s, t, len, err);
        else if (f->of[i].part == FACTOR_A)
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
        rc = find_parts(f, &s, err);
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

/* A [rank, in]: rows of the tensor's own rank, then zeros. */
static int read_a(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct mt_fold *f = s->ctx;
    const struct mt_st_tensor *t = s->of;
    size_t there = MT_MIN(n, t->n_elems - MT_MIN(t->n_elems, first));
    memset((float *)dst + there, 0, (n - there) * sizeof(float));
    return there ? mt_st_read_f32(f->weights, t, first, there, dst, err) : 0;
}

/* B [out, rank]: rows of the tensor's own rank, scaled, and zeros after each. */
static int read_b(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct mt_fold *f = s->ctx;
    const struct mt_st_tensor *t = s->of;
    const size_t own = (size_t)t->shape[1], rank = (size_t)f->rank;
    const size_t row = first / rank, rows = (first + n - 1) / rank + 1 - row;
    float *from = mt_calloc(rows * own, sizeof(*from)), *to = dst, scale = f->of[t - f->weights->tensors].scale;
    int rc = from ? mt_st_read_f32(f->weights, t, row * own, rows * own, from, err)
                  : mt_fail_nomem(err, t->name, rows * own * sizeof(*from));
    for (size_t k = 0; k < n && !rc; k++) {
        size_t at = first + k, column = at % rank;
        to[k] = column < own ? from[(at / rank - row) * own + column] * scale : 0;
    }
    free(from);
    return rc;
}

int mt_fold_list(struct mt_fold *f, struct mt_source_list *out, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < f->weights->n_tensors && !rc; i++) {
        struct mt_source s = mt_source_raw(f->weights, &f->weights->tensors[i]);
        enum part part = f->of[i].part;
        if (part != OTHER) {
            s = (struct mt_source){s.decl, part == FACTOR_A ? read_a : read_b, f, s.of, 0};
            s.decl.dtype = MT_ST_F32;
            s.decl.shape[part == FACTOR_A ? 0 : 1] = f->rank;
        }
        rc = mt_source_add(out, s, err);
    }
    return rc;
}
