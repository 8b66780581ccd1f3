/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/sources.h"

#include <stdlib.h>

#include "base/mem.h"

int mt_sources_find(struct mt_sources *s, const struct mt_layout *l, struct mt_err *err)
{
    int rc = 0;
    s->of = mt_calloc(l->n_tensors, sizeof(*s->of));
    if (!s->of)
        return mt_fail_nomem(err, "the list of weights", l->n_tensors * sizeof(*s->of));
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        rc = l->tensors[i].adapter ? 0 : mt_packed_find(&s->of[i], &s->st, l, &l->tensors[i], err);
    return rc;
}

int mt_sources_open(struct mt_sources *out, const struct mt_layout *l, const char *dir, struct mt_err *err)
{
    *out = (struct mt_sources){.of = NULL};
    int rc = mt_st_open_dir(&out->st, dir, err);
    return rc ? rc : mt_sources_find(out, l, err);
}

void mt_sources_close(struct mt_sources *s)
{
    free(s->of);
    mt_st_close(&s->st);
    *s = (struct mt_sources){.of = NULL};
}
