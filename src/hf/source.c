/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/source.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static int read_raw(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    size_t size = mt_st_dtype_size(s->decl.dtype);
    return mt_st_read_raw(s->ctx, s->of, first * size, n * size, dst, err);
}

static int read_f32(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    return mt_st_read_f32(s->ctx, s->of, first, n, dst, err);
}

struct mt_source mt_source_raw(const struct mt_st_model *m, const struct mt_st_tensor *t)
{
    struct mt_source s = {.decl = {.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims}, .read = read_raw,
                          .ctx = (void *)m, .of = t};
    memcpy(s.decl.shape, t->shape, sizeof(t->shape));
    return s;
}

struct mt_source mt_source_f32(const struct mt_st_model *m, const struct mt_st_tensor *t)
{
    struct mt_source s = mt_source_raw(m, t);
    s.decl.dtype = MT_ST_F32;
    s.read = read_f32;
    return s;
}

int mt_source_add(struct mt_source_list *l, struct mt_source s, struct mt_err *err)
{
    if (!mt_grow(&l->p, &l->cap, l->n + 1, sizeof(*l->p)))
        return mt_fail_nomem(err, s.decl.name, (l->n + 1) * sizeof(*l->p));
    l->p[l->n++] = s;
    return 0;
}

void mt_source_list_finish(struct mt_source_list *l)
{
    free(l->p);
    *l = (struct mt_source_list){.p = NULL};
}
