/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_HELPER_H
#define MT_DATA_HELPER_H

#include "base/err.h"
#include "base/json.h"

/**
 * Runs scripts/prepare_data.py, the data helper, with a job and waits for its end. It is a Python program
 * with the reference libraries for tokenizers, chat templates and columnar files.
 *
 * Found         $MEGATRAIN_DATA_HELPER, share/megatrain/ beside the program's folder, or scripts/ at most four folders
 *               above it; where nobody but root, the user and the program's owner may write
 * Python        $MEGATRAIN_PYTHON, .venv-data beside the scripts, or python3
 * Protocol      the job as one JSON object on its standard input; a JSON object a line on its standard
 *               output, each given to on_event() but the last, which says how it ended. Its standard error
 *               is kept and its end becomes part of the message where it dies.
 * Returns       0; what the helper says is wrong, with its kind; -ENOENT (MT_ERR_RUNTIME) with the command
 *               that makes the environment where that is missing
 * Threads       any; the child dies with the thread that made it
 */
int mt_helper_run(const cJSON *job, void (*on_event)(void *ctx, const cJSON *event), void *ctx,
                  struct mt_err *err);

/** The helper's folder, whose code is part of the hash of a shard; freed with free(). NULL where it is not found. */
char *mt_helper_dir(void);

#endif
