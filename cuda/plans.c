/* SPDX-License-Identifier: Apache-2.0 */
#include "plans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

struct entry {
    struct mt_fused_shape shape;
    void *plan; /* NULL: there is none, for the reason in `why` */
    int rc;     /* of making it */
    size_t workspace_bytes;
    char why[256];
    size_t used; /* number of the call that used it last */
};

struct mt_fused_plans {
    const struct mt_fused_engine *engine;
    void *ctx;
    cudaStream_t stream;
    size_t n, made, calls;
    struct entry entries[MT_FUSED_MAX_PLANS];
};

mt_fused_plans *mt_fused_plans_create(const struct mt_fused_engine *engine, cudaStream_t stream, char *why,
                                      size_t why_len)
{
    mt_fused_plans *p = mt_calloc(1, sizeof(*p));
    if (!p) {
        snprintf(why, why_len, "out of memory for its plans");
        return NULL;
    }
    p->engine = engine;
    p->stream = stream;
    if (!engine->open(&p->ctx, stream, why, why_len))
        return p;
    free(p);
    return NULL;
}

void mt_fused_plans_destroy(mt_fused_plans **plans)
{
    mt_fused_plans *p = *plans;
    if (!p)
        return;
    cudaStreamSynchronize(p->stream);
    for (size_t i = 0; i < p->n; i++)
        if (p->entries[i].plan)
            p->engine->drop(p->ctx, p->entries[i].plan);
    p->engine->close(p->ctx);
    free(p);
    *plans = NULL;
}

/* A free entry: a new one, or the least recently used, dropped. */
static struct entry *vacate(mt_fused_plans *p)
{
    struct entry *oldest = p->entries;
    if (p->n < MT_FUSED_MAX_PLANS)
        return &p->entries[p->n++];
    for (size_t i = 1; i < p->n; i++)
        if (p->entries[i].used < oldest->used)
            oldest = &p->entries[i];
    if (oldest->plan) {
        cudaStreamSynchronize(p->stream); /* an error is sticky: the next launch reports it */
        p->engine->drop(p->ctx, oldest->plan);
    }
    return oldest;
}

static struct entry *find(mt_fused_plans *p, const struct mt_fused_shape *s)
{
    for (size_t i = 0; i < p->n; i++)
        if (!memcmp(&p->entries[i].shape, s, sizeof(*s)))
            return &p->entries[i];
    struct entry *e = vacate(p);
    *e = (struct entry){.shape = *s};
    int64_t begin = mt_now_ns();
    e->rc = p->engine->plan(p->ctx, s, &e->plan, &e->workspace_bytes, e->why, sizeof(e->why));
    mt_debug("attention%s: %s plan for %lld%s documents of %lld, heads of %lld, in %.0f ms", s->backward ? "'s backward" : "",
             e->rc ? "no" : "a", (long long)s->batch, s->ragged ? " ragged" : "", (long long)s->len, (long long)s->dim,
             (double)(mt_now_ns() - begin) * 1e-6);
    if (e->rc)
        e->plan = NULL;
    p->made++;
    return e;
}

int mt_fused_plans_get(mt_fused_plans *p, const struct mt_fused_shape *s, void **plan, size_t *workspace_bytes,
                       char *why, size_t why_len)
{
    struct entry *e = find(p, s);
    e->used = ++p->calls;
    *plan = e->plan;
    *workspace_bytes = e->workspace_bytes;
    if (e->rc)
        snprintf(why, why_len, "%s", e->why);
    return e->rc;
}

int mt_fused_plans_run(mt_fused_plans *p, void *plan, const struct mt_fused_call *c, char *why, size_t why_len)
{
    return p->engine->run(p->ctx, plan, c, why, why_len);
}

size_t mt_fused_plans_made(const mt_fused_plans *p)
{
    return p->made;
}
