/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/pool.h"
#include "optim/optimizer.h"
#include "store/planes.h"

/** Updates of made-up parameters (bf16 gradients), to be timed: divided over threads as in a run, with
 * planes at the same homes. */
struct mt_adam_probe {
    mt_plane_set *planes;
    mt_pool *pool;
    size_t n;
    uint64_t t; /* updates made */
    struct mt_update_form form;
    double keys[MT_OPTIMIZER_SLOTS];
};
struct mt_adam_probe_params {
    struct mt_update_form form; /* its optimizer NULL: mt_adamw */
    size_t n; /* parameters */
    int n_threads;
    const int *cpus;           /* [n_threads] or NULL */
    const struct mt_numa *numa; /* NULL: the system places memory */
};
/** Finish it also after an error. */
int mt_adam_probe_init(struct mt_adam_probe *a, const struct mt_adam_probe_params *p, struct mt_err *err);
void mt_adam_probe_finish(struct mt_adam_probe *a);
/** Makes one update. */
void mt_adam_probe_run(struct mt_adam_probe *a);

/** Nanoseconds per parameter, of 32M parameters if p->n is 0; best of several updates. */
int mt_probe_adam(const struct mt_adam_probe_params *p, double *ns, struct mt_err *err);
