/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of a walk over an operation's arguments (row.h). */
#include "device/ops/row.h"

size_t mt_op_dim(struct mt_op_walk *w, size_t *dim)
{
    int i = w->n_dims++;
    if (w->x)
        *dim = (size_t)w->shape->dim[i];
    else if (w->cost)
        w->cost->dim[i] = *dim;
    return *dim;
}

enum mt_dtype mt_op_dtype(struct mt_op_walk *w, enum mt_dtype *dtype)
{
    if (w->x)
        *dtype = w->shape->dtype;
    else if (w->cost)
        w->cost->dtype = *dtype;
    return *dtype;
}

/* Pointers of any type are read and written as bytes: they are void pointers to none but mt_example_take(). */
void mt_op_array(struct mt_op_walk *w, void *pointer, const char *needs, unsigned use, enum mt_dtype dtype, size_t n,
                 int moves)
{
    const void *p;
    memcpy(&p, pointer, sizeof(p));
    if (w->x && !p && (use & ABSENT) != ABSENT) {
        p = mt_example_take(w->x, use & (MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH), dtype, n);
        memcpy(pointer, &p, sizeof(p));
    } else if (w->cost && (p || !(use & OPTIONAL))) {
        w->cost->bytes += moves * mt_op_bytes(n, 1, dtype);
    } else if (!w->x && !w->cost && !w->wrong) {
        w->wrong = (!p && !(use & OPTIONAL)) || (!(use & LOOSE) && !aligned_or_null(p)) ? needs : NULL;
    }
}

void *mt_op_take_workspace(struct mt_op_walk *w, const void *args)
{
    return mt_example_workspace(w->x, mt_device_workspace(mt_example_device(w->x), w->shape->op, args));
}
