/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"
#include "store/files/file_weights.h"
#include "store/planes.h"
#include "train/second_look.h"
#include "train/setup.h"

/** What is allocated for a setup: planes, scratch on drives, the engine. */
struct mt_session {
    const struct mt_setup *setup; /* borrowed */
    mt_disk *disk;          /* NULL where nothing is on one */
    mt_file_weights *files; /* NULL where nothing is read in place */
    struct mt_st_model base; /* the model's files, open while it trains: the folder may be renamed. No tensors: it has none */
    mt_plane_set *planes;
    mt_engine *engine;
    mt_guard *guard;        /* of planes in host memory; NULL: memory.verify = off */
    mt_second_look *second_look; /* at the weights that were loaded, while it is under way */
    uint64_t steps;         /* since the session began */
    uint64_t *base_sum; /* [n_tensors] what frozen tensors of the model's files are known by (in_base) */
    uint64_t *own_sum;  /* [n_tensors of a learner's layout] the same of the learner asked for last */
};

/** Allocates planes and engine; the weights follow. The caller finishes *s, also after a failure, before setup. */
int mt_session_start(struct mt_session *s, const struct mt_setup *setup, struct mt_err *err);
/** Fills the planes: from the model's folder, or at random; then for each learner from the checkpoint resume[learner], or
 * adapter.path, if any. resume: NULL for none of all. */
int mt_session_fill_weights(struct mt_session *s, const char *const *resume, struct mt_err *err);
/** Once the weights are there, if they came in another way: begins to look at them. */
int mt_session_start_guard(struct mt_session *s, struct mt_err *err);
/** Sums of all tensors of the base (in_base), into base_sum: reads what no pass has read yet. */
int mt_session_sum_base(struct mt_session *s, struct mt_err *err);
/** These sums by the tensors of a learner's layout; valid until the next call. */
const uint64_t *mt_session_base_sums(struct mt_session *s, size_t learner);
/**
 * After a step: mends frozen weights that have changed in host memory, from the model's files, and starts the next look at
 * them. -EBADMSG: what was found cannot be mended.
 */
int mt_session_guard(struct mt_session *s, struct mt_err *err);
/** The same at once, of all that is frozen: before the last save. A warning, if there is no memory for that. */
int mt_session_check_frozen(struct mt_session *s, struct mt_err *err);
/**
 * Before a save: the model's weights have been read a second time. -EBADMSG: they were not as first. If that is not done yet,
 * it goes on, or, with `last`, is given up, which is warned of.
 */
int mt_session_look_again(struct mt_session *s, bool last, struct mt_err *err);
void mt_session_finish(struct mt_session *s);
