/* SPDX-License-Identifier: Apache-2.0 */
#include "schedule/tables.h"

const struct mt_queue_desc mt_queues[MT_N_QUEUES] = {
    [MT_Q_COMPUTE] = {.name = "compute", .title = "compute", .device = true, .stream = MT_STREAM_COMPUTE,
                      .ends_in_order = true},
    [MT_Q_H2D] = {.name = "h2d", .title = "H2D link", .thread = "mt-h2d-issue", .device = true,
                  .stream = MT_STREAM_H2D, .ends_in_order = true},
    [MT_Q_D2H] = {.name = "d2h", .title = "D2H link", .thread = "mt-d2h-issue", .device = true,
                  .stream = MT_STREAM_D2H, .ends_in_order = true},
    [MT_Q_HOST] = {.name = "host", .title = "host optimizer", .thread = "mt-optimizer", .ends_in_order = true},
    [MT_Q_DISK_READ] = {.name = "disk read", .title = "disk reads", .thread = "mt-disk-read", .disk = true},
    [MT_Q_DISK_WRITE] = {.name = "disk write", .title = "disk writes", .thread = "mt-disk-write", .disk = true},
    [MT_Q_NET] = {.name = "net", .title = "network", .thread = "mt-net-issue"},
};

enum mt_queue mt_queue_kind(int number)
{
    enum mt_queue kind = MT_Q_COMPUTE;
    if (number < MT_N_QUEUES)
        return (enum mt_queue)number;
    while (!mt_queues[kind].device || (int)mt_queues[kind].stream != (number - MT_N_QUEUES) % MT_N_STREAMS)
        kind++;
    return kind;
}

#define DEVICE_POOL(text, min, host_pool, poison)                                                                      \
    {.name = text, .device = true, .least = min, .spilled = host_pool, .poisonable = poison}
#define HOST_POOL(text, min) {.name = text, .least = min, .spilled = MT_NO_POOL}
#define RECORD_POOL(size)                                                                                              \
    [MT_POOL_RECORD + size] = DEVICE_POOL("activations", 1, MT_POOL_SPILLED_RECORD + size, true)

const struct mt_pool_desc mt_pools[MT_N_POOLS] = {
    [MT_POOL_WEIGHTS] = DEVICE_POOL("weight slots", 2, MT_NO_POOL, true),
    [MT_POOL_WEIGHTS_VOCAB] = DEVICE_POOL("vocabulary weights", 1, MT_NO_POOL, true),
    [MT_POOL_WEIGHTS_NORM] = DEVICE_POOL("norm weights", 1, MT_NO_POOL, true),
    [MT_POOL_ADAPTERS] = DEVICE_POOL("resident weights", 0, MT_NO_POOL, true),
    [MT_POOL_BOUNDARY] = DEVICE_POOL("boundaries", 2, MT_POOL_SPILLED, true),
    RECORD_POOL(0),
    RECORD_POOL(1),
    RECORD_POOL(2),
    RECORD_POOL(3),
    RECORD_POOL(4),
    RECORD_POOL(5),
    [MT_POOL_ROWS] = DEVICE_POOL("rows of a step", 1, MT_POOL_SPILLED_ROWS, true),
    [MT_POOL_SUM] = DEVICE_POOL("sums of a step", 1, MT_POOL_SPILLED_SUM, true),
    [MT_POOL_ROUTING] = DEVICE_POOL("routing", 1, MT_POOL_SPILLED_ROUTING, true),
    [MT_POOL_GRAD] = DEVICE_POOL("gradients", 1, MT_NO_POOL, true),
    [MT_POOL_GRAD_VOCAB] = DEVICE_POOL("vocabulary gradients", 1, MT_NO_POOL, true),
    [MT_POOL_GRAD_NORM] = DEVICE_POOL("norm gradients", 1, MT_NO_POOL, true),
    [MT_POOL_CAST] = DEVICE_POOL("gradient casts", 1, MT_NO_POOL, false),
    [MT_POOL_CAST_VOCAB] = DEVICE_POOL("vocabulary gradient casts", 1, MT_NO_POOL, false),
    [MT_POOL_CAST_NORM] = DEVICE_POOL("norm gradient casts", 1, MT_NO_POOL, false),
    [MT_POOL_CACHE] = DEVICE_POOL("keys and values", 2, MT_NO_POOL, false),
    [MT_POOL_CACHE_WINDOW] = DEVICE_POOL("keys and values of windows", 2, MT_NO_POOL, false),
    [MT_POOL_CACHE_STATES] = DEVICE_POOL("states of recurrences", 2, MT_NO_POOL, false),
    [MT_POOL_MOMENTS] = DEVICE_POOL("optimizer states", 1, MT_NO_POOL, true),
    [MT_POOL_STATE] = HOST_POOL("state staging", 2),
    [MT_POOL_STAGED] = HOST_POOL("weight staging", 2),
    [MT_POOL_STAGED_VOCAB] = HOST_POOL("vocabulary weight staging", 1),
    [MT_POOL_STAGED_NORM] = HOST_POOL("norm weight staging", 1),
    [MT_POOL_GRAD_OUT] = HOST_POOL("gradient staging", 1),
    [MT_POOL_GRAD_OUT_VOCAB] = HOST_POOL("vocabulary gradient staging", 1),
    [MT_POOL_GRAD_OUT_NORM] = HOST_POOL("norm gradient staging", 1),
    [MT_POOL_SPILLED] = HOST_POOL("boundary staging", 2),
    [MT_POOL_SPILLED_RECORD ... MT_POOL_SPILLED_RECORD_LAST] = HOST_POOL("activation staging", 2),
    [MT_POOL_SPILLED_ROWS] = HOST_POOL("staging of rows", 2),
    [MT_POOL_SPILLED_SUM] = HOST_POOL("staging of sums", 2),
    [MT_POOL_SPILLED_ROUTING] = HOST_POOL("staging of routing", 2),
    [MT_POOL_KEYS] = DEVICE_POOL("keys and values of rows", 1, MT_POOL_SPILLED_KEYS, true),
    [MT_POOL_DKEYS] = DEVICE_POOL("gradients of keys and values", 1, MT_POOL_SPILLED_DKEYS, true),
    [MT_POOL_SPILLED_KEYS] = HOST_POOL("staging of keys and values", 2),
    [MT_POOL_SPILLED_DKEYS] = HOST_POOL("staging of their gradients", 2),
};

