/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_SIM_H
#define MT_PLAN_SIM_H

#include "plan/cost.h"

/**
 * The simulator: a step's instructions become tasks on queues, and the queues share the machine's
 * resources as measured: compute, the link's two directions, host threads, disk reads and writes. Time
 * passes from event to event; what is active slows each other down (a copy against the other direction, on
 * the cpu device compute against copies and updates for the cores).
 */
enum mt_sim_resource {
    MT_SIM_COMPUTE,
    MT_SIM_H2D,
    MT_SIM_D2H,
    MT_SIM_HOST,
    MT_SIM_DISK_READ,
    MT_SIM_DISK_WRITE,
    MT_SIM_N_RESOURCES,
};
const char *mt_sim_resource_name(enum mt_sim_resource r);

/** In-order queues; those after the program's own serve units that are on disk. */
enum mt_sim_queue {
    MT_SIM_Q_COMPUTE,
    MT_SIM_Q_H2D,
    MT_SIM_Q_D2H,
    MT_SIM_Q_HOST,
    MT_SIM_Q_STATE_READ,
    MT_SIM_Q_STATE_WRITE,
    MT_SIM_Q_WEIGHT_READ,
    MT_SIM_Q_GRAD_WRITE,
    MT_SIM_Q_SPILL_READ,
    MT_SIM_Q_SPILL_WRITE,
    MT_SIM_N_QUEUES,
};

enum mt_sim_phase { MT_SIM_FORWARD, MT_SIM_BACKWARD, MT_SIM_N_PHASES };

struct mt_sim_task {
    uint8_t queue, op; /* op: enum mt_opcode */
    int16_t mb;
    int32_t unit;
    int32_t wait[MT_SIM_N_QUEUES]; /* newest task of that queue that must have ended, or -1 */
    double seconds;                /* alone */
    double bytes, flops;
    double start, end; /* filled by the simulation */
    int32_t cause;     /* whose end let it start, or -1 */
};

struct mt_sim_graph {
    struct mt_sim_task *tasks;
    size_t n, cap;
    size_t turn; /* the last task of the forward pass */
};
void mt_sim_graph_finish(struct mt_sim_graph *g);

/** Where a unit's planes live. */
enum mt_unit_tier {
    MT_UNIT_ON_HOST,
    MT_UNIT_STATES_ON_DISK, /* lo and moments; weights (hi) and gradients in host memory */
    MT_UNIT_ON_DISK,        /* all; weights are read for every load, gradients written */
};
/* Units, and boundaries or records, on their way between disk and host at once. */
enum { MT_SIM_UNIT_RING = 3, MT_SIM_SPILL_RING = 8 };

struct mt_sim_params {
    const struct mt_machine *machine;
    const struct mt_layout *layout;
    enum mt_dtype dtype, grad_dtype;
    int adam_threads;
    double link_gbps;              /* cpu device: throttle of each direction, 0 = none */
    const enum mt_unit_tier *tier; /* [n_units], NULL: all on the host */
    bool spill_on_disk;            /* boundaries and records that leave the device */
    double tokens;                 /* of a step, for the host's part */
};

/** Tasks of a placed program. */
int mt_sim_graph_build(struct mt_sim_graph *out, const struct mt_program *prog, mt_cost_table *costs,
                       const struct mt_sim_params *p, struct mt_err *err);

struct mt_sim_result {
    double seconds;  /* of a step, the host's fixed part included */
    double makespan; /* of its tasks */
    double phase[MT_SIM_N_PHASES];
    enum mt_sim_resource bound[MT_SIM_N_PHASES];  /* most of the phase's critical path */
    double critical[MT_SIM_N_RESOURCES];          /* seconds on the critical path */
    double busy[MT_SIM_N_RESOURCES];
    double bytes[MT_SIM_N_RESOURCES];
    double idle[MT_SIM_N_RESOURCES]; /* compute's idle seconds by what it waited for; [COMPUTE]: the end */
    double flops;
};
/** Runs the graph; start and end of every task are filled in. -EDEADLK names a task that never starts. */
int mt_sim_run(struct mt_sim_result *out, struct mt_sim_graph *g, const struct mt_sim_params *p,
               struct mt_err *err);

/** Bytes that a unit of n elements moves from and to disk in a step; *read, *write. */
void mt_sim_disk_bytes(enum mt_unit_tier tier, double n_elems, enum mt_dtype dtype,
                       enum mt_dtype grad_dtype, double *read, double *write);

#endif
