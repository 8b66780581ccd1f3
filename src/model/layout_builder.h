/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "model/part.h"

/* A layout while it is filled: shared by the files that lay out tensors. */

struct mt_layout_builder {
    struct mt_layout *l;
    struct mt_unit *u;
    const struct mt_layout_params *p;
    bool *glob_used, *always_used;
    size_t cap_tensors, n_experts; /* n_experts: rows of l->experts in use */
    size_t n_adapters;             /* of l->adapters in use */
    int learner;                   /* whose adapters are being laid out */
    bool failed;
    struct mt_err *err;            /* for the first adapter that is not possible, */
    int rc;                        /* with its code */
};

/** Where a parameter's tensors are added. */
struct mt_layout_place {
    const struct mt_part *part;
    struct mt_param *param;
    int expert; /* or -1 */
};

/* layout_tensors.c */

bool mt_layout_has_adapters(const struct mt_layout_builder *b);
/** The adapters of the learner under way. */
static inline struct mt_adapter_spec *mt_layout_spec(const struct mt_layout_builder *b)
{
    return &b->p->adapter[b->learner];
}
static inline size_t mt_layout_n_learners(const struct mt_layout_builder *b)
{
    return b->p->n_learners ? b->p->n_learners : 1;
}
/** A tensor's name without its last part. */
void mt_layout_module_of(char *module, size_t len, const char *name);
/** Adds a tensor whose name is not set yet to the unit; NULL: no memory. */
struct mt_tensor *mt_layout_begin_tensor(struct mt_layout_builder *b, const struct mt_layout_place *at, int64_t rows,
                                         int64_t cols);
/** Whether it is for optimizers of matrices; after its name is known. */
bool mt_layout_is_matrix(const struct mt_layout_builder *b, const struct mt_layout_place *at,
                         const struct mt_tensor *t);
/** -EINVAL (MT_ERR_USAGE): a glob of matrices matches none. */
int mt_layout_check_matrices(const struct mt_layout_builder *b, struct mt_err *err);
void mt_layout_set_trainable(struct mt_layout_builder *b, struct mt_tensor *t, bool trainable);

/* layout_adapters.c */

/** Adds adapters after the parameters that they adapt: a part's or an expert's, whose tensors are [first, ...). */
void mt_layout_add_adapters(struct mt_layout_builder *b, struct mt_part *part, struct mt_param *params, int n_params,
                            size_t first);
/** Whether all names of the adapters' keys match, and PEFT can read what is trained. */
int mt_layout_check_adapters(struct mt_layout_builder *b, struct mt_err *err);
/** Sets mt_tensor.number of all tensors. */
void mt_layout_number_tensors(const struct mt_layout_builder *b);
