/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/sim.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

struct state {
    const struct mt_sim_params *p;
    struct mt_sim_graph *g;
    int32_t *order;                /* tasks by queue, in order */
    int n_queues, n_lanes;
    enum mt_queue kind[MT_SIM_MAX_QUEUES]; /* by queue number, as the following */
    size_t first[MT_SIM_MAX_QUEUES + 1]; /* a queue's part of it */
    size_t next[MT_SIM_MAX_QUEUES];
    int32_t active[MT_SIM_MAX_QUEUES];   /* or -1 */
    int32_t newest[MT_SIM_MAX_QUEUES];   /* that has ended, or -1 */
    double late[MT_SIM_MAX_QUEUES];      /* seconds until the active task begins: its thread is woken up */
    double left[MT_SIM_MAX_QUEUES];
    double ended[MT_SIM_MAX_QUEUES];     /* when a task of the queue last did */
    double busy[MT_SIM_MAX_QUEUES];
    double now;
    int32_t last_ended;
};

static double rate(const struct state *s, enum mt_rate_id id)
{
    return s->p->machine->rate[id].value;
}

static void sort_by_queue(struct state *s)
{
    size_t n = s->g->n, at[MT_SIM_MAX_QUEUES];
    for (size_t i = 0; i < n; i++)
        s->first[s->g->tasks[i].queue + 1]++;
    for (int q = 0; q < s->n_queues; q++)
        s->first[q + 1] += s->first[q];
    for (int q = 0; q < s->n_queues; q++)
        at[q] = s->next[q] = s->first[q];
    for (size_t i = 0; i < n; i++)
        s->order[at[s->g->tasks[i].queue]++] = (int32_t)i;
}

static bool ready(const struct state *s, const struct mt_sim_task *t)
{
    for (int q = 0; q < s->n_queues; q++)
        if (t->wait[q] > s->newest[q])
            return false;
    return true;
}

/* A request's latency shows only if its queue was idle: otherwise it overlaps with the request before. */
static double latency(const struct state *s, int q)
{
    return mt_queues[s->kind[q]].disk && !(s->ended[q] >= s->now) ? rate(s, MT_RATE_DISK_US) * 1e-6 : 0;
}

/* On the cpu device a thread that waited for another queue goes on a little after what it waited for. */
static double wake_up(const struct state *s, int q)
{
    bool waited = s->last_ended >= 0 && s->ended[q] < s->now;
    return s->p->machine->cpu && !mt_queues[s->kind[q]].disk && waited ? rate(s, MT_RATE_COPY_US) * 1e-6 : 0;
}

/* Whether a task of the queue takes cores, memory or a link. */
static bool runs(const struct state *s, int q)
{
    return s->active[q] >= 0 && !(s->late[q] > 0);
}

static bool start_tasks(struct state *s)
{
    bool any = false;
    for (int q = 0; q < s->n_queues; q++) {
        if (s->active[q] < 0 && s->next[q] < s->first[q + 1]) {
            struct mt_sim_task *t = &s->g->tasks[s->order[s->next[q]]];
            if (ready(s, t)) {
                s->active[q] = s->order[s->next[q]++];
                s->left[q] = t->seconds + latency(s, q);
                s->late[q] = t->seconds > 0 ? wake_up(s, q) : 0;
                t->start = s->now;
                t->cause = s->last_ended;
            }
        }
        any |= s->active[q] >= 0;
    }
    return any;
}

/* Fraction of a core that a copying thread uses: a throttled one sleeps in between. */
static double copy_duty(const struct state *s, int q)
{
    double throttle = s->p->link_gbps;
    if (!runs(s, q))
        return 0;
    return throttle > 0 ? MT_MIN(throttle / rate(s, MT_RATE_COPY), 1.0) : 1;
}

static double slowed(double share, double duty)
{
    return share > 0 ? 1 - duty * (1 - share) : 1;
}