/* Pools of a kind whose objects are as large as a unit's parameters, and of a kind with one pool. */
#define BY_CLASS(pool)                                                                                                 \
    {[MT_CLASS_LAYER] = pool,                                                                                          \
     [MT_CLASS_VOCAB] = pool##_VOCAB,                                                                                  \
     [MT_CLASS_NORM] = pool##_NORM}
#define ONE_POOL(pool) {[0 ... MT_N_CLASSES - 1] = pool}

const struct mt_kind_desc mt_kinds[MT_N_OBJECT_KINDS] = {
    [MT_OBJ_WEIGHTS] = {.name = "w", .device = true, .home = MT_HOME_PLANE, .begins_home = true, .disk_use = MT_DISK_WEIGHTS,
                        .pool = BY_CLASS(MT_POOL_WEIGHTS)},
    [MT_OBJ_ADAPTERS] = {.name = "ad", .device = true, .home = MT_HOME_PLANE, .begins_home = true, .disk_use = MT_DISK_WEIGHTS,
                         .pool = ONE_POOL(MT_POOL_ADAPTERS)},
    [MT_OBJ_PERTURBED] = {.name = "pw", .device = true, .home = MT_HOME_NONE, .disk_use = MT_DISK_WEIGHTS,
                          .pool = BY_CLASS(MT_POOL_WEIGHTS)},
    [MT_OBJ_PERTURBED_ADAPTERS] = {.name = "pad", .device = true, .home = MT_HOME_NONE, .disk_use = MT_DISK_WEIGHTS,
                                   .pool = ONE_POOL(MT_POOL_ADAPTERS)},
    [MT_OBJ_BOUNDARY] = {.name = "x", .device = true, .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                         .pool = ONE_POOL(MT_POOL_BOUNDARY)},
    [MT_OBJ_DX] = {.name = "dx", .device = true, .home = MT_HOME_SPILL, .training = true, .disk_use = MT_DISK_ACTIVATIONS,
                   .pool = ONE_POOL(MT_POOL_BOUNDARY)},
    [MT_OBJ_RECORD] = {.name = "rec", .device = true, .home = MT_HOME_SPILL, .training = true, .disk_use = MT_DISK_ACTIVATIONS,
                       .pool = ONE_POOL(MT_POOL_RECORD)},
    [MT_OBJ_ROWS] = {.name = "a", .device = true, .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                     .pool = ONE_POOL(MT_POOL_ROWS)},
    [MT_OBJ_SUM] = {.name = "sum", .device = true, .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                    .pool = ONE_POOL(MT_POOL_SUM)},
    [MT_OBJ_ROUTING] = {.name = "rt", .device = true, .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                        .pool = ONE_POOL(MT_POOL_ROUTING)},
    [MT_OBJ_GRAD] = {.name = "g", .device = true, .home = MT_HOME_SPILL, .training = true, .trained = true, .disk_use = MT_DISK_GRADIENTS,
                     .pool = BY_CLASS(MT_POOL_GRAD)},
    [MT_OBJ_CAST] = {.name = "c", .device = true, .home = MT_HOME_NONE, .training = true, .trained = true, .disk_use = MT_DISK_GRADIENTS,
                     .pool = BY_CLASS(MT_POOL_CAST)},
    [MT_OBJ_MOMENTS] = {.name = "m", .device = true, .home = MT_HOME_PLANE, .training = true, .trained = true, .begins_home = true,
                        .returns = true, .disk_use = MT_DISK_STATES, .pool = ONE_POOL(MT_POOL_MOMENTS)},
    [MT_OBJ_CACHE] = {.name = "kv", .device = true, .home = MT_HOME_SPILL, .begins_home = true, .returns = true,
                      .disk_use = MT_DISK_ACTIVATIONS, .pool = ONE_POOL(MT_POOL_CACHE)},
    [MT_OBJ_KEYS] = {.name = "k", .device = true, .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                     .pool = ONE_POOL(MT_POOL_KEYS)},
    [MT_OBJ_DKEYS] = {.name = "dk", .device = true, .home = MT_HOME_SPILL, .training = true, .disk_use = MT_DISK_ACTIVATIONS,
                      .pool = ONE_POOL(MT_POOL_DKEYS)},
    [MT_OBJ_STATE] = {.name = "s", .home = MT_HOME_PLANE, .begins_home = true, .disk_use = MT_DISK_STATES,
                      .pool = ONE_POOL(MT_POOL_STATE)},
    [MT_OBJ_STAGED] = {.name = "hw", .home = MT_HOME_PLANE, .begins_home = true, .disk_use = MT_DISK_WEIGHTS,
                       .pool = BY_CLASS(MT_POOL_STAGED)},
    [MT_OBJ_GRAD_OUT] = {.name = "hg", .home = MT_HOME_PLANE, .disk_use = MT_DISK_GRADIENTS,
                         .pool = BY_CLASS(MT_POOL_GRAD_OUT)},
    [MT_OBJ_GRAD_RING] = {.name = "gr", .home = MT_HOME_NONE, .disk_use = MT_DISK_GRADIENTS,
                          .pool = BY_CLASS(MT_POOL_GRAD_OUT)},
    /* its pool is `spilled` of the copied object's pool */
    [MT_OBJ_SPILLED] = {.name = "hx", .home = MT_HOME_SPILL, .disk_use = MT_DISK_ACTIVATIONS,
                        .pool = ONE_POOL(MT_NO_POOL)},
};

const struct mt_opcode_desc mt_opcodes[MT_N_OPCODES] = {
    [MT_OP_UPDATE] = {"update", MT_Q_HOST},
    [MT_OP_SCATTER] = {"scatter", MT_Q_HOST},
    [MT_OP_GATHER] = {"gather", MT_Q_HOST},
    [MT_OP_LOAD] = {"load", MT_Q_H2D, .moves = true},
    [MT_OP_STORE] = {"store", MT_Q_D2H, .moves = true},
    [MT_OP_JOIN] = {"join", MT_Q_COMPUTE},
    [MT_OP_ZERO] = {"zero", MT_Q_COMPUTE},
    [MT_OP_POISON] = {"poison", MT_Q_COMPUTE},
    [MT_OP_PERTURB] = {"perturb", MT_Q_COMPUTE},
    [MT_OP_EMBED] = {"embed", MT_Q_COMPUTE},
    [MT_OP_FORWARD] = {"forward", MT_Q_COMPUTE},
    [MT_OP_LOSSES] = {"losses", MT_Q_COMPUTE},
    [MT_OP_HEAD] = {"head", MT_Q_COMPUTE, .ends_forward = true},
    [MT_OP_BALANCE] = {"balance", MT_Q_COMPUTE},
    [MT_OP_BACKWARD] = {"backward", MT_Q_COMPUTE},
    [MT_OP_EMBED_BWD] = {"embed_bwd", MT_Q_COMPUTE},
    [MT_OP_ADD_GROUP] = {"add_group", MT_Q_COMPUTE},
    [MT_OP_GRAD_CAST] = {"grad_cast", MT_Q_COMPUTE},
    [MT_OP_STORE_GRAD] = {"store_grad", MT_Q_D2H, .moves = true},
    [MT_OP_STATS] = {"stats", MT_Q_D2H},
    [MT_OP_READ] = {"read", MT_Q_DISK_READ, .moves = true},
    [MT_OP_WRITE] = {"write", MT_Q_DISK_WRITE, .moves = true},
    [MT_OP_PASS] = {"pass", MT_Q_NET, .moves = true},
    [MT_OP_SHARE] = {"share", MT_Q_NET, .moves = true},
    [MT_OP_RENEW] = {"renew", MT_Q_NET},
    [MT_OP_COUNTS] = {"counts", MT_Q_NET},
};

static const char *const use_names[MT_N_DISK_USES] = {
    [MT_DISK_STATES] = "states",
    [MT_DISK_WEIGHTS] = "weights",
    [MT_DISK_GRADIENTS] = "gradients",
    [MT_DISK_ACTIVATIONS] = "activations",
};

const char *mt_disk_use_name(enum mt_disk_use use)
{
    return use_names[use];
}
