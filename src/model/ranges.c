/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "model/packing.h"

enum { PIECE = 1024 }; /* elements of a tensor that are split or joined at once */

/* The planes of each kind of range, and what they are called. */
static const struct {
    struct mt_range_planes planes;
    const char *hi, *lo;
} of_range[MT_N_RANGE_KINDS] = {
    [MT_RANGE_TRAINED] = {{MT_PLANE_HI, MT_PLANE_LO}, "weights (hi)", "weights (lo)"},
    [MT_RANGE_FROZEN] = {{MT_PLANE_FROZEN, MT_NO_PLANE}, "frozen weights (small)", NULL},
    [MT_RANGE_IN_FILE] = {{MT_PLANE_IN_FILE, MT_NO_PLANE}, "frozen weights", NULL},
    [MT_RANGE_FROZEN_WIDE] = {{MT_PLANE_FROZEN_HI, MT_PLANE_FROZEN_LO}, "frozen weights (hi)", "frozen weights (lo)"},
    [MT_RANGE_IN_FILE_WIDE] = {{MT_PLANE_IN_FILE_HI, MT_PLANE_IN_FILE_LO}, "frozen weights (large, hi)",
                               "frozen weights (large, lo)"},
    [MT_RANGE_PACKED] = {{MT_PLANE_PACKED, MT_NO_PLANE}, "frozen weights (packed)", NULL},
};

void mt_plane_descs(struct mt_plane_desc desc[MT_N_PLANES], const struct mt_optimizer *optimizer, enum mt_master master,
                    enum mt_dtype grad)
{
    const size_t half = mt_dtype_size(MT_BF16);
    for (int k = 0; k < MT_N_PLANES; k++)
        desc[k] = (struct mt_plane_desc){.use = NULL};
    for (int r = 0; r < MT_N_RANGE_KINDS; r++) {
        struct mt_range_planes k = of_range[r].planes;
        size_t lo = r == MT_RANGE_TRAINED ? mt_master_lo_bytes(master) : half;
        desc[k.hi] = (struct mt_plane_desc){.use = of_range[r].hi, .role = MT_ROLE_WEIGHT, .range = r, .dtype = MT_BF16,
                                            .block = 1, .block_bytes = r == MT_RANGE_PACKED ? 1 : half};
        if (k.lo != MT_NO_PLANE && lo)
            desc[k.lo] = (struct mt_plane_desc){.use = of_range[r].lo, .role = MT_ROLE_WEIGHT, .range = r,
                                                .dtype = MT_BF16, .block = 1, .block_bytes = lo};
    }
    if (!optimizer)
        return;
    for (int i = 0; i < optimizer->n_states; i++) {
        const struct mt_optimizer_state *s = &optimizer->state[i];
        desc[MT_PLANE_STATE + i] = (struct mt_plane_desc){
            .use = s->use, .saved_as = s->name, .role = MT_ROLE_STATE, .range = MT_RANGE_TRAINED, .dtype = s->dtype,
            .block = s->apart ? 1 : s->block, .block_bytes = s->apart ? 1 : s->block_bytes, .bytes = s->bytes,
            .apart = s->apart, .on_device = s->on_device};
    }
    if (!optimizer->zeroth)
        desc[MT_PLANE_GRAD] = (struct mt_plane_desc){"gradients", NULL, MT_ROLE_GRADIENT, MT_RANGE_TRAINED, grad, 1,
                                                     mt_dtype_size(grad)};
}

size_t mt_piece_align(const struct mt_plane_desc desc[MT_N_PLANES])
{
    size_t align = MT_PIECE_ALIGN;
    for (int k = 0; k < MT_N_PLANES; k++)
        while (desc[k].block && desc[k].range == MT_RANGE_TRAINED && !desc[k].apart &&
               mt_plane_desc_bytes(&desc[k], align) % MT_DISK_ALIGN)
            align *= 2;
    return align;
}

