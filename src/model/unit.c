/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of a unit: its parts one after the other. A unit's record consists of the segments of its
 * parts, in their order; the first segment of each part but the first begins with the part's input x:
 *
 *   qkv | attention's output | x of the MLP, gate and up
 *
 * A segment that is not kept has the same layout at the start of the scratch and is made again before backward.
 */
#include <stdlib.h>

#include "model/packing.h"
#include "model/recipe.h"
#include "model/state.h"

/* A part's run and the address of its output. */
struct stage {
    struct mt_part_run run;
    void *y;       /* NULL: the unit's output */
    unsigned kept; /* bit i: segment i of its record is kept for backward; bit 0: and the x before it */
    bool all_kept;
};

enum { MAX_STAGES = MT_LAYER_MAX_PARTS };

/* The segments of the unit's record, or the scratch for those that are not kept; returns the rest of the scratch. */
static void *find_segments(char *at[MT_MAX_SEGMENTS], mt_model *m, const struct mt_unit_run *r)
{
    struct mt_segment segment[MT_MAX_SEGMENTS];
    size_t n = mt_unit_segments(m->layout, r->unit, m->dt, m->p.max_tokens, segment);
    char *scratch = m->unit_scratch;
    for (size_t i = 0; i < n; i++) {
        at[i] = r->at[mt_record_role(i)] ? r->at[mt_record_role(i)] : scratch;
        scratch += segment[i].bytes;
    }
    return scratch;
}

/* The unit's weights, or their gradient: the embedding's have roles of their own. */
static void *either(const struct mt_unit_run *r, enum mt_role role, enum mt_role of_table)
{
    return r->at[role] ? r->at[role] : r->at[of_table];
}

static const void *weights_of(const mt_model *m, const struct mt_unit_run *r)
{
    return mt_unit_decoded_bytes(m->layout, r->unit, m->dt) ? m->decoded : either(r, MT_ROLE_WEIGHTS, MT_ROLE_TABLE);
}

/* Few rows are multiplied by codes. */
static int decode(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    bool decodes = mt_unit_decoded_bytes(m->layout, r->unit, m->dt);
    bool plain = decodes && m->inputs[r->mb].n_tokens <= m->coded_rows;
    const char *slot = r->at[MT_ROLE_WEIGHTS];
    size_t owner = m->layout->units[r->unit].weights;
    bool coded = m->p.coded_weights && mt_unit_becomes_codes(m->layout, owner);
    m->own.codes = (struct mt_codes){plain ? m->decoded : NULL, 0, r->unit, slot};
    m->own.coded = (struct mt_coded){coded ? slot : NULL, owner};
    const struct mt_decoding d = {r->unit, slot, m->decoded, plain};
    return decodes ? mt_unit_decode_to(m->layout, &d, m->dev, err) : 0;
}

static size_t stages_of(struct stage *s, mt_model *m, const struct mt_unit_run *r)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    char *at[MT_MAX_SEGMENTS], *scratch = find_segments(at, m, r);
    for (size_t i = 0, segment = 0; i < u->n_parts; i++) {
        const struct mt_part *part = &m->layout->parts[u->first_part + i];
        const struct mt_part_shape shape = {&m->layout->cfg, part->spec, m->dt, m->p.max_tokens,
                                            mt_model_group_rows(&m->p), part->recipe};
        size_t n = mt_part_n_segments(part->kind);
        const void *x = r->at[MT_ROLE_X];
        if (i) {
            x = s[i - 1].y = at[segment];
            at[segment] += mt_model_boundary_bytes(m);
        }
        s[i] = (struct stage){.run = {.m = m, .part = part, .shape = shape, .in = &m->inputs[r->mb], .of = r,
                                      .w = weights_of(m, r), .x = x, .scratch = scratch,
                                      .dx = r->at[MT_ROLE_DX], .g = either(r, MT_ROLE_GRAD, MT_ROLE_TABLE_GRAD)}};
        for (size_t k = 0; k < n; k++, segment++) {
            s[i].run.record.base[k] = at[segment];
            s[i].kept |= (r->at[mt_record_role(segment)] != NULL) << k;
        }
        s[i].all_kept = s[i].kept == (1u << n) - 1;
    }
    return u->n_parts;
}

static int prepare(const struct stage *s, struct mt_err *err)
{
    mt_model_poison_parts(s->run.m, s->run.scratch);
    return s->run.part->kind->prepare ? s->run.part->kind->prepare(&s->run, err) : 0;
}

int mt_model_forward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    m->adapters = r->at[MT_ROLE_ADAPTERS];
    mt_model_poison_parts(m, NULL);
    int rc = decode(m, r, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = prepare(&s[i], err)
          ?: s[i].run.part->kind->finish(&s[i].run, s[i].y ? s[i].y : r->at[MT_ROLE_Y], err);
    return rc;
}

/* Recomputes what is not kept of the record; the unit's own output is not needed. */
static int recompute(struct stage *s, size_t n, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        s[i].run.kept = s[i].kept;
        if (!s[i].all_kept)
            rc = prepare(&s[i], err);
        if (!rc && i + 1 < n && !(s[i + 1].kept & 1))
            rc = s[i].run.part->kind->finish(&s[i].run, s[i].y, err);
    }
    return rc;
}

/* By place in the unit's gradient, which need not be the order of roles. */
static int compare_grads(const void *a, const void *b)
{
    const struct mt_param *x = a, *y = b;
    return (x->grad > y->grad) - (x->grad < y->grad);
}

int mt_model_begin_grad(mt_model *m, size_t unit, float *g, const struct mt_param *products, size_t n,
                        struct mt_err *err)
{
    struct mt_param p[MT_MAX_PRODUCTS];
    size_t at = 0, end = m->layout->units[unit].n_grad, k = 0;
    int rc = 0;
    for (size_t i = 0; i < n; i++)
        if (mt_grad_of(g, products[i]))
            p[k++] = products[i];
    if (k)
        qsort(p, k, sizeof(*p), compare_grads);
    for (size_t i = 0; i <= k && !rc; i++) {
        size_t to = i < k ? p[i].grad : end, from = at / MT_PARAM_ALIGN * MT_PARAM_ALIGN; /* products come later */
        if (from < to)
            rc = mt_op_zero(m->dev, &(struct mt_zero){g + from, (to - from) * sizeof(float)}, err);
        at = i < k ? p[i].grad + p[i].n : end;
    }
    return rc;
}

static int begin_grad(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    const struct mt_part *first = &m->layout->parts[u->first_part];
    struct mt_param products[MT_MAX_PRODUCTS];
    size_t n = 0;
    for (const struct mt_part *part = first; part < first + u->n_parts; part++)
        for (int role = 0; role < MT_PART_MAX_PARAMS; role++)
            if (part->recipe && part->recipe->linears >> role & 1)
                products[n++] = part->param[role];
    return mt_model_begin_grad(m, u->weights, r->at[MT_ROLE_GRAD], products, n, err);
}

int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    m->adapters = r->at[MT_ROLE_ADAPTERS];
    mt_model_poison_parts(m, NULL);
    int rc = decode(m, r, err);
    if (!rc && r->at[MT_ROLE_GRAD] && r->first)
        rc = begin_grad(m, r, err);
    rc = rc ?: recompute(s, n, err);
    for (size_t i = n; i-- > 0 && !rc;) {
        mt_model_poison_parts(m, s[i].run.scratch);
        rc = s[i].run.part->kind->backward(&s[i].run, err);
    }
    return rc;
}
