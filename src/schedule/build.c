/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the draft of a step. Layered (Lamy-Poirier 2021): all micro-batches pass a unit before the next
 * unit is needed, so weights are read twice a step and gradients leave once. Micro-batch by micro-batch:
 * the loops exchanged, which is what other offloading trainers do; here for comparison.
 */
#include "schedule/build.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { NONE = -1 };

struct writer {
    struct mt_draft *d;
    const struct mt_program_params *p;
    int *w, *g, *x, *rec, *dx; /* objects: by unit; x and rec by unit * n_micro + mb; dx by mb */
    struct mt_instr sink;           /* takes what is added after memory ran out */
    bool failed;
};

static enum mt_size_class class_of(const struct mt_program_params *p, size_t unit)
{
    enum mt_size_class vocab = p->one_ring ? MT_CLASS_LAYER : MT_CLASS_VOCAB;
    switch (p->units[unit].kind) {
    case MT_SHAPE_LAYER:
        return MT_CLASS_LAYER;
    case MT_SHAPE_HEAD:
        return p->tied ? MT_CLASS_NORM : vocab;
    case MT_SHAPE_EMBED:
    default:
        return vocab;
    }
}

enum mt_pool_id mt_program_pool(const struct mt_program_params *p, enum mt_object_kind kind, size_t unit)
{
    return mt_kinds[kind].pool[class_of(p, unit)];
}

static bool has_gradient(const struct mt_program_params *p, size_t unit)
{
    return p->mode == MT_MODE_TRAIN && p->units[unit].trainable;
}

static int add_object(struct writer *w, enum mt_object_kind kind, size_t unit, size_t mb, size_t bytes)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->objects, &g->cap_objects, g->n_objects + 1, sizeof(*g->objects))) {
        w->failed = true;
        return NONE;
    }
    g->objects[g->n_objects] = (struct mt_object){
        .kind = kind, .pool = mt_program_pool(w->p, kind, unit), .unit = (int32_t)unit, .mb = (int32_t)mb,
        .bytes = bytes, .spill = -1};
    return (int)g->n_objects++;
}

static struct mt_instr *add_instr(struct writer *w, enum mt_opcode op, size_t unit, size_t mb)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->instrs, &g->cap_instrs, g->n_instrs + 1, sizeof(*g->instrs))) {
        w->failed = true;
        return &w->sink;
    }
    struct mt_instr *in = &g->instrs[g->n_instrs++];
    *in = mt_instr_make(op, unit, mb);
    return in;
}

static void operand(struct mt_instr *in, int object, enum mt_access access)
{
    if (object != NONE)
        in->operand[in->n_operands++] = (struct mt_operand){object, NONE, (uint8_t)access};
}

static int boundary(struct writer *w, size_t unit, size_t mb)
{
    int *slot = &w->x[unit * w->p->n_micro + mb];
    if (*slot == NONE)
        *slot = add_object(w, MT_OBJ_BOUNDARY, unit, mb, w->p->boundary_bytes);
    return *slot;
}

static int record(struct writer *w, size_t unit, size_t mb)
{
    if (w->p->mode != MT_MODE_TRAIN || w->p->units[unit].recompute)
        return NONE;
    int *slot = &w->rec[unit * w->p->n_micro + mb];
    if (*slot == NONE)
        *slot = add_object(w, MT_OBJ_RECORD, unit, mb, w->p->units[unit].record_bytes);
    return *slot;
}

/* The unit's gradient, zeroed at its first use. */
static int gradient(struct writer *w, size_t unit)
{
    if (!has_gradient(w->p, unit))
        return NONE;
    if (w->g[unit] == NONE) {
        w->g[unit] = add_object(w, MT_OBJ_GRAD, unit, 0, w->p->units[unit].grad_elems * 4);
        operand(add_instr(w, MT_OP_ZERO, unit, 0), w->g[unit], MT_WRITE);
    }
    return w->g[unit];
}

