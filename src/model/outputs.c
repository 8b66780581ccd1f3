/* SPDX-License-Identifier: Apache-2.0 */
#include "model/outputs.h"

#include "base/mem.h"
#include "model/part.h"

/* Rows of all experts' padded lists, at most. */
static size_t all_rows(const struct mt_model_params *p, mt_device *dev)
{
    const struct mt_moe *moe = &p->layout->cfg.moe;
    size_t bucket = mt_device_limits(dev)->row_bucket, entries = mt_model_group_rows(p) * (size_t)moe->top_k;
    return entries + MT_MIN(entries, (size_t)moe->n_experts) * (bucket - 1);
}

size_t mt_outputs_rows(const struct mt_model_params *p, mt_device *dev)
{
    size_t share = p->expert_sums > 0 ? mt_div_up(all_rows(p, dev), (size_t)p->expert_sums) : 0;
    share = mt_align_up(share, mt_device_limits(dev)->row_bucket);
    return p->layout->cfg.moe.n_experts ? MT_MAX(share, mt_expert_tile_rows(p, dev)) : 0;
}

size_t mt_outputs_bytes(const struct mt_model_params *p, mt_device *dev)
{
    return mt_outputs_rows(p, dev) * mt_moe_row(&p->layout->cfg) * mt_dtype_size(p->dtype);
}

bool mt_outputs_take(struct mt_outputs *o, size_t place, size_t n, bool down)
{
    bool begins = o->first == o->end;
    size_t first = begins ? place : MT_MIN(o->first, place), end = begins ? place + n : MT_MAX(o->end, place + n);
    int64_t origin = !begins ? o->origin : down ? (int64_t)end - (int64_t)o->n : (int64_t)first;
    if ((int64_t)first < origin || (int64_t)end > origin + (int64_t)o->n)
        return false;
    o->origin = origin;
    o->first = first;
    o->end = end;
    return true;
}

void *mt_outputs_at(const mt_model *m, size_t place)
{
    const struct mt_outputs *o = &m->outputs;
    return mt_elem(m, o->rows, (size_t)((int64_t)place - o->origin) * mt_moe_row(&m->layout->cfg));
}

static struct mt_moe_combine arguments(const mt_model *m, const struct mt_outputs_sum *s)
{
    return (struct mt_moe_combine){
        .n = mt_model_rows_in_use(m, s->mb),
        .c = mt_moe_row(&m->layout->cfg),
        .k = (size_t)m->layout->cfg.moe.top_k,
        .down = s->down,
        .dtype = m->dt,
        .places = s->routing.places,
        .weights = s->weighted ? s->routing.weights : NULL,
        .sum = s->sum,
    };
}

int mt_outputs_sum(mt_model *m, const struct mt_outputs_sum *s, struct mt_err *err)
{
    struct mt_outputs *o = &m->outputs;
    struct mt_moe_combine a = arguments(m, s);
    if (o->first == o->end)
        return 0;
    a.first = o->first;
    a.rows = o->end - o->first;
    a.src = mt_outputs_at(m, o->first);
    o->first = o->end = 0;
    return mt_op_moe_combine(m->dev, &a, err);
}

int mt_outputs_assume(mt_model *m, const struct mt_outputs_sum *s, size_t rows, struct mt_err *err)
{
    struct mt_moe_combine a = arguments(m, s);
    size_t all = a.n * a.k;
    a.rows = MT_MIN(rows, all);
    if (m->p.expert_sums > 0)
        a.n = mt_div_up(a.n * mt_div_up(all, m->outputs.n) * a.rows, all);
    else
        a.n *= mt_div_up(a.rows, m->outputs.n);
    a.src = m->outputs.rows;
    return a.rows ? mt_op_moe_combine(m->dev, &a, err) : 0;
}