static mt_plane_bits bit_of(enum mt_plane_kind k)
{
    return k == MT_NO_PLANE ? 0 : (mt_plane_bits)1 << k;
}

struct mt_range_planes mt_range_planes(enum mt_range_kind range)
{
    return of_range[range].planes;
}

struct mt_range_planes mt_device_planes(const struct mt_layout *l, enum mt_range_kind range)
{
    struct mt_range_planes k = of_range[range].planes;
    if (range == MT_RANGE_TRAINED && l->master != MT_MASTER_F32)
        k.lo = MT_NO_PLANE;
    return k;
}

mt_plane_bits mt_loaded_planes(enum mt_dtype dtype)
{
    mt_plane_bits loaded = 0;
    for (int r = 0; r < MT_N_RANGE_KINDS; r++) {
        struct mt_range_planes k = of_range[r].planes;
        loaded |= bit_of(k.hi) | (dtype == MT_F32 ? bit_of(k.lo) : 0);
    }
    return loaded;
}

mt_plane_bits mt_unit_loaded_planes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    const struct mt_tensor *t = mt_unit_f32_tensor(l, unit, dtype);
    enum mt_plane_kind lo = t ? mt_device_planes(l, t->kind).lo : MT_NO_PLANE;
    return mt_loaded_planes(dtype) | bit_of(lo);
}

mt_plane_bits mt_layout_loaded_planes(const struct mt_layout *l, enum mt_dtype dtype)
{
    mt_plane_bits loaded = 0;
    for (size_t u = 0; u < l->n_units; u++)
        loaded |= mt_unit_loaded_planes(l, u, dtype);
    return loaded;
}

mt_plane_bits mt_frozen_planes(void)
{
    mt_plane_bits frozen = 0;
    for (int r = 0; r < MT_N_RANGE_KINDS; r++)
        frozen |= r == MT_RANGE_TRAINED ? 0 : bit_of(of_range[r].planes.hi) | bit_of(of_range[r].planes.lo);
    return frozen;
}

mt_plane_bits mt_unit_file_planes(const struct mt_unit *u)
{
    const mt_plane_bits plain = 1 << MT_PLANE_IN_FILE | 1 << MT_PLANE_IN_FILE_HI | 1 << MT_PLANE_IN_FILE_LO;
    return plain | (u->packed_in_files ? (mt_plane_bits)1 << MT_PLANE_PACKED : 0);
}

bool mt_plane_is_loaded(enum mt_plane_kind k, enum mt_dtype dtype)
{
    return k != MT_NO_PLANE && mt_loaded_planes(dtype) >> k & 1;
}

size_t mt_unit_n_elems(const struct mt_unit *u, const struct mt_plane_desc desc[MT_N_PLANES], enum mt_plane_kind k)
{
    if (desc[k].on_device && !u->has_state[k - MT_PLANE_STATE])
        return 0;
    return !desc[k].block ? 0 : desc[k].apart ? u->n_apart[k - MT_PLANE_STATE] : u->n_in_planes[desc[k].range];
}

struct mt_state_shape mt_tensor_state_shape(const struct mt_tensor *t)
{
    size_t cols = t->n_dims > 1 ? (size_t)t->shape[1] : 1;
    return (struct mt_state_shape){.n_dims = t->n_dims, .matrix = t->matrix, .rows = t->n / cols, .cols = cols,
                                   .n = t->n, .rank = t->rank};
}

static size_t state_bytes(const struct mt_tensor *t, size_t (*bytes)(const struct mt_state_shape *))
{
    struct mt_state_shape s = mt_tensor_state_shape(t);
    return bytes(&s);
}

struct mt_tensor_span mt_tensor_span(const struct mt_tensor *t, const struct mt_plane_desc *d, enum mt_plane_kind k)
{
    struct mt_tensor_span all = {mt_plane_desc_bytes(d, t->at), mt_plane_desc_bytes(d, t->n)}, none = {0};
    if (!d->block || d->range != t->kind)
        return none;
    if (d->apart)
        return (struct mt_tensor_span){t->apart[k - MT_PLANE_STATE], state_bytes(t, d->bytes)};
    return d->bytes && !state_bytes(t, d->bytes) ? none : all;
}

