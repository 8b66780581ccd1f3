/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "schedule/program.h"

/* State of the checker of one host's program. check.c explains it; check_hosts.c runs those of all hosts together. */

enum { MT_CHECK_NONE = -1 };

struct mt_check_place {
    int object, version; /* content; MT_CHECK_NONE: poison or nothing */
    size_t loaded;       /* elements, of weights that are loaded in parts, of which some are missing; else 0 */
    int writer;
    int reader[MT_MAX_QUEUES]; /* newest of each queue since the write */
};

/* What is known of an object. */
struct mt_check_object {
    int latest; /* newest version */
    int parts;  /* contributions so far */
    int level;  /* height in the tree of the sum of groups that it has */
    int went;   /* the instruction that took that sum on, into another or to its cast; or none */
    int routed; /* the instruction that made the lists of experts' rows in it, or none */
};

/* Instructions of a unit, or none. */
struct mt_check_unit {
    int updated;   /* its pending update */
    int own;       /* its update with the gradient of this step */
    int taken;     /* what cast its gradient */
    int stored;    /* its STORE_GRAD */
    int fetched;   /* the newest disk read of its weights */
    int scattered; /* its UNPACK */
    int returns;   /* the object that was written and is to be stored to its home */
    int renewed;   /* the message that sends its weights to other hosts; of one that comes `updated` */
    int pieces;    /* how many pieces are updated */
};

/* The newest lists of a group's rows of experts, or the message with their counts; and the message that sent these. */
struct mt_check_group {
    int counted, told;
};

struct mt_checker {
    const struct mt_program *p;
    int n_queues;
    struct mt_arrays arrays; /* what follows; the caller frees them, on failure too */
    int32_t *clock; /* [n_instrs, n_queues] */
    int32_t last_of[MT_MAX_QUEUES];
    struct mt_check_place *buffers[MT_MAX_LANES][MT_N_POOLS];
    struct mt_check_place *homes; /* by object: of those that have one in turn, the first's */
    int *home_of;                 /* by object: whose that is */
    struct mt_check_object *objects; /* [n_objects] */
    struct mt_check_unit *units;     /* [n_units] */
    struct mt_check_group *groups;
    int *loaded;                     /* [n_units, n_lanes] the newest load of a unit's weights, or none */
    int balanced[MT_MAX_LANES]; /* the lane's BALANCE, or none */
    struct mt_err *err;
};

static inline struct mt_check_place *mt_check_home(const struct mt_checker *c, int object)
{
    return &c->homes[c->home_of[object]];
}

/* The caller sets p and err. */
int mt_check_begin(struct mt_checker *c);
/* Instruction i, after all before it; of a message only that it is well made, and what it waits for. */
int mt_check_instr(struct mt_checker *c, size_t i);
int mt_check_end(struct mt_checker *c);

/* A fault of instruction i against another one, or MT_CHECK_NONE. Returns -EPROTO. */
int mt_check_fault(struct mt_checker *c, size_t i, int other, const char *what);
/* A fault of instruction i against another one, unless that is so. */
int mt_check_that(struct mt_checker *c, size_t i, bool so, int other, const char *what);
/* A fault unless `before`, an instruction or none, has ended when i starts. */
int mt_check_after(struct mt_checker *c, size_t i, int before, const char *what);
/* A fault if there is such an instruction. */
int mt_check_none(struct mt_checker *c, size_t i, int other, const char *what);
/* Whether `before` has ended when i starts. */
bool mt_check_ordered(const struct mt_checker *c, int before, size_t i);
int mt_check_read_place(struct mt_checker *c, size_t i, struct mt_check_place *at, const char *what);
int mt_check_write_place(struct mt_checker *c, size_t i, struct mt_check_place *at, int object, int version,
                         const char *what);

/* One operand of instruction i: what it reads is there, and what it writes not in use. */
int mt_check_operand(struct mt_checker *c, size_t i, const struct mt_operand *op);
/* An update, or the weights of one: nothing has loaded the unit before. */
int mt_check_renews(struct mt_checker *c, size_t i);
/** A message with the counts of a group, on the side that sends or receives it. */
int mt_check_counts(struct mt_checker *c, size_t i);
