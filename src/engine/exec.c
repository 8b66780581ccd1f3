/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a program with a thread per queue; the caller's thread is that of the first lane's COMPUTE. A wait between device queues is an
 * event; the waiting thread only makes sure that it has been recorded. For updates and the disk the issuing thread
 * waits. The disk queues and that of messages start their instructions in order, many at a time; one counts as ended
 * when all before it have ended, too.
 *
 * A run that is abandoned (interrupted, or after an error) still finishes the pending update, in memory and on the
 * disk: its instructions go on and do not wait for device work that was not submitted, so that the planes are those
 * after a whole number of updates. Only an error of the update itself stops it, too.
 */

#include "base/clock.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/thread.h"
#include "engine/state.h"

/* Call under lock. Keeps the first error; an error replaces an interruption. `update`: the update failed, too. */
static void note_error(struct mt_exec *x, int code, const struct mt_err *err, bool update)
{
    if (!x->error_code || x->error_code == -ECANCELED) {
        x->error_code = code;
        if (err)
            x->error = *err;
    }
    x->stop = true;
    x->broken |= update;
    for (int q = 0; q < x->n_queues; q++)
        pthread_cond_broadcast(&x->moved[q]);
}

/* Abandons the run; with `update`, also the pending update. */
static void give_up(struct mt_exec *x, int code, const struct mt_err *err, bool update)
{
    MT_LOCKED(&x->lock);
    note_error(x, code, err, update);
}

static void publish(struct mt_exec *x, int q, size_t i)
{
    MT_LOCKED(&x->lock);
    x->progress[q] = (int32_t)i;
    pthread_cond_broadcast(&x->moved[q]);
}

/* The queue issues nothing more in this run. */
static void close_queue(struct mt_exec *x, int q)
{
    mt_raise(&x->lock, &x->moved[q], &x->closed[q]);
}

enum waited { REACHED, ABANDONED, STOPPED };

/* Waits until queue q has reached instruction i or never will. Updates keep waiting in an abandoned run. */
static enum waited await(struct mt_exec *x, int q, int32_t i, bool update)
{
    MT_LOCKED(&x->lock);
    while (!x->broken && !(x->stop && !update) && x->progress[q] < i && !x->closed[q])
        pthread_cond_wait(&x->moved[q], &x->lock);
    bool over = x->broken || (x->stop && !update);
    return over ? STOPPED : x->progress[q] >= i ? REACHED : ABANDONED;
}

static bool is_device(int q)
{
    return mt_queues[mt_queue_kind(q)].device;
}

/* --- device queues --------------------------------------------------------------------------- */

/* Makes the instruction's stream wait for its dependencies; false if the run is abandoned. */
static bool await_dependencies(struct mt_exec *x, struct mt_runnable *r, size_t i, int *rc,
                               struct mt_err *err)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    enum mt_stream s = mt_queues[in->queue].stream;
    mt_device *dev = mt_lane_of(x->e->lane, in)->b.dev;
    if (r->before[i])
        *rc = mt_event_record(dev, r->before[i], s, err);
    for (int q = 0; q < x->n_queues && !*rc; q++) {
        if (in->wait[q] < 0)
            continue;
        if (await(x, q, in->wait[q], false) != REACHED)
            return false;
        if (is_device(q))
            *rc = mt_event_wait(dev, r->done[in->wait[q]], s, err);
    }
    if (!*rc && r->after[i])
        *rc = mt_event_record(dev, r->after[i], s, err);
    return true;
}

/* Whether an earlier run has loaded the instruction's object, which stays on the device. */
static bool is_resident(const struct mt_exec *x, const struct mt_instr *in)
{
    return in->once && mt_lane_of(x->e->lane, in)->resident[in->unit];
}

/* Whether the instruction has nothing to do in this run. */
static bool is_skipped(const struct mt_exec *x, const struct mt_instr *in)
{
    mt_model *m = mt_lane_of(x->e->lane, in)->b.model;
    return is_resident(x, in) || (in->if_rows && mt_model_unit_is_idle(m, (size_t)in->unit));
}

