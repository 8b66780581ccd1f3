/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A placed program as tasks. Units on disk get, around their update, a read and a write of their states,
 * and where their weights are there too, a read before each load and a write of the gradient; a few units
 * are under way at once.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "plan/sim.h"

static const enum mt_sim_queue queue_of[MT_N_QUEUES] = {
    [MT_Q_COMPUTE] = MT_SIM_Q_COMPUTE,
    [MT_Q_H2D] = MT_SIM_Q_H2D,
    [MT_Q_D2H] = MT_SIM_Q_D2H,
    [MT_Q_HOST] = MT_SIM_Q_HOST,
};

struct builder {
    struct mt_sim_graph *g;
    const struct mt_program *prog;
    mt_cost_table *costs;
    const struct mt_sim_params *p;
    int32_t *task_of; /* [n_instrs] */
    int32_t *spilled; /* [n_objects] the write that brought it to disk, or -1 */
    int32_t ring[MT_SIM_N_QUEUES][MT_SIM_SPILL_RING]; /* newest tasks that free a staging buffer */
    size_t n_ring[MT_SIM_N_QUEUES];
    bool failed;
};

void mt_sim_graph_finish(struct mt_sim_graph *g)
{
    free(g->tasks);
    *g = (struct mt_sim_graph){0};
}

static enum mt_unit_tier tier_of(const struct builder *b, int32_t unit)
{
    return b->p->tier ? b->p->tier[unit] : MT_UNIT_ON_HOST;
}

static double rate_of(const struct builder *b, enum mt_rate_id id)
{
    return b->p->machine->rate[id].value;
}

static int32_t add(struct builder *b, enum mt_sim_queue q, const struct mt_instr *in)
{
    struct mt_sim_graph *g = b->g;
    if (!mt_grow(&g->tasks, &g->cap, g->n + 1, sizeof(*g->tasks))) {
        b->failed = true;
        return 0;
    }
    struct mt_sim_task *t = &g->tasks[g->n];
    *t = (struct mt_sim_task){.queue = (uint8_t)q, .op = in->op, .mb = in->mb, .unit = in->unit,
                              .cause = -1};
    for (int k = 0; k < MT_SIM_N_QUEUES; k++)
        t->wait[k] = -1;
    return (int32_t)g->n++;
}

static void wait_for(struct builder *b, int32_t task, int32_t other)
{
    if (other < 0)
        return;
    int32_t *w = &b->g->tasks[task].wait[b->g->tasks[other].queue];
    *w = MT_MAX(*w, other);
}

static size_t ring_length(enum mt_sim_queue q)
{
    return q == MT_SIM_Q_SPILL_READ || q == MT_SIM_Q_SPILL_WRITE ? MT_SIM_SPILL_RING : MT_SIM_UNIT_RING;
}

/* A staging buffer of the ring `q` for `task`; it is free again when `until` has ended (set later). */
static void take_staging(struct builder *b, enum mt_sim_queue q, int32_t task)
{
    if (b->n_ring[q] >= ring_length(q))
        wait_for(b, task, b->ring[q][b->n_ring[q] % ring_length(q)]);
}

static void give_staging(struct builder *b, enum mt_sim_queue q, int32_t until)
{
    b->ring[q][b->n_ring[q]++ % ring_length(q)] = until;
}

static void set_disk(struct builder *b, int32_t task, double bytes, bool write)
{
    struct mt_sim_task *t = &b->g->tasks[task];
    double drives = MT_MAX(rate_of(b, MT_RATE_DRIVES), 1.0);
    t->bytes = bytes;
    t->seconds = bytes / (drives * rate_of(b, write ? MT_RATE_WRITE : MT_RATE_READ) * 1e9) +
                 rate_of(b, MT_RATE_DISK_US) * 1e-6;
}

/* Bytes of an update's planes on disk: lo and moments; of units wholly there hi and the gradient too. */
static double state_bytes(enum mt_unit_tier tier, double n, double grad_size, bool write)
{
    double per = tier == MT_UNIT_STATES_ON_DISK ? 10 : tier == MT_UNIT_ON_DISK ? 12 : 0;
    return n * (per + (tier == MT_UNIT_ON_DISK && !write ? grad_size : 0));
}

