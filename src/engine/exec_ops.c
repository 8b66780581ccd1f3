/* SPDX-License-Identifier: Apache-2.0 */
/* Device operations of each instruction. */
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "engine/binding.h"
#include "model/direct.h"
#include "model/packing.h"

/* The buffers of an instruction by role; NULL: none. */
struct roles {
    void *of[MT_N_ROLES];
    bool begins[MT_N_ROLES]; /* written without being read */
    bool writes[MT_N_ROLES];
};

static void *buffer_of(const struct mt_binding *b, const struct mt_program *prog,
                       const struct mt_operand *op)
{
    return b->buffers[prog->objects[op->object].pool][op->buffer];
}

static struct roles find_roles(const struct mt_binding *b, const struct mt_program *prog,
                               const struct mt_instr *in)
{
    struct roles r = {{NULL}, {false}, {false}};
    for (int k = 0; k < in->n_operands; k++) {
        r.of[in->operand[k].role] = buffer_of(b, prog, &in->operand[k]);
        r.begins[in->operand[k].role] = !(in->operand[k].access & MT_READ);
        r.writes[in->operand[k].role] = in->operand[k].access & MT_WRITE;
    }
    return r;
}

static int copy_flat(const struct mt_binding *b, enum mt_stream s, void *dst, const void *src, size_t bytes,
                     struct mt_err *err)
{
    return mt_device_copy(b->dev, s, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1}, err);
}

/* Copies elements [first, first + n) of the unit to one half of each join block (mt_op_join): 0 hi, 1 lo. */
static int load_half(const struct mt_binding *b, char *dst, int which, size_t first, size_t n, const char *src,
                     struct mt_err *err)
{
    const size_t block = MT_JOIN_BLOCK, half = 2 * block;
    int rc = 0;
    dst += which ? half : 0;
    while (n && !rc) {
        size_t at = first % block, rows = at ? 0 : n / block, k = rows ? rows * block : MT_MIN(n, block - at);
        size_t row = rows ? half : 2 * k;
        struct mt_copy c = {dst + first / block * 2 * half + 2 * at, 2 * half, src, row, row, MT_MAX(rows, (size_t)1)};
        rc = mt_device_copy(b->dev, MT_STREAM_H2D, &c, err);
        first += k;
        src += 2 * k;
        n -= k;
    }
    return rc;
}

/* A load of a unit's weights. */
struct load {
    const struct mt_binding *b;
    int unit;
    char *dst, *staged;
};

/* Elements [from, from + n) of the range. bf16: copies hi. f32: hi and lo, to the two halves of each join block. */
static int load_range(const struct load *l, const struct mt_range *r, size_t from, size_t n, struct mt_err *err)
{
    const struct mt_binding *b = l->b;
    size_t unit = (size_t)l->unit;
    struct mt_range_planes k = mt_range_planes(r->kind);
    const char *hi = mt_plane_view(b, unit, k.hi, 0, NULL, l->staged).data + 2 * (r->at + from);
    size_t at = mt_unit_range_at(b->layout, unit, r, b->dtype) + from;
    if (b->dtype == MT_BF16)
        return copy_flat(b, MT_STREAM_H2D, l->dst + 2 * at, hi, 2 * n, err);
    int rc = load_half(b, l->dst, 0, r->first + from, n, hi, err);
    if (rc || k.lo == MT_NO_PLANE)
        return rc;
    const char *lo = mt_plane_view(b, unit, k.lo, 0, NULL, l->staged).data + 2 * (r->at + from);
    return load_half(b, l->dst, 1, r->first + from, n, lo, err);
}

/* What elements [first, end) of the trained planes have of a trained range. */
static int load_part(const struct load *l, const struct mt_range *r, size_t first, size_t end, struct mt_err *err)
{
    size_t from = MT_MAX(r->at, first), to = MT_MIN(r->at + r->n, end);
    return from < to ? load_range(l, r, from - r->at, to - from, err) : 0;
}

