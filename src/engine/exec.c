/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a program: a thread a queue, the caller's for COMPUTE. A wait between device queues is an event; the
 * waiter only sees to it that the event has been recorded first. Waits for updates and for the disk are
 * waits of the issuing thread. The disk queues start what they have in order, many at a time; an
 * instruction of theirs counts as ended when all before it have, too.
 *
 * A run that is given up (an interruption, an error) still carries out the pending update, on the disk as
 * in memory: what is part of it goes on, waiting no longer for device work that will not come, and the
 * planes end at the last applied update, whole. Only where the update itself fails is that given up, too.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine_priv.h"

/* Under lock. An interruption is no error: what goes wrong after it is told instead. */
static void note_error(mt_engine *e, int code, const struct mt_err *err, bool update)
{
    if (!e->error_code || e->error_code == -ECANCELED) {
        e->error_code = code;
        if (err)
            e->error = *err;
    }
    e->stop = true;
    e->broken |= update;
    for (int q = 0; q < MT_N_QUEUES; q++)
        pthread_cond_broadcast(&e->moved[q]);
}

/* Ends the run; with `update`, the pending update too. */
static void give_up(mt_engine *e, int code, const struct mt_err *err, bool update)
{
    pthread_mutex_lock(&e->lock);
    note_error(e, code, err, update);
    pthread_mutex_unlock(&e->lock);
}

static void publish(mt_engine *e, enum mt_queue q, size_t i)
{
    pthread_mutex_lock(&e->lock);
    e->progress[q] = (int32_t)i;
    pthread_cond_broadcast(&e->moved[q]);
    pthread_mutex_unlock(&e->lock);
}

/* Nothing more comes of the queue in this run. */
static void close_queue(mt_engine *e, enum mt_queue q)
{
    pthread_mutex_lock(&e->lock);
    e->closed[q] = true;
    pthread_cond_broadcast(&e->moved[q]);
    pthread_mutex_unlock(&e->lock);
}

enum waited { THERE, NEVER_COMES, GIVEN_UP };

/* Until queue q has come to instruction i, or will not; updates wait on when the run is given up. */
static enum waited await(mt_engine *e, int q, int32_t i, bool update)
{
    pthread_mutex_lock(&e->lock);
    while (!e->broken && !(e->stop && !update) && e->progress[q] < i && !e->closed[q])
        pthread_cond_wait(&e->moved[q], &e->lock);
    bool over = e->broken || (e->stop && !update);
    enum waited w = over ? GIVEN_UP : e->progress[q] >= i ? THERE : NEVER_COMES;
    pthread_mutex_unlock(&e->lock);
    return w;
}

/* --- device queues --------------------------------------------------------------------------- */

/* Makes the instruction's stream wait for what it depends on; false where the run is given up. */
static bool await_dependencies(mt_engine *e, struct mt_runnable *r, size_t i, int *rc,
                               struct mt_err *err)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    enum mt_stream s = mt_queues[in->queue].stream;
    if (r->before[i])
        *rc = mt_event_record(e->dev, r->before[i], s, err);
    for (int q = 0; q < MT_N_QUEUES && !*rc; q++) {
        if (in->wait[q] < 0)
            continue;
        if (await(e, q, in->wait[q], false) != THERE)
            return false;
        if (mt_queues[q].device)
            *rc = mt_event_wait(e->dev, r->done[in->wait[q]], s, err);
    }
    if (!*rc && r->after[i])
        *rc = mt_event_record(e->dev, r->after[i], s, err);
    return true;
}

/* What the instruction brings in has been on the device since an earlier run. */
static bool is_resident(const mt_engine *e, const struct mt_instr *in)
{
    return in->once && e->resident[in->unit];
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
    if (!rc && !is_resident(e, in))
        rc = mt_exec_submit(e, &r->prog, in, &err);
    if (!rc)
        rc = mt_exec_trace_end(e, r, i, &err);
    if (!rc && r->done[i])
        rc = mt_event_record(e->dev, r->done[i], mt_queues[in->queue].stream, &err);
    if (rc) {
        give_up(e, rc, &err, false);
        return false;
    }
    if (r->done[i])
        publish(e, in->queue, i);
    return true;
}

static void run_copies(mt_engine *e, struct mt_runnable *r, enum mt_queue q)
{
    for (size_t k = 0; k < r->queue[q].n; k++)
        if (!issue(e, r, (size_t)r->queue[q].at[k]))
            return;
}

