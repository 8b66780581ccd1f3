/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/err.h"
#include "base/json.h"

/**
 * Runs scripts/prepare_data.py, the data helper, on a job and waits until it ends. It is a Python program
 * that uses the reference libraries for tokenizers, chat templates and columnar files.
 *
 * Found         $MEGATRAIN_DATA_HELPER, share/megatrain/ beside the program's folder, or scripts/ at most four folders
 *               above it; where nobody but root, the user and the program's owner may write
 * Python        $MEGATRAIN_PYTHON, .venv-data beside the scripts, what megatrain setup-data made (python/ in
 *               ~/.local/share/megatrain, of earlier versions in ~/.cache/megatrain), or python3
 * Protocol      the job as one JSON object on its standard input; one JSON object per line on its standard
 *               output, each passed to on_event() but the last, which is the result. If the helper dies, the
 *               end of its standard error becomes part of the message.
 * Returns       0; the error that the helper reports, with its kind; -ENOENT (MT_ERR_RUNTIME) if the Python
 *               environment is missing, with the command that makes it
 * Threads       any; the child dies with the thread that made it
 */
int mt_helper_run(const cJSON *job, void (*on_event)(void *ctx, const cJSON *event), void *ctx,
                  struct mt_err *err);

/** The Python that runs it; freed with free(). NULL: the helper is not found. */
char *mt_helper_python(void);
/** The helper's folder, whose code is part of the hash of a shard; freed with free(). NULL: not found. */
char *mt_helper_dir(void);