/* The unit's tensor that is computed with in FP32 although the weights are bf16: hi and lo, beside the bf16 copy. */
static int load_f32_tensor(const struct mt_binding *b, int unit, char *dst, char *staged, struct mt_err *err)
{
    const struct mt_tensor *t = mt_unit_f32_tensor(b->layout, (size_t)unit, b->dtype);
    struct mt_range_planes k = mt_device_planes(b->layout, t ? t->kind : MT_RANGE_FROZEN);
    if (!t)
        return 0;
    char *to = dst + mt_unit_f32_at(b->layout, (size_t)unit, b->dtype);
    const char *hi = mt_plane_view(b, (size_t)unit, k.hi, 0, NULL, staged).data + 2 * t->at;
    int rc = load_half(b, to, 0, 0, t->n, hi, err);
    if (rc || k.lo == MT_NO_PLANE)
        return rc;
    return load_half(b, to, 1, 0, t->n, mt_plane_view(b, (size_t)unit, k.lo, 0, NULL, staged).data + 2 * t->at, err);
}

static int join_f32_tensor(const struct mt_binding *b, int unit, char *w, struct mt_err *err)
{
    const struct mt_tensor *t = mt_unit_f32_tensor(b->layout, (size_t)unit, b->dtype);
    if (!t)
        return 0;
    return mt_op_join(b->dev,
                      &(struct mt_join){.buf = w + mt_unit_f32_at(b->layout, (size_t)unit, b->dtype),
                                        .n = mt_align_up(t->n, MT_JOIN_BLOCK),
                                        .no_lo = mt_device_planes(b->layout, t->kind).lo == MT_NO_PLANE},
                      err);
}

/* Is the range in the buffer of the unit's adapters, instead of among its weights? */
static bool is_apart(const struct mt_binding *b, const struct mt_unit *u, const struct mt_range *r)
{
    return b->adapters_stay && u->adapters_alone && r->kind == MT_RANGE_TRAINED;
}

/*
 * Copies ranges to where they are used; packed ones to the place from which they are decoded. A load of a part copies
 * that part of the trained planes; the last one also what is not updated, and what is copied twice.
 */
static int load_weights(const struct mt_binding *b, const struct mt_instr *in, char *dst, char *staged,
                        struct mt_err *err)
{
    int unit = in->unit;
    const struct mt_unit *u = &b->layout->units[unit];
    size_t packed = u->n_in_planes[MT_RANGE_PACKED], n = u->n_in_planes[MT_RANGE_TRAINED];
    size_t end = in->elems ? in->first + in->elems : n;
    struct load load = {b, unit, dst, staged};
    int rc = 0;
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges && !rc; i++) {
        const struct mt_range *r = &b->layout->ranges[i];
        if (is_apart(b, u, r))
            continue;
        if (r->kind == MT_RANGE_TRAINED)
            rc = load_part(&load, r, in->first, end, err);
        else if (r->kind != MT_RANGE_PACKED && end == n)
            rc = load_range(&load, r, 0, r->n, err);
    }
    if (rc || end < n)
        return rc;
    rc = load_f32_tensor(b, unit, dst, staged, err);
    if (rc || !packed)
        return rc;
    return copy_flat(b, MT_STREAM_H2D, dst + mt_unit_landing(b->layout, (size_t)unit, b->dtype),
                     mt_plane_view(b, (size_t)unit, MT_PLANE_PACKED, 0, NULL, staged).data, packed, err);
}

/* The unit's trained planes, as they are; joined later in f32. */
static int load_adapters(const struct mt_binding *b, int unit, char *dst, char *staged, struct mt_err *err)
{
    struct mt_range_planes k = mt_range_planes(MT_RANGE_TRAINED);
    size_t n = b->layout->units[unit].n_in_planes[MT_RANGE_TRAINED];
    const char *hi = mt_plane_view(b, (size_t)unit, k.hi, 0, NULL, staged).data;
    if (b->dtype == MT_BF16)
        return copy_flat(b, MT_STREAM_H2D, dst, hi, 2 * n, err);
    int rc = load_half(b, dst, 0, 0, n, hi, err);
    return rc ? rc : load_half(b, dst, 1, 0, n, mt_plane_view(b, (size_t)unit, k.lo, 0, NULL, staged).data, err);
}

static int join_adapters(const struct mt_binding *b, int unit, char *w, struct mt_err *err)
{
    size_t n = b->layout->units[unit].n_in_planes[MT_RANGE_TRAINED];
    return mt_op_join(b->dev, &(struct mt_join){w, mt_align_up(n, MT_JOIN_BLOCK)}, err);
}

