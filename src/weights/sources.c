/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/sources.h"

#include <stdlib.h>

#include "base/mem.h"

int mt_sources_find(struct mt_sources *s, const struct mt_layout *l, struct mt_err *err)
{
    int rc = 0;
    s->l = l;
    s->plain = (struct mt_stored_reader){.l = l, .st = &s->st};
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
    return mt_st_open_dir(&out->st, dir, err) ?: mt_sources_find(out, l, err);
}

void mt_sources_forget(struct mt_sources *s)
{
    mt_packed_matrix_finish(&s->packed);
    mt_stored_reader_finish(&s->plain);
    free(s->of);
    s->of = NULL;
}

void mt_sources_close(struct mt_sources *s)
{
    mt_sources_forget(s);
    mt_st_close(&s->st);
}

int mt_sources_read_f32(struct mt_sources *s, const struct mt_tensor *t, size_t first, size_t n, float *dst,
                        struct mt_err *err)
{
    const struct mt_packed_source *src = &s->of[t - s->l->tensors];
    bool again = s->plain.summer && first == 0; /* it is to be summed */
    int rc = 0;
    if (!src->format)
        return mt_stored_read_f32(&s->plain, src->codes, t, first, n, dst, err);
    if (s->decoded != t || again) {
        rc = mt_packed_file_read(&s->packed, &s->st, src, t, s->plain.summer, err);
        s->decoded = rc ? NULL : t;
    }
    if (!rc)
        mt_packed_matrix_values(&s->packed, first, n, dst);
    return rc;
}

int mt_sources_check_finite(const char *where, const char *tensor, size_t at, const float *x, size_t n,
                            struct mt_err *err)
{
    size_t i = 0;
    while (i < n && (mt_f32_bits(x[i]) & 0x7fffffffu) < 0x7f7f8000u)
        i++;
    return i == n ? 0 : mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: tensor \"%s\" holds %g at element %zu: weights must be "
                                "finite and below 3.39e38", where, tensor, (double)x[i], at + i);
}
