/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "net/net.h"
#include "train/control.h"

/**
 * The hosts of a run, as a launcher has started them, one process each. The first leads: it reads the configuration,
 * decides, evaluates what is to be done next, writes checkpoints, metrics and logs. The others follow: they take the
 * configuration and the weights from the first, and make the steps and evaluations that it names, on their own copy
 * of the data. A follower keeps no files, and needs only the model's config.json and the data. Where each unit's states
 * are on one host alone, the first reads and writes them there, window by window, when it loads and saves.
 *
 * Between what all do together a thread of the first tells the others that it is there: a long save is no lost host.
 */
typedef struct mt_cluster mt_cluster;

/** *out is NULL if no launcher has started several processes. */
int mt_cluster_open(mt_cluster **out, struct mt_err *err);
/** Accepts NULL. code: this process's exit code. The first ends what is left of the others, which end with the
 * same; if the hosts have not come to the end of a step together, this does not return. */
void mt_cluster_close(mt_cluster **c, int code);

mt_net *mt_cluster_net(mt_cluster *c);
bool mt_cluster_leads(const mt_cluster *c);

/** What several hosts plan with alike, though each has other memory and drives: the first sets those of each in *limits
 * before it plans, and asks them what is free in memory.nvme_paths; the others take budgets, room and what the process
 * needs from the first into *r. c NULL: no effect. */
int mt_cluster_set_limits(mt_cluster *c, struct mt_plan_limits *limits, const struct mt_config *cfg,
                          struct mt_err *err);
void mt_cluster_take_limits(const mt_cluster *c, struct mt_plan_request *r);

/* --- the first ------------------------------------------------------------------------------------------------- */

/**
 * Sends the configuration, in which nothing is open any more and no folder or file is named that this host alone need
 * have (adapter.path, a checkpoint, preference.reference), and what has to be the same on all: the data, the model's
 * config.json, the version of the program, the GPU, how a CPU computes. A host that cannot take part says why: that is
 * the error.
 */
int mt_cluster_send_config(mt_cluster *c, const struct mt_setup *s, struct mt_err *err);
/** Moves a part of a plane to or from the host that has it (struct mt_plane_move); setup: the struct mt_setup. */
int mt_cluster_move(void *setup, const struct mt_plane_part *part, struct mt_err *err);
/** Sends the weights and states that all hosts have, and how many updates they have had. */
int mt_cluster_send_state(mt_cluster *c, const struct mt_session *s, const struct mt_train_state *st,
                          struct mt_err *err);
/** Sends what the training state has of its reference, if it has any (reference.h). c NULL: no effect. */
int mt_cluster_send_reference(mt_cluster *c, const struct mt_train_state *st, struct mt_err *err);
/**
 * Compares the trained weights of all hosts, unit by unit; call it when no update is pending. -EBADMSG
 * (MT_ERR_RUNTIME): a host has others, which is named with the unit. 0, with a warning, if the hosts cannot be reached:
 * the next step fails with that. frozen: the others check what is frozen first, as this one has done. c NULL: no
 * effect.
 */
int mt_cluster_compare_weights(mt_cluster *c, const struct mt_session *s, bool frozen, struct mt_err *err);
/**
 * Before an engine's step with the data of step `at`, a flush, an evaluation of that step of data.eval or of a set of eval.sets,
 * or one of the training's data: the others do the same. Call mt_cluster_end() after it. c NULL: no effect.
 */
enum mt_cluster_act {
    MT_CLUSTER_STEP,
    MT_CLUSTER_FLUSH,
    MT_CLUSTER_EVAL,
    MT_CLUSTER_EVAL_SET,
    MT_CLUSTER_EVAL_TRAINING
};
struct mt_cluster_do {
    enum mt_cluster_act act;
    uint64_t at;
    double lr;  /* STEP */
    size_t set; /* EVAL_SET: its index in struct mt_inputs */
};
int mt_cluster_begin(mt_cluster *c, const struct mt_cluster_do *what, struct mt_err *err);
/** rc: what the engine has returned; the others hear its error, *err. */
void mt_cluster_end(mt_cluster *c, int rc, const struct mt_err *err);

/* --- the others ------------------------------------------------------------------------------------------------ */

/** Takes the configuration; *cfg is the caller's. 1: the first has ended before that, without an error of the hosts. */
int mt_cluster_take_config(mt_cluster *c, struct mt_config **cfg, struct mt_err *err);
/** What the first goes on from. Borrows from c. */
struct mt_resumed mt_cluster_resumed(const mt_cluster *c);
/** Answers it: rc and *why of opening what it says; s: as far as that came. 1: then the first has ended, for this host
 * cannot take part. */
int mt_cluster_answer(mt_cluster *c, const struct mt_setup *s, const struct mt_inputs *in, int rc,
                      const struct mt_err *why, struct mt_err *err);
/** Takes weights, states and findings, and makes what the first does, until that ends. setup: the session's. MT_AGAIN:
 * until another phase begins (train/blocks.h), whose configuration is to be taken. */
int mt_cluster_follow(mt_cluster *c, struct mt_session *s, struct mt_setup *setup, struct mt_train_control *control,
                      struct mt_err *err);
/** This host cannot go on: the others hear why. */
void mt_cluster_fail(mt_cluster *c, const struct mt_err *why);
/** With which exit code the first has ended. */
int mt_cluster_code(const mt_cluster *c);