static int zero_lo(const struct mt_binding *b, char *w, size_t first, size_t n, struct mt_err *err)
{
    const size_t block = MT_JOIN_BLOCK;
    char *lo = w + first / block * 4 * block + 2 * block + 2 * (first % block);
    return n ? mt_op_zero(b->dev, &(struct mt_zero){lo, 2 * n}, err) : 0;
}

/* Joins hi and lo in each block. Ranges without lo: zeros for lo in blocks that they share with other ranges; blocks of
 * their own are widened from hi. Blocks with only packed ranges, or adapters that are not there, are skipped. */
static int join_weights(const struct mt_binding *b, int unit, char *w, struct mt_err *err)
{
    const struct mt_unit *u = &b->layout->units[unit];
    const size_t block = MT_JOIN_BLOCK, bytes = 4 * block;
    size_t done = 0;
    int rc = 0;
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges && !rc; i++) {
        const struct mt_range *r = &b->layout->ranges[i];
        size_t first = mt_align_up(r->first, block), end = (r->first + r->n) / block * block;
        bool empty = r->kind == MT_RANGE_PACKED || is_apart(b, u, r);
        if ((!empty && mt_range_planes(r->kind).lo != MT_NO_PLANE) || (empty && end <= first))
            continue;
        if (empty) {
            rc = mt_op_join(b->dev, &(struct mt_join){w + done / block * bytes, first - done}, err);
            done = end;
            continue;
        }
        rc = zero_lo(b, w, r->first, MT_MIN(first, r->first + r->n) - r->first, err);
        if (!rc && end >= first)
            rc = zero_lo(b, w, end, r->first + r->n - end, err);
        if (rc || end <= first)
            continue;
        rc = mt_op_join(b->dev, &(struct mt_join){w + done / block * bytes, first - done}, err);
        if (!rc)
            rc = mt_op_join(b->dev, &(struct mt_join){w + first / block * bytes, end - first, .no_lo = true}, err);
        done = end;
    }
    size_t plain = mt_align_up(mt_unit_plain_end(b->layout, (size_t)unit), block);
    if (rc || plain <= done)
        return rc;
    return mt_op_join(b->dev, &(struct mt_join){w + done / block * bytes, plain - done}, err);
}

/* Converts loaded weights to the form in which they are used: joined, decoded and encoded. */
static int prepare_weights(const struct mt_binding *b, int unit, char *w, struct mt_err *err)
{
    int rc = b->dtype == MT_F32 ? join_weights(b, unit, w, err) : join_f32_tensor(b, unit, w, err);
    return rc ?: mt_unit_decode(b->layout, (size_t)unit, b->dtype, w, b->dev, err)
              ?: mt_model_encode(b->model, (size_t)unit, w, err);
}

/* Copies the gradient's trained ranges to the host, contiguously. */
static int store_gradient(const struct mt_binding *b, int unit, char *dst, const char *src, struct mt_err *err)
{
    const struct mt_unit *u = &b->layout->units[unit];
    size_t size = mt_dtype_size(b->grad_dtype);
    int rc = 0;
    for (const struct mt_range *r = &b->layout->ranges[u->first_range], *end = r + u->n_ranges; r < end && !rc; r++)
        if (r->kind == MT_RANGE_TRAINED)
            rc = copy_flat(b, MT_STREAM_D2H, dst + r->at * size, src + r->grad * size, r->n * size, err);
    return rc;
}

/* Copies the rows of the step's tokens to the beginning of the plane: an UNPACK moves them later. */
static int store_rows(const struct mt_binding *b, const struct mt_instr *in, const char *src, struct mt_err *err)
{
    return copy_flat(b, MT_STREAM_D2H, mt_plane(b->planes, (size_t)in->unit, MT_PLANE_GRAD), src,
                     mt_model_used_rows(b->model).n * in->row_bytes, err);
}

/* Whether the gradient's update follows in this step: it needs the sums of its squares. */
static bool is_for_ring(const struct mt_program *prog, const struct mt_instr *in)
{
    return in->n_operands > 1 && prog->objects[in->operand[1].object].kind == MT_OBJ_GRAD_RING;
}

