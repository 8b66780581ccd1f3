/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge_base.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* A packed tensor, as one of the files that is not packed. */
static struct mt_merged decoded(const struct mt_layout *l, const struct mt_tensor *of, int file)
{
    const struct mt_stored *s = &l->stored[of->place.stored];
    struct mt_merged m = {.stored = s, .t = {.name = (char *)(uintptr_t)s->name, .dtype = MT_ST_BF16,
                                             .n_dims = s->n_dims, .n_elems = s->n, .file = file}};
    memcpy(m.t.shape, s->shape, sizeof(s->shape));
    return m;
}

/* packed: [n_tensors] of the files, the layout's tensor whose codes it is, or NULL; of experts that share them, the
 * first one's. */
static void list_tensors(struct mt_merge_base *b, const struct mt_tensor **packed, mt_merge_changes changes,
                         const void *ctx)
{
    const struct mt_layout *l = b->sources.l;
    bool all = b->decodes;
    for (size_t i = 0; i < b->st->n_tensors && !all; i++)
        all = packed[i] && changes(ctx, l->stored[packed[i]->place.stored].name); /* files' name, the layout's is a module's */
    b->decodes = false; /* unless something is packed */
    for (size_t i = 0; i < b->st->n_tensors; i++) {
        const struct mt_st_tensor *t = &b->st->tensors[i];
        if (all && !packed[i] && mt_packed_is_piece(t->name))
            continue;
        bool decodes = all && packed[i];
        b->tensors[b->n++] = decodes ? decoded(l, packed[i], t->file) : (struct mt_merged){.t = *t};
        b->decodes |= decodes;
    }
}

static int read_decoded(void *ctx, const struct mt_tensor *t, size_t first, size_t n, size_t, void *dst,
                        struct mt_err *err)
{
    return mt_sources_read_f32(ctx, t, first, n, dst, err);
}

int mt_merge_base_open(struct mt_merge_base *b, const struct mt_st_model *st, const struct mt_layout *l, bool all,
                       mt_merge_changes changes, const void *ctx, struct mt_err *err)
{
    *b = (struct mt_merge_base){.st = st, .decodes = all, .tensors = mt_calloc(st->n_tensors, sizeof(*b->tensors)),
                                .sources = {.st = *st}, .writer = {.l = l, .read = read_decoded, .ctx = &b->sources}};
    MT_FREED const struct mt_tensor **packed = mt_calloc(st->n_tensors, sizeof(*packed));
    int rc = b->tensors && packed ? mt_sources_find(&b->sources, l, err)
                                  : mt_fail_nomem(err, "an export", st->n_tensors * sizeof(*b->tensors));
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_packed_source *src = &b->sources.of[i];
        const struct mt_tensor **p = src->format ? &packed[src->codes - st->tensors] : NULL;
        if (p && !*p)
            *p = &l->tensors[i];
    }
    if (!rc)
        list_tensors(b, packed, changes, ctx);
    return rc;
}

void mt_merge_base_close(struct mt_merge_base *b)
{
    mt_stored_writer_finish(&b->writer);
    mt_sources_forget(&b->sources);
    free(b->tensors);
    *b = (struct mt_merge_base){.st = NULL};
}

int mt_merge_base_read(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                       struct mt_err *err)
{
    size_t stored = x->stored ? (size_t)(x->stored - b->sources.l->stored) : 0;
    return x->stored ? mt_stored_gather(&b->writer, stored, first, n, sizeof(*w), w, err)
                     : mt_st_read_f32(b->st, &x->t, first, n, w, err);
}
