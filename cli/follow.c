/* SPDX-License-Identifier: Apache-2.0 */
#include "follow.h"

#include "base/log.h"
#include "cli.h"
#include "train/memory.h"

struct follower {
    struct mt_cluster *cluster;
    struct mt_config *cfg;
    struct mt_inputs in;
    struct mt_setup setup;
    struct mt_session session;
};

/* Opens what the first has decided, and tells it whether that is possible here. */
static int join(struct follower *f, struct mt_err *err)
{
    struct mt_err why = {0};
    struct mt_memory memory;
    int rc = mt_cluster_take_config(f->cluster, &f->cfg, err);
    if (rc)
        return rc;
    struct mt_resumed resumed = mt_cluster_resumed(f->cluster);
    rc = mt_inputs_open(&f->in, f->cfg, MT_RUN_TRAIN, &resumed, &why)
      ?: mt_setup_open_on_hosts(&f->setup, &f->in, f->cluster, &why)
      ?: mt_setup_memory(&f->setup, &memory, &why)
      ?: mt_memory_check(&memory, &why);
    return mt_cluster_answer(f->cluster, &f->setup, &f->in, rc, &why, err);
}

/* 1: there is nothing to follow. */
static int follow(struct follower *f, struct mt_train_control *control, struct mt_err *err)
{
    int rc = join(f, err);
    if (rc)
        return rc;
    rc = mt_session_start(&f->session, &f->setup, err);
    if (rc)
        mt_cluster_fail(f->cluster, err);
    return rc ?: mt_cluster_follow(f->cluster, &f->session, &f->setup, control, err);
}

int cli_follow(struct mt_cluster *cluster, struct mt_train_control *control)
{
    struct follower f = {.cluster = cluster};
    struct mt_err err = {0};
    mt_log_set_level(MT_LOG_ERROR);
    int rc = follow(&f, control, &err);
    int code = rc < 0 ? cli_fail(&err) : mt_cluster_code(cluster);
    mt_session_finish(&f.session);
    mt_setup_finish(&f.setup);
    mt_inputs_finish(&f.in);
    mt_config_destroy(&f.cfg);
    mt_cluster_close(&cluster, code);
    return code;
}