/* Copies the unit's states that the device reads, to or from its planes. */
static int copy_moments(const struct mt_binding *b, const struct mt_instr *in, char *buf, struct mt_err *err)
{
    struct mt_moment_plane plane[MT_MAX_STATES];
    size_t n = mt_unit_moment_planes(b->layout, (size_t)in->unit, plane);
    bool load = in->op == MT_OP_LOAD;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        char *home = mt_plane(b->planes, (size_t)in->unit, plane[i].kind), *at = buf + plane[i].at;
        rc = load ? copy_flat(b, MT_STREAM_H2D, at, home, plane[i].bytes, err)
                  : copy_flat(b, MT_STREAM_D2H, home, at, plane[i].bytes, err);
    }
    return rc;
}

/* The first blocks of a cache, as many as the micro-batch's documents have from before, to the device; or what these have
 * begun or gone on with, home. */
static int copy_cache(const struct mt_binding *b, const struct mt_instr *in, const struct mt_object *o, char *buf,
                      struct mt_err *err)
{
    const struct mt_batch *of = b->batch;
    const struct mt_cache_shape *s = &of->cache;
    int k = o->pool - MT_POOL_CACHE, rc = 0;
    size_t bytes = o->bytes / s->n[k], end = 0;
    if (o->resident) /* it begins empty, and has no home */
        return 0;
    char *home = b->spill + o->spill;
    for (size_t d = 0; d < of->n_docs && !rc; d++) {
        size_t past = (size_t)of->past[d], new = (size_t)(of->cu_seqlens[d + 1] - of->cu_seqlens[d]);
        bool load = in->op == MT_OP_LOAD;
        size_t last = (load ? past : past + new - 1) / s->block, first = last - MT_MIN(last, s->ld[k] - 1);
        for (size_t i = load ? first : MT_MAX(first, past / s->block); i <= last && !rc; i++) {
            size_t at = (size_t)of->table[k][d * s->ld[k] + i % s->ld[k]];
            end = past ? MT_MAX(end, at + 1) : end;
            if (!load)
                rc = copy_flat(b, MT_STREAM_D2H, home + at * bytes, buf + at * bytes, bytes, err);
        }
    }
    return rc || in->op != MT_OP_LOAD || !end ? rc : copy_flat(b, MT_STREAM_H2D, buf, home, end * bytes, err);
}

/* Copies between a device buffer and the host: spill memory, a plane, or a buffer of host staging. */
static int submit_copy(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                       struct mt_err *err)
{
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    void *buf = buffer_of(b, prog, &in->operand[0]);
    char *staged = in->n_operands > 1 ? buffer_of(b, prog, &in->operand[1]) : NULL;
    if (o->kind == MT_OBJ_CACHE)
        return copy_cache(b, in, o, buf, err);
    switch (in->op) {
    case MT_OP_LOAD:
        if (mt_kinds[o->kind].returns)
            return copy_moments(b, in, buf, err);
        if (o->kind == MT_OBJ_WEIGHTS)
            return load_weights(b, in, buf, staged, err);
        if (o->kind == MT_OBJ_ADAPTERS)
            return load_adapters(b, o->unit, buf, staged, err);
        return copy_flat(b, MT_STREAM_H2D, buf, staged ? staged : b->spill + o->spill, o->bytes, err);
    case MT_OP_STORE:
        if (mt_kinds[o->kind].returns)
            return copy_moments(b, in, buf, err);
        return copy_flat(b, MT_STREAM_D2H, staged ? staged : b->spill + o->spill, buf, o->bytes, err);
    default: /* MT_OP_STORE_GRAD */
        if (in->row_bytes)
            return store_rows(b, in, buf, err);
        return store_gradient(b, o->unit, staged ? staged : mt_plane(b->planes, (size_t)o->unit, MT_PLANE_GRAD),
                              buf, err);
    }
}

static int submit_head(const struct mt_binding *b, const struct mt_instr *in, const struct roles *r,
                       struct mt_err *err)
{
    bool tied = b->layout->tied;
    struct mt_model_head a = {
        .mb = (size_t)in->mb,
        .w = r->of[MT_ROLE_WEIGHTS],
        .table = r->of[tied ? MT_ROLE_TABLE : MT_ROLE_WEIGHTS],
        .x = r->of[MT_ROLE_X],
        .dx = r->of[MT_ROLE_DX],
        .g = r->of[MT_ROLE_GRAD],
        .g_table = r->of[tied ? MT_ROLE_TABLE_GRAD : MT_ROLE_GRAD],
        .adapters = r->of[MT_ROLE_ADAPTERS],
        .first = r->begins[MT_ROLE_GRAD],
        .first_table = r->begins[tied ? MT_ROLE_TABLE_GRAD : MT_ROLE_GRAD],
    };
    return mt_model_head(b->model, &a, err);
}

