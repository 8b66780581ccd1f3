/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of a unit: its parts one after the other. A unit's record consists of those of its parts,
 * divided by enum mt_record_part; each division has the records of its parts in their order, each after its input x,
 * except for the unit's first part:
 *
 *   attention: record | rest: x of the MLP, its record
 *
 * A division of the record that is not kept has the same layout at the start of the scratch and is recomputed before
 * backward.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "model/model_priv.h"
#include "model/part.h"

/* A part's run and the address of its output. */
struct stage {
    struct mt_part_run run;
    void *y;   /* NULL: the unit's output */
    bool kept; /* its record and the x before it are kept for backward */
};

enum { MAX_STAGES = MT_FAMILY_MAX_PARTS };

static const enum mt_role record_roles[MT_N_RECORD_PARTS] = {
    [MT_RECORD_ATTENTION] = MT_ROLE_RECORD_ATTENTION,
    [MT_RECORD_REST] = MT_ROLE_RECORD,
};

/* The unit's weights, or their gradient: the embedding's have roles of their own. */
static void *either(const struct mt_unit_run *r, enum mt_role role, enum mt_role of_table)
{
    return r->at[role] ? r->at[role] : r->at[of_table];
}

static size_t stages_of(struct stage *s, mt_model *m, const struct mt_unit_run *r)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    char *at[MT_N_RECORD_PARTS], *scratch = m->unit_scratch;
    for (int i = 0; i < MT_N_RECORD_PARTS; i++) {
        at[i] = r->at[record_roles[i]] ? r->at[record_roles[i]] : scratch;
        scratch += mt_unit_record_bytes(m->layout, r->unit, (enum mt_record_part)i, m->dt, m->p.max_tokens);
    }
    for (size_t i = 0; i < u->n_parts; i++) {
        const struct mt_part *part = &m->layout->parts[u->first_part + i];
        const struct mt_part_shape shape = {&m->layout->cfg, part->spec, m->dt, m->p.max_tokens,
                                            mt_model_step_rows(&m->p)};
        char **record = &at[part->kind->record_part];
        const void *x = r->at[MT_ROLE_X];
        if (i) {
            x = s[i - 1].y = *record;
            *record += mt_model_boundary_bytes(m);
        }
        s[i] = (struct stage){.kept = r->at[record_roles[part->kind->record_part]],
                              .run = {.m = m, .part = part, .shape = shape, .in = &m->inputs[r->mb], .of = r,
                                      .w = either(r, MT_ROLE_WEIGHTS, MT_ROLE_TABLE), .x = x, .record = *record,
                                      .scratch = scratch, .dx = r->at[MT_ROLE_DX],
                                      .g = either(r, MT_ROLE_GRAD, MT_ROLE_TABLE_GRAD)}};
        *record += part->kind->record_bytes ? part->kind->record_bytes(&shape) : 0;
    }
    return u->n_parts;
}

static int prepare(const struct stage *s, struct mt_err *err)
{
    return s->run.part->kind->prepare ? s->run.part->kind->prepare(&s->run, err) : 0;
}

int mt_model_forward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    m->adapters = r->at[MT_ROLE_ADAPTERS];
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare(&s[i], err);
        if (!rc)
            rc = s[i].run.part->kind->finish(&s[i].run, s[i].y ? s[i].y : r->at[MT_ROLE_Y], err);
    }
    return rc;
}

/* Recomputes what is not kept of the record; the unit's own output is not needed. */
static int recompute(const struct stage *s, size_t n, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        if (!s[i].kept)
            rc = prepare(&s[i], err);
        if (!rc && i + 1 < n && !s[i + 1].kept)
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
    struct mt_param products[MT_MAX_PRODUCTS];
    size_t n = 0;
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++)
        for (int role = 0; role < MT_PART_MAX_PARAMS; role++)
            if (m->layout->parts[i].kind->products >> role & 1)
                products[n++] = m->layout->parts[i].param[role];
    return mt_model_begin_grad(m, r->unit, r->at[MT_ROLE_GRAD], products, n, err);
}

int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    m->adapters = r->at[MT_ROLE_ADAPTERS];
    int rc = r->at[MT_ROLE_GRAD] && r->first ? begin_grad(m, r, err) : 0;
    if (!rc)
        rc = recompute(s, n, err);
    for (size_t i = n; i-- > 0 && !rc;)
        rc = s[i].run.part->kind->backward(&s[i].run, err);
    return rc;
}
