/* SPDX-License-Identifier: Apache-2.0 */
#include "store/planes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "store/files/file_weights.h"

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
_Static_assert(MT_N_PLANES <= 8 * sizeof(mt_plane_bits), "a bit for each kind");

/* Part of a plane on the disk, in files or on another host, in memory. */
struct window {
    char *mem; /* NULL: all planes of the kind are in host memory */
    size_t capacity; /* bytes of mem */
    uint64_t offset; /* of the content: on the disk, or of other planes in disk_at's numbering */
    size_t unit;     /* whose it is */
    size_t bytes;    /* 0: empty */
    bool dirty;
    const struct mt_disk_sums *sums; /* of its plane */
};

struct mt_plane_set {
    char *base[MT_N_PLANES]; /* of each kind's planes in host memory */
    size_t bytes[MT_N_PLANES], n_units;
    struct mt_numa numa;
    size_t stripe; /* elements of trained planes */
    struct mt_plane_desc desc[MT_N_PLANES];
    struct mt_plane_elems *elems;
    size_t (*at)[MT_N_PLANES];        /* offset of each plane in its kind's memory; SIZE_MAX: none */
    size_t (*number)[MT_N_PLANES];    /* of a plane's first element in the row of all units' elements of the kind */
    uint64_t (*disk_at)[MT_N_PLANES]; /* as a window's offset; UINT64_MAX: in host memory */
    struct mt_disk_sums (*sums)[MT_N_PLANES]; /* NULL: no sums */
    uint64_t *sum;                            /* memory of all of them */
    mt_disk *disk;
    mt_plane_bits *in_files, *elsewhere; /* [n_units] */
    mt_file_weights *files;
    struct mt_plane_move move;
    struct window window[MT_N_PLANES];
};

static bool has_plane(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return p->desc[k].block && p->elems[unit].n[k];
}

static bool is_in_files(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return p->in_files && (p->in_files[unit] >> k & 1) && has_plane(p, unit, k);
}

static bool is_elsewhere(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return p->elsewhere && (p->elsewhere[unit] >> k & 1) && has_plane(p, unit, k);
}

static bool is_on_disk(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return p->on_disk && (p->on_disk[unit] >> k & 1) && has_plane(p, unit, k) && !is_in_files(p, unit, k) &&
           !is_elsewhere(p, unit, k);
}

static bool is_in_host(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return has_plane(p, unit, k) && !is_on_disk(p, unit, k) && !is_in_files(p, unit, k) && !is_elsewhere(p, unit, k);
}

static size_t plane_bytes(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    return mt_align_up(mt_plane_desc_bytes(&p->desc[k], p->elems[unit].n[k]), PAGE);
}

/* Bytes of a plane without the padding of its last page. */
static size_t bytes_of(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return mt_plane_desc_bytes(&s->desc[k], s->elems[unit].n[k]);
}

size_t mt_plane_set_plane_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k)
{
    size_t sum = 0;
    for (size_t u = 0; u < p->n_units; u++)
        if (is_in_host(p, u, k))
            sum += plane_bytes(p, u, k);
    return sum;
}

uint64_t mt_plane_set_plane_disk_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k)
{
    uint64_t sum = 0;
    for (size_t u = 0; u < p->n_units; u++)
        if (is_on_disk(p, u, k))
            sum += plane_bytes(p, u, k);
    return sum;
}

uint64_t mt_plane_set_disk_bytes(const struct mt_plane_set_params *p)
{
    uint64_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        sum += mt_plane_set_plane_disk_bytes(p, k);
    return sum;
}

/* Window of one kind: at most its largest plane. Gradients have none: only the engine uses them. */
static size_t window_size(const struct mt_plane_set_params *p, enum mt_plane_kind k)
{
    size_t most = 0;
    for (size_t u = 0; u < p->n_units && p->desc[k].role != MT_ROLE_GRADIENT; u++)
        if (is_on_disk(p, u, k) || is_in_files(p, u, k) || is_elsewhere(p, u, k))
            most = MT_MAX(most, plane_bytes(p, u, k));
    size_t bytes = p->window_bytes ? p->window_bytes : (size_t)MT_PLANE_WINDOW;
    if (p->sums && p->disk)
        bytes = MT_MAX(bytes, mt_disk_block(p->disk)); /* it must hold a whole block */
    return MT_MIN(most, bytes);
}

static size_t piece_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k)
{
    return mt_plane_desc_bytes(&p->desc[k], p->piece_elems);
}