static struct mt_unit_run unit_run(const struct mt_binding *b, const struct mt_instr *in, const struct roles *r)
{
    struct mt_unit_run run = {.unit = (size_t)in->unit, .mb = (size_t)in->mb, .first = r->begins[MT_ROLE_GRAD],
                              .cast_dtype = b->grad_dtype};
    memcpy(run.at, r->of, sizeof(run.at));
    return run;
}

/* Casts to a buffer of its own, or in place. If the FP32 gradient is written beside that, it takes the packed rows. */
static int cast_gradient(const struct mt_binding *b, const struct mt_unit_run *run, bool compacts, struct mt_err *err)
{
    void *g = run->at[MT_ROLE_GRAD], *cast = run->at[MT_ROLE_CAST];
    int rc = run->at[MT_ROLE_MOMENTS] ? mt_model_direct(b->model, run, err) : 0;
    if (!rc)
        rc = mt_model_grad_cast(b->model, run->unit, g, cast ? cast : g, b->grad_dtype, err);
    return rc || !compacts ? rc : mt_model_compact_rows(b->model, cast, b->grad_dtype, g, err);
}

/* A pair of buffers of PERTURB: weights as they were loaded, or adapters alone, and what they become. */
struct perturbed {
    const struct mt_object *o; /* of the first */
    const char *from;
    char *to;
    struct mt_perturb noise; /* of a group: all but what is a tensor's */
};

/* The trained tensors of a range, which lies at element `at` of the buffers. */
static int perturb_range(const struct mt_binding *b, const struct perturbed *p, const struct mt_range *r, size_t at,
                         struct mt_err *err)
{
    const size_t unit = (size_t)p->o->unit, wide = mt_unit_f32_at(b->layout, unit, b->dtype);
    const struct mt_unit *u = &b->layout->units[unit];
    const struct mt_tensor *f32 = mt_unit_f32_tensor(b->layout, unit, b->dtype);
    struct mt_perturb a = p->noise;
    int rc = 0;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &b->layout->tensors[i];
        size_t byte = (at + t->at - r->at) * mt_dtype_size(b->dtype);
        if (t->kind != r->kind || t->at < r->at || t->at >= r->at + r->n)
            continue;
        a.n = t->n;
        a.stream = mt_noise_stream(b->perturbing ? b->perturbing->step : 0, t->number);
        a.limit = b->perturbing ? mt_noise_limit(b->perturbing->numerics, b->planes, t) : MT_NOISE_ALL;
        for (int twice = 0; !rc && twice <= (t == f32); twice++) { /* again, its copy in FP32 */
            a.dtype = twice ? MT_F32 : b->dtype;
            a.x = p->from + (twice ? wide : byte);
            a.y = p->to + (twice ? wide : byte);
            rc = mt_op_perturb(b->dev, &a, err);
        }
    }
    return rc;
}

/* Copies the buffer, if it has another place, and adds noise to what is trained of it, if the layer takes any. */
static int perturb_buffer(const struct mt_binding *b, const struct perturbed *p, struct mt_err *err)
{
    const struct mt_unit *u = &b->layout->units[p->o->unit];
    const bool adapters = p->o->kind == MT_OBJ_ADAPTERS;
    const struct mt_cast copy = {p->o->bytes / sizeof(float), MT_F32, MT_F32, p->from, p->to};
    int rc = p->to == p->from ? 0 : mt_op_cast(b->dev, &copy, err);
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges && p->noise.scale != 0 && !rc; i++) {
        const struct mt_range *r = &b->layout->ranges[i];
        size_t at = adapters ? r->at : mt_unit_range_at(b->layout, (size_t)p->o->unit, r, b->dtype);
        if (r->kind == MT_RANGE_TRAINED && adapters == is_apart(b, u, r))
            rc = perturb_range(b, p, r, at, err);
    }
    return rc;
}