/*
 * The run is given up and something that an update waits for will not come; what came before it may still
 * be under way on the device, reading the buffer that the update is about to fill. Until the device is idle.
 */
static void drain_device(mt_engine *e)
{
    pthread_mutex_lock(&e->lock);
    for (int q = 0; q < MT_N_QUEUES; q++)
        while (mt_queues[q].device && !e->closed[q])
            pthread_cond_wait(&e->moved[q], &e->lock);
    pthread_mutex_unlock(&e->lock);
    pthread_mutex_lock(&e->drain_lock); /* nobody feeds the streams now: one of us may */
    if (!e->drained)
        mt_device_sync(e->dev, NULL); /* its error is told at the end of the run */
    e->drained = true;
    pthread_mutex_unlock(&e->drain_lock);
}

/* --- updates and disk ------------------------------------------------------------------------ */

/*
 * Device instruction `at` was abandoned. Waits that follow from it were pruned from the program, so this waits directly
 * for every update and disk transfer that `at` and the device instructions before it were waiting for: those go on.
 * Returns false if the update itself failed.
 */
static bool await_in_its_place(mt_engine *e, struct mt_runnable *r, int32_t at)
{
    int32_t last[MT_N_QUEUES];
    for (int q = 0; q < MT_N_QUEUES; q++)
        last[q] = -1;
    for (int32_t i = 0; i <= at; i++)
        for (int q = 0; mt_queues[r->prog.instrs[i].queue].device && q < MT_N_QUEUES; q++)
            last[q] = MT_MAX(last[q], r->prog.instrs[i].wait[q]);
    drain_device(e);
    for (int q = 0; q < MT_N_QUEUES; q++)
        if (!mt_queues[q].device && last[q] >= 0 && await(e, q, last[q], true) == GIVEN_UP)
            return false;
    return true;
}

/* The thread itself waits, also where the run is given up. false: the update is given up. */
static bool await_on_host(mt_engine *e, struct mt_runnable *r, const struct mt_instr *in)
{
    for (int q = 0; q < MT_N_QUEUES; q++) {
        if (in->wait[q] < 0)
            continue;
        enum waited w = await(e, q, in->wait[q], true);
        if (w == GIVEN_UP)
            return false;
        if (!mt_queues[q].device)
            continue;
        if (w == NEVER_COMES && !await_in_its_place(e, r, in->wait[q]))
            return false;
        struct mt_err err = {0};
        int rc = w == THERE ? mt_event_sync(e->dev, r->done[in->wait[q]], &err) : 0;
        if (rc)
            give_up(e, rc, &err, false);
    }
    return true;
}

static void run_updates(mt_engine *e, struct mt_runnable *r)
{
    int64_t busy = 0;
    for (size_t k = 0; k < r->queue[MT_Q_HOST].n; k++) {
        size_t i = (size_t)r->queue[MT_Q_HOST].at[k];
        const struct mt_instr *in = &r->prog.instrs[i];
        if (!await_on_host(e, r, in))
            return;
        struct mt_err err = {0};
        int64_t t0 = mt_now_ns();
        mt_exec_trace_begin(e, r, i, NULL);
        int rc = mt_optimizer_update(e, &r->prog, in, &err);
        mt_exec_trace_end(e, r, i, NULL);
        busy += mt_now_ns() - t0;
        if (rc) {
            give_up(e, rc, &err, true);
            return;
        }
        publish(e, MT_Q_HOST, i);
    }
    e->adam_ns = busy;
    e->updated = true;
}

/* Instruction `at` has ended, or is not to be: its queue has come as far as all before it have. */
static void end_disk_op(mt_engine *e, struct mt_runnable *r, int32_t at)
{
    enum mt_queue q = r->prog.instrs[at].queue;
    const struct mt_queue_list *list = &r->queue[q];
    r->ended[at] = true;
    while (e->disk_head[q] < list->n && r->ended[list->at[e->disk_head[q]]])
        e->progress[q] = list->at[e->disk_head[q]++];
    pthread_cond_broadcast(&e->moved[q]);
}