static void write_forward(struct writer *w, size_t unit, size_t mb)
{
    const struct mt_program_params *p = w->p;
    bool embed = p->units[unit].kind == MT_SHAPE_EMBED;
    struct mt_instr *in = add_instr(w, embed ? MT_OP_EMBED : MT_OP_FORWARD, unit, mb);
    operand(in, w->w[unit], MT_READ);
    if (!embed)
        operand(in, boundary(w, unit, mb), MT_READ);
    operand(in, boundary(w, unit + 1, mb), MT_WRITE);
    if (!embed)
        operand(in, record(w, unit, mb), MT_WRITE);
}

static void write_head(struct writer *w, size_t mb)
{
    const struct mt_program_params *p = w->p;
    size_t unit = p->n_units - 1, table = p->tied ? 0 : unit;
    bool train = p->mode == MT_MODE_TRAIN;
    int g = train ? gradient(w, unit) : NONE, gt = train && p->tied ? gradient(w, table) : NONE;
    struct mt_instr *in = add_instr(w, p->mode == MT_MODE_LOGITS ? MT_OP_LOGITS : MT_OP_HEAD, unit, mb);
    operand(in, w->w[unit], MT_READ);
    if (p->tied)
        operand(in, w->w[table], MT_READ);
    operand(in, boundary(w, unit, mb), MT_READ);
    if (!train)
        return;
    w->dx[mb] = add_object(w, MT_OBJ_DX, 0, mb, p->boundary_bytes);
    operand(in, w->dx[mb], MT_WRITE);
    operand(in, g, MT_UPDATE);
    operand(in, gt, MT_UPDATE);
}

static void write_backward(struct writer *w, size_t unit, size_t mb)
{
    bool embed = w->p->units[unit].kind == MT_SHAPE_EMBED;
    int g = gradient(w, unit);
    if (embed && g == NONE)
        return;
    struct mt_instr *in = add_instr(w, embed ? MT_OP_EMBED_BWD : MT_OP_BACKWARD, unit, mb);
    if (!embed) {
        operand(in, w->w[unit], MT_READ);
        operand(in, boundary(w, unit, mb), MT_READ);
        operand(in, record(w, unit, mb), MT_READ); /* consumed: no later reader */
    }
    operand(in, w->dx[mb], embed ? MT_READ : MT_UPDATE);
    operand(in, g, MT_UPDATE);
}

/* The unit has seen its last micro-batch: its gradient leaves. */
static void write_grad_out(struct writer *w, size_t unit)
{
    const struct mt_program_params *p = w->p;
    if (!has_gradient(p, unit))
        return;
    int g = gradient(w, unit), out = g;
    size_t bytes = p->units[unit].grad_elems * p->grad_bytes;
    struct mt_instr *in = add_instr(w, MT_OP_GRAD_CAST, unit, 0);
    operand(in, g, p->cast ? MT_READ : MT_UPDATE);
    if (p->cast) {
        out = add_object(w, MT_OBJ_CAST, unit, 0, bytes);
        operand(in, out, MT_WRITE);
    }
    in = add_instr(w, MT_OP_STORE_GRAD, unit, 0);
    operand(in, out, MT_READ);
    in->bytes = bytes;
}

/* Backward stops at the first unit that is trained: below it no gradient is wanted. */
static size_t first_trained(const struct mt_program_params *p)
{
    size_t u = 0;
    while (u + 1 < p->n_units && !p->units[u].trainable)
        u++;
    return u;
}

static void write_layered(struct writer *w)
{
    size_t head = w->p->n_units - 1, n_mb = w->p->n_micro, first = first_trained(w->p);
    for (size_t u = 0; u < head; u++)
        for (size_t mb = 0; mb < n_mb; mb++)
            write_forward(w, u, mb);
    for (size_t mb = 0; mb < n_mb; mb++)
        write_head(w, mb);
    if (w->p->mode != MT_MODE_TRAIN)
        return;
    write_grad_out(w, head);
    for (size_t u = head; u-- > first;) {
        for (size_t mb = 0; mb < n_mb; mb++)
            write_backward(w, u, mb);
        write_grad_out(w, u);
    }
}

static void write_by_microbatch(struct writer *w)
{
    size_t head = w->p->n_units - 1, n_mb = w->p->n_micro, first = first_trained(w->p);
    for (size_t mb = 0; mb < n_mb; mb++) {
        bool last = mb + 1 == n_mb;
        for (size_t u = 0; u < head; u++)
            write_forward(w, u, mb);
        write_head(w, mb);
        if (w->p->mode != MT_MODE_TRAIN)
            continue;
        if (last)
            write_grad_out(w, head);
        for (size_t u = head; u-- > first;) {
            write_backward(w, u, mb);
            if (last)
                write_grad_out(w, u);
        }
    }
}

