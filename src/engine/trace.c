/* SPDX-License-Identifier: Apache-2.0 */
/* Begin and end of each instruction of a step: by events on device queues, by the clock on the others. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/state.h"

struct mt_exec_trace {
    size_t n;
    struct {
        mt_event *event[2]; /* begin, end; device queues */
        int64_t ns[2];      /* other queues */
    } at[];
};

void mt_engine_trace(mt_engine *e, bool on)
{
    e->x.tracing = on;
}

void mt_exec_trace_destroy(struct mt_runnable *r)
{
    for (size_t i = 0; r->trace && i < r->trace->n; i++)
        for (int k = 0; k < 2; k++)
            mt_event_destroy(&r->trace->at[i].event[k]);
    free(r->trace);
    r->trace = NULL;
}

static int make_trace(struct mt_exec *x, struct mt_runnable *r, struct mt_err *err)
{
    size_t n = r->prog.n_instrs;
    r->trace = mt_calloc(1, sizeof(*r->trace) + n * sizeof(r->trace->at[0]));
    if (!r->trace)
        return mt_fail_nomem(err, "events", n * sizeof(r->trace->at[0]));
    r->trace->n = n;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++)
        for (int k = 0; k < 2 && !rc && mt_queues[r->prog.instrs[i].queue].device; k++)
            rc = mt_event_create(mt_lane_of(x->e->lane, &r->prog.instrs[i])->b.dev, &r->trace->at[i].event[k], err);
    return rc;
}

/* Call before a run: makes the events if it is to be traced. A run goes on without a trace. */
void mt_exec_trace_prepare(struct mt_exec *x, struct mt_runnable *r)
{
    struct mt_err why;
    if (x->tracing && r->mode <= MT_MODE_ZEROTH && !r->trace && make_trace(x, r, &why)) {
        mt_warn("this step is not traced: %s", why.msg);
        mt_exec_trace_destroy(r);
    }
    if (x->tracing && r->trace)
        x->traced = r;
}

static int mark(struct mt_exec *x, struct mt_runnable *r, size_t i, int k, struct mt_err *err)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    const struct mt_queue_desc *q = &mt_queues[in->queue];
    if (!x->tracing || !r->trace)
        return 0;
    if (q->device)
        return mt_event_record(mt_lane_of(x->e->lane, in)->b.dev, r->trace->at[i].event[k], q->stream, err);
    r->trace->at[i].ns[k] = mt_now_ns();
    return 0;
}

int mt_exec_trace_begin(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err)
{
    return mark(x, r, i, 0, err);
}

int mt_exec_trace_end(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err)
{
    return mark(x, r, i, 1, err);
}

static int64_t time_of(const struct mt_exec_trace *t, size_t i, int k)
{
    return t->at[i].event[k] ? mt_event_time_ns(t->at[i].event[k]) : t->at[i].ns[k];
}

int mt_engine_trace_read(const mt_engine *e, struct mt_trace_span **spans, size_t *n, struct mt_err *err)
{
    const struct mt_runnable *r = e->x.traced;
    if (!r || !r->trace)
        return mt_fail(err, MT_ERR_RUNTIME, -ENODATA, "no step has been traced");
    struct mt_trace_span *s = mt_calloc(r->trace->n, sizeof(*s));
    if (!s)
        return mt_fail_nomem(err, "a trace", r->trace->n * sizeof(*s));
    for (size_t i = 0; i < r->trace->n; i++) {
        const struct mt_instr *in = &r->prog.instrs[i];
        s[i] = (struct mt_trace_span){.queue = (uint8_t)mt_instr_queue(in), .op = in->op, .mb = in->mb,
                                      .piece = in->piece, .unit = in->unit, .bytes = in->bytes,
                                      .begin_ns = time_of(r->trace, i, 0), .end_ns = time_of(r->trace, i, 1)};
    }
    *spans = s;
    *n = r->trace->n;
    return 0;
}
