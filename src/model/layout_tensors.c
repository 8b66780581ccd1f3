/* SPDX-License-Identifier: Apache-2.0 */
/* What layout.c and layout_adapters.c need to add a tensor to the unit that is being laid out. */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/layout_builder.h"
#include "model/part.h"

bool mt_layout_has_adapters(const struct mt_layout_builder *b)
{
    return b->p->adapter && mt_layout_spec(b)->on;
}

void mt_layout_module_of(char *module, size_t len, const char *name)
{
    const char *dot = strrchr(name, '.');
    snprintf(module, len, "%.*s", dot ? (int)(dot - name) : 0, name);
}

struct mt_tensor *mt_layout_begin_tensor(struct mt_layout_builder *b, const struct mt_layout_place *at, int64_t rows,
                                         int64_t cols)
{
    struct mt_layout *l = b->l;
    struct mt_param *p = at->param;
    if (!mt_grow(&l->tensors, &b->cap_tensors, l->n_tensors + 1, sizeof(*l->tensors))) {
        b->failed = true;
        return NULL;
    }
    struct mt_tensor *t = &l->tensors[l->n_tensors++];
    *t = (struct mt_tensor){.n_dims = cols ? 2 : 1, .shape = {rows, cols}, .param = p, .expert = at->expert,
                            .lr_scale = 1};
    t->unit = (size_t)(b->u - l->units);
    t->n = (size_t)rows * (size_t)MT_MAX(cols, (int64_t)1);
    t->first = p->at + p->n;
    p->n += t->n;
    b->u->n_elems = t->first + t->n;
    b->u->n_tensors++;
    return t;
}

bool mt_layout_is_matrix(const struct mt_layout_builder *b, const struct mt_layout_place *at,
                         const struct mt_tensor *t)
{
    enum { LEAST = 8 };
    bool hit = false;
    for (size_t i = 0; i < b->p->n_matrices; i++)
        hit |= !fnmatch(b->p->matrices[i], t->name, 0);
    if (t->n_dims < 2 || b->p->n_matrices)
        return t->n_dims > 1 && hit;
    bool router = at->part->kind->routes && at->param == &at->part->param[MT_ROUTER_WEIGHT];
    return b->u->kind == MT_UNIT_LAYER && !router && t->shape[0] >= LEAST && t->shape[1] >= LEAST;
}

int mt_layout_check_matrices(const struct mt_layout_builder *b, struct mt_err *err)
{
    for (size_t i = 0; i < b->p->n_matrices; i++) {
        size_t hits = 0;
        for (size_t t = 0; t < b->l->n_tensors; t++)
            hits += b->l->tensors[t].matrix && !fnmatch(b->p->matrices[i], b->l->tensors[t].name, 0);
        if (!hits)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.matrices: \"%s\" matches no matrix (names are like %s)",
                           b->p->matrices[i], b->l->tensors[b->l->n_tensors / 2].name);
    }
    return 0;
}

void mt_layout_set_trainable(struct mt_layout_builder *b, struct mt_tensor *t, bool trainable)
{
    t->trainable = trainable;
    t->param->trainable |= trainable;
    b->u->trainable |= trainable;
    if (trainable)
        b->l->n_trained += t->n;
}