static bool alloc_writer(struct writer *w)
{
    size_t n = w->p->n_units, nm = (n + 1) * w->p->n_micro, total = 2 * n + 2 * nm + w->p->n_micro;
    int *all = mt_calloc(total, sizeof(int));
    if (!all)
        return false;
    for (size_t i = 0; i < total; i++)
        all[i] = NONE;
    w->w = all;
    w->g = w->w + n;
    w->x = w->g + n;
    w->rec = w->x + nm;
    w->dx = w->rec + nm;
    return true;
}

/* Positions and micro-batches are 32-bit numbers. */
static int check_size(const struct mt_program_params *p, struct mt_err *err)
{
    const size_t most = INT32_MAX / 40; /* forward and backward, each with a copy in and out for every operand */
    if (p->n_micro <= most / p->n_units)
        return 0;
    return mt_fail(err, MT_ERR_NO_FIT, -E2BIG,
                   "a step of %zu micro-batches over %zu units has too many instructions (at most %zu micro-batches): "
                   "raise train.micro_batch or lower train.tokens_per_step",
                   p->n_micro, p->n_units, most / p->n_units);
}

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *p, struct mt_err *err)
{
    struct writer w = {.d = d, .p = p};
    int rc = check_size(p, err);
    if (rc)
        return rc;
    *d = (struct mt_draft){.params = p};
    d->prog.n_units = p->n_units;
    d->prog.n_micro = p->n_micro;
    d->prog.backward = p->mode == MT_MODE_TRAIN;
    if (!alloc_writer(&w))
        return mt_fail_nomem(err, "a step program", p->n_units * p->n_micro * sizeof(int));
    bool updates = p->mode == MT_MODE_TRAIN || p->mode == MT_MODE_UPDATE;
    for (size_t u = 0; u < p->n_units; u++) {
        if (updates && p->units[u].trainable) {
            struct mt_instr *in = add_instr(&w, MT_OP_ADAM, u, 0);
            in->elems = p->units[u].grad_elems;
            in->update = true;
        }
        w.w[u] = add_object(&w, MT_OBJ_WEIGHTS, u, 0, p->units[u].weight_bytes);
    }
    if (p->mode == MT_MODE_UPDATE)
        ;
    else if (p->microbatch)
        write_by_microbatch(&w);
    else
        write_layered(&w);
    if (p->mode == MT_MODE_TRAIN || p->mode == MT_MODE_EVAL)
        add_instr(&w, MT_OP_STATS, p->n_units - 1, 0);
    free(w.w);
    if (w.failed) {
        mt_program_finish(&d->prog);
        return mt_fail_nomem(err, "a step program", p->n_units * p->n_micro * sizeof(struct mt_instr));
    }
    return 0;
}

/* The pool of a unit's objects of the kind holds one of that many bytes. */
static void hold(const struct mt_program_params *p, size_t bytes[MT_N_POOLS], enum mt_object_kind kind, size_t unit,
                 size_t object_bytes)
{
    size_t *b = &bytes[mt_program_pool(p, kind, unit)];
    *b = MT_MAX(*b, object_bytes);
}

/* Of the pools in host memory; all are multiples of a page, as the disk wants them. */
static void host_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS])
{
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        size_t piece = MT_MIN(p->piece_elems, mt_align_up(s->grad_elems, MT_PIECE_ALIGN));
        hold(p, bytes, MT_OBJ_STAGED, u, mt_align_up(s->grad_elems, MT_PIECE_ALIGN) * s->staged_elem_bytes);
        if (s->trainable)
            hold(p, bytes, MT_OBJ_STATE, u, piece * s->state_elem_bytes);
        if (s->trainable && s->grad_on_disk)
            hold(p, bytes, MT_OBJ_GRAD_OUT, u, mt_align_up(s->grad_elems * p->grad_bytes, 4096));
    }
    for (int i = 0; p->spill_disk && i < MT_N_POOLS; i++)
        if (mt_pools[i].spilled != MT_NO_POOL)
            bytes[mt_pools[i].spilled] = mt_align_up(bytes[i], 4096);
}