static struct mt_plane_elems unit_elems(const struct mt_unit *u, const struct mt_plane_desc desc[MT_N_PLANES])
{
    struct mt_plane_elems e = {{0}};
    for (int k = 0; k < MT_N_PLANES; k++)
        e.n[k] = mt_unit_n_elems(u, desc, (enum mt_plane_kind)k);
    return e;
}

int mt_layout_plane_params(struct mt_plane_set_params *out, const struct mt_layout *l,
                           const struct mt_optimizer *optimizer, enum mt_dtype grad, struct mt_err *err)
{
    struct mt_plane_elems *elems = mt_calloc(l->n_units, sizeof(*elems));
    if (!elems)
        return mt_fail_nomem(err, "the planes", l->n_units * sizeof(*elems));
    *out = (struct mt_plane_set_params){.n_units = l->n_units, .elems = elems};
    mt_plane_descs(out->desc, optimizer, l->master, grad);
    for (size_t u = 0; u < l->n_units; u++)
        elems[u] = unit_elems(&l->units[u], out->desc);
    return 0;
}

static bool all_zero(const uint16_t *x, size_t n)
{
    uint16_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= x[i];
    return !any;
}

/* Bytes of lo of the tensor's elements. */
static size_t lo_bytes(const mt_plane_set *planes, const struct mt_tensor *t)
{
    enum mt_plane_kind lo = mt_range_planes(t->kind).lo;
    const struct mt_plane_desc *d = lo == MT_NO_PLANE ? NULL : mt_plane_desc_of(planes, lo);
    return d && d->block ? d->block_bytes : 0;
}

/* hi and lo of 32 bits, to those of 24 bits. */
static int round_24bit(const struct mt_tensor *t, uint16_t *hi, const uint16_t *lo, uint8_t *lo8, size_t n,
                       struct mt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        mt_master_split24(mt_f32_bits(mt_master_join(hi[i], lo[i])), &hi[i], &lo8[i]);
        if ((hi[i] & 0x7fff) >= 0x7f80)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE, "tensor \"%s\" has a weight that is too large for a master of 24 "
                           "bits: set optimizer.master = f32", t->name);
    }
    return 0;
}

static int write_piece(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n, uint16_t *hi,
                       const uint16_t *lo, struct mt_err *err)
{
    struct mt_range_planes k = mt_range_planes(t->kind);
    uint8_t lo8[PIECE];
    size_t bytes = lo_bytes(planes, t);
    int rc = bytes == sizeof(*lo8) ? round_24bit(t, hi, lo, lo8, n, err) : 0;
    rc = rc ?: mt_planes_write(planes, t->unit, k.hi, t->at + first, n, hi, err);
    if (rc)
        return rc;
    if (bytes)
        return mt_planes_write(planes, t->unit, k.lo, t->at + first, n,
                               bytes == sizeof(*lo8) ? (const void *)lo8 : (const void *)lo, err);
    return all_zero(lo, n) || t->kind == MT_RANGE_TRAINED ? 0
                           : mt_fail(err, MT_ERR_INPUT, -ERANGE,
                                     "tensor \"%s\" is frozen and bf16 in the model's folder, but the weights to be loaded "
                                     "are not exact in bf16: set model.path to the model that they come from", t->name);
}

int mt_tensor_write_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n,
                            const float *masters, struct mt_err *err)
{
    uint16_t hi[PIECE], lo[PIECE];
    int rc = 0;
    for (size_t at = 0; at < n && !rc; at += PIECE) {
        size_t k = MT_MIN((size_t)PIECE, n - at);
        for (size_t i = 0; i < k; i++)
            mt_master_split(masters[at + i], &hi[i], &lo[i]);
        rc = write_piece(planes, t, first + at, k, hi, lo, err);
    }
    return rc;
}

