/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "checkpoint/lineage.h"
#include "checkpoint/manifest.h"

/** -EBADMSG (MT_ERR_CHECKPOINT), with what is wrong with a file or folder. */
int mt_checkpoint_damaged(struct mt_err *err, const char *path, const char *what);
/** Is the content wrong, rather than unreadable at the moment? rc: of looking at a checkpoint, not 0. */
bool mt_checkpoint_is_damage(int rc);

/** The identity of a checkpoint, from its sealed file. */
struct mt_checkpoint_id {
    uint64_t step;
    bool full;             /* can be resumed */
    char sum[MT_SUM_TEXT]; /* of the sealed file */
    struct mt_lineage lineage;
};
void mt_checkpoint_id_finish(struct mt_checkpoint_id *id);

/**
 * Reads and verifies DIR/megatrain/state.json, or manifest.json if there is no training state.
 * MT_ERR_CHECKPOINT: -EBADMSG if it is damaged, -ENOENT if there is none, else the error of reading it.
 */
struct mt_sealed {
    cJSON *json;
    char sum[MT_SUM_TEXT];
    bool full; /* state.json */
};
int mt_seal_read(const char *dir, struct mt_sealed *out, struct mt_err *err);
/** mt_layout.share of the run that wrote it. */
int mt_sealed_share(const struct mt_sealed *s);
/** Before the declaration of one, with its first value: it is deleted where its scope ends. */
#define MT_SEALED_FREED MT_CLOSED_BY(mt_sealed_finish)
void mt_sealed_finish(struct mt_sealed *s);
/** The same, reading only its identity. */
int mt_checkpoint_identify(const char *dir, struct mt_checkpoint_id *out, struct mt_err *err);
