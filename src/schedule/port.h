/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "schedule/tables.h"

/**
 * What the units of a model read and write. Each value has a role; a unit lists its ports: the roles that it uses, and
 * how. A value that one part hands to another is a line of MT_ROLES and a port of each of the two. Its objects,
 * buffers, copies and pointers follow from these.
 */

/** How long the objects of a value live. */
enum mt_lifetime {
    MT_LIFE_MICROBATCH, /* an object for each micro-batch */
    MT_LIFE_GROUP,      /* an object for each group of micro-batches (struct mt_groups): with one group, for the step */
    MT_LIFE_ONE_ROW,    /* an object for each row, of which micro-batches are chunks (mt_program_params.chunks) */
    MT_LIFE_STEP,       /* one object for all micro-batches of a step */
    MT_LIFE_RUN,        /* one object, whose home has its content before, that keeps its buffer from step to step */
};

/** How far a role means the same value. */
enum mt_reach {
    MT_REACH_UNIT,  /* each unit has a value of its own, as large as the unit's sizes say (mt_unit_shape) */
    MT_REACH_LAYER, /* the units of a layer use one */
    MT_REACH_MODEL, /* all units use one */
    MT_REACH_NEXT,  /* each unit that uses it makes one, which is X of the units after it */
};

/** ROW(role, kind of its objects, lifetime, reach) for each value of a program. */
#define MT_ROLES(ROW)                                                                                                  \
    ROW(WEIGHTS, WEIGHTS, STEP, UNIT)                                                                                  \
    ROW(TABLE, WEIGHTS, STEP, MODEL)       /* the embedding's weights, which a tied head uses, too */                  \
    ROW(X, BOUNDARY, MICROBATCH, MODEL)    /* boundary before the unit */                                              \
    ROW(Y, BOUNDARY, MICROBATCH, NEXT)     /* boundary after the unit */                                               \
    ROW(ROWS, ROWS, GROUP, LAYER)          /* the experts' input: a row for each token of a group */                   \
    ROW(SUM, SUM, GROUP, LAYER)            /* the sum of the experts' outputs */                                       \
    ROW(ROUTING, ROUTING, GROUP, LAYER)                                                                                \
    ROW(DY, ROWS, GROUP, LAYER)            /* gradient of the sum */                                                   \
    ROW(DN, SUM, GROUP, LAYER)             /* gradient of the rows, which experts add into */                          \
    ROW(DWEIGHTS, ROUTING, GROUP, LAYER)   /* gradient of the routing weights */                                       \
    ROW(DX, DX, MICROBATCH, MODEL)         /* gradient of a boundary, updated in place from the head down */           \
    ROW(GRAD, GRAD, GROUP, UNIT)           /* FP32 gradient of the unit */                                             \
    ROW(TABLE_GRAD, GRAD, GROUP, MODEL)    /* of TABLE */                                                              \
    ROW(CAST, CAST, STEP, UNIT)            /* gradient of the unit as cast */                                          \
    ROW(MOMENTS, MOMENTS, STEP, UNIT)      /* optimizer states by which its gradient becomes a direction */            \
    ROW(ADAPTERS, ADAPTERS, RUN, UNIT)     /* the unit's adapters, if they are not among its weights */                \
    ROW(PERTURBED, PERTURBED, GROUP, UNIT) /* WEIGHTS, or TABLE, with noise */                                         \
    ROW(PERTURBED_ADAPTERS, PERTURBED_ADAPTERS, GROUP, UNIT)                                                           \
    ROW(CACHE, CACHE, STEP, UNIT)          /* keys and values of sequences that generation goes on with */             \
    ROW(RECORD_0, RECORD, MICROBATCH, UNIT)  /* segments of the unit's record, in their order */                       \
    ROW(RECORD_1, RECORD, MICROBATCH, UNIT)                                                                            \
    ROW(RECORD_2, RECORD, MICROBATCH, UNIT)                                                                            \
    ROW(RECORD_3, RECORD, MICROBATCH, UNIT)                                                                            \
    ROW(RESIDUAL, ROWS, GROUP, LAYER)      /* what came to the router, if the layer's end needs it */                  \
    ROW(ROUNDED, ROWS, GROUP, LAYER)       /* the sum, if backward needs it */                                         \
    ROW(KEYS, KEYS, ONE_ROW, UNIT)         /* what a row in chunks keeps: keys and values, or states */                \
    ROW(DKEYS, DKEYS, ONE_ROW, UNIT)       /* their gradients in FP32 */

/** Role of a value in an operation, by which the executor and the model find its buffer. */
enum mt_role {
    MT_ROLE_NONE, /* the instruction has one object (a copy, a zeroing), or it needs no name */
#define MT_ROLE_ENTRY(role, kind, life, reach) MT_ROLE_##role,
    MT_ROLES(MT_ROLE_ENTRY)
#undef MT_ROLE_ENTRY
    MT_N_ROLES,
};

/** The most segments of a unit's record. */
enum { MT_MAX_SEGMENTS = 4 };
static inline enum mt_role mt_record_role(size_t segment)
{
    return (enum mt_role)(MT_ROLE_RECORD_0 + segment);
}

struct mt_role_desc {
    enum mt_object_kind kind;
    enum mt_lifetime life;
    enum mt_reach reach;
};
extern const struct mt_role_desc mt_roles[MT_N_ROLES];

/**
 * How an operation uses an object. FILL and ADD are contributions: the object is complete after the last of them. FILL
 * writes the operation's own part of it (a micro-batch's rows), ADD adds to all of it (a gradient). If the first
 * contribution is an ADD, the object is zeroed before. SUM is an ADD whose operation overwrites the object if it is the
 * first contribution.
 */
enum mt_access {
    MT_NO_ACCESS,
    MT_READ = 1,
    MT_WRITE = 2,
    MT_UPDATE = MT_READ | MT_WRITE,
    MT_PART = 4,
    MT_FILL = MT_WRITE | MT_PART,
    MT_ADD = MT_UPDATE | MT_PART,
    MT_BEGINS = 8,
    MT_SUM = MT_ADD | MT_BEGINS, /* only in calls: an instruction's operand is FILL or ADD */
};

/** A unit's use of a value in its forward and in its backward. */
struct mt_port {
    uint8_t role;              /* enum mt_role */
    uint8_t forward, backward; /* enum mt_access */
    size_t bytes;              /* of an object, unless the unit's sizes say; 0: another port of the role says */
};

enum { MT_MAX_PORTS = 12 };
