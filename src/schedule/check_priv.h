/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/program.h"

/* State of the checker of one host's program. check.c explains it; check_hosts.c runs those of all hosts together. */

enum { MT_CHECK_NONE = -1 };

struct mt_check_place {
    int object, version; /* content; MT_CHECK_NONE: poison or nothing */
    size_t loaded;       /* elements, of weights that are loaded in parts, of which some are missing; else 0 */
    int writer;
    int reader[MT_MAX_QUEUES]; /* newest of each queue since the write */
};

struct mt_checker {
    const struct mt_program *p;
    int n_queues;
    int32_t *clock; /* [n_instrs, n_queues] */
    int32_t last_of[MT_MAX_QUEUES];
    struct mt_check_place *buffers[MT_MAX_LANES][MT_N_POOLS];
    struct mt_check_place *homes; /* by object */
    int *latest;         /* by object: newest version */
    int *updated;           /* by unit: its pending update, or none */
    int *own;            /* by unit: its update with the gradient of this step, or none */
    int *parts;          /* by object: contributions so far */
    int *level;          /* by object: height in the tree of the sum of groups that it has */
    int *went;           /* by object: the instruction that took that sum on, into another or to its cast; or none */
    int *taken;          /* by unit: the instruction that cast its gradient, or none */
    int *stored;         /* by unit: its STORE_GRAD, or none */
    int *returns;        /* by unit: the object that was written and is to be stored to its home, or none */
    int *pieces;         /* by unit: pieces updated */
    int *loaded;         /* [n_units, n_lanes] the newest load of its weights, or none */
    int *fetched;        /* by unit: the newest disk read of them, or none */
    int *scattered;       /* by unit: its UNPACK, or none */
    int *routed;         /* by object: the instruction that made the lists of experts' rows in it, or none */
    int *counted;        /* by group: the newest lists of its rows' experts, or the message with their counts; or none */
    int *told;           /* by group: the message that sent these counts, or none */
    int balanced[MT_MAX_LANES]; /* the lane's BALANCE, or none */
    struct mt_err *err;
};

/* The caller sets p and err, and finishes it, on failure too. */
int mt_check_begin(struct mt_checker *c);
/* Instruction i, after all before it; of a message only that it is well made, and what it waits for. */
int mt_check_instr(struct mt_checker *c, size_t i);
int mt_check_end(struct mt_checker *c);
void mt_check_finish(struct mt_checker *c);

/* A fault of instruction i against another one, or MT_CHECK_NONE. Returns -EPROTO. */
int mt_check_fault(struct mt_checker *c, size_t i, int other, const char *what);
/* Whether `before` has ended when i starts. */
bool mt_check_ordered(const struct mt_checker *c, int before, size_t i);
int mt_check_read_place(struct mt_checker *c, size_t i, struct mt_check_place *at, const char *what);
int mt_check_write_place(struct mt_checker *c, size_t i, struct mt_check_place *at, int object, int version,
                         const char *what);

/** A message with the counts of a group, on the side that sends or receives it. */
int mt_check_counts(struct mt_checker *c, size_t i);
