/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/packer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/pool.h"
#include "base/pack.h"
#include "model/packing.h"
#include "model/ranges.h"

enum { NOTE_MADE = 256, PIECE = 1 << 20 };

struct packer {
    const struct mt_tensor *t;
    mt_plane_set *planes;
    mt_pool *pool;
    struct mt_packing_cost *cost;
    float factor;    /* NVFP4's */
    uint8_t *codes;  /* of a piece */
    float *scales;   /* of the tensor */
    float *back;     /* a piece, decoded again */
    size_t rows, cols; /* of the tensor */
};

/* Bytes of a piece from `skip` on. */
static int write_piece(const struct packer *p, enum mt_piece kind, size_t skip, size_t n, const void *src,
                       struct mt_err *err)
{
    return mt_planes_write(p->planes, p->t->unit, MT_PLANE_PACKED, mt_packed_piece_at(p->t, kind) + skip, n, src, err);
}

struct job {
    struct packer *p;
    const float *w;
    size_t rows, scale_at;
};

static void job_main(void *ctx, size_t i, int thread)
{
    const struct job *j = ctx;
    struct packer *p = j->p;
    (void)thread;
    const struct mt_pack of = {p->t->packed, p->factor, j->rows, p->cols};
    mt_pack_job(&of, j->w, i, p->codes, p->scales + j->scale_at);
}

/* "mlp.up_proj" of "model.layers.3.mlp.up_proj.weight", also without the number of an expert. */
static void kind_of(char *kind, size_t len, const char *name)
{
    const char *p = strstr(name, "layers.");
    size_t at = 0;
    p = p ? p + 7 : name;
    for (bool number = p != name; *p && strcmp(p, ".weight") && at + 1 < len; p++) {
        if (p > name && p[-1] == '.' && *p >= '0' && *p <= '9')
            number = true;
        if (!number)
            kind[at++] = *p;
        if (*p == '.')
            number = false;
    }
    kind[at] = 0;
}

static void add_cost(struct packer *p, const float *w, size_t n)
{
    char kind[64];
    double lost = 0, all = 0;
    int i = 0;
    for (size_t k = 0; k < n; k++) {
        double d = (double)w[k] - (double)p->back[k];
        lost += d * d;
        all += (double)w[k] * (double)w[k];
    }
    kind_of(kind, sizeof(kind), p->t->name);
    while (i < p->cost->n && strcmp(p->cost->of[i].kind, kind))
        i++;
    if (i == MT_PACKING_KINDS)
        return;
    if (i == p->cost->n)
        snprintf(p->cost->of[p->cost->n++].kind, sizeof(kind), "%s", kind);
    p->cost->of[i].lost += lost;
    p->cost->of[i].all += all;
}

/* Elements [at, at + n): whole rows, but for the end whole blocks. */
static int pack(struct packer *p, const float *w, size_t at, size_t n, struct mt_err *err)
{
    enum mt_packed f = p->t->packed;
    struct job j = {p, w, n / p->cols, mt_packed_n_scales(f, at / p->cols, p->cols)};
    size_t bytes = mt_packed_code_bytes(f, j.rows, p->cols);
    mt_pool_run(p->pool, job_main, &j, mt_pack_n_jobs(f, j.rows, p->cols));
    mt_packed_values(&(struct mt_packed_view){f, p->cols, p->codes, p->scales + j.scale_at, NULL}, 0, n, p->back);
    if (p->cost)
        add_cost(p, w, n);
    return write_piece(p, MT_PIECE_CODES, mt_packed_codes_before(f, at), bytes, p->codes, err);
}

/* NF4's scales, nested, and the tensors that bitsandbytes stores with them. */
static int write_nf4(struct packer *p, size_t n, struct mt_err *err)
{
    const struct mt_tensor *t = p->t;
    size_t groups = mt_div_up(n, MT_NF4_NESTED);
    float map[256], offset = 0, *nested = mt_calloc(groups, sizeof(*nested));
    MT_FREED uint8_t *bytes = mt_calloc(n, 1);
    char note[NOTE_MADE + 1];
    int rc = nested && bytes ? 0 : mt_fail_nomem(err, t->name, n);
    if (!rc) {
        mt_pack_nested_map(map);
        mt_pack_nest(p->scales, n, map, bytes, nested, &offset);
        rc = write_piece(p, MT_PIECE_SCALES, 0, n, bytes, err);
    }
    int len = snprintf(note, sizeof(note),
                       "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", \"shape\": [%zu, %zu], "
                       "\"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": %.17g}",
                       p->rows, p->cols, (double)offset);
    memset(note + len, ' ', sizeof(note) - (size_t)len);
    rc = rc ?: write_piece(p, MT_PIECE_NESTED, 0, groups * sizeof(float), nested, err)
            ?: write_piece(p, MT_PIECE_MAP, 0, sizeof(map), map, err)
            ?: write_piece(p, MT_PIECE_OFFSET, 0, sizeof(offset), &offset, err)
            ?: write_piece(p, MT_PIECE_VALUES, 0, sizeof(mt_nf4_values), mt_nf4_values, err)
            ?: write_piece(p, MT_PIECE_NOTE, 0, NOTE_MADE, note, err);
    free(nested);
    return rc;
}

