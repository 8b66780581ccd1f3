/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/lock.h"
#include "base/mem.h"
#include "engine/state.h"

/* The planes of an update. */
struct views {
    struct mt_plane_view plane[MT_N_PLANES];
    bool own; /* with the gradient of the step under way, else the pending one */
};

static void *element(const mt_engine *e, const struct views *v, int k, size_t i)
{
    const struct mt_plane_desc *d = mt_plane_desc_of(e->p.planes, (enum mt_plane_kind)k);
    return v->plane[k].data + mt_plane_desc_bytes(d, i - v->plane[k].first);
}

/* State i of the tensor from element `first` on, or the tensor's if only devices change it; NULL: it has no such state. */
static void *state_at(const mt_engine *e, const struct views *v, const struct mt_tensor *t, int i, size_t first)
{
    const struct mt_optimizer_state *s = &mt_engine_learner_of(e, t)->numerics.optimizer->state[i];
    int k = MT_PLANE_STATE + i;
    struct mt_tensor_span span =
        mt_tensor_span(t, mt_plane_desc_of(e->p.planes, (enum mt_plane_kind)k), (enum mt_plane_kind)k);
    if (!span.bytes)
        return NULL;
    size_t before = s->on_device ? 0 : (first - t->at) / s->block * s->block_bytes;
    return s->apart ? v->plane[k].data + span.at + before : element(e, v, k, first);
}

/* The update of a learner that is being made. */
static const struct mt_pending *pending_of(const struct mt_learner *l, const struct views *v)
{
    return v->own ? &l->own : &l->pending;
}

/* Whether there is an update of the tensor to make. */
static bool is_due(const mt_engine *e, const struct views *v, const struct mt_tensor *t)
{
    const struct mt_learner *l = mt_engine_learner_of(e, t);
    const struct mt_pending *p = pending_of(l, v);
    bool any = t->trainable && p->any && l->clip[t->unit] >= 0 && !atomic_load(&l->bad);
    const struct mt_layout *all = e->b.layout;
    return any && (!p->along.n ||
                   mt_mezo_takes(&l->numerics, p->step, all->units[t->unit].layer, (int)all->cfg.n_layers));
}

/* Updates elements [first, first + n) of the trained planes, all of tensor t. Returns how many weights are then not
 * finite. */
static uint64_t update_run(const mt_engine *e, const struct views *v, const struct mt_tensor *t, size_t first, size_t n)
{
    const struct mt_learner *l = mt_engine_learner_of(e, t);
    const struct mt_optimizer *o = l->numerics.optimizer;
    const struct mt_pending *pending = pending_of(l, v);
    enum mt_master master = e->b.layout->master;
    void *lo = mt_master_lo_bytes(master) ? element(e, v, MT_PLANE_LO, first) : NULL;
    struct mt_along along = pending->along;
    along.stream = mt_noise_stream(pending->step, t->number);
    along.limit = along.n ? mt_noise_limit(&l->numerics, e->p.planes, t) : 0;
    struct mt_update u = {
        .n = n,
        .master = master,
        .hi = element(e, v, MT_PLANE_HI, first),
        .lo = master == MT_MASTER_F32 ? lo : NULL,
        .lo8 = master == MT_MASTER_24BIT ? lo : NULL,
        .grad = along.n ? NULL : element(e, v, MT_PLANE_GRAD, first),
        .along = along.n ? &along : NULL,
        .grad_dtype = e->p.numerics.grad_dtype,
        .keys = l->keys,
        .lr = pending->lr * t->lr_scale,
        .weight_decay = t->decay ? l->numerics.weight_decay : 0,
        .t = pending->t,
        .t0 = l->t0,
        .clip = l->clip[t->unit],
        .stochastic = l->numerics.rounding == MT_ROUND_STOCHASTIC,
        .seed = l->numerics.seed,
        .tensor = t->number,
        .first = first - t->at,
    };
    for (int i = 0; i < o->n_states; i++)
        u.state[i] = state_at(e, v, t, i, first);
    return o->update(o, &u, e->p.isa);
}