/* What messages leave to compute and updates, which have all cores but the idle ones. */
static double beside_messages(const struct state *s)
{
    const struct mt_machine *m = s->p->machine;
    const double threads = MT_MAX(s->p->update_threads, 1), idle = MT_MAX(rate(s, MT_RATE_CORES) - threads, 0.0);
    bool moving = false;
    for (int q = 0; q < s->n_queues; q++)
        moving |= s->kind[q] == MT_Q_NET && runs(s, q);
    return moving && m->cpu ? 1 - MT_MIN(MT_MAX(s->p->net.cores - idle, 0.0) / threads, 0.5) : 1;
}

/* Slowdown of compute, copies and updates on the same cores; messages take their time of them. Lanes that compute at
 * once share them. */
static void share_cores(const struct state *s, double speed[MT_SIM_MAX_QUEUES])
{
    int computing = 0;
    bool update = runs(s, MT_Q_HOST);
    for (int lane = 0; lane < s->n_lanes; lane++)
        computing += runs(s, mt_queue_number(lane, MT_Q_COMPUTE));
    double messages = beside_messages(s);
    double compute = messages * (computing > 1 ? 1.0 / computing : 1);
    speed[MT_Q_HOST] *= messages;
    static const enum mt_queue link[] = {MT_Q_H2D, MT_Q_D2H};
    for (size_t i = 0; i < MT_ARRAY_LEN(link) * (size_t)s->n_lanes; i++) {
        int q = mt_queue_number((int)(i / MT_ARRAY_LEN(link)), link[i % MT_ARRAY_LEN(link)]);
        double duty = copy_duty(s, q);
        compute *= slowed(rate(s, MT_RATE_SHARE_COPY), duty);
        speed[MT_Q_HOST] *= slowed(rate(s, MT_RATE_SHARE_COPY), duty);
        if (duty >= 1 && (computing || update)) /* a throttled copy sleeps and is not slowed down */
            speed[q] *= slowed(rate(s, MT_RATE_COPY_SHARE), 1);
    }
    if (computing && update) {
        compute *= slowed(rate(s, MT_RATE_SHARE_UPDATE), 1);
        speed[MT_Q_HOST] *= slowed(rate(s, MT_RATE_UPDATE_SHARE), 1);
    }
    for (int lane = 0; lane < s->n_lanes; lane++)
        speed[mt_queue_number(lane, MT_Q_COMPUTE)] *= compute;
}

/* Updates get the host memory bandwidth that copies and drives leave. */
static void share_dram(const struct state *s, double speed[MT_SIM_MAX_QUEUES])
{
    int32_t update = s->active[MT_Q_HOST];
    if (update < 0 || !(s->g->tasks[update].seconds > 0))
        return;
    double free = rate(s, MT_RATE_DRAM) * 1e9, want;
    for (int q = 0; q < s->n_queues; q++) {
        const struct mt_sim_task *t = s->active[q] < 0 ? NULL : &s->g->tasks[s->active[q]];
        if (t && s->kind[q] != MT_Q_COMPUTE && q != MT_Q_HOST && t->seconds > 0)
            free -= t->bytes / t->seconds * speed[q];
    }
    want = s->g->tasks[update].bytes / s->g->tasks[update].seconds;
    if (want > free)
        speed[MT_Q_HOST] *= MT_MAX(free / want, 0.1);
}

/* Two directions of a drive, each slower while the other is active. */
static void share_both(const struct state *s, const int q[2], const enum mt_rate_id alone[2],
                       const enum mt_rate_id both[2], double speed[MT_SIM_MAX_QUEUES])
{
    if (!runs(s, q[0]) || !runs(s, q[1]))
        return;
    for (int i = 0; i < 2; i++)
        speed[q[i]] = rate(s, both[i]) / rate(s, alone[i]);
}

