/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of a unit: its parts one after the other. A unit's record is that of each part. What belongs to
 * one part of it (enum mt_record_part) lies together, in the order of the unit's parts, each but the unit's first with
 * the hidden state that it began with before it:
 *
 *   attention: record | rest: x of the MLP, its record
 *
 * Where a part of the record is not kept, the same layout lies at the start of the scratch and is filled again before
 * backward.
 */
#include "base/mem.h"
#include "model/model_priv.h"
#include "model/part.h"

/* A part's run and where its output belongs. */
struct stage {
    struct mt_part_run run;
    void *y;   /* NULL: the unit's output */
    bool kept; /* its record, and the x that lies with it, are there when backward begins */
};

enum { MAX_STAGES = MT_FAMILY_MAX_PARTS };

static size_t stages_of(struct stage *s, mt_model *m, const struct mt_unit_run *r)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    const struct mt_part_shape shape = {&m->layout->cfg, m->dt, m->p.max_tokens};
    char *at[MT_N_RECORD_PARTS], *scratch = m->unit_scratch;
    for (int i = 0; i < MT_N_RECORD_PARTS; i++) {
        at[i] = r->record[i] ? r->record[i] : scratch;
        scratch += mt_unit_record_bytes(m->layout, r->unit, (enum mt_record_part)i, m->dt, m->p.max_tokens);
    }
    for (size_t i = 0; i < u->n_parts; i++) {
        const struct mt_part *part = &m->layout->parts[u->first_part + i];
        char **record = &at[part->kind->record_part];
        const void *x = r->x;
        if (i) {
            x = s[i - 1].y = *record;
            *record += mt_model_boundary_bytes(m);
        }
        s[i] = (struct stage){.kept = r->record[part->kind->record_part],
                              .run = {.m = m, .part = part, .shape = shape, .in = &m->inputs[r->mb], .of = r,
                                      .w = r->w, .x = x, .record = *record, .scratch = scratch, .dx = r->dx,
                                      .g = r->g}};
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
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare(&s[i], err);
        if (!rc)
            rc = s[i].run.part->kind->finish(&s[i].run, s[i].y ? s[i].y : r->y, err);
    }
    return rc;
}

/* Fills again what is not kept of the record; the unit's own output is not needed. */
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

int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    struct stage s[MAX_STAGES];
    size_t n = stages_of(s, m, r);
    mt_model_set_rows(m, r->mb, NULL);
    int rc = recompute(s, n, err);
    for (size_t i = n; i-- > 0 && !rc;)
        rc = s[i].run.part->kind->backward(&s[i].run, err);
    return rc;
}
