/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "machine/network.h"
#include "plan/cost.h"

/**
 * The simulator: a step's instructions become tasks on the executor's queues, and the queues share the
 * machine's resources as measured: compute, the link's two directions, host threads, disk reads and writes.
 * Time advances from event to event; active tasks slow each other down (copies in both directions of the link; on the
 * cpu device compute, copies and updates, which share the cores). The disk queues have many requests under way at once,
 * which share the drives: in total this takes as long as one after the other at full rate, and a request's latency
 * shows only if no other was under way. Messages between hosts have a direction each, out and in, at full rate both;
 * one goes after the other in each. Other hosts are as far in the step as the one that is simulated. A resource is
 * named by the kind of queue that uses it; its title in plans is the queue's (mt_queues).
 */

/** Between hosts, where nothing else is known: 10 Gb/s. */
#define MT_NET_GBS 1.15

/** Messages that come in have a queue of their own here, behind the program's. */
enum { MT_SIM_MAX_QUEUES = MT_MAX_QUEUES + 1 };
static inline int mt_sim_net_in(int n_lanes)
{
    return mt_n_queues(n_lanes);
}
static inline enum mt_queue mt_sim_queue_kind(int number, int n_lanes)
{
    return number == mt_sim_net_in(n_lanes) ? MT_Q_NET : mt_queue_kind(number);
}

enum mt_sim_phase { MT_SIM_FORWARD, MT_SIM_BACKWARD, MT_SIM_N_PHASES };

struct mt_sim_task {
    uint8_t queue, op; /* queue: its number, or mt_sim_net_in(); op: enum mt_opcode */
    int32_t unit, mb, piece;
    int32_t wait[MT_SIM_MAX_QUEUES]; /* newest task of that queue that must have ended, or -1 */
    double seconds;                /* that it takes alone */
    double bytes, flops;
    double start, end; /* filled by the simulation */
    int32_t cause;     /* the task whose end started it, or -1 */
};

struct mt_sim_graph {
    struct mt_sim_task *tasks; /* by instruction */
    size_t n;
    int n_lanes; /* 0: one */
    size_t turn; /* the last task of the forward pass */
};
void mt_sim_graph_finish(struct mt_sim_graph *g);

struct mt_sim_params {
    const struct mt_machine *machine;
    const struct mt_numerics *numerics; /* borrowed: optimizer and gradient dtype */
    int update_threads, drives;
    double link_gbps; /* cpu device: throttle of each direction, 0 = none */
    struct mt_network net; /* between hosts; gbs 0: MT_NET_GBS */
    const struct mt_cache_shape *cache; /* of generation: texts add a token each; NULL or without slots: none */
    double idle, idle_groups; /* of experts, and of units of them: the share to which the step's tokens send no rows */
    double tokens;    /* of a step, for the host's fixed part */
};

/** Tasks of a program as the engine runs it. */
int mt_sim_graph_build(struct mt_sim_graph *out, const struct mt_program *prog, mt_cost_table *costs,
                       const struct mt_sim_params *p, struct mt_err *err);

struct mt_sim_result {
    double seconds;  /* of a step, the host's fixed part included */
    double makespan; /* of its tasks */
    double phase[MT_SIM_N_PHASES];
    enum mt_queue bound[MT_SIM_N_PHASES]; /* has most of the phase's critical path */
    double critical[MT_N_QUEUES];         /* seconds on the critical path; by resource, as what follows */
    double busy[MT_N_QUEUES];             /* of all lanes; of the network its busier direction */
    double bytes[MT_N_QUEUES];
    double idle[MT_N_QUEUES]; /* the first lane's compute's idle seconds by what it waited for; the end of the step, too */
    double flops;
};
/** Runs the graph; start and end of every task are filled in. -EDEADLK names a task that never starts. */
int mt_sim_run(struct mt_sim_result *out, struct mt_sim_graph *g, const struct mt_sim_params *p,
               struct mt_err *err);