int mt_tensor_read_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n, float *masters,
                           struct mt_err *err)
{
    uint16_t hi[PIECE], lo[PIECE] = {0};
    uint8_t lo8[PIECE];
    struct mt_range_planes kind = mt_range_planes(t->kind);
    size_t bytes = lo_bytes(planes, t);
    bool narrow = bytes == sizeof(*lo8);
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = MT_MIN((size_t)PIECE, n - at);
        int rc = mt_planes_read(planes, t->unit, kind.hi, t->at + first + at, k, hi, err);
        if (!rc && bytes)
            rc = mt_planes_read(planes, t->unit, kind.lo, t->at + first + at, k,
                                narrow ? (void *)lo8 : (void *)lo, err);
        if (rc)
            return rc;
        for (size_t i = 0; narrow && i < k; i++)
            lo[i] = (uint16_t)(lo8[i] << 8);
        for (size_t i = 0; i < k; i++)
            masters[at + i] = mt_master_join(hi[i], lo[i]);
    }
    return 0;
}

/* --- dividing units into ranges ---------------------------------------------------------------- */

static enum mt_range_kind kind_of(const struct mt_tensor *t)
{
    return t->trainable  ? MT_RANGE_TRAINED
           : t->packed   ? MT_RANGE_PACKED
           : !t->is_bf16 ? (t->in_file ? MT_RANGE_IN_FILE_WIDE : MT_RANGE_FROZEN_WIDE)
           : t->in_file  ? MT_RANGE_IN_FILE
                         : MT_RANGE_FROZEN;
}

/* Elements at multiples of which tensors of that kind begin. */
static size_t grain_of(const struct mt_layout *l, enum mt_range_kind kind)
{
    const struct mt_optimizer *o = kind == MT_RANGE_TRAINED ? l->optimizer : NULL;
    return o && o->grain != MT_GRAIN_TENSOR ? o->grain : 1;
}

/* The next place at or after `cursor` with the alignment of element `first` of the unit; or between two grains, if that
 * is in the middle of one. */
static size_t place(size_t cursor, size_t first, size_t grain)
{
    size_t at = mt_align_up(cursor, MT_PARAM_ALIGN) + first % MT_PARAM_ALIGN;
    return at % grain ? mt_align_up(cursor, MT_MAX((size_t)MT_PARAM_ALIGN, grain)) : at;
}

/* Gives the tensor its bytes in the planes of states that are kept apart. */
static void place_apart(const struct mt_layout *l, struct mt_unit *u, struct mt_tensor *t)
{
    enum { ALIGN = 64 };
    for (int i = 0; t->trainable && l->optimizer && i < l->optimizer->n_states; i++) {
        const struct mt_optimizer_state *s = &l->optimizer->state[i];
        t->apart[i] = u->n_apart[i];
        u->has_state[i] |= !s->bytes || state_bytes(t, s->bytes);
        u->n_apart[i] += s->apart ? mt_align_up(state_bytes(t, s->bytes), (size_t)ALIGN) : 0;
    }
}

/* Places the gradients of parameters with a trained tensor, one after the other. */
static void place_gradients(struct mt_layout *l, struct mt_unit *u)
{
    size_t cursor = 0;
    for (struct mt_tensor *t = &l->tensors[u->first_tensor], *end = t + u->n_tensors; t < end; t++) {
        struct mt_param *p = t->param;
        if (!p->trainable)
            continue;
        if (t->first == p->at) {
            p->grad = mt_align_up(cursor, MT_PARAM_ALIGN);
            cursor = p->grad + p->n;
        }
        t->grad = p->grad + (t->first - p->at);
    }
    u->n_grad = mt_align_up(cursor, MT_JOIN_BLOCK);
}