void mt_sim_disk_bytes(enum mt_unit_tier tier, double n, enum mt_dtype dtype, enum mt_dtype grad_dtype,
                       double *read, double *write)
{
    double g = (double)mt_dtype_size(grad_dtype), w = (double)mt_dtype_size(dtype);
    bool all = tier == MT_UNIT_ON_DISK;
    *read = state_bytes(tier, n, g, false) + (all ? 2 * n * w : 0);
    *write = state_bytes(tier, n, g, true) + (all ? n * g : 0);
}

static double unit_elems(const struct builder *b, int32_t unit)
{
    return (double)b->p->layout->units[unit].n_elems;
}

static int32_t add_update(struct builder *b, const struct mt_instr *in)
{
    enum mt_unit_tier tier = tier_of(b, in->unit);
    double n = unit_elems(b, in->unit), g = (double)mt_dtype_size(b->p->grad_dtype);
    double bytes = 24 + g; /* both ways over hi, lo and moments; the gradient once */
    bool disk = tier != MT_UNIT_ON_HOST;
    int32_t read = -1;
    if (disk) {
        read = add(b, MT_SIM_Q_STATE_READ, in);
        set_disk(b, read, state_bytes(tier, n, g, false), false);
        take_staging(b, MT_SIM_Q_STATE_READ, read);
    }
    int32_t update = add(b, MT_SIM_Q_HOST, in);
    if (b->failed)
        return 0;
    b->g->tasks[update].seconds =
        n * mt_machine_adam_ns(b->p->machine, b->p->adam_threads) * 1e-9 * bytes / 26;
    b->g->tasks[update].bytes = n * bytes;
    wait_for(b, update, read);
    if (disk) {
        int32_t write = add(b, MT_SIM_Q_STATE_WRITE, in);
        if (b->failed)
            return 0;
        set_disk(b, write, state_bytes(tier, n, g, true), true);
        wait_for(b, write, update);
        give_staging(b, MT_SIM_Q_STATE_READ, write);
    }
    return update;
}

static void set_copy(struct builder *b, int32_t task, const struct mt_instr *in)
{
    struct mt_sim_task *t = &b->g->tasks[task];
    bool in_ward = t->queue == MT_SIM_Q_H2D;
    double gbs = rate_of(b, in_ward ? MT_RATE_H2D : MT_RATE_D2H);
    if (b->p->link_gbps > 0)
        gbs = MT_MIN(gbs, b->p->link_gbps);
    t->bytes = (double)in->bytes;
    t->seconds = t->bytes / (gbs * 1e9) + rate_of(b, MT_RATE_COPY_US) * 1e-6;
}

static bool is_weights(const struct builder *b, const struct mt_instr *in)
{
    return in->op == MT_OP_LOAD && b->prog->objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS;
}

static int32_t add_disk(struct builder *b, enum mt_sim_queue q, const struct mt_instr *in, bool write)
{
    int32_t t = add(b, q, in);
    if (!b->failed)
        set_disk(b, t, (double)in->bytes, write);
    return t;
}

/* What a load waits for where its source is on disk: a read, or -1. */
static int32_t add_read(struct builder *b, const struct mt_instr *in)
{
    if (in->op != MT_OP_LOAD)
        return -1;
    bool weights = is_weights(b, in);
    int32_t write = weights ? -1 : b->spilled[in->operand[0].object];
    if (weights ? tier_of(b, in->unit) != MT_UNIT_ON_DISK : write < 0)
        return -1;
    enum mt_sim_queue q = weights ? MT_SIM_Q_WEIGHT_READ : MT_SIM_Q_SPILL_READ;
    int32_t read = add_disk(b, q, in, false);
    if (b->failed)
        return -1;
    take_staging(b, q, read);
    wait_for(b, read, write);
    return read;
}