/* Copies of GPUs behind one link: those in one direction share it, and each is slower while the other one is busy. */
static void share_links(const struct state *s, const enum mt_rate_id alone[2], const enum mt_rate_id both[2],
                        double speed[MT_SIM_MAX_QUEUES])
{
    static const enum mt_queue link[2] = {MT_Q_H2D, MT_Q_D2H};
    int behind = MT_MAX((int)rate(s, MT_RATE_LINK_GPUS), 1);
    for (int first = 0; first < s->n_lanes; first += behind) {
        int n[2] = {0}, end = MT_MIN(first + behind, s->n_lanes);
        for (int lane = first; lane < end; lane++)
            for (int d = 0; d < 2; d++)
                n[d] += runs(s, mt_queue_number(lane, link[d]));
        for (int lane = first; lane < end; lane++)
            for (int d = 0; d < 2; d++) {
                double *v = &speed[mt_queue_number(lane, link[d])];
                *v = (n[!d] ? rate(s, both[d]) / rate(s, alone[d]) : 1) / MT_MAX(n[d], 1);
            }
    }
}

static void find_speeds(const struct state *s, double speed[MT_SIM_MAX_QUEUES])
{
    static const int disk[2] = {MT_Q_DISK_READ, MT_Q_DISK_WRITE};
    static const enum mt_rate_id link_alone[2] = {MT_RATE_H2D, MT_RATE_D2H},
                                 link_both[2] = {MT_RATE_H2D_BOTH, MT_RATE_D2H_BOTH},
                                 disk_alone[2] = {MT_RATE_READ, MT_RATE_WRITE},
                                 disk_both[2] = {MT_RATE_READ_BOTH, MT_RATE_WRITE_BOTH};
    for (int q = 0; q < s->n_queues; q++)
        speed[q] = 1;
    if (!(s->p->link_gbps > 0))
        share_links(s, link_alone, link_both, speed);
    share_both(s, disk, disk_alone, disk_both, speed);
    if (s->p->machine->cpu)
        share_cores(s, speed);
    else
        share_dram(s, speed);
}

/* Advances the time until the next task ends. */
static void advance(struct state *s, struct mt_sim_result *r)
{
    double speed[MT_SIM_MAX_QUEUES], dt = INFINITY;
    find_speeds(s, speed);
    for (int q = 0; q < s->n_queues; q++)
        if (s->active[q] >= 0)
            dt = fmin(dt, s->late[q] > 0 ? s->late[q] : s->left[q] / speed[q]);
    s->now += dt;
    for (int q = 0; q < s->n_queues; q++) {
        if (s->active[q] < 0)
            continue;
        if (s->late[q] > 0) {
            s->late[q] = s->late[q] - dt > 1e-12 ? s->late[q] - dt : 0;
            continue;
        }
        s->left[q] -= dt * speed[q];
        if (s->left[q] > 1e-12)
            continue;
        struct mt_sim_task *t = &s->g->tasks[s->active[q]];
        t->end = s->now;
        s->ended[q] = s->now;
        s->busy[q] += t->end - t->start;
        r->bytes[s->kind[q]] += t->bytes;
        r->flops += t->flops;
        s->newest[q] = s->last_ended = s->active[q];
        s->active[q] = -1;
    }
}

static int run_tasks(struct state *s, struct mt_sim_result *r, struct mt_err *err)
{
    while (start_tasks(s))
        advance(s, r);
    for (int q = 0; q < s->n_queues; q++)
        if (s->next[q] < s->first[q + 1]) {
            const struct mt_sim_task *t = &s->g->tasks[s->order[s->next[q]]];
            return mt_fail(err, MT_ERR_RUNTIME, -EDEADLK,
                           "simulation: %s of unit %d, micro-batch %d never starts",
                           mt_opcodes[t->op].name, t->unit, t->mb);
        }
    return 0;
}