/* Submits one instruction of a device queue; false: the queue stops. */
static bool issue(struct mt_exec *x, struct mt_runnable *r, size_t i)
{
    const struct mt_instr *in = &r->prog.instrs[i];
    const struct mt_lane *lane = mt_lane_of(x->e->lane, in);
    struct mt_err err = {0};
    int rc = 0;
    if (!await_dependencies(x, r, i, &rc, &err))
        return false;
    rc = rc ?: mt_exec_trace_begin(x, r, i, &err);
    if (!rc && in->op == MT_OP_BALANCE)
        mt_engine_balance(x->e, in);
    if (!rc && !is_skipped(x, in)) {
        rc = mt_exec_submit(&lane->b, &r->prog, in, &err);
        if (in->op == MT_OP_LOAD)
            atomic_fetch_add(&x->loaded, in->bytes);
    }
    rc = rc ?: mt_exec_trace_end(x, r, i, &err);
    if (!rc && r->done[i])
        rc = mt_event_record(lane->b.dev, r->done[i], mt_queues[in->queue].stream, &err);
    if (rc) {
        give_up(x, rc, &err, false);
        return false;
    }
    if (r->done[i])
        publish(x, mt_instr_queue(in), i);
    return true;
}

/* Before what changes planes by this step's gradients: from the first of them on, the step must be finished. false: it
 * is abandoned already. */
static bool commit(struct mt_exec *x)
{
    MT_LOCKED(&x->lock);
    bool go = !x->stop;
    x->committed |= go;
    return go;
}

static void run_copies(struct mt_exec *x, struct mt_runnable *r, int q)
{
    for (size_t k = 0; k < r->queue[q].n; k++) {
        size_t i = (size_t)r->queue[q].at[k];
        if ((mt_instr_returns(&r->prog, &r->prog.instrs[i]) && !commit(x)) || !issue(x, r, i))
            return;
    }
}

/* Waits until all devices are idle; returns the first error. */
static int sync_lanes(const struct mt_exec *x, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < x->e->n_lanes; i++) {
        int lane = mt_device_sync(x->e->lane[i].b.dev, rc ? NULL : err);
        rc = rc ? rc : lane;
    }
    return rc;
}

/*
 * Waits until the devices are idle. In an abandoned run an update may wait for an instruction that is never submitted;
 * device work submitted before may still be reading the buffer that the update is about to write.
 */
static void drain_device(struct mt_exec *x)
{
    pthread_mutex_lock(&x->lock);
    for (int q = 0; q < x->n_queues; q++)
        while (is_device(q) && !x->closed[q])
            pthread_cond_wait(&x->moved[q], &x->lock);
    pthread_mutex_unlock(&x->lock);
    MT_LOCKED(&x->drain_lock); /* no thread submits any more; one of those waiting here synchronises */
    if (!x->drained)
        sync_lanes(x, NULL); /* its error is reported at the end of the run */
    x->drained = true;
}

/* --- updates and disk ------------------------------------------------------------------------ */

/*
 * Device instruction `at` was abandoned. Waits that follow from it were pruned from the program, so this waits directly
 * for every update and disk transfer that `at` and the device instructions before it were waiting for: those go on.
 * Returns false if the update itself failed.
 */
static bool await_its_waits(struct mt_exec *x, struct mt_runnable *r, int32_t at)
{
    int32_t last[MT_MAX_QUEUES] = MT_NO_WAITS;
    for (int32_t i = 0; i <= at; i++)
        for (int q = 0; mt_queues[r->prog.instrs[i].queue].device && q < x->n_queues; q++)
            last[q] = MT_MAX(last[q], r->prog.instrs[i].wait[q]);
    drain_device(x);
    for (int q = 0; q < x->n_queues; q++)
        if (!is_device(q) && last[q] >= 0 && await(x, q, last[q], true) == STOPPED)
            return false;
    return true;
}

/* The calling thread waits for the instruction's dependencies, in an abandoned run too. false: the update failed. */
static bool await_on_host(struct mt_exec *x, struct mt_runnable *r, const struct mt_instr *in)
{
    for (int q = 0; q < x->n_queues; q++) {
        if (in->wait[q] < 0)
            continue;
        enum waited w = await(x, q, in->wait[q], true);
        if (w == STOPPED)
            return false;
        if (!is_device(q))
            continue;
        if (w == ABANDONED && !await_its_waits(x, r, in->wait[q]))
            return false;
        struct mt_err err = {0};
        mt_device *dev = mt_lane_of(x->e->lane, &r->prog.instrs[in->wait[q]])->b.dev;
        int rc = w == REACHED ? mt_event_sync(dev, r->done[in->wait[q]], &err) : 0;
        if (rc)
            give_up(x, rc, &err, false);
    }
    return true;
}