static size_t n_sums(const struct mt_plane_set_params *p, size_t unit, enum mt_plane_kind k)
{
    size_t block = p->disk ? mt_disk_block(p->disk) : (size_t)MT_DISK_BLOCK;
    return p->sums && is_on_disk(p, unit, k) ? mt_disk_sums_n(plane_bytes(p, unit, k), piece_bytes(p, k), block) : 0;
}

size_t mt_plane_set_sum_bytes(const struct mt_plane_set_params *p)
{
    size_t n = 0;
    for (size_t u = 0; u < p->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++)
            n += n_sums(p, u, k);
    return n * sizeof(uint64_t);
}

size_t mt_plane_set_window_bytes(const struct mt_plane_set_params *p)
{
    size_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        sum += window_size(p, k);
    return sum;
}

size_t mt_plane_set_bytes(const struct mt_plane_set_params *p)
{
    size_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        sum += mt_plane_set_plane_bytes(p, k);
    return sum;
}

/* Lays planes out kind by kind, so that the planes of a kind are contiguous. */
static void lay_out(mt_plane_set *s, const struct mt_plane_set_params *p)
{
    uint64_t disk_at = 0;
    for (int k = 0; k < MT_N_PLANES; k++) {
        uint64_t other_at = 0;
        size_t at = GAP, number = 0;
        for (size_t u = 0; u < p->n_units; u++) {
            bool host = is_in_host(p, u, k), disk = is_on_disk(p, u, k);
            bool other = is_in_files(p, u, k) || is_elsewhere(p, u, k);
            s->at[u][k] = host ? at : SIZE_MAX;
            s->disk_at[u][k] = disk ? disk_at : other ? other_at : UINT64_MAX;
            s->number[u][k] = number;
            at += host ? GAP + plane_bytes(p, u, k) : 0;
            disk_at += disk ? plane_bytes(p, u, k) : 0;
            other_at += other ? plane_bytes(p, u, k) : 0;
            number += mt_plane_elems(s, u, k);
        }
        s->bytes[k] = at > GAP ? at : 0;
    }
}

/* --- homes ------------------------------------------------------------------------------------- */

/* The least stripe of which every trained plane has a whole huge page. */
static size_t choose_stripe(const struct mt_plane_desc desc[MT_N_PLANES])
{
    size_t stripe = MT_PLANE_STRIPE;
    for (int k = 0; k < MT_N_PLANES; k++)
        while (desc[k].block && desc[k].range == MT_RANGE_TRAINED && !desc[k].apart &&
               mt_plane_desc_bytes(&desc[k], stripe) < MT_HUGE_PAGE)
            stripe *= 2;
    return stripe;
}

int mt_plane_home(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t element)
{
    return (int)((s->number[unit][k] + element) / s->stripe % (size_t)s->numa.n);
}

/* Planes of a kind in host memory. */
struct kind {
    const mt_plane_set *set;
    enum mt_plane_kind k;
};

/* The home of the element in the middle of a range of the kind's memory. Only updates compute with planes: what is
 * never updated alternates. */
static int home_in_kind(const void *ctx, size_t at, size_t bytes)
{
    const struct kind *in = ctx;
    const mt_plane_set *s = in->set;
    const struct mt_plane_desc *d = &s->desc[in->k];
    size_t middle = at + bytes / 2, unit = 0;
    if (d->range != MT_RANGE_TRAINED || d->apart)
        return (int)(at / MT_HUGE_PAGE % (size_t)s->numa.n);
    for (size_t u = 0; u < s->n_units; u++)
        if (s->at[u][in->k] <= middle)
            unit = u;
    size_t from = s->at[unit][in->k];
    return mt_plane_home(s, unit, in->k, from <= middle ? (middle - from) / d->block_bytes * d->block : 0);
}

/* Each kind has its own mapping, so that stripes of all kinds begin at huge pages. */
static int alloc_planes(mt_plane_set *s, struct mt_err *err)
{
    int rc = 0;
    for (int k = 0; k < MT_N_PLANES && !rc; k++) {
        struct kind in = {s, (enum mt_plane_kind)k};
        void *base = NULL;
        if (!s->bytes[k])
            continue;
        rc = mt_host_alloc_at(&base, s->bytes[k], &(struct mt_host_homes){&s->numa, home_in_kind, &in},
                              "weights and optimizer states", err);
        s->base[k] = base;
        if (rc)
            continue;
        POISON(s->base[k], s->bytes[k]);
        for (size_t u = 0; u < s->n_units; u++)
            if (s->at[u][k] != SIZE_MAX)
                UNPOISON(s->base[k] + s->at[u][k], bytes_of(s, u, in.k));
    }
    return rc;
}