/* Follows the critical path back from the last task: each task's `cause` is the one it waited for. */
static void walk_critical_path(const struct mt_sim_graph *g, int32_t last, double turn,
                               struct mt_sim_result *r)
{
    double by_phase[MT_SIM_N_PHASES][MT_N_QUEUES] = {{0}};
    const int n_lanes = MT_MAX(g->n_lanes, 1);
    for (int32_t i = last; i >= 0; i = g->tasks[i].cause) {
        const struct mt_sim_task *t = &g->tasks[i];
        double fwd = fmax(0, fmin(t->end, turn) - t->start);
        enum mt_queue kind = mt_sim_queue_kind(t->queue, n_lanes);
        by_phase[MT_SIM_FORWARD][kind] += fwd;
        by_phase[MT_SIM_BACKWARD][kind] += t->end - t->start - fwd;
        r->critical[kind] += t->end - t->start;
    }
    for (int ph = 0; ph < MT_SIM_N_PHASES; ph++)
        for (int k = 0; k < MT_N_QUEUES; k++)
            if (by_phase[ph][k] > by_phase[ph][r->bound[ph]])
                r->bound[ph] = (enum mt_queue)k;
}

/* Attributes [from, to), in which the first lane's compute was idle, to the tasks on the critical path to its next task. */
static void blame_gap(const struct mt_sim_graph *g, int32_t i, double from, double to,
                      struct mt_sim_result *r)
{
    while (i >= 0 && to > from) {
        const struct mt_sim_task *t = &g->tasks[i];
        double begin = fmax(t->start, from);
        if (t->queue != MT_Q_COMPUTE && begin < to) {
            r->idle[mt_sim_queue_kind(t->queue, MT_MAX(g->n_lanes, 1))] += to - begin;
            to = begin;
        }
        i = t->cause;
    }
}

static void blame_idle(const struct state *s, struct mt_sim_result *r)
{
    double at = 0;
    for (size_t k = s->first[MT_Q_COMPUTE]; k < s->first[MT_Q_COMPUTE + 1]; k++) {
        const struct mt_sim_task *t = &s->g->tasks[s->order[k]];
        if (t->start > at)
            blame_gap(s->g, t->cause, at, t->start, r);
        at = t->end;
    }
    if (s->now > at)
        blame_gap(s->g, s->last_ended, at, s->now, r);
}

int mt_sim_run(struct mt_sim_result *out, struct mt_sim_graph *g, const struct mt_sim_params *p,
               struct mt_err *err)
{
    struct state s = {.p = p, .g = g, .last_ended = -1};
    struct mt_sim_result r = {0};
    s.n_lanes = MT_MAX(g->n_lanes, 1);
    s.n_queues = mt_n_queues(s.n_lanes) + 1;
    for (int q = 0; q < s.n_queues; q++) {
        s.kind[q] = mt_sim_queue_kind(q, s.n_lanes);
        s.active[q] = s.newest[q] = -1;
        s.ended[q] = -1;
    }
    int rc = MT_NEW(&s.order, g->n, "a simulation", err);
    if (!rc) {
        sort_by_queue(&s);
        rc = run_tasks(&s, &r, err);
    }
    if (!rc) {
        double turn = g->n ? g->tasks[g->turn].end : 0;
        r.makespan = s.now;
        r.seconds = s.now + rate(&s, MT_RATE_STEP_US) * 1e-6 +
                    p->tokens * rate(&s, MT_RATE_TOKEN_NS) * 1e-9;
        r.phase[MT_SIM_FORWARD] = turn;
        r.phase[MT_SIM_BACKWARD] = s.now - turn;
        for (int q = 0; q < s.n_queues; q++)
            if (s.kind[q] == MT_Q_NET)
                r.busy[MT_Q_NET] = fmax(r.busy[MT_Q_NET], s.busy[q]);
            else
                r.busy[s.kind[q]] += s.busy[q];
        walk_critical_path(g, s.last_ended, turn, &r);
        blame_idle(&s, &r);
        *out = r;
    }
    free(s.order);
    return rc;
}
