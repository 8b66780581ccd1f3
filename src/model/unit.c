/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of a unit: its parts one after the other. A unit's record is that of each part, with
 * the hidden state between two parts after the first one's:
 *
 *   record of part 0 | x of part 1 | record of part 1 | x of part 2 | ...
 *
 * Where no record is kept, the same layout lies at the start of the scratch and is filled again before backward.
 */
#include "base/mem.h"
#include "model/model_priv.h"
#include "model/part.h"

/* A part's run and where its output belongs. */
struct stage {
    struct mt_part_run run;
    void *y; /* NULL: the unit's output */
};

enum { MAX_STAGES = MT_FAMILY_MAX_PARTS };

static size_t stages_of(struct stage *s, mt_model *m, const struct mt_unit_run *r)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    const struct mt_part_shape shape = {&m->layout->cfg, m->dt, m->p.max_tokens};
    const void *x = r->x;
    char *at = r->record ? r->record : m->unit_scratch;
    char *scratch = (char *)m->unit_scratch + mt_unit_record_bytes(m->layout, r->unit, m->dt, m->p.max_tokens);
    for (size_t i = 0; i < u->n_parts; i++) {
        const struct mt_part *part = &m->layout->parts[u->first_part + i];
        s[i] = (struct stage){.run = {.m = m, .part = part, .shape = shape, .in = &m->inputs[r->mb], .of = r,
                                      .w = r->w, .x = x, .record = at, .scratch = scratch, .dx = r->dx, .g = r->g}};
        at += part->kind->record_bytes ? part->kind->record_bytes(&shape) : 0;
        if (i + 1 == u->n_parts)
            continue;
        x = s[i].y = at;
        at += mt_model_boundary_bytes(m);
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
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare(&s[i], err);
        if (!rc)
            rc = s[i].run.part->kind->finish(&s[i].run, s[i].y ? s[i].y : r->y, err);
    }
    return rc;
}

/* Fills the record again; the unit's own output is not needed. */
static int recompute(const struct stage *s, size_t n, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare(&s[i], err);
        if (!rc && s[i].y)
            rc = s[i].run.part->kind->finish(&s[i].run, s[i].y, err);
    }
    return rc;
}

int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    int rc = r->record ? 0 : recompute(s, n, err);
    for (size_t i = n; i-- > 0 && !rc;)
        rc = s[i].run.part->kind->backward(&s[i].run, err);
    return rc;
}