/* What a unit's weights get in a group: all but what is a tensor's. Of no step where it is metered. */
static struct mt_perturb noise_of(const struct mt_binding *b, int unit, size_t group)
{
    const struct mt_perturbing *of = b->perturbing;
    if (!of)
        return (struct mt_perturb){.scale = 1, .sample = group / 2};
    const struct mt_numerics *n = of->numerics;
    size_t variant = of->variant + group;
    bool takes = mt_mezo_takes(n, of->step, b->layout->units[unit].layer, (int)b->layout->cfg.n_layers);
    return (struct mt_perturb){.scale = !takes ? 0 : (float)(variant % 2 ? -n->mezo.eps : n->mezo.eps),
                               .kind = n->mezo.noise, .seed = n->seed, .sample = variant / 2};
}

static int perturb(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err)
{
    int rc = 0;
    for (int k = 0; k < in->n_operands && !rc; k += 2) {
        const struct mt_object *o = &prog->objects[in->operand[k].object];
        const struct perturbed p = {o, buffer_of(b, prog, &in->operand[k]), buffer_of(b, prog, &in->operand[k + 1]),
                                    noise_of(b, o->unit, mt_group_of(prog->groups, (size_t)in->mb))};
        rc = perturb_buffer(b, &p, err);
    }
    return rc;
}

/* Makes what was loaded to what is computed with. */
static int join(const struct mt_binding *b, const struct mt_object *o, char *w, struct mt_err *err)
{
    bool adapters = o->kind == MT_OBJ_ADAPTERS, as_loaded = adapters && b->dtype != MT_F32;
    int rc = as_loaded ? 0 : (adapters ? join_adapters : prepare_weights)(b, o->unit, w, err);
    return rc || !b->noisy_loads
               ? rc
               : perturb_buffer(b, &(struct perturbed){o, w, w, noise_of(b, o->unit, 0)}, err);
}

static int submit_compute(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                          struct mt_err *err)
{
    if (in->op == MT_OP_BALANCE) /* of no object */
        return mt_model_balance(b->model, err);
    struct roles r = find_roles(b, prog, in);
    struct mt_unit_run run = unit_run(b, in, &r);
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    void *own = buffer_of(b, prog, &in->operand[0]);
    switch (in->op) {
    case MT_OP_JOIN:
        return join(b, o, own, err);
    case MT_OP_ZERO:
        return mt_op_zero(b->dev, &(struct mt_zero){own, o->bytes}, err);
    case MT_OP_POISON:
        mt_device_poison(b->dev, own, o->bytes);
        return 0;
    case MT_OP_PERTURB:
        return perturb(b, prog, in, err);
    case MT_OP_EMBED:
    case MT_OP_FORWARD:
        return mt_model_forward(b->model, &run, err);
    case MT_OP_LOSSES:
    case MT_OP_HEAD:
        return submit_head(b, in, &r, err);
    case MT_OP_BACKWARD:
    case MT_OP_EMBED_BWD:
        return mt_model_backward(b->model, &run, err);
    case MT_OP_ADD_GROUP:
        return mt_op_add(b->dev, &(struct mt_add){.n = o->bytes / sizeof(float), .dtype = MT_F32, .a = own,
                                                  .b = buffer_of(b, prog, &in->operand[1]), .out = own}, err);
    case MT_OP_GRAD_CAST:
        return cast_gradient(b, &run, run.at[MT_ROLE_CAST] && r.writes[MT_ROLE_GRAD], err);
    default:
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "instruction %s on the compute queue",
                       mt_opcodes[in->op].name);
    }
}

int mt_exec_submit(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err)
{
    const char *op = mt_opcodes[in->op].name, *unit = b->layout->units[in->unit].name;
    int rc;
    mt_device_range_begin(b->dev, "%s %s, %d", op, unit, in->mb);
    if (in->op == MT_OP_STATS)
        rc = mt_model_fetch_stats(b->model, prog->n_micro, prog->backward, b->n_late, err);
    else if (in->queue == MT_Q_COMPUTE)
        rc = submit_compute(b, prog, in, err);
    else
        rc = submit_copy(b, prog, in, err);
    if (!rc && in->op == MT_OP_STORE_GRAD && is_for_ring(prog, in))
        rc = mt_model_fetch_partials(b->model, (size_t)in->unit, err);
    mt_device_range_end(b->dev);
    if (rc)
        mt_fail_prefix(err, rc, "%s of %s, micro-batch %d", op, unit, in->mb);
    return rc;
}