/* Abandons the run because it was asked to, unless that is too late. Returns whether the run is abandoned. */
static bool heed_interrupt(struct mt_exec *x)
{
    struct mt_err err;
    mt_fail(&err, MT_ERR_RUNTIME, -ECANCELED, "interrupted");
    MT_LOCKED(&x->lock);
    if (!x->committed)
        note_error(x, -ECANCELED, &err, false);
    return x->stop;
}

static void run_updates(struct mt_exec *x, struct mt_runnable *r)
{
    int64_t busy = 0;
    for (size_t k = 0; k < r->queue[MT_Q_HOST].n; k++) {
        size_t i = (size_t)r->queue[MT_Q_HOST].at[k];
        const struct mt_instr *in = &r->prog.instrs[i];
        x->updated |= in->own; /* all of the pending update comes before */
        if (!await_on_host(x, r, in) || (in->own && !commit(x)))
            return;
        struct mt_err err = {0};
        int64_t t0 = mt_now_ns();
        mt_exec_trace_begin(x, r, i, NULL);
        int rc = mt_optimizer_update(x->e, &r->prog, in, &err);
        mt_exec_trace_end(x, r, i, NULL);
        busy += mt_now_ns() - t0;
        x->update_ns = busy;
        if (rc) {
            give_up(x, rc, &err, true);
            return;
        }
        publish(x, MT_Q_HOST, i);
    }
    x->updated = true;
}

/* Call under lock. Instruction `at` of a queue with many under way has ended or is skipped; advances the queue past all
 * that have, in order. */
static void end_in_any_order(struct mt_exec *x, struct mt_runnable *r, int32_t at)
{
    enum mt_queue q = r->prog.instrs[at].queue;
    const struct mt_queue_list *list = &r->queue[q];
    r->ended[at] = true;
    while (x->head[q] < list->n && r->ended[list->at[x->head[q]]])
        x->progress[q] = list->at[x->head[q]++];
    pthread_cond_broadcast(&x->moved[q]);
}

static void begin_op(struct mt_exec_op *op, struct mt_exec *x, struct mt_runnable *r, int32_t at, int requests)
{
    *op = (struct mt_exec_op){.x = x, .run = r, .at = at, .left = requests};
    mt_exec_trace_begin(x, r, (size_t)at, NULL);
}

/* All requests of the operation have ended. */
static void end_op(struct mt_exec_op *op)
{
    struct mt_exec *x = op->x;
    const struct mt_program *prog = &op->run->prog;
    const struct mt_instr *in = &prog->instrs[op->at];
    bool message = in->queue == MT_Q_NET;
    mt_exec_trace_end(x, op->run, (size_t)op->at, NULL);
    MT_LOCKED(&x->lock);
    if (op->rc) {
        mt_fail_prefix(&op->err, op->rc, "%s of %s",
                       message ? mt_opcodes[in->op].name : mt_disk_use_name(mt_instr_disk_use(prog, in)),
                       x->e->b.layout->units[in->unit].name);
        note_error(x, op->rc, &op->err, in->update);
    }
    if (!op->rc || (!message && !in->update)) /* a drive's error outside the update must not block later updates */
        end_in_any_order(x, op->run, op->at);
    op->x = NULL;
    x->in_flight[in->queue]--;
    pthread_cond_broadcast(&x->moved[in->queue]);
}

/* One of the operation's requests has ended. */
static void end_request(struct mt_exec_op *op, int rc, const struct mt_err *err)
{
    pthread_mutex_lock(&op->x->lock);
    if (rc && !op->rc) {
        op->rc = rc;
        op->err = *err;
    }
    bool last = --op->left == 0;
    pthread_mutex_unlock(&op->x->lock);
    if (last)
        end_op(op);
}

/* Runs on the disk's thread. */
static void disk_request_done(struct mt_disk_request *r)
{
    end_request(r->ctx, r->rc, &r->err);
}

/* Runs on a thread that reads files. */
static void file_request_done(struct mt_file_request *r)
{
    end_request(r->ctx, r->rc, &r->err);
}

static bool reads_files(const struct mt_file_request *f)
{
    bool any = false;
    for (int k = 0; k < MT_N_PLANES; k++)
        any |= f->plane[k] != NULL;
    return any;
}