void mt_program_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS])
{
    memset(bytes, 0, MT_N_POOLS * sizeof(bytes[0]));
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        hold(p, bytes, MT_OBJ_WEIGHTS, u, s->weight_bytes);
        if (has_gradient(p, u))
            hold(p, bytes, MT_OBJ_GRAD, u, s->grad_elems * 4);
        if (has_gradient(p, u) && p->cast)
            hold(p, bytes, MT_OBJ_CAST, u, s->grad_elems * p->grad_bytes);
        if (p->mode == MT_MODE_TRAIN && s->kind == MT_SHAPE_LAYER && !s->recompute)
            hold(p, bytes, MT_OBJ_RECORD, u, s->record_bytes);
    }
    hold(p, bytes, MT_OBJ_BOUNDARY, 0, p->boundary_bytes);
    host_buffer_bytes(p, bytes);
}

bool mt_program_uses_disk(const struct mt_program_params *p)
{
    bool any = p->spill_disk;
    for (size_t u = 0; u < p->n_units && !any; u++)
        any = p->units[u].staged_elem_bytes || p->units[u].state_elem_bytes || p->units[u].grad_on_disk;
    return any;
}

void mt_program_min_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(p, bytes);
    for (int i = 0; i < MT_N_POOLS; i++)
        n[i] = bytes[i] ? mt_pools[i].least : 0;
}

static int clip(size_t n_buffers)
{
    return (int)MT_MIN(n_buffers, (size_t)MT_MAX_BUFFERS);
}

void mt_program_max_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS], n_mb = p->n_micro, between = p->n_units - 2, saved = 0;
    bool train = p->mode == MT_MODE_TRAIN;
    mt_program_buffer_bytes(p, bytes);
    memset(n, 0, MT_N_POOLS * sizeof(n[0]));
    for (size_t u = 0; u < p->n_units; u++) {
        static const enum mt_object_kind one_a_unit[] = {MT_OBJ_WEIGHTS, MT_OBJ_GRAD, MT_OBJ_CAST, MT_OBJ_STAGED,
                                                         MT_OBJ_GRAD_OUT};
        for (size_t k = 0; k < MT_ARRAY_LEN(one_a_unit); k++) {
            int *count = &n[mt_program_pool(p, one_a_unit[k], u)];
            /* gradients leave: two at once are enough; by micro-batches, all live to the end */
            bool leaves = one_a_unit[k] == MT_OBJ_CAST || one_a_unit[k] == MT_OBJ_GRAD_OUT ||
                          (one_a_unit[k] == MT_OBJ_GRAD && !p->microbatch);
            *count = leaves ? MT_MIN(*count + 1, 2) : *count + 1;
        }
        saved += p->units[u].kind == MT_SHAPE_LAYER && !p->units[u].recompute;
    }
    n[MT_POOL_STATE] = 6; /* two each on their way in, in Adam's hands and on their way out */
    n[MT_POOL_SPILLED] = clip((between + 2) * n_mb + n_mb);
    n[MT_POOL_SPILLED_RECORD] = clip(saved * n_mb);
    n[MT_POOL_BOUNDARY] = clip((train ? between + 2 : 2) * n_mb);
    n[MT_POOL_RECORD] = clip(saved * n_mb);
    int least[MT_N_POOLS];
    mt_program_min_buffers(p, least);
    for (int i = 0; i < MT_N_POOLS; i++)
        n[i] = bytes[i] ? MT_MAX(n[i], least[i]) : 0;
}

int mt_program_build(struct mt_program *out, const struct mt_program_params *params,
                     struct mt_err *err)
{
    struct mt_draft d;
    int rc = mt_draft_write(&d, params, err);
    if (rc)
        return rc;
    rc = mt_draft_place(out, &d, err);
    mt_program_finish(&d.prog);
    if (rc)
        return rc;
    if (mt_program_uses_disk(params))
        rc = mt_program_stage(out, params, err);
    if (!rc)
        rc = mt_program_prune_waits(out, err);
    if (rc)
        mt_program_finish(out);
    return rc;
}