static int fail_update(const mt_engine *e, const struct views *v, const struct mt_tensor *t, uint64_t bad,
                       struct mt_err *err)
{
    unsigned long long update = pending_of(mt_engine_learner_of(e, t), v)->t;
    return mt_fail(err, MT_ERR_TRAINING, -EDOM,
                   "update %llu made %llu weights of %s not finite: lower "
                   "train.learning_rate or raise optimizer.eps",
                   update, (unsigned long long)bad, t->name);
}

int mt_engine_check_learner(const mt_engine *e, size_t learner, struct mt_err *err)
{
    const struct mt_tensor *bad = atomic_load(&e->learner[learner].bad);
    return bad ? mt_fail(err, MT_ERR_TRAINING, -EDOM, "update %llu made weights of %s not finite: lower "
                         "train.learning_rate or raise optimizer.eps",
                         (unsigned long long)e->learner[learner].updates, bad->name)
               : 0;
}

/* --- rows of the embedding, for forward, before its own update ------------------------------------------------ */

enum { SLICE = MT_PIECE_ALIGN };

/* A slice of a row: copies of what its update changes. */
struct slice {
    uint16_t hi[SLICE], lo[SLICE];
    char state[MT_MAX_STATES][SLICE * MT_GATHER_STATE_BYTES];
    char grad[SLICE * sizeof(float)]; /* if it was stored packed */
};

struct gather {
    mt_engine *e;
    const struct mt_tensor *t;
    const struct mt_token_runs *runs;
    size_t cols;
    char *out;
    uint64_t bad; /* atomic */
};

/* Copies elements [first, first + n) of the planes to the slice; *v: views of the copies, and of the gradient. */
static void copy_slice(mt_engine *e, struct slice *s, struct views *v, size_t unit, size_t first, size_t n)
{
    for (int k = 0; k < MT_N_PLANES; k++) {
        char *to = k == MT_PLANE_HI   ? (char *)s->hi
                   : k == MT_PLANE_LO ? (char *)s->lo
                   : k >= MT_PLANE_STATE && k < MT_PLANE_GRAD ? s->state[k - MT_PLANE_STATE] : NULL;
        const struct mt_plane_desc *d = mt_plane_desc_of(e->p.planes, (enum mt_plane_kind)k);
        v->plane[k] = mt_plane_view(&e->b, unit, (enum mt_plane_kind)k, 0, NULL, NULL);
        if (!to || !d->block || d->apart || !v->plane[k].data ||
            (d->role == MT_ROLE_STATE && !mt_engine_is_pending(e)))
            continue;
        memcpy(to, v->plane[k].data + mt_plane_desc_bytes(d, first), mt_plane_desc_bytes(d, n));
        v->plane[k] = (struct mt_plane_view){to, first};
    }
    if (mt_row_gradient_read(e, s->grad, first, n))
        v->plane[MT_PLANE_GRAD] = (struct mt_plane_view){s->grad, first};
}

/* Copies to memory that is read much later, by the device: without reading it into the cache first. */
static void copy_past_cache(char *to, const char *from, size_t n)
{
#ifdef __SSE2__
    for (; n >= sizeof(__m128i) && (uintptr_t)to % sizeof(__m128i) == 0; n -= sizeof(__m128i)) {
        _mm_stream_si128((__m128i *)(void *)to, _mm_loadu_si128((const __m128i *)(const void *)from));
        to += sizeof(__m128i);
        from += sizeof(__m128i);
    }
#endif
    memcpy(to, from, n);
}

