/* SPDX-License-Identifier: Apache-2.0 */
/* The simulator's tasks from the step's program: one per instruction, with the time it takes alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "plan/sim.h"

void mt_sim_graph_finish(struct mt_sim_graph *g)
{
    free(g->tasks);
    *g = (struct mt_sim_graph){0};
}

static double rate_of(const struct mt_sim_params *p, enum mt_rate_id id)
{
    return p->machine->rate[id].value;
}

/* Of a byte that the machine's own measured update moves. */
static double byte_ns(const struct mt_sim_params *p)
{
    return mt_machine_update_ns(p->machine, p->update_threads) / mt_optimizer_bytes(&mt_adamw, MT_MASTER_F32, MT_BF16);
}

/* ns: of an element; 0: not yet known. A step has thousands of updates, so that is looked up once. */
static void price_update(struct mt_sim_task *t, const struct mt_instr *in, const struct mt_sim_params *p, double *ns)
{
    const struct mt_optimizer *o = p->numerics->optimizer;
    double n = (double)in->elems;
    *ns = *ns > 0 ? *ns : mt_machine_optimizer_ns(p->machine, p->numerics, p->update_threads);
    t->bytes = n * mt_optimizer_bytes(o, p->numerics->master, p->numerics->grad_dtype);
    t->seconds = n * *ns * 1e-9;
}

/*
 * Different tokens among n: Heaps' law (1978), with constants on the high side of what text and code have with
 * vocabularies of 30,000 to 250,000: 2,200 of 8,192 tokens.
 */
static double distinct_tokens(double n)
{
    return fmin(n, 4 * pow(n, 0.7));
}

/*
 * Reads the planes of a row for each different token, and writes a row for each token, past the cache; both are bound
 * by memory.
 */
static void price_gather(struct mt_sim_task *t, const struct mt_program *prog, const struct mt_instr *in,
                         const struct mt_sim_params *p)
{
    double tokens = MT_MAX(p->tokens / (double)prog->n_micro, 1.0), rows = distinct_tokens(tokens) / tokens;
    double elems = (double)in->bytes / (double)mt_dtype_size(p->numerics->dtype);
    double both = mt_optimizer_bytes(p->numerics->optimizer, p->numerics->master, p->numerics->grad_dtype);
    double read = (both + (double)mt_dtype_size(p->numerics->grad_dtype)) / 2;
    t->bytes = elems * rows * read + (double)in->bytes;
    t->seconds = t->bytes * byte_ns(p) * 1e-9;
}

/* Bytes of the rows of a gradient that the step's tokens have. */
static double used_bytes(const struct mt_instr *in, const struct mt_sim_params *p)
{
    return fmin((double)in->bytes, distinct_tokens(p->tokens) * (double)in->row_bytes);
}

/* Reads and writes each row; a write reads, too. */
static void price_scatter(struct mt_sim_task *t, const struct mt_instr *in, const struct mt_sim_params *p)
{
    t->bytes = 3 * used_bytes(in, p);
    t->seconds = t->bytes * byte_ns(p) * 1e-9;
}

/* On the cpu device the caches make short copies faster. Between the two sizes measured: by their logarithms. */
static double copy_gbs(const struct mt_sim_params *p, bool in, double bytes)
{
    double gbs = rate_of(p, in ? MT_RATE_H2D : MT_RATE_D2H);
    if (p->machine->cpu && bytes > 0) {
        double near = rate_of(p, in ? MT_RATE_H2D_SHORT : MT_RATE_D2H_SHORT);
        double length = log(bytes / MT_SHORT_COPY_BYTES) / log((double)MT_LONG_COPY_BYTES / MT_SHORT_COPY_BYTES);
        gbs = near * pow(gbs / near, fmin(fmax(length, 0), 1));
    }
    return p->link_gbps > 0 ? MT_MIN(gbs, p->link_gbps) : gbs;
}

static void price_copy(struct mt_sim_task *t, const struct mt_program *prog, const struct mt_instr *in,
                       const struct mt_sim_params *p)
{
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    t->bytes = in->row_bytes ? used_bytes(in, p) : (double)in->bytes;
    if (o->kind == MT_OBJ_CACHE && in->queue == MT_Q_D2H) /* the block to which each text has added */
        t->bytes *= (double)p->cache->slots / (double)p->cache->n[o->pool - MT_POOL_CACHE];
    double gbs = copy_gbs(p, in->queue == MT_Q_H2D, t->bytes);
    t->seconds = t->bytes / (gbs * 1e9);
    if (!p->machine->cpu) /* there it is the time until a waiting thread goes on, of any queue: sim.c */
        t->seconds += rate_of(p, MT_RATE_COPY_US) * 1e-6;
}

static void price_disk(struct mt_sim_task *t, const struct mt_instr *in, const struct mt_sim_params *p)
{
    double gbs = rate_of(p, in->queue == MT_Q_DISK_WRITE ? MT_RATE_WRITE : MT_RATE_READ);
    t->bytes = (double)in->bytes;
    t->seconds = t->bytes / (MT_MAX(p->drives, 1) * gbs * 1e9);
}