static int write_scales(struct packer *p, struct mt_err *err)
{
    enum mt_packed f = p->t->packed;
    size_t n = mt_packed_n_scales(f, p->rows, p->cols);
    int rc = 0;
    if (f == MT_PACKED_NF4)
        return write_nf4(p, n, err);
    if (mt_packed_factor_name(p->t->scale))
        rc = write_piece(p, MT_PIECE_FACTOR, 0, sizeof(p->factor), &p->factor, err);
    if (f == MT_PACKED_INT4)
        rc = write_piece(p, MT_PIECE_NOTE, 0, sizeof(int64_t[2]), p->t->shape, err);
    mt_pack_scales(p->t->scale, p->factor, p->scales, n, p->scales);
    return rc ?: write_piece(p, MT_PIECE_SCALES, 0, n * mt_scale_size(p->t->scale), p->scales, err);
}

/* piece: elements that are packed at once. Finish it in any case. */
static int begin(struct packer *p, const struct mt_filling *f, size_t piece, struct mt_err *err)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = f->n_threads ? f->n_threads : (int)MT_MIN(MT_MAX(cpus, 1), 64);
    p->rows = (size_t)p->t->shape[0];
    p->cols = (size_t)p->t->shape[1];
    p->cost = f->cost;
    p->factor = mt_pack_nvfp4_factor(f->largest);
    p->codes = mt_calloc(piece, 1);
    p->back = mt_calloc(piece, sizeof(float));
    p->scales = mt_calloc(mt_packed_n_scales(p->t->packed, p->rows, p->cols), sizeof(float));
    return p->codes && p->back && p->scales
               ? mt_pool_create(&p->pool, &(struct mt_pool_params){"pack", threads, NULL, NULL}, err)
               : mt_fail_nomem(err, p->t->name, piece * sizeof(float));
}

static void finish(struct packer *p)
{
    mt_pool_destroy(&p->pool);
    free(p->codes);
    free(p->back);
    free(p->scales);
}

/* How many elements to read at once; packed: whole blocks of every format. */
static size_t piece_of(const struct mt_tensor *t)
{
    size_t band = t->kind == MT_RANGE_PACKED ? MT_FP8_BLOCK * (size_t)t->shape[1] : 1;
    return MT_MIN(MT_MAX(PIECE / band, (size_t)1) * band, t->n);
}

int mt_tensor_fill(mt_plane_set *planes, const struct mt_tensor *t, const struct mt_filling *f, struct mt_err *err)
{
    MT_CLOSED_BY(finish) struct packer p = {.t = t, .planes = planes};
    bool packs = planes && t->kind == MT_RANGE_PACKED;
    size_t piece = piece_of(t);
    MT_FREED float *w = mt_alloc_aligned(piece * sizeof(*w));
    int rc = !w ? mt_fail_nomem(err, t->name, piece * sizeof(*w)) : packs ? begin(&p, f, piece, err) : 0;
    for (size_t at = 0; at < t->n && !rc; at += piece) {
        size_t n = MT_MIN(piece, t->n - at);
        rc = f->read(f->ctx, t, at, n, w, err);
        if (!rc && planes)
            rc = packs ? pack(&p, w, at, n, err) : mt_tensor_write_masters(planes, t, at, n, w, err);
    }
    return rc || !packs ? rc : write_scales(&p, err);
}

const char *mt_packing_cost_format(const struct mt_packing_cost *c, char *buf, size_t len)
{
    size_t at = 0;
    buf[0] = 0;
    for (int i = 0; i < c->n && at < len; i++)
        at += (size_t)snprintf(buf + at, len - at, "%s%s %.2f%%", i ? ", " : "", c->of[i].kind,
                               c->of[i].all > 0 ? 100 * sqrt(c->of[i].lost / c->of[i].all) : 0);
    return buf;
}

/* vLLM takes the largest factor of those that it fuses, whatever their scales were divided by. */
bool mt_packing_share_factor(const struct mt_layout *l, const struct mt_tensor *a, const struct mt_tensor *b)
{
    static const char *const fused[] = {".q_proj.k_proj.v_proj.", ".gate_proj.up_proj.", ".w1.w3.",
                                        ".q_a_proj.kv_a_proj_with_mqa.", ".in_proj_qkv.in_proj_z."};
    char own[64], other[64];
    size_t dot = 0;
    bool near = l->units[a->unit].layer == l->units[b->unit].layer && a->expert == b->expert;
    if (a == b || !near || b->n_dims != 2 || b->adapter)
        return a == b;
    for (size_t i = 0; a->name[i] && a->name[i] == b->name[i]; i++)
        dot = a->name[i] == '.' ? i : dot;
    snprintf(own, sizeof(own), "%.*s", (int)strcspn(a->name + dot + 1, ".") + 2, a->name + dot);
    snprintf(other, sizeof(other), "%.*s", (int)strcspn(b->name + dot + 1, ".") + 2, b->name + dot);
    for (size_t i = 0; i < MT_ARRAY_LEN(fused); i++)
        if (strstr(fused[i], own) && strstr(fused[i], other))
            return true;
    return false;
}

void mt_packing_make(struct mt_tensor *t, enum mt_packed f)
{
    t->packed = f;
    t->scale = f == MT_PACKED_NF4 ? MT_SCALE_NESTED : mt_packed_formats[f].scale;
    t->note_bytes = f == MT_PACKED_NF4 ? NOTE_MADE : mt_packed_kind(f) == MT_PACKED_INT4 ? 2 * sizeof(int64_t) : 0;
}
