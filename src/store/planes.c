/* SPDX-License-Identifier: Apache-2.0 */
#include "store/planes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { GAP = 4096 }; /* between planes, poisoned */
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
enum { GAP = 0 };
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

enum { PAGE = 4096 };

struct mt_plane_set {
    char *base;
    size_t bytes, n_units;
    size_t *n_elems;
    size_t (*at)[MT_N_PLANES]; /* offset of each plane; SIZE_MAX: none */
    enum mt_dtype state_dtype, grad_dtype;
};

const char *mt_plane_name(enum mt_plane_kind k)
{
    static const char *const names[] = {"hi", "lo", "m", "v", "gradient"};
    return names[k];
}

static size_t elem_size(enum mt_plane_kind k, enum mt_dtype state, enum mt_dtype grad)
{
    switch (k) {
    case MT_PLANE_M:
    case MT_PLANE_V:
        return mt_dtype_size(state);
    case MT_PLANE_GRAD:
        return mt_dtype_size(grad);
    default:
        return 2;
    }
}

static bool has_plane(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return k <= MT_PLANE_LO || p->trainable[unit];
}

size_t mt_plane_set_plane_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k)
{
    size_t sum = 0;
    for (size_t u = 0; u < p->n_units; u++)
        if (has_plane(p, u, k))
            sum += mt_align_up(p->n_elems[u] * elem_size(k, p->state_dtype, p->grad_dtype), PAGE);
    return sum;
}

size_t mt_plane_set_bytes(const struct mt_plane_set_params *p)
{
    size_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        sum += mt_plane_set_plane_bytes(p, k);
    return sum;
}

/* One kind after the other, so that what streams together lies together. */
static size_t lay_out(mt_plane_set *s, const struct mt_plane_set_params *p)
{
    size_t at = GAP;
    for (int k = 0; k < MT_N_PLANES; k++)
        for (size_t u = 0; u < p->n_units; u++) {
            s->at[u][k] = has_plane(p, u, k) ? at : SIZE_MAX;
            if (has_plane(p, u, k))
                at += GAP + mt_align_up(p->n_elems[u] *
                                            elem_size(k, p->state_dtype, p->grad_dtype),
                                        PAGE);
        }
    return at;
}

int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err)
{
    void *p = mmap(NULL, MT_MAX(bytes, (size_t)1), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "cannot map %zu bytes of host memory for %s: %s",
                       bytes, what, strerror(errno));
    if (bytes >= ((size_t)4 << 20))
        madvise(p, bytes, MADV_HUGEPAGE); /* a wish: refused where pages are not to be had */
    *out = p;
    return 0;
}

void mt_host_free(void *p, size_t bytes)
{
    if (p)
        munmap(p, MT_MAX(bytes, (size_t)1));
}

int mt_plane_set_create(mt_plane_set **out, const struct mt_plane_set_params *p, struct mt_err *err)
{
    mt_plane_set *s = mt_calloc(1, sizeof(*s));
    if (!s)
        return mt_fail_nomem(err, "the planes", sizeof(*s));
    s->n_units = p->n_units;
    s->state_dtype = p->state_dtype;
    s->grad_dtype = p->grad_dtype;
    s->at = mt_calloc(p->n_units, sizeof(*s->at));
    s->n_elems = mt_calloc(p->n_units, sizeof(size_t));
    if (!s->at || !s->n_elems) {
        mt_plane_set_destroy(&s);
        return mt_fail_nomem(err, "the planes", p->n_units * sizeof(*s->at));
    }
    memcpy(s->n_elems, p->n_elems, p->n_units * sizeof(size_t));
    s->bytes = lay_out(s, p);
    void *base = NULL;
    int rc = mt_host_alloc(&base, s->bytes, "weights and optimizer states", err);
    if (rc) {
        mt_plane_set_destroy(&s);
        return rc;
    }
    s->base = base;
    POISON(s->base, s->bytes);
    for (size_t u = 0; u < p->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++)
            if (s->at[u][k] != SIZE_MAX)
                UNPOISON(s->base + s->at[u][k],
                         p->n_elems[u] * elem_size(k, p->state_dtype, p->grad_dtype));
    *out = s;
    return 0;
}

void mt_plane_set_destroy(mt_plane_set **set)
{
    mt_plane_set *s = *set;
    if (!s)
        return;
    if (s->base)
        UNPOISON(s->base, s->bytes);
    mt_host_free(s->base, s->bytes);
    free(s->at);
    free(s->n_elems);
    free(s);
    *set = NULL;
}

void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return s->at[unit][k] == SIZE_MAX ? NULL : s->base + s->at[unit][k];
}

size_t mt_plane_elems(const mt_plane_set *s, size_t unit)
{
    return s->n_elems[unit];
}

enum mt_dtype mt_plane_dtype(const mt_plane_set *s, enum mt_plane_kind k)
{
    return k == MT_PLANE_GRAD ? s->grad_dtype : k <= MT_PLANE_LO ? MT_BF16 : s->state_dtype;
}

void *mt_plane_set_base(const mt_plane_set *s, size_t *bytes)
{
    *bytes = s->bytes;
    return s->base;
}
