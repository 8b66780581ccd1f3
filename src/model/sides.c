/* SPDX-License-Identifier: Apache-2.0 */
#include "model/sides.h"

#include "base/mem.h"
#include "model/linear.h"
#include "model/part.h"

/* Parts that experts share with nothing that sides have a copy of. */
static bool shares_scratch(const struct mt_model_params *p)
{
    bool shares = mt_direct_scratch_bytes(p) > 0;
    for (size_t i = 0; i < p->layout->n_adapters; i++)
        shares |= p->layout->adapters[i].dropout > 0;
    return shares || mt_dora_bytes(p) > 0;
}

int mt_model_sides(const struct mt_model_params *p, mt_device *dev)
{
    int most = MT_MIN(mt_device_limits(dev)->sides, p->expert_streams);
    return most < 2 || !p->layout->cfg.moe.n_experts || shares_scratch(p) ? 0 : most;
}

int mt_model_sides_create(mt_model *m, struct mt_err *err)
{
    int rc = mt_device_open_sides(m->dev, m->n_sides, m->side_memory, err); /* no stream is made while a step runs */
    for (int i = 0; i < m->n_sides + MT_SIDE_ROWS && m->n_sides && !rc; i++)
        rc = mt_event_create(m->dev, &m->side_event[i], err);
    return rc;
}

void mt_model_sides_destroy(mt_model *m)
{
    for (int i = 0; i < MT_SIDE_EVENTS; i++)
        mt_event_destroy(&m->side_event[i]);
}

/* Event of a side, or of COMPUTE's progress (from n_sides on). */
static mt_event *event(const struct mt_sides *s, int i)
{
    return s->m->side_event[i];
}

static void turn_to(struct mt_sides *s, int side)
{
    mt_model *m = s->m;
    m->side[s->side] = m->own; /* with what is known of FP8 operands */
    m->own = m->side[side];
    m->own.product.known = NULL;
    s->side = side;
    mt_device_turn_to(m->dev, side);
}

int mt_sides_fork(struct mt_sides *s, mt_model *m, size_t rows, struct mt_err *err)
{
    *s = (struct mt_sides){.m = m, .rows = rows, .n = m->n_sides};
    if (!s->n)
        return 0;
    int rc = mt_device_open_sides(m->dev, s->n, m->side_memory, err)
          ?: mt_event_record(m->dev, event(s, 0), MT_STREAM_COMPUTE, err);
    for (int i = 1; i <= s->n && !rc; i++) {
        turn_to(s, i);
        rc = mt_event_wait(m->dev, event(s, 0), MT_STREAM_COMPUTE, err);
    }
    turn_to(s, 0);
    return rc;
}

int mt_sides_turn(struct mt_sides *s, size_t i)
{
    if (s->n)
        turn_to(s, (int)(i % (size_t)s->n) + 1);
    return s->side;
}

static bool overlap(const struct mt_side_rows *t, size_t first, size_t end)
{
    return t->first < end && first < t->end;
}

/*
 * COMPUTE is done with all older rows when it is done with the last ones that are free, so one wait is enough. Every
 * side has it: another may have waited for the same rows, and have taken a part of them.
 */
int mt_sides_take_rows(struct mt_sides *s, size_t n, size_t *first, struct mt_err *err)
{
    *first = 0;
    if (!s->n)
        return 0;
    size_t at = s->next + n <= s->rows ? s->next : 0, free = 0;
    for (size_t i = 0; i < s->n_taken; i++)
        if (overlap(&s->taken[i], at, at + n) || s->n_taken - i == MT_SIDE_ROWS)
            free = i + 1;
    s->freed = free ? s->taken[free - 1].event : s->freed;
    int rc = s->freed ? mt_event_wait(s->m->dev, event(s, s->freed), MT_STREAM_COMPUTE, err) : 0;
    s->n_taken -= free;
    for (size_t i = 0; i < s->n_taken; i++)
        s->taken[i] = s->taken[i + free];
    s->taken[s->n_taken++] = (struct mt_side_rows){at, at + n, s->n + s->next_event};
    s->next_event = (s->next_event + 1) % MT_SIDE_ROWS;
    s->next = at + n;
    *first = at;
    return rc;
}

int mt_sides_follow(struct mt_sides *s, struct mt_err *err)
{
    int side = s->side;
    if (!side)
        return 0;
    int rc = mt_event_record(s->m->dev, event(s, side - 1), MT_STREAM_COMPUTE, err);
    turn_to(s, 0);
    return rc ?: mt_event_wait(s->m->dev, event(s, side - 1), MT_STREAM_COMPUTE, err);
}

int mt_sides_give_rows(struct mt_sides *s, struct mt_err *err)
{
    return s->n ? mt_event_record(s->m->dev, event(s, s->taken[s->n_taken - 1].event), MT_STREAM_COMPUTE, err) : 0;
}

int mt_sides_join(struct mt_sides *s, struct mt_err *err)
{
    int rc = 0;
    for (int i = 1; i <= s->n; i++) {
        turn_to(s, i);
        int follows = mt_sides_follow(s, rc ? NULL : err);
        rc = rc ? rc : follows;
    }
    return rc;
}