/* What is sent goes to one host after the other. */
static void price_message(struct mt_sim_task *t, const struct mt_instr *in, const struct mt_sim_params *p)
{
    t->bytes = (in->row_bytes ? used_bytes(in, p) : (double)in->bytes) * __builtin_popcount(in->hosts);
    t->seconds = t->bytes / ((p->net.gbs > 0 ? p->net.gbs : MT_NET_GBS) * 1e9) + p->net.us * 1e-6;
}

static int price(struct mt_sim_task *t, const struct mt_program *prog, const struct mt_instr *in,
                 mt_cost_table *costs, const struct mt_sim_params *p, double *update_ns, struct mt_err *err)
{
    struct mt_cost c;
    int rc = 0;
    switch (in->queue) {
    case MT_Q_COMPUTE:
        rc = mt_cost_of(costs, prog, in, &c, err);
        if (rc)
            return rc;
        t->seconds = c.seconds;
        t->flops = c.flops;
        t->bytes = c.bytes;
        break;
    case MT_Q_HOST:
        if (in->op == MT_OP_GATHER)
            price_gather(t, prog, in, p);
        else if (in->op == MT_OP_SCATTER)
            price_scatter(t, in, p);
        else
            price_update(t, in, p, update_ns);
        break;
    case MT_Q_H2D:
    case MT_Q_D2H:
        price_copy(t, prog, in, p);
        break;
    case MT_Q_NET:
        price_message(t, in, p);
        break;
    default:
        price_disk(t, in, p);
    }
    return 0;
}

/* What messages wait for, as far as the graph is built. */
struct messages {
    int net_in;
    int32_t wait[MT_SIM_MAX_QUEUES]; /* they start in order: what any of them has waited for */
    int32_t computing;               /* the newest operation */
};

/* A wait for a message is one for all before it, of both directions. */
static void split_wait(struct mt_sim_task *t, const struct mt_sim_task *tasks, const struct messages *m)
{
    int32_t out = t->wait[MT_Q_NET], in = out;
    while (in >= 0 && tasks[in].queue != m->net_in)
        in--;
    while (out >= 0 && tasks[out].queue != MT_Q_NET)
        out--;
    t->wait[MT_Q_NET] = out;
    t->wait[m->net_in] = in;
}

/* What comes in was made by a host that is as far as this one. */
static void add_message(struct mt_sim_task *t, const struct mt_instr *in, struct messages *m)
{
    for (int q = 0; q < MT_SIM_MAX_QUEUES; q++)
        t->wait[q] = m->wait[q] = MT_MAX(m->wait[q], t->wait[q]);
    if (in->sends)
        return;
    t->queue = (uint8_t)m->net_in;
    t->wait[MT_Q_COMPUTE] = MT_MAX(t->wait[MT_Q_COMPUTE], m->computing);
}

/* Of experts without rows nothing is loaded or computed: of which, nobody knows before, so all take less. */
static void leave_out_idle(struct mt_sim_task *t, const struct mt_instr *in, const struct mt_sim_params *p)
{
    bool experts = false;
    for (int k = 0; k < in->n_operands && in->op == MT_OP_FORWARD; k++)
        experts |= in->operand[k].role == MT_ROLE_SUM && in->operand[k].access & MT_WRITE;
    double part = experts ? 1 - p->idle : in->if_rows ? 1 - p->idle_groups : 1;
    t->seconds *= part;
    t->bytes *= part;
    t->flops *= part;
}

int mt_sim_graph_build(struct mt_sim_graph *out, const struct mt_program *prog, mt_cost_table *costs,
                       const struct mt_sim_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph g = {.n = prog->n_instrs, .n_lanes = prog->n_lanes};
    struct messages m = {.net_in = mt_sim_net_in(MT_MAX(g.n_lanes, 1)), .computing = MT_NO_WAIT};
    double update_ns = 0;
    memset(m.wait, MT_NO_WAIT, sizeof(m.wait));
    int rc = MT_NEW(&g.tasks, g.n, "a simulation", err);
    for (size_t i = 0; i < g.n && !rc; i++) {
        const struct mt_instr *in = &prog->instrs[i];
        struct mt_sim_task *t = &g.tasks[i];
        *t = (struct mt_sim_task){.queue = (uint8_t)mt_instr_queue(in), .op = in->op, .unit = in->unit, .mb = in->mb,
                                  .piece = in->piece, .cause = -1};
        memcpy(t->wait, in->wait, sizeof(in->wait));
        t->wait[MT_MAX_QUEUES] = MT_NO_WAIT;
        if (t->wait[MT_Q_NET] >= 0)
            split_wait(t, g.tasks, &m);
        if (in->queue == MT_Q_NET)
            add_message(t, in, &m);
        if (in->queue == MT_Q_COMPUTE)
            m.computing = in->lane ? m.computing : (int32_t)i;
        if (!in->once) /* it takes time only in the first step */
            rc = price(t, prog, in, costs, p, &update_ns, err);
        leave_out_idle(t, in, p);
        if (mt_opcodes[in->op].ends_forward)
            g.turn = i;
    }
    if (!rc)
        *out = MT_GIVE(g);
    return rc;
}