/* Counts a disk operation as under way; false: the run is abandoned, and it is not part of the update. */
static bool enter_disk_op(struct mt_exec *x, enum mt_queue q, bool update)
{
    MT_LOCKED(&x->lock);
    bool enter = update || !x->stop;
    x->in_flight[q] += enter;
    return enter;
}

static void start_disk_op(struct mt_exec *x, struct mt_runnable *r, int32_t at)
{
    const struct mt_instr *in = &r->prog.instrs[at];
    const struct mt_operand *o = &in->operand[0];
    struct mt_disk_op *op = &x->disk_ops[r->prog.objects[o->object].pool][o->buffer];
    enum mt_disk_use use = mt_instr_disk_use(&r->prog, in);
    bool write = in->op == MT_OP_WRITE;
    op->r = (struct mt_disk_request){.done = disk_request_done, .ctx = &op->op};
    op->f = (struct mt_file_request){.done = file_request_done, .ctx = &op->op};
    mt_disk_op_fill(&x->e->b, &r->prog, in, r->spilled, &op->r, &op->f);
    bool files = reads_files(&op->f), disk = op->r.n_spans || !files;
    for (int i = 0; i < op->r.n_spans; i++)
        *(write ? &x->traffic.written[use] : &x->traffic.read[use]) += op->r.span[i].bytes;
    if (files)
        x->traffic.read[use] += mt_file_weights_wanted(x->e->p.files, &op->f);
    begin_op(&op->op, x, r, at, files + disk);
    if (disk)
        mt_disk_submit(x->e->p.disk, &op->r);
    if (files)
        mt_file_weights_submit(x->e->p.files, &op->f);
}

/* Waits until nothing of the queue is under way. */
static void await_flights(struct mt_exec *x, enum mt_queue q)
{
    MT_LOCKED(&x->lock);
    while (x->in_flight[q])
        pthread_cond_wait(&x->moved[q], &x->lock);
}

/* Whether a disk instruction is skipped: the read for a load that is skipped, and without a pending update all of its
 * reads and writes, except reads of weights, which loads need. */
static bool is_idle(const struct mt_exec *x, const struct mt_program *p, const struct mt_instr *in)
{
    if (is_skipped(x, in))
        return true;
    bool load = in->op == MT_OP_READ && p->objects[in->operand[0].object].kind == MT_OBJ_STAGED;
    return in->update && !load && !x->pending;
}

/* A skipped instruction must still complete in queue order: later waiters rely on it to imply everything it was waiting
 * for. */
static void skip(struct mt_exec *x, struct mt_runnable *r, int32_t at)
{
    MT_LOCKED(&x->lock);
    end_in_any_order(x, r, at);
}

static void run_disk(struct mt_exec *x, struct mt_runnable *r, enum mt_queue q)
{
    for (size_t k = 0; k < r->queue[q].n; k++) {
        int32_t at = r->queue[q].at[k];
        const struct mt_instr *in = &r->prog.instrs[at];
        if (!await_on_host(x, r, in))
            break;
        if (!is_idle(x, &r->prog, in) && enter_disk_op(x, q, in->update))
            start_disk_op(x, r, at);
        else
            skip(x, r, at);
    }
    await_flights(x, q);
}

/* --- messages between hosts ------------------------------------------------------------------ */

/* Waits for what a message sends, or writes over; false: the run is abandoned. */
static bool await_content(struct mt_exec *x, struct mt_runnable *r, const struct mt_instr *in)
{
    struct mt_err err = {0};
    for (int q = 0; q < x->n_queues; q++) {
        int32_t w = in->wait[q];
        if (w < 0)
            continue;
        if (await(x, q, w, false) != REACHED)
            return false;
        int rc = is_device(q) ? mt_event_sync(mt_lane_of(x->e->lane, &r->prog.instrs[w])->b.dev, r->done[w], &err) : 0;
        if (rc) {
            give_up(x, rc, &err, false);
            return false;
        }
    }
    return true;
}

/* To or from one host, on the thread of the net. */
static void message_done(struct mt_net_message *m)
{
    end_request(m->ctx, m->rc, &m->err);
}

/* Waits for one that is free; NULL: the run is abandoned. */
static struct mt_net_op *take_message(struct mt_exec *x)
{
    struct mt_net_op *op = NULL;
    MT_LOCKED(&x->lock);
    while (!x->stop && x->in_flight[MT_Q_NET] == MT_NET_UNDER_WAY)
        pthread_cond_wait(&x->moved[MT_Q_NET], &x->lock);
    for (size_t k = 0; k < MT_NET_UNDER_WAY && !x->stop && !op; k++)
        op = x->e->hosts.ops[k].op.x ? NULL : &x->e->hosts.ops[k];
    if (op) {
        op->op.x = x;
        x->in_flight[MT_Q_NET]++;
    }
    return op;
}