/* Writes columns [col, col + n) of a row, as computed with, to all tokens of the run. */
static void write_tokens(const struct gather *g, size_t run, size_t col, const uint16_t *hi, const uint16_t *lo,
                         size_t n)
{
    size_t size = mt_dtype_size(g->e->b.dtype);
    union {
        float wide[SLICE];
        uint16_t half[SLICE];
    } row;
    for (size_t i = 0; size == sizeof(float) && i < n; i++)
        row.wide[i] = mt_master_join(hi[i], lo[i]);
    if (size != sizeof(float))
        memcpy(row.half, hi, n * size);
    mt_embed_scale_row(&g->e->b.layout->cfg, g->e->b.dtype, &row, n);
    for (int32_t i = g->runs->starts[run]; i < g->runs->starts[run + 1]; i++)
        copy_past_cache(g->out + ((size_t)g->runs->order[i] * g->cols + col) * size, (const char *)&row, n * size);
}

/* A row of the table, slice by slice. Slices are cut like pieces, so that states have whole blocks. */
static void gather_row(void *ctx, size_t run, int)
{
    struct gather *g = ctx;
    struct slice s;
    struct views v = {.own = false};
    size_t begin = g->t->at + (size_t)g->runs->ids[run] * g->cols, end = begin + g->cols, last = g->t->at + g->t->n;
    for (size_t at = begin / SLICE * SLICE; at < end; at += SLICE) {
        size_t first = MT_MAX(at, g->t->at), to = MT_MIN(at + SLICE, last);
        copy_slice(g->e, &s, &v, 0, first, to - first);
        uint64_t bad = is_due(g->e, &v, g->t) ? update_run(g->e, &v, g->t, first, to - first) : 0;
        if (bad)
            __atomic_fetch_add(&g->bad, bad, __ATOMIC_RELAXED);
        size_t from = MT_MAX(first, begin), n = MT_MIN(to, end) - from;
        write_tokens(g, run, from - begin, s.hi + (from - first), s.lo + (from - first), n);
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/*
 * The embedding of a micro-batch's tokens, as after the pending update, which is computed here for just their rows and
 * in copies of them: the planes change in their own update, which comes later.
 */
static int gather(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in, struct mt_err *err)
{
    const struct mt_layout *l = e->b.layout;
    struct mt_token_runs runs = mt_model_token_runs(mt_engine_inputs(e), (size_t)in->mb);
    const struct mt_tensor *table = &l->tensors[l->units[in->unit].first_tensor];
    struct gather g = {.e = e, .runs = &runs, .cols = (size_t)l->cfg.hidden, .t = table,
                       .out = e->b.spill + prog->objects[in->operand[0].object].spill};
    mt_pool_run(e->update_pool, gather_row, &g, runs.n);
    return g.bad ? fail_update(e, &(struct views){.own = false}, g.t, g.bad, err) : 0;
}

static char *operand_of(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        enum mt_object_kind kind)
{
    for (int k = 0; k < in->n_operands; k++) {
        const struct mt_object *o = &prog->objects[in->operand[k].object];
        if (o->kind == kind)
            return e->b.buffers[o->pool][in->operand[k].buffer];
    }
    return NULL;
}

/* --- the update of a unit, or of a piece of it ----------------------------------------------------------------- */

struct update {
    const mt_engine *e;
    const struct mt_unit *unit;
    struct views v;
    pthread_mutex_t lock;
    const struct mt_tensor *bad; /* under lock: the first with weights that are not finite, and their number */
    uint64_t n_bad;
    bool corrupt; /* under lock: memory does not hold what the last update left there, at element corrupt_at */
    size_t corrupt_at;
};

static void note_corrupt(struct update *u, size_t first)
{
    MT_LOCKED(&u->lock);
    u->corrupt = true;
    u->corrupt_at = first;
}

static int fail_corrupt(const struct update *u, struct mt_err *err)
{
    const struct mt_tensor *t = &u->e->b.layout->tensors[u->unit->first_tensor], *last = t + u->unit->n_tensors - 1;
    while (t < last && (!t->trainable || t->at + t->n <= u->corrupt_at))
        t++;
    return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                   "weights or states of %s in host memory are not what their last update left there: a bit of the memory has "
                   "changed (is it ECC memory? see megatrain doctor); nothing of it is saved: go on from the last checkpoint "
                   "with --resume", t->name);
}

static void note_bad(struct update *u, const struct mt_tensor *t, uint64_t bad)
{
    if (u->e->n_learners > 1) { /* the others go on: mt_engine_check_learner() */
        atomic_store(&u->e->learner[t->learner].bad, t);
        return;
    }
    MT_LOCKED(&u->lock);
    if (!u->bad || t <= u->bad) {
        u->n_bad = t == u->bad ? u->n_bad + bad : bad;
        u->bad = t;
    }
}

static void update_chunk(void *ctx, size_t from, size_t n)
{
    struct update *u = ctx;
    const struct mt_tensor *t = &u->e->b.layout->tensors[u->unit->first_tensor], *last = t + u->unit->n_tensors;
    size_t unit = (size_t)(u->unit - u->e->b.layout->units);
    if (!mt_guard_before(u->e->p.guard, unit, from, n)) {
        note_corrupt(u, from);
        return;
    }
    for (; t < last; t++) {
        size_t first = MT_MAX(t->at, from), end = MT_MIN(t->at + t->n, from + n);
        if (first >= end || !is_due(u->e, &u->v, t))
            continue;
        uint64_t bad = update_run(u->e, &u->v, t, first, end - first);
        if (bad)
            note_bad(u, t, bad);
    }
    mt_guard_after(u->e->p.guard, unit, from, n);
}

/* A whole tensor, for an optimizer that needs it. */
static void update_tensor(void *ctx, size_t i, int)
{
    struct update *u = ctx;
    const struct mt_tensor *t = &u->e->b.layout->tensors[u->unit->first_tensor + i];
    uint64_t bad = is_due(u->e, &u->v, t) ? update_run(u->e, &u->v, t, t->at, t->n) : 0;
    if (bad)
        note_bad(u, t, bad);
}

int mt_optimizer_update(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in, struct mt_err *err)
{
    size_t unit = (size_t)in->unit, piece = (size_t)in->piece;
    char *state = operand_of(e, prog, in, MT_OBJ_STATE), *staged = operand_of(e, prog, in, MT_OBJ_STAGED);
    struct update u = {.e = e, .unit = &e->b.layout->units[unit], .lock = PTHREAD_MUTEX_INITIALIZER};
    if (in->op == MT_OP_GATHER)
        return gather(e, prog, in, err);
    if (in->op == MT_OP_SCATTER)
        return mt_row_gradient_scatter(e);
    if (!in->own && !mt_engine_is_pending(e))
        return 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        u.v.plane[k] = mt_plane_view(&e->b, unit, (enum mt_plane_kind)k, piece, state, staged);
    u.v.own = in->own;
    if (in->own)
        u.v.plane[MT_PLANE_GRAD] = (struct mt_plane_view){operand_of(e, prog, in, MT_OBJ_GRAD_RING), 0};
    for (size_t k = 0; in->decides && k < e->n_learners; k++)
        if (e->learner[k].own.any)
            mt_engine_decide_block(e, k, (size_t)in->block, (size_t)in->block_end);
    size_t first = state ? piece * prog->piece_elems : in->first;
    if (e->p.numerics.optimizer->grain == MT_GRAIN_TENSOR)
        mt_pool_run(e->update_pool, update_tensor, &u, u.unit->n_tensors);
    else
        mt_planes_run(e->p.planes, unit, first, in->elems, e->update_pool, update_chunk, &u);
    if (u.corrupt)
        return fail_corrupt(&u, err);
    if (u.bad)
        return fail_update(e, &u.v, u.bad, u.n_bad, err);
    if (unit == 0)
        mt_row_gradient_clear(e);
    return 0;
}