const struct mt_numa *mt_plane_set_numa(const mt_plane_set *s)
{
    return &s->numa;
}

struct run {
    void (*fn)(void *ctx, size_t first, size_t n);
    void *ctx;
    size_t first, n, number; /* number: of the first element */
};

static void run_chunk(void *ctx, size_t chunk, int)
{
    const struct run *r = ctx;
    size_t begin = (r->number / MT_PLANE_CHUNK + chunk) * MT_PLANE_CHUNK, end = begin + MT_PLANE_CHUNK;
    begin = MT_MAX(begin, r->number);
    end = MT_MIN(end, r->number + r->n);
    r->fn(r->ctx, r->first + (begin - r->number), end - begin);
}

void mt_planes_run(const mt_plane_set *s, size_t unit, size_t first, size_t n, mt_pool *pool,
                   void (*fn)(void *ctx, size_t first, size_t n), void *ctx)
{
    struct run r = {fn, ctx, first, n, s->number[unit][MT_PLANE_HI] + first};
    struct mt_pool_stripes stripes = {r.number / MT_PLANE_CHUNK, s->stripe / MT_PLANE_CHUNK};
    if (n)
        mt_pool_run_in_lanes(pool, run_chunk, &r, mt_div_up(r.number + n, MT_PLANE_CHUNK) - stripes.first, stripes);
}

/* --- the set ------------------------------------------------------------------------------------ */

static int alloc_windows(mt_plane_set *s, const struct mt_plane_set_params *p, struct mt_err *err)
{
    int rc = 0;
    s->disk = p->disk;
    s->files = p->files;
    s->move = p->move;
    for (int k = 0; k < MT_N_PLANES && !rc; k++) {
        void *mem = NULL;
        s->window[k].capacity = window_size(p, k);
        if (s->window[k].capacity)
            rc = mt_host_alloc(&mem, s->window[k].capacity, "windows to the disk", err);
        s->window[k].mem = mem;
    }
    return rc;
}

static int alloc_sums(mt_plane_set *s, const struct mt_plane_set_params *p, struct mt_err *err)
{
    size_t bytes = mt_plane_set_sum_bytes(p), at = 0;
    if (!bytes)
        return 0;
    s->sums = mt_calloc(p->n_units, sizeof(*s->sums));
    s->sum = mt_calloc(bytes / sizeof(*s->sum), sizeof(*s->sum));
    if (!s->sums || !s->sum)
        return mt_fail_nomem(err, "sums of planes on drives", bytes);
    for (size_t u = 0; u < p->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++) {
            s->sums[u][k] = (struct mt_disk_sums){.sum = s->sum + at, .offset = s->disk_at[u][k],
                                                  .bytes = plane_bytes(p, u, k), .piece = piece_bytes(p, k),
                                                  .block = mt_disk_block(p->disk), .what = p->desc[k].use, .unit = u};
            at += n_sums(p, u, k);
        }
    return 0;
}

int mt_plane_set_create(mt_plane_set **out, const struct mt_plane_set_params *p, struct mt_err *err)
{
    mt_plane_set *s = mt_calloc(1, sizeof(*s));
    if (!s)
        return mt_fail_nomem(err, "the planes", sizeof(*s));
    s->n_units = p->n_units;
    memcpy(s->desc, p->desc, sizeof(s->desc));
    if (p->numa)
        s->numa = *p->numa;
    else
        mt_numa_none(&s->numa);
    s->stripe = choose_stripe(s->desc);
    s->at = mt_calloc(p->n_units, sizeof(*s->at));
    s->number = mt_calloc(p->n_units, sizeof(*s->number));
    s->disk_at = mt_calloc(p->n_units, sizeof(*s->disk_at));
    s->elems = mt_calloc(p->n_units, sizeof(*s->elems));
    s->in_files = mt_calloc(p->n_units, sizeof(*s->in_files));
    s->elsewhere = mt_calloc(p->n_units, sizeof(*s->elsewhere));
    if (!s->at || !s->number || !s->disk_at || !s->elems || !s->in_files || !s->elsewhere) {
        mt_plane_set_destroy(&s);
        return mt_fail_nomem(err, "the planes", p->n_units * sizeof(*s->at));
    }
    memcpy(s->elems, p->elems, p->n_units * sizeof(*s->elems));
    if (p->in_files)
        memcpy(s->in_files, p->in_files, p->n_units * sizeof(*s->in_files));
    if (p->elsewhere)
        memcpy(s->elsewhere, p->elsewhere, p->n_units * sizeof(*s->elsewhere));
    lay_out(s, p);
    int rc = alloc_planes(s, err) ?: alloc_windows(s, p, err) ?: alloc_sums(s, p, err);
    if (rc)
        mt_plane_set_destroy(&s);
    else
        *out = s;
    return rc;
}

