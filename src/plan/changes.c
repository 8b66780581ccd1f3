/* SPDX-License-Identifier: Apache-2.0 */
/* If nothing fits: the changes that would make it fit, each tried alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "plan/search.h"

enum { MAX_CHANGES = 16, BISECTIONS = 10 };

struct list {
    struct mt_plan_change c[MAX_CHANGES];
    double per_token[MAX_CHANGES];
    size_t n;
};

static bool fits(const struct mt_plan_request *r, double *seconds)
{
    struct mt_plan_choice c;
    if (mt_plan_search(&c, r, NULL))
        return false;
    *seconds = c.sim.seconds;
    mt_plan_choice_finish(&c);
    return true;
}

/* Whether the placement with the least memory that the request allows fits. */
static bool could_fit(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    if (t.numerics.micro_batch == MT_AUTO)
        t.numerics.micro_batch = 1;
    if (t.placement.slots == MT_AUTO)
        t.placement.slots = 2;
    t.placement.keep_layers = MT_MAX(r->placement.keep_layers, 0);
    if (t.placement.activations == MT_ACT_AUTO)
        t.placement.activations = MT_ACT_RECOMPUTE;
    return !mt_plan_fits(&t, NULL);
}

static void consider(struct list *l, const struct mt_plan_request *r, bool hardware, const char *what)
{
    double s;
    if (l->n == MAX_CHANGES || !could_fit(r) || !fits(r, &s))
        return;
    struct mt_plan_change *c = &l->c[l->n];
    *c = (struct mt_plan_change){.seconds = s, .hardware = hardware};
    snprintf(c->what, sizeof(c->what), "%s", what);
    l->per_token[l->n++] = s / (double)(r->numerics.rows_per_step * r->numerics.seq_len);
}

/* Considers the least sufficient value of `budget`, a field of *t; above 1 GiB rounded up to whole GiB. */
static void consider_budget(struct list *l, struct mt_plan_request *t, uint64_t *budget,
                            const char *what)
{
    uint64_t have = *budget, lo = have, hi = MT_MAX(have, (uint64_t)1 << 20);
    char text[160], a[32], b[32];
    for (int i = 0; i < 8 && !could_fit(t); i++)
        *budget = hi = hi * 2;
    if (could_fit(t)) {
        for (int i = 0; i < BISECTIONS && hi - lo > MT_MAX(hi / 64, (uint64_t)1 << 20); i++) {
            *budget = lo + (hi - lo) / 2;
            if (could_fit(t))
                hi = *budget;
            else
                lo = *budget;
        }
        if (hi > (uint64_t)1 << 30)
            hi = mt_align_up(hi, (size_t)1 << 30);
        *budget = hi;
        snprintf(text, sizeof(text), "%s of %s instead of %s", what, mt_format_bytes(a, sizeof(a), hi),
                 mt_format_bytes(b, sizeof(b), have));
        consider(l, t, true, text);
    }
    *budget = have;
}

static void consider_settings(struct list *l, const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    char text[160];
    if (r->placement.activations != MT_ACT_AUTO && r->placement.activations != MT_ACT_RECOMPUTE) {
        t.placement.activations = MT_ACT_RECOMPUTE;
        consider(l, &t, false, "memory.activations = recompute");
        t = *r;
    }
    if (r->placement.slots > 2) {
        t.placement.slots = 2;
        consider(l, &t, false, "memory.slots = 2");
        t = *r;
    }
    for (int64_t mb = r->numerics.micro_batch / 2; mb >= 1; mb /= 2) {
        size_t before = l->n;
        t.numerics.micro_batch = mb;
        snprintf(text, sizeof(text), "train.micro_batch = %lld", (long long)mb);
        consider(l, &t, false, text);
        if (l->n > before)
            break;
    }
    t = *r;
    if (r->placement.states == MT_STATES_HOST) {
        t.placement.states = MT_STATES_AUTO;
        consider(l, &t, false, "memory.states = auto, with nvme_paths");
        t = *r;
    }
    for (int64_t len = r->numerics.seq_len / 2; len >= 128; len /= 2) {
        size_t before = l->n;
        t.numerics.seq_len = len;
        t.numerics.rows_per_step = r->numerics.rows_per_step * (r->numerics.seq_len / len);
        snprintf(text, sizeof(text), "data.seq_len = %lld", (long long)len);
        consider(l, &t, false, text);
        if (l->n > before)
            break;
    }
    t = *r;
    for (int64_t rows = r->numerics.rows_per_step / 2; rows >= 1; rows /= 2) {
        size_t before = l->n;
        t.numerics.rows_per_step = rows;
        t.numerics.micro_batch = MT_MIN(t.numerics.micro_batch, rows);
        snprintf(text, sizeof(text), "train.batch_size = %lld", (long long)rows);
        consider(l, &t, false, text);
        if (l->n > before)
            break;
    }
}

static void consider_hardware(struct list *l, const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    consider_budget(l, &t, &t.placement.device_budget.bytes, "device memory");
    consider_budget(l, &t, &t.placement.host_budget.bytes, "host memory");
    struct mt_machine m = *r->machine;
    char text[160];
    if (r->drives > 0)
        return;
    const enum mt_rate_id id[] = {MT_RATE_READ, MT_RATE_WRITE, MT_RATE_READ_BOTH, MT_RATE_WRITE_BOTH};
    const double typical[] = {6.5, 4, 4, 2.5};
    for (size_t i = 0; i < MT_ARRAY_LEN(id); i++)
        m.rate[id[i]] = (struct mt_rate){typical[i], MT_RATE_RATED};
    t.machine = &m;
    t.drives = 2;
    t.placement.states = MT_STATES_AUTO;
    snprintf(text, sizeof(text), "two NVMe drives for the states (memory.nvme_paths)");
    consider(l, &t, true, text);
}

size_t mt_plan_changes(struct mt_plan_change *out, size_t max, const struct mt_plan_request *r)
{
    struct list l = {.n = 0};
    consider_settings(&l, r);
    consider_hardware(&l, r);
    size_t n = 0;
    for (int hardware = 0; hardware < 2; hardware++)
        for (;;) { /* the fastest of those not yet taken */
            size_t best = l.n;
            for (size_t i = 0; i < l.n; i++)
                if (l.c[i].hardware == hardware && l.per_token[i] >= 0 &&
                    (best == l.n || l.per_token[i] < l.per_token[best]))
                    best = i;
            if (best == l.n || n == max)
                break;
            out[n++] = l.c[best];
            l.per_token[best] = -1;
        }
    return n;
}