static void start_message(struct mt_exec *x, struct mt_runnable *r, struct mt_net_op *op, int32_t at)
{
    const struct mt_instr *in = &r->prog.instrs[at];
    struct mt_net_part part[MT_NET_PARTS];
    size_t n = mt_hosts_content(x->e, &r->prog, in, part), k = 0, all = (size_t)__builtin_popcount(in->hosts) * n;
    begin_op(&op->op, x, r, at, (int)all);
    for (int host = 0; k < all; host++)
        for (size_t i = 0; i < n && in->hosts & 1u << host; i++) {
            op->m[k] = (struct mt_net_message){.host = host, .sends = in->sends, .data = part[i].data,
                                               .bytes = part[i].bytes, .done = message_done, .ctx = &op->op};
            mt_net_submit(x->e->p.net, &op->m[k++]);
        }
}

/* Many are under way at once. In a run that is abandoned those end with it: their other sides may never come. */
static void run_messages(struct mt_exec *x, struct mt_runnable *r)
{
    for (size_t k = 0; k < r->queue[MT_Q_NET].n; k++) {
        int32_t at = r->queue[MT_Q_NET].at[k];
        const struct mt_instr *in = &r->prog.instrs[at];
        bool ready = await_content(x, r, in);
        if (ready && in->op == MT_OP_RENEW && !in->n_operands && !x->pending) { /* nothing is updated, nor read here */
            skip(x, r, at);
            continue;
        }
        struct mt_net_op *op = ready ? take_message(x) : NULL;
        if (!op)
            break;
        start_message(x, r, op, at);
    }
    pthread_mutex_lock(&x->lock);
    while (x->in_flight[MT_Q_NET] && !x->stop)
        pthread_cond_wait(&x->moved[MT_Q_NET], &x->lock);
    bool any = x->in_flight[MT_Q_NET] > 0;
    pthread_mutex_unlock(&x->lock);
    if (any)
        mt_net_abandon(x->e->p.net);
    await_flights(x, MT_Q_NET);
}

/* --- threads --------------------------------------------------------------------------------- */

/* The operations of one lane. */
static void run_compute(struct mt_exec *x, struct mt_runnable *r, int lane)
{
    struct mt_err err = {0};
    mt_device *dev = x->e->lane[lane].b.dev;
    int rc = r->start[lane] ? mt_event_record(dev, r->start[lane], MT_STREAM_COMPUTE, &err) : 0;
    for (size_t i = 0; !rc && i < r->prog.n_instrs; i++) {
        const struct mt_instr *in = &r->prog.instrs[i];
        /* checked at each instruction, of any queue */
        if (atomic_load_explicit(&x->interrupted, memory_order_relaxed) && heed_interrupt(x))
            return;
        if (in->queue != MT_Q_COMPUTE || in->lane != lane)
            continue;
        if (!issue(x, r, i))
            return;
        if (i == r->turn_at)
            rc = mt_event_record(dev, r->turn, MT_STREAM_COMPUTE, &err);
    }
    if (!rc && r->end[lane])
        rc = mt_event_record(dev, r->end[lane], MT_STREAM_COMPUTE, &err);
    if (rc)
        give_up(x, rc, &err, false);
}

static void run_queue(struct mt_exec *x, struct mt_runnable *r, int q)
{
    enum mt_queue kind = mt_queue_kind(q);
    if (kind == MT_Q_HOST)
        run_updates(x, r);
    else if (kind == MT_Q_COMPUTE && mt_runnable_uses_device(r))
        run_compute(x, r, mt_queue_lane(q));
    else if (mt_queues[kind].device)
        run_copies(x, r, q);
    else if (kind == MT_Q_NET)
        run_messages(x, r);
    else
        run_disk(x, r, kind);
    close_queue(x, q);
}