/* Begins a range at the tensor, or adds it to the unit's last one. */
static void add_to_range(struct mt_layout *l, struct mt_unit *u, struct mt_tensor *t, size_t cursor)
{
    struct mt_range *r = u->n_ranges ? &l->ranges[l->n_ranges - 1] : NULL;
    size_t grain = grain_of(l, t->kind);
    bool cut = r && r->kind == t->kind && (r->at + (t->first - r->first)) % grain;
    if (!r || r->kind != t->kind || r->learner != t->learner || cut) {
        r = &l->ranges[l->n_ranges++];
        u->n_ranges++;
        *r = (struct mt_range){.kind = t->kind, .learner = t->learner, .first = t->first,
                               .at = place(cursor, t->first, grain), .grad = t->grad};
    }
    u->adapters_alone &= !(cut && t->adapter && t->first != t->param->at);
    r->n = t->first + t->n - r->first;
    t->at = r->at + (t->first - r->first);
    if (t->adapter && t->first == t->param->at)
        t->param->plane = t->at;
}

/* A unit whose tensors are all alike keeps its own order and padding in every plane. */
static void divide_unit(struct mt_layout *l, struct mt_unit *u)
{
    size_t end[MT_N_RANGE_KINDS] = {0};
    u->first_range = l->n_ranges;
    u->n_ranges = 0;
    u->wide_file_bytes = 0;
    u->adapters_alone = u->trainable && u->kind != MT_UNIT_EMBED;
    memset(u->n_apart, 0, sizeof(u->n_apart));
    memset(u->has_state, 0, sizeof(u->has_state));
    place_gradients(l, u);
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        struct mt_tensor *t = &l->tensors[i];
        t->kind = kind_of(t);
        add_to_range(l, u, t, end[t->kind]);
        place_apart(l, u, t);
        end[t->kind] = t->at + t->n;
        u->adapters_alone &= t->adapter ? !t->adapter->merged : !t->trainable;
        u->wide_file_bytes += t->kind == MT_RANGE_IN_FILE_WIDE ? t->n * t->file_elem : 0;
    }
    if (u->n_ranges == 1) {
        l->ranges[u->first_range].n = u->n_elems;
        end[l->ranges[u->first_range].kind] = u->n_elems;
    }
    for (int k = 0; k < MT_N_RANGE_KINDS; k++)
        u->n_in_planes[k] = mt_align_up(end[k], MT_RANGE_ALIGN);
    u->n_in_planes[MT_RANGE_PACKED] = mt_align_up(mt_packing_lay_out(l, u), MT_RANGE_ALIGN);
    u->packed_in_files = u->n_in_planes[MT_RANGE_PACKED] > 0;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++)
        u->packed_in_files &= l->tensors[i].kind != MT_RANGE_PACKED || l->tensors[i].in_file;
    u->codes_stay = u->per_step && u->n_in_planes[MT_RANGE_PACKED];
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++)
        u->codes_stay &= !l->tensors[i].adapter;
    l->codes_stay |= u->codes_stay;
}

/* The parts of a unit without weights of its own have the parameters of another's. */
static void take_params(struct mt_layout *l, const struct mt_unit *u)
{
    const struct mt_part *of = &l->parts[l->units[u->weights].first_part];
    for (struct mt_part *p = &l->parts[u->first_part], *end = p + u->n_parts; p < end; p++, of++) {
        if (p == of)
            return;
        memcpy(p->param, of->param, sizeof(p->param));
        if (p->n_experts)
            memcpy(p->expert, of->expert, (size_t)p->n_experts * sizeof(*p->expert));
    }
}

int mt_layout_set_ranges(struct mt_layout *l, struct mt_err *err)
{
    struct mt_range *ranges = mt_calloc(l->n_tensors, sizeof(*ranges)); /* at most one for each tensor */
    if (!ranges)
        return mt_fail_nomem(err, "the model's ranges", l->n_tensors * sizeof(*ranges));
    free(l->ranges);
    l->ranges = ranges;
    l->n_ranges = 0;
    l->codes_stay = false;
    for (size_t u = 0; u < l->n_units; u++)
        divide_unit(l, &l->units[u]);
    for (size_t u = 0; u < l->n_units; u++)
        take_params(l, &l->units[u]);
    return 0;
}