/* On the disk's thread. */
static void disk_op_done(struct mt_disk_request *request)
{
    struct mt_disk_op *op = request->ctx;
    mt_engine *e = op->e;
    struct mt_runnable *r = op->run;
    const struct mt_instr *in = &r->prog.instrs[op->at];
    mt_exec_trace_end(e, r, (size_t)op->at, NULL);
    pthread_mutex_lock(&e->lock);
    if (request->rc) {
        mt_fail_prefix(&request->err, request->rc, "%s of %s",
                       mt_disk_use_name(mt_instr_disk_use(&r->prog, in)),
                       e->layout->units[in->unit].name);
        note_error(e, request->rc, &request->err, in->update);
    }
    if (!request->rc || !in->update) /* what is no update must not keep updates behind it waiting */
        end_disk_op(e, r, op->at);
    e->disk_in_flight[in->queue]--;
    pthread_cond_broadcast(&e->moved[in->queue]);
    pthread_mutex_unlock(&e->lock);
}

/* An operation more is under way, unless the run is given up and it is of no update. */
static bool enter_disk_op(mt_engine *e, enum mt_queue q, bool update)
{
    pthread_mutex_lock(&e->lock);
    bool enter = update || !e->stop;
    e->disk_in_flight[q] += enter;
    pthread_mutex_unlock(&e->lock);
    return enter;
}

static void start_disk_op(mt_engine *e, struct mt_runnable *r, int32_t at)
{
    const struct mt_instr *in = &r->prog.instrs[at];
    const struct mt_operand *o = &in->operand[0];
    struct mt_disk_op *op = &e->disk_ops[r->prog.objects[o->object].pool][o->buffer];
    enum mt_disk_use use = mt_instr_disk_use(&r->prog, in);
    bool write = in->op == MT_OP_WRITE;
    op->e = e;
    op->run = r;
    op->at = at;
    op->r = (struct mt_disk_request){.done = disk_op_done, .ctx = op};
    mt_disk_op_fill(e, &r->prog, in, &op->r);
    for (int i = 0; i < op->r.n_spans; i++)
        *(write ? &e->traffic.written[use] : &e->traffic.read[use]) += op->r.span[i].bytes;
    mt_exec_trace_begin(e, r, (size_t)at, NULL);
    mt_disk_submit(e->p.disk, &op->r);
}

/* No update is pending: states stay as they are; weights are read for the load that follows alone. Nor is anything read
 * for a load that is skipped. */
static bool is_idle(const mt_engine *e, const struct mt_program *p, const struct mt_instr *in)
{
    if (is_resident(e, in))
        return true;
    bool load = in->op == MT_OP_READ && p->objects[in->operand[0].object].kind == MT_OBJ_STAGED;
    return in->update && !load && !e->pending.any;
}

/* A skipped disk instruction must still complete in queue order: later waiters rely on it to imply everything it was
 * waiting for. */
static void run_disk(mt_engine *e, struct mt_runnable *r, enum mt_queue q)
{
    for (size_t k = 0; k < r->queue[q].n; k++) {
        int32_t at = r->queue[q].at[k];
        const struct mt_instr *in = &r->prog.instrs[at];
        if (!await_on_host(e, r, in))
            break;
        if (!is_idle(e, &r->prog, in) && enter_disk_op(e, q, in->update)) {
            start_disk_op(e, r, at);
            continue;
        }
        pthread_mutex_lock(&e->lock);
        end_disk_op(e, r, at);
        pthread_mutex_unlock(&e->lock);
    }
    pthread_mutex_lock(&e->lock);
    while (e->disk_in_flight[q])
        pthread_cond_wait(&e->moved[q], &e->lock);
    pthread_mutex_unlock(&e->lock);
}

/* --- threads --------------------------------------------------------------------------------- */

static void run_queue(mt_engine *e, struct mt_runnable *r, enum mt_queue q)
{
    if (q == MT_Q_HOST)
        run_updates(e, r);
    else if (mt_queues[q].device)
        run_copies(e, r, q);
    else
        run_disk(e, r, q);
    close_queue(e, q);
}

static void *worker_main(void *arg)
{
    const struct mt_worker *w = arg;
    mt_engine *e = w->e;
    unsigned seen = 0;
    for (;;) {
        pthread_mutex_lock(&e->lock);
        while (!e->quit && e->generation == seen)
            pthread_cond_wait(&e->workers, &e->lock);
        seen = e->generation;
        bool quit = e->quit;
        struct mt_runnable *r = e->run;
        pthread_mutex_unlock(&e->lock);
        if (quit)
            return NULL;
        run_queue(e, r, w->queue);
        pthread_mutex_lock(&e->lock);
        if (--e->n_busy == 0)
            pthread_cond_broadcast(&e->workers);
        pthread_mutex_unlock(&e->lock);
    }
}