void mt_plane_set_destroy(mt_plane_set **set)
{
    mt_plane_set *s = *set;
    if (!s)
        return;
    for (int k = 0; k < MT_N_PLANES; k++) {
        if (s->base[k])
            UNPOISON(s->base[k], s->bytes[k]);
        mt_host_free(s->base[k], s->bytes[k]);
        mt_host_free(s->window[k].mem, s->window[k].capacity);
    }
    free(s->at);
    free(s->number);
    free(s->disk_at);
    free(s->elems);
    free(s->in_files);
    free(s->elsewhere);
    free(s->sums);
    free(s->sum);
    free(s);
    *set = NULL;
}

void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return s->at[unit][k] == SIZE_MAX ? NULL : s->base[k] + s->at[unit][k];
}

size_t mt_plane_elems(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return s->desc[k].block ? s->elems[unit].n[k] : 0;
}

const struct mt_plane_desc *mt_plane_desc_of(const mt_plane_set *s, enum mt_plane_kind k)
{
    return &s->desc[k];
}

void *mt_plane_set_range(const mt_plane_set *s, enum mt_plane_kind k, size_t *bytes)
{
    size_t from = SIZE_MAX, to = 0;
    for (size_t u = 0; u < s->n_units; u++) {
        size_t at = s->at[u][k];
        if (at == SIZE_MAX)
            continue;
        from = MT_MIN(from, at);
        to = MT_MAX(to, at + mt_align_up(bytes_of(s, u, k), PAGE));
    }
    *bytes = to > from ? to - from : 0;
    return *bytes ? s->base[k] + from : NULL;
}

bool mt_plane_on_disk(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, uint64_t *offset)
{
    if (s->disk_at[unit][k] == UINT64_MAX || mt_plane_in_files(s, unit, k) || mt_plane_is_elsewhere(s, unit, k))
        return false;
    *offset = s->disk_at[unit][k];
    return true;
}

const struct mt_disk_sums *mt_plane_sums(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    uint64_t unused;
    return s->sums && mt_plane_on_disk(s, unit, k, &unused) ? &s->sums[unit][k] : NULL;
}

bool mt_plane_in_files(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return (s->in_files[unit] >> k & 1) && mt_plane_elems(s, unit, k);
}

bool mt_plane_is_elsewhere(const mt_plane_set *s, size_t unit, enum mt_plane_kind k)
{
    return (s->elsewhere[unit] >> k & 1) && mt_plane_elems(s, unit, k);
}

static int move_window(mt_plane_set *s, enum mt_plane_kind k, bool write, struct mt_err *err)
{
    struct window *w = &s->window[k];
    struct mt_disk_request r = {.write = write, .n_spans = 1, .span = {{w->offset, w->mem, w->bytes, w->sums}}};
    size_t at = (size_t)(w->offset - s->disk_at[w->unit][k]), n = MT_MIN(w->bytes, bytes_of(s, w->unit, k) - at);
    int rc;
    if (mt_plane_in_files(s, w->unit, k))
        rc = mt_file_weights_read(s->files, w->unit, k, at, w->bytes, w->mem, err);
    else if (mt_plane_is_elsewhere(s, w->unit, k))
        rc = s->move.fn(s->move.ctx, &(struct mt_plane_part){w->unit, at, n, k, write, w->mem}, err);
    else
        rc = mt_disk_run(s->disk, &r, err);
    if (!rc)
        w->dirty = false;
    return rc;
}

/* Window at `offset` of a plane that ends at `end`: as large as its memory allows; whole blocks if it has sums. */
static void place_window(struct window *w, uint64_t offset, uint64_t end)
{
    w->offset = w->sums ? mt_disk_block_begin(w->sums, offset) : offset / PAGE * PAGE;
    w->bytes = (size_t)MT_MIN(end - w->offset, (uint64_t)w->capacity);
    uint64_t to = w->offset + w->bytes;
    if (w->sums && to < end)
        w->bytes = (size_t)(mt_disk_block_begin(w->sums, to) - w->offset);
}