static void add_write(struct builder *b, const struct mt_instr *in, int32_t copy)
{
    bool spill = in->op == MT_OP_STORE && b->p->spill_on_disk;
    bool grad = in->op == MT_OP_STORE_GRAD && tier_of(b, in->unit) == MT_UNIT_ON_DISK;
    if (!spill && !grad)
        return;
    enum mt_sim_queue q = spill ? MT_SIM_Q_SPILL_WRITE : MT_SIM_Q_GRAD_WRITE;
    take_staging(b, q, copy);
    int32_t write = add_disk(b, q, in, true);
    if (b->failed)
        return;
    wait_for(b, write, copy);
    give_staging(b, q, write);
    if (spill)
        b->spilled[in->operand[0].object] = write;
}

/* *read: the read that goes before it, or -1. */
static int32_t add_copy(struct builder *b, const struct mt_instr *in, int32_t *read)
{
    *read = add_read(b, in);
    int32_t copy = add(b, queue_of[in->queue], in);
    if (b->failed)
        return 0;
    set_copy(b, copy, in);
    wait_for(b, copy, *read);
    if (*read >= 0)
        give_staging(b, (enum mt_sim_queue)b->g->tasks[*read].queue, copy);
    add_write(b, in, copy);
    return copy;
}

/* The write that follows an update, or the update itself. */
static int32_t write_after(const struct builder *b, int32_t update)
{
    size_t next = (size_t)update + 1;
    return next < b->g->n && b->g->tasks[next].queue == MT_SIM_Q_STATE_WRITE ? update + 1 : update;
}

static int add_instr(struct builder *b, size_t i, struct mt_err *err)
{
    const struct mt_instr *in = &b->prog->instrs[i];
    int32_t task, read = -1;
    if (in->queue == MT_Q_HOST) {
        task = add_update(b, in);
    } else if (in->queue == MT_Q_COMPUTE) {
        struct mt_cost c;
        int rc = mt_cost_of(b->costs, b->prog, in, &c, err);
        if (rc)
            return rc;
        task = add(b, MT_SIM_Q_COMPUTE, in);
        if (!b->failed) {
            b->g->tasks[task].seconds = c.seconds;
            b->g->tasks[task].flops = c.flops;
            b->g->tasks[task].bytes = c.bytes;
        }
    } else {
        task = add_copy(b, in, &read);
    }
    if (b->failed)
        return mt_fail_nomem(err, "a simulation", b->g->n * sizeof(struct mt_sim_task));
    b->task_of[i] = task;
    for (int q = 0; q < MT_N_QUEUES; q++)
        if (in->wait[q] >= 0) {
            wait_for(b, task, b->task_of[in->wait[q]]);
            if (read >= 0 && q == MT_Q_HOST) /* the file must hold the new weights */
                wait_for(b, read, write_after(b, b->task_of[in->wait[q]]));
        }
    if (in->op == MT_OP_HEAD || in->op == MT_OP_LOGITS)
        b->g->turn = (size_t)task;
    return 0;
}

int mt_sim_graph_build(struct mt_sim_graph *out, const struct mt_program *prog, mt_cost_table *costs,
                       const struct mt_sim_params *p, struct mt_err *err)
{
    struct mt_sim_graph g = {0};
    struct builder b = {.g = &g, .prog = prog, .costs = costs, .p = p};
    b.task_of = mt_calloc(prog->n_instrs, sizeof(int32_t));
    b.spilled = mt_calloc(prog->n_objects, sizeof(int32_t));
    int rc = b.task_of && b.spilled
                 ? 0
                 : mt_fail_nomem(err, "a simulation", prog->n_instrs * sizeof(int32_t));
    for (size_t i = 0; i < prog->n_objects && !rc; i++)
        b.spilled[i] = -1;
    for (size_t i = 0; i < prog->n_instrs && !rc; i++)
        rc = add_instr(&b, i, err);
    free(b.task_of);
    free(b.spilled);
    if (rc) {
        mt_sim_graph_finish(&g);
        return rc;
    }
    *out = g;
    return 0;
}