void mt_exec_init(mt_engine *e)
{
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->drain_lock, NULL);
    pthread_cond_init(&e->workers, NULL);
    for (int q = 0; q < MT_N_QUEUES; q++)
        pthread_cond_init(&e->moved[q], NULL);
}

int mt_exec_start(mt_engine *e, struct mt_err *err)
{
    mt_exec_init(e);
    for (int q = 0; q < MT_N_QUEUES; q++) {
        struct mt_worker *w = &e->worker[q];
        if (!mt_queues[q].thread || (mt_queues[q].disk && !e->p.disk))
            continue;
        w->e = e;
        w->queue = (enum mt_queue)q;
        int rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (rc)
            return mt_fail(err, MT_ERR_RUNTIME, -rc, "cannot start the engine's threads: %s",
                           strerror(rc));
        w->started = true;
        pthread_setname_np(w->thread, mt_queues[q].thread);
    }
    return 0;
}

void mt_exec_stop(mt_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->quit = true;
    pthread_cond_broadcast(&e->workers);
    pthread_mutex_unlock(&e->lock);
    for (int q = 0; q < MT_N_QUEUES; q++)
        if (e->worker[q].started)
            pthread_join(e->worker[q].thread, NULL);
    for (int q = 0; q < MT_N_QUEUES; q++)
        pthread_cond_destroy(&e->moved[q]);
    pthread_cond_destroy(&e->workers);
    pthread_mutex_destroy(&e->drain_lock);
    pthread_mutex_destroy(&e->lock);
}

static void begin(mt_engine *e, struct mt_runnable *r)
{
    pthread_mutex_lock(&e->lock);
    e->run = r;
    e->stop = e->broken = e->drained = false;
    e->error_code = 0;
    e->updated = false;
    e->n_busy = 0;
    e->traffic = (struct mt_disk_traffic){{0}, {0}};
    for (int q = 0; q < MT_N_QUEUES; q++) {
        e->progress[q] = -1;
        e->closed[q] = false;
        e->n_busy += e->worker[q].started;
        e->disk_head[q] = 0;
        for (size_t k = 0; k < r->queue[q].n; k++)
            r->ended[r->queue[q].at[k]] = false;
    }
    e->generation++;
    pthread_cond_broadcast(&e->workers);
    pthread_mutex_unlock(&e->lock);
}

static void await_workers(mt_engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (e->n_busy)
        pthread_cond_wait(&e->workers, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

static void run_compute(mt_engine *e, struct mt_runnable *r)
{
    struct mt_err err = {0};
    int rc = mt_event_record(e->dev, r->start, MT_STREAM_COMPUTE, &err);
    for (size_t i = 0; !rc && i < r->prog.n_instrs; i++) {
        /* between instructions of whatever queue */
        if (atomic_load_explicit(&e->interrupted, memory_order_relaxed)) {
            rc = mt_fail(&err, MT_ERR_RUNTIME, -ECANCELED, "interrupted");
            break;
        }
        if (r->prog.instrs[i].queue != MT_Q_COMPUTE)
            continue;
        if (!issue(e, r, i))
            return;
        if (i == r->turn_at)
            rc = mt_event_record(e->dev, r->turn, MT_STREAM_COMPUTE, &err);
    }
    if (!rc)
        rc = mt_event_record(e->dev, r->end, MT_STREAM_COMPUTE, &err);
    if (rc)
        give_up(e, rc, &err, false);
}

/* After a run that ended well. */
static void note_residents(mt_engine *e, const struct mt_program *p)
{
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].once)
            e->resident[p->instrs[i].unit] = true;
}

int mt_exec_run(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    struct mt_err sync_err = {0};
    int rc = mt_planes_settle(e->p.planes, err);
    if (!rc)
        rc = mt_exec_trace_prepare(e, r, err);
    if (rc)
        return rc;
    begin(e, r);
    if (mt_runnable_uses_device(r))
        run_compute(e, r);
    close_queue(e, MT_Q_COMPUTE);
    await_workers(e);
    if (mt_runnable_uses_device(r))
        rc = mt_device_sync(e->dev, &sync_err);
    if (e->error_code) {
        if (err)
            *err = e->error;
        return e->error_code;
    }
    if (rc && err)
        *err = sync_err;
    if (!rc)
        note_residents(e, &r->prog);
    return rc;
}