static void *worker_main(void *arg)
{
    const struct mt_worker *w = arg;
    struct mt_exec *x = w->x;
    unsigned seen = 0;
    for (;;) {
        pthread_mutex_lock(&x->lock);
        while (!x->quit && x->generation == seen)
            pthread_cond_wait(&x->workers, &x->lock);
        seen = x->generation;
        bool quit = x->quit;
        struct mt_runnable *r = x->run;
        pthread_mutex_unlock(&x->lock);
        if (quit)
            return NULL;
        run_queue(x, r, w->queue);
        MT_LOCKED(&x->lock);
        if (--x->n_busy == 0)
            pthread_cond_broadcast(&x->workers);
    }
}

static void init_locks(struct mt_exec *x)
{
    x->n_queues = mt_n_queues((int)x->e->n_lanes);
    pthread_mutex_init(&x->lock, NULL);
    pthread_mutex_init(&x->drain_lock, NULL);
    pthread_cond_init(&x->workers, NULL);
    for (int q = 0; q < x->n_queues; q++)
        pthread_cond_init(&x->moved[q], NULL);
}

int mt_exec_start(mt_engine *e, struct mt_err *err)
{
    struct mt_exec *x = &e->x;
    x->e = e;
    init_locks(x);
    for (int q = 0; q < x->n_queues; q++) {
        struct mt_worker *w = &x->worker[q];
        const struct mt_queue_desc *d = &mt_queues[mt_queue_kind(q)];
        const char *name = d->thread || !mt_queue_lane(q) ? d->thread : "mt-compute"; /* of a lane but the first */
        bool idle = d->disk ? !e->p.disk && !e->p.files : mt_queue_kind(q) == MT_Q_NET && !e->p.net;
        if (!name || idle)
            continue;
        w->x = x;
        w->queue = q;
        int rc = mt_thread_start(&w->thread, name, worker_main, w, err);
        w->started = !rc;
        if (rc)
            return rc;
    }
    return 0;
}

void mt_exec_stop(struct mt_exec *x)
{
    mt_raise(&x->lock, &x->workers, &x->quit);
    for (int q = 0; q < x->n_queues; q++)
        if (x->worker[q].started)
            pthread_join(x->worker[q].thread, NULL);
    for (int q = 0; q < x->n_queues; q++)
        pthread_cond_destroy(&x->moved[q]);
    pthread_cond_destroy(&x->workers);
    pthread_mutex_destroy(&x->drain_lock);
    pthread_mutex_destroy(&x->lock);
}

static void begin(struct mt_exec *x, struct mt_runnable *r)
{
    MT_LOCKED(&x->lock);
    x->run = r;
    x->stop = x->broken = x->drained = x->committed = false;
    x->update_ns = 0;
    x->error_code = 0;
    x->updated = false;
    x->n_busy = 0;
    x->loaded = 0;
    x->traffic = (struct mt_disk_traffic){{0}, {0}};
    for (int q = 0; q < MT_N_QUEUES; q++)
        x->head[q] = 0;
    for (int q = 0; q < x->n_queues; q++) {
        x->progress[q] = -1;
        x->closed[q] = false;
        x->n_busy += x->worker[q].started;
        for (size_t k = 0; k < r->queue[q].n; k++)
            r->ended[r->queue[q].at[k]] = false;
    }
    x->generation++;
    pthread_cond_broadcast(&x->workers);
}

static void await_workers(struct mt_exec *x)
{
    MT_LOCKED(&x->lock);
    while (x->n_busy)
        pthread_cond_wait(&x->workers, &x->lock);
}

/* Call after a run without errors. */
static void note_residents(struct mt_exec *x, const struct mt_program *p)
{
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].once && !is_skipped(x, &p->instrs[i]))
            mt_lane_of(x->e->lane, &p->instrs[i])->resident[p->instrs[i].unit] = true;
}

int mt_exec_run(struct mt_exec *x, struct mt_runnable *r, struct mt_err *err)
{
    struct mt_err sync_err = {0};
    x->updated = false;
    int rc = mt_planes_settle(x->e->b.planes, err);
    x->broken = rc;
    if (rc)
        return rc;
    mt_exec_trace_prepare(x, r);
    begin(x, r);
    if (mt_runnable_uses_device(r))
        run_compute(x, r, 0);
    close_queue(x, MT_Q_COMPUTE);
    await_workers(x);
    if (mt_runnable_uses_device(r))
        rc = sync_lanes(x, &sync_err);
    if (x->error_code) {
        if (err)
            *err = x->error;
        return x->error_code;
    }
    if (rc && err)
        *err = sync_err;
    if (!rc)
        note_residents(x, &r->prog);
    return rc;
}
