/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a program with three threads. The caller submits COMPUTE and D2H instructions: these wait only for
 * each other and for copies in. One thread submits H2D copies, because a load of weights must wait on the
 * host for its update. One thread runs the updates, with the optimizer's team. A wait between device
 * queues is an event; the waiter only sees to it that the event has been recorded first.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine_priv.h"

static const enum mt_stream stream_of[] = {
    [MT_Q_COMPUTE] = MT_STREAM_COMPUTE, [MT_Q_H2D] = MT_STREAM_H2D, [MT_Q_D2H] = MT_STREAM_D2H};

bool mt_exec_stream_of(int queue, enum mt_stream *s)
{
    if (queue == MT_Q_HOST)
        return false;
    *s = stream_of[queue];
    return true;
}

static void give_up(mt_engine *e, int code, const struct mt_err *err)
{
    pthread_mutex_lock(&e->lock);
    if (!e->error_code) {
        e->error_code = code;
        if (err)
            e->error = *err;
    }
    e->stop = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

static void publish(mt_engine *e, enum mt_queue q, size_t i)
{
    pthread_mutex_lock(&e->lock);
    e->progress[q] = (int32_t)i;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Until queue q has come to instruction i; false where the run is given up. */
static bool await(mt_engine *e, int q, int32_t i)
{
    pthread_mutex_lock(&e->lock);
    while (!e->stop && e->progress[q] < i)
        pthread_cond_wait(&e->changed, &e->lock);
    bool ok = !e->stop;
    pthread_mutex_unlock(&e->lock);
    return ok;
}

/* Makes the instruction's stream wait for what it depends on; false where the run is given up. */
static bool await_dependencies(mt_engine *e, struct mt_runnable *r, size_t i, int *rc,
                               struct mt_err *err)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    enum mt_stream s = stream_of[in->queue];
    if (r->before[i])
        *rc = mt_event_record(e->dev, r->before[i], s, err);
    for (int q = 0; q < MT_N_QUEUES && !*rc; q++) {
        if (in->wait[q] < 0)
            continue;
        if (!await(e, q, in->wait[q]))
            return false;
        if (q != MT_Q_HOST)
            *rc = mt_event_wait(e->dev, r->done[in->wait[q]], s, err);
    }
    if (!*rc && r->after[i])
        *rc = mt_event_record(e->dev, r->after[i], s, err);
    return true;
}

/* Submits one instruction of a device queue; false ends the thread's part of the run. */
static bool issue(mt_engine *e, struct mt_runnable *r, size_t i)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    struct mt_err err = {0};
    int rc = 0;
    if (!await_dependencies(e, r, i, &rc, &err))
        return false;
    if (!rc)
        rc = mt_exec_trace_begin(e, r, i, &err);
    if (!rc)
        rc = mt_exec_submit(e, &r->prog, in, &err);
    if (!rc)
        rc = mt_exec_trace_end(e, r, i, &err);
    if (!rc && r->done[i])
        rc = mt_event_record(e->dev, r->done[i], stream_of[in->queue], &err);
    if (rc) {
        give_up(e, rc, &err);
        return false;
    }
    if (r->done[i])
        publish(e, in->queue, i);
    return true;
}

static void run_h2d(mt_engine *e, struct mt_runnable *r)
{
    for (size_t i = 0; i < r->prog.n_instrs; i++)
        if (r->prog.instrs[i].queue == MT_Q_H2D && !issue(e, r, i))
            return;
}

/* Updates go on when a run is given up: the planes end at the last applied update, whole. */
static void run_host(mt_engine *e, struct mt_runnable *r)
{
    int64_t busy = 0;
    for (size_t i = 0; i < r->prog.n_instrs; i++) {
        if (r->prog.instrs[i].queue != MT_Q_HOST)
            continue;
        struct mt_err err = {0};
        int64_t t0 = mt_now_ns();
        mt_exec_trace_begin(e, r, i, NULL);
        int rc = mt_optimizer_update_unit(e, (size_t)r->prog.instrs[i].unit, &err);
        mt_exec_trace_end(e, r, i, NULL);
        busy += mt_now_ns() - t0;
        if (rc) {
            give_up(e, rc, &err);
            break;
        }
        publish(e, MT_Q_HOST, i);
    }
    e->adam_ns = busy;
}

static void worker_loop(mt_engine *e, void (*part)(mt_engine *, struct mt_runnable *))
{
    unsigned seen = 0;
    for (;;) {
        pthread_mutex_lock(&e->lock);
        while (!e->quit && e->generation == seen)
            pthread_cond_wait(&e->changed, &e->lock);
        seen = e->generation;
        bool quit = e->quit;
        struct mt_runnable *r = e->run;
        pthread_mutex_unlock(&e->lock);
        if (quit)
            return;
        part(e, r);
        pthread_mutex_lock(&e->lock);
        e->n_busy--;
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
    }
}

static void *h2d_main(void *arg)
{
    worker_loop(arg, run_h2d);
    return NULL;
}

static void *host_main(void *arg)
{
    worker_loop(arg, run_host);
    return NULL;
}

int mt_exec_start(mt_engine *e, struct mt_err *err)
{
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    int rc = pthread_create(&e->h2d_thread, NULL, h2d_main, e);
    if (!rc) {
        e->n_threads = 1;
        pthread_setname_np(e->h2d_thread, "mt-h2d-issue");
        rc = pthread_create(&e->host_thread, NULL, host_main, e);
    }
    if (!rc) {
        e->n_threads = 2;
        pthread_setname_np(e->host_thread, "mt-optimizer");
    }
    return rc ? mt_fail(err, MT_ERR_RUNTIME, -rc, "cannot start the engine's threads: %s",
                        strerror(rc))
              : 0;
}