/* Brings byte `at` of a plane into the window; *mem points to it, *n bytes are valid from there. */
static int open_window(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t at, char **mem,
                       size_t *n, struct mt_err *err)
{
    struct window *w = &s->window[k];
    uint64_t plane = s->disk_at[unit][k], offset = plane + at;
    size_t end = mt_align_up(bytes_of(s, unit, k), PAGE);
    int rc = 0;
    if (!w->bytes || w->unit != unit || offset < w->offset || offset >= w->offset + w->bytes) {
        if (w->dirty)
            rc = move_window(s, k, true, err);
        w->bytes = 0;
        if (rc)
            return rc;
        w->sums = mt_plane_sums(s, unit, k);
        w->unit = unit;
        place_window(w, offset, plane + end);
        rc = move_window(s, k, false, err);
        if (rc) {
            w->bytes = 0;
            return rc;
        }
    }
    *mem = w->mem + (offset - w->offset);
    *n = (size_t)(w->offset + w->bytes - offset);
    return 0;
}

/* Bytes [at, at + bytes) of a plane, to dst or from src: the other is NULL. */
struct plane_copy {
    size_t at, bytes;
    char *dst;
    const char *src;
};

static int copy_plane(mt_plane_set *s, size_t unit, enum mt_plane_kind k, const struct plane_copy *c,
                      struct mt_err *err)
{
    size_t at = c->at, left = c->bytes;
    char *dst = c->dst;
    const char *src = c->src;
    char *host = mt_plane(s, unit, k);
    int rc = 0;
    if (!host && s->disk_at[unit][k] == UINT64_MAX)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "unit %zu has no plane of %s", unit,
                       s->desc[k].use ? s->desc[k].use : "this kind");
    if (at > bytes_of(s, unit, k) || left > bytes_of(s, unit, k) - at)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "bytes %zu to %zu of %s of unit %zu, which has %zu", at,
                       at + left, s->desc[k].use, unit, bytes_of(s, unit, k));
    if (mt_plane_is_elsewhere(s, unit, k) && !s->move.fn)
        return mt_fail(err, MT_ERR_RUNTIME, -EHOSTUNREACH, "%s of unit %zu are on another host", s->desc[k].use, unit);
    if (!dst && mt_plane_in_files(s, unit, k))
        return mt_fail(err, MT_ERR_RUNTIME, -EROFS, "%s of unit %zu are in the model's files, which are never written",
                       s->desc[k].use, unit);
    while (left && !rc) {
        char *mem = host ? host + at : NULL;
        size_t have = left;
        if (!host)
            rc = open_window(s, unit, k, at, &mem, &have, err);
        if (rc)
            break;
        have = MT_MIN(have, left);
        memcpy(dst ? dst : mem, dst ? mem : src, have);
        if (!dst) {
            src += have;
            s->window[k].dirty |= !host;
        } else {
            dst += have;
        }
        at += have;
        left -= have;
    }
    return rc;
}

int mt_planes_read(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                   void *dst, struct mt_err *err)
{
    size_t at = mt_plane_desc_bytes(&s->desc[k], first);
    struct plane_copy c = {at, mt_plane_desc_bytes(&s->desc[k], first + n) - at, dst, NULL};
    return copy_plane(s, unit, k, &c, err);
}

int mt_planes_write(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                    const void *src, struct mt_err *err)
{
    size_t at = mt_plane_desc_bytes(&s->desc[k], first);
    struct plane_copy c = {at, mt_plane_desc_bytes(&s->desc[k], first + n) - at, NULL, src};
    return copy_plane(s, unit, k, &c, err);
}

int mt_planes_read_bytes(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err)
{
    return copy_plane(s, unit, k, &(struct plane_copy){first, n, dst, NULL}, err);
}

int mt_planes_write_bytes(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n, const void *src,
                          struct mt_err *err)
{
    return copy_plane(s, unit, k, &(struct plane_copy){first, n, NULL, src}, err);
}

int mt_planes_settle(mt_plane_set *s, struct mt_err *err)
{
    int rc = 0;
    for (int k = 0; k < MT_N_PLANES; k++) {
        if (s->window[k].dirty && !rc)
            rc = move_window(s, (enum mt_plane_kind)k, true, err);
        s->window[k].bytes = 0;
        s->window[k].dirty = false;
    }
    return rc;
}
