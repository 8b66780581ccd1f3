/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "base/lock.h"
#include "train/cluster.h"

/* What cluster.c, which speaks with the other hosts, and follow.c, which makes what is said, have in common. */

enum {
    MT_CLUSTER_BEAT = 16,
    MT_CLUSTER_CONFIG,
    MT_CLUSTER_DRIVES, /* a text of folders follows: what is free there? */
    MT_CLUSTER_STATE,
    MT_CLUSTER_REFERENCE,
    MT_CLUSTER_WEIGHTS,
    MT_CLUSTER_GET, /* and PUT: a part of a plane that the first does not have */
    MT_CLUSTER_PUT,
    MT_CLUSTER_END
};

/* What the first tells the others to do, besides enum mt_cluster_act. */
struct mt_cluster_command {
    int64_t op;
    uint64_t at;       /* step of the data; of a text its bytes; REFERENCE: numbers; GET, PUT: the first byte; of END
                          the exit code */
    double lr;
    uint64_t data[3];  /* CONFIG: hashes of the data, and bytes of what follows; STATE: updates, and
                          those before the states were new; EVAL_SET: which set; GET, PUT: unit, kind of
                          plane, bytes */
};

struct mt_cluster {
    mt_net *net;
    double timeout;
    pthread_mutex_t lock; /* held while something is sent, and while all do something together */
    pthread_cond_t quits;
    pthread_t beats;
    bool beating, quit;   /* quit: under lock */
    bool broken;          /* hosts have not come to the end of a step: they do not speak with each other any more */
    struct mt_cluster_command phase; /* CONFIG: another phase has begun with it; op 0: none */
    bool over;            /* the first has told this one to end */
    int code;             /* with that */
    uint64_t data[2];     /* hashes of the first's data: trained on, and evaluated on */
    uint64_t memory[MT_MAX_LANES]; /* the first: what each of the others may use of its host memory */
    cJSON *facts;         /* the others: what the first has said of itself */
    char *window;         /* for planes that are not in memory; NULL: none yet. A late message may still write to it */
    double *reference;    /* the others: of the first's training state; NULL: none */
    struct mt_err why;    /* of the thread that beats, under lock; code 0: none */
    int rc;
};

/* Hosts that fail where others wait are apart: returns rc. */
int mt_cluster_note(mt_cluster *c, int rc);
/* The first, under the lock: whether the others can be told anything. */
int mt_cluster_ready(mt_cluster *c, struct mt_err *err);
/* The same bytes to all others. */
int mt_cluster_tell_all(mt_cluster *c, const void *data, size_t bytes, struct mt_err *err);
/* The others: the next command that is not a sign of life. */
int mt_cluster_next(mt_cluster *c, struct mt_cluster_command *what, struct mt_err *err);