void mt_exec_stop(mt_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->quit = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (e->n_threads > 0)
        pthread_join(e->h2d_thread, NULL);
    if (e->n_threads > 1)
        pthread_join(e->host_thread, NULL);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
}

static void begin(mt_engine *e, struct mt_runnable *r)
{
    pthread_mutex_lock(&e->lock);
    e->run = r;
    e->stop = false;
    e->error_code = 0;
    for (int q = 0; q < MT_N_QUEUES; q++)
        e->progress[q] = -1;
    e->n_busy = 2;
    e->generation++;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

static void await_workers(mt_engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (e->n_busy)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

static void run_compute(mt_engine *e, struct mt_runnable *r)
{
    struct mt_err err = {0};
    int rc = mt_event_record(e->dev, r->start, MT_STREAM_COMPUTE, &err);
    for (size_t i = 0; !rc && i < r->prog.n_instrs; i++) {
        int q = r->prog.instrs[i].queue;
        if (q != MT_Q_COMPUTE && q != MT_Q_D2H)
            continue;
        if (atomic_load_explicit(&e->interrupted, memory_order_relaxed)) {
            rc = mt_fail(&err, MT_ERR_RUNTIME, -ECANCELED, "interrupted");
            break;
        }
        if (!issue(e, r, i))
            return;
        if (i == r->turn_at)
            rc = mt_event_record(e->dev, r->turn, MT_STREAM_COMPUTE, &err);
    }
    if (!rc)
        rc = mt_event_record(e->dev, r->end, MT_STREAM_COMPUTE, &err);
    if (rc)
        give_up(e, rc, &err);
}

int mt_exec_run(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    struct mt_err sync_err = {0};
    int traced = mt_exec_trace_prepare(e, r, err);
    if (traced)
        return traced;
    begin(e, r);
    run_compute(e, r);
    await_workers(e);
    int rc = mt_device_sync(e->dev, &sync_err);
    if (e->error_code) {
        if (err)
            *err = e->error;
        return e->error_code;
    }
    if (rc && err)
        *err = sync_err;
    return rc;
}

static void destroy_runnable(struct mt_runnable *r)
{
    for (size_t i = 0; r->done && i < r->prog.n_instrs; i++) {
        mt_event_destroy(&r->done[i]);
        mt_event_destroy(&r->before[i]);
        mt_event_destroy(&r->after[i]);
    }
    mt_event_destroy(&r->start);
    mt_event_destroy(&r->turn);
    mt_event_destroy(&r->end);
    free(r->done);
    mt_exec_trace_destroy(r);
    mt_program_finish(&r->prog);
    free(r);
}

void mt_runnable_destroy_all(mt_engine *e)
{
    while (e->programs) {
        struct mt_runnable *r = e->programs;
        e->programs = r->next;
        destroy_runnable(r);
    }
}

static int create_events(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    size_t n = r->prog.n_instrs;
    r->done = mt_calloc(3 * n, sizeof(*r->done));
    if (!r->done)
        return mt_fail_nomem(err, "events", 3 * n * sizeof(*r->done));
    r->before = r->done + n;
    r->after = r->before + n;
    int rc = mt_event_create(e->dev, &r->start, err);
    if (!rc)
        rc = mt_event_create(e->dev, &r->turn, err);
    if (!rc)
        rc = mt_event_create(e->dev, &r->end, err);
    for (size_t i = 0; !rc && i < n; i++) {
        const struct mt_instr *in = &r->prog.instrs[i];
        if (in->signals && in->queue != MT_Q_HOST)
            rc = mt_event_create(e->dev, &r->done[i], err);
        if (!rc && in->queue == MT_Q_COMPUTE && in->wait[MT_Q_H2D] >= 0) {
            rc = mt_event_create(e->dev, &r->before[i], err);
            if (!rc)
                rc = mt_event_create(e->dev, &r->after[i], err);
        }
        if (in->op == MT_OP_HEAD || in->op == MT_OP_LOGITS)
            r->turn_at = i;
    }
    return rc;
}

int mt_runnable_get(struct mt_runnable **out, mt_engine *e, enum mt_program_mode mode,
                    size_t n_micro, struct mt_err *err)
{
    for (struct mt_runnable *r = e->programs; r; r = r->next)
        if (r->mode == mode && r->prog.n_micro == n_micro) {
            *out = r;
            return 0;
        }
    struct mt_runnable *r = mt_calloc(1, sizeof(*r));
    if (!r)
        return mt_fail_nomem(err, "a step program", sizeof(*r));
    struct mt_program_params params = e->plan.program;
    params.mode = mode;
    params.n_micro = n_micro;
    r->mode = mode;
    int rc = mt_program_build(&r->prog, &params, err);
    if (!rc)
        rc = mt_program_check(&r->prog, err);
    if (!rc && r->prog.spill_bytes > e->plan.spill_bytes)
        rc = mt_fail(err, MT_ERR_RUNTIME, -ENOSPC,
                     "a step of %zu micro-batches spills %zu bytes, planned were %zu", n_micro,
                     r->prog.spill_bytes, e->plan.spill_bytes);
    if (!rc)
        rc = create_events(e, r, err);
    if (rc) {
        destroy_runnable(r);
        return rc;
    }
    r->next = e->programs;
    e->programs = r;
    *out = r;
    return 0;
}
