/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the draft of a step. Layered (Lamy-Poirier 2021): all micro-batches pass a unit before the next
 * unit is needed, so weights are read twice a step and gradients leave once. Micro-batch by micro-batch:
 * the loops exchanged, which is what other offloading trainers do; here for comparison.
 */
#include "schedule/build.h"

#include <stdlib.h>

#include "base/mem.h"

enum { NONE = -1 };

struct writer {
    struct mt_draft *d;
    const struct mt_program_params *p;
    int *w, *g, *x, *rec, *dx; /* objects: by unit; x and rec by unit * n_micro + mb; dx by mb */
    struct mt_instr sink;           /* takes what is added after memory ran out */
    bool failed;
};

int mt_program_pool_class(const struct mt_program_params *p, size_t unit)
{
    switch (p->units[unit].kind) {
    case MT_SHAPE_LAYER:
        return 0;
    case MT_SHAPE_HEAD:
        return p->tied ? 2 : p->one_ring ? 0 : 1;
    case MT_SHAPE_EMBED:
    default:
        return p->one_ring ? 0 : 1;
    }
}

static bool has_gradient(const struct mt_program_params *p, size_t unit)
{
    return p->mode == MT_MODE_TRAIN && p->units[unit].trainable;
}

static int add_object(struct writer *w, enum mt_object_kind kind, int pool, int unit, int mb,
                      size_t bytes)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->objects, &g->cap_objects, g->n_objects + 1, sizeof(*g->objects))) {
        w->failed = true;
        return NONE;
    }
    g->objects[g->n_objects] = (struct mt_object){
        .kind = kind, .pool = pool, .unit = unit, .mb = mb, .bytes = bytes, .spill = -1};
    return (int)g->n_objects++;
}

static struct mt_instr *add_instr(struct writer *w, enum mt_opcode op, enum mt_queue q, size_t unit,
                                  size_t mb)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->instrs, &g->cap_instrs, g->n_instrs + 1, sizeof(*g->instrs))) {
        w->failed = true;
        return &w->sink;
    }
    struct mt_instr *in = &g->instrs[g->n_instrs++];
    *in = (struct mt_instr){.op = op, .queue = q, .unit = (int32_t)unit, .mb = (int16_t)mb,
                            .wait = MT_NO_WAITS};
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
        *slot = add_object(w, MT_OBJ_BOUNDARY, MT_POOL_BOUNDARY, (int)unit, (int)mb,
                           w->p->boundary_bytes);
    return *slot;
}

static int record(struct writer *w, size_t unit, size_t mb)
{
    if (w->p->mode != MT_MODE_TRAIN || w->p->units[unit].recompute)
        return NONE;
    int *slot = &w->rec[unit * w->p->n_micro + mb];
    if (*slot == NONE)
        *slot = add_object(w, MT_OBJ_RECORD, MT_POOL_RECORD, (int)unit, (int)mb,
                           w->p->units[unit].record_bytes);
    return *slot;
}

/* The unit's gradient, zeroed at its first use. */
static int gradient(struct writer *w, size_t unit)
{
    if (!has_gradient(w->p, unit))
        return NONE;
    if (w->g[unit] == NONE) {
        w->g[unit] = add_object(w, MT_OBJ_GRAD, MT_POOL_GRAD + mt_program_pool_class(w->p, unit), (int)unit, 0,
                                w->p->units[unit].grad_elems * 4);
        operand(add_instr(w, MT_OP_ZERO, MT_Q_COMPUTE, unit, 0), w->g[unit], MT_WRITE);
    }
    return w->g[unit];
}

static void write_forward(struct writer *w, size_t unit, size_t mb)
{
    const struct mt_program_params *p = w->p;
    bool embed = p->units[unit].kind == MT_SHAPE_EMBED;
    struct mt_instr *in = add_instr(w, embed ? MT_OP_EMBED : MT_OP_FORWARD, MT_Q_COMPUTE, unit, mb);
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
    struct mt_instr *in = add_instr(w, p->mode == MT_MODE_LOGITS ? MT_OP_LOGITS : MT_OP_HEAD,
                                    MT_Q_COMPUTE, unit, mb);
    operand(in, w->w[unit], MT_READ);
    if (p->tied)
        operand(in, w->w[table], MT_READ);
    operand(in, boundary(w, unit, mb), MT_READ);
    if (!train)
        return;
    w->dx[mb] = add_object(w, MT_OBJ_DX, MT_POOL_BOUNDARY, 0, (int)mb, p->boundary_bytes);
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
    struct mt_instr *in =
        add_instr(w, embed ? MT_OP_EMBED_BWD : MT_OP_BACKWARD, MT_Q_COMPUTE, unit, mb);
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
    struct mt_instr *in = add_instr(w, MT_OP_GRAD_CAST, MT_Q_COMPUTE, unit, 0);
    operand(in, g, p->cast ? MT_READ : MT_UPDATE);
    if (p->cast) {
        out = add_object(w, MT_OBJ_CAST, MT_POOL_CAST + mt_program_pool_class(p, unit), (int)unit, 0, bytes);
        operand(in, out, MT_WRITE);
    }
    in = add_instr(w, MT_OP_STORE_GRAD, MT_Q_D2H, unit, 0);
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

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *p, struct mt_err *err)
{
    struct writer w = {.d = d, .p = p};
    *d = (struct mt_draft){.params = p};
    d->prog.n_units = p->n_units;
    d->prog.n_micro = p->n_micro;
    d->prog.backward = p->mode == MT_MODE_TRAIN;
    if (!alloc_writer(&w))
        return mt_fail_nomem(err, "a step program", p->n_units * p->n_micro * sizeof(int));
    bool updates = p->mode == MT_MODE_TRAIN || p->mode == MT_MODE_UPDATE;
    for (size_t u = 0; u < p->n_units; u++) {
        if (updates && p->units[u].trainable) {
            struct mt_instr *in = add_instr(&w, MT_OP_ADAM, MT_Q_HOST, u, 0);
            in->elems = p->units[u].grad_elems;
            in->update = true;
        }
        w.w[u] = add_object(&w, MT_OBJ_WEIGHTS, MT_POOL_WEIGHTS + mt_program_pool_class(p, u), (int)u, 0,
                            p->units[u].weight_bytes);
    }
    if (p->mode == MT_MODE_UPDATE)
        ;
    else if (p->microbatch)
        write_by_microbatch(&w);
    else
        write_layered(&w);
    if (p->mode == MT_MODE_TRAIN || p->mode == MT_MODE_EVAL)
        add_instr(&w, MT_OP_STATS, MT_Q_D2H, p->n_units - 1, 0);
    free(w.w);
    if (w.failed) {
        mt_program_finish(&d->prog);
        return mt_fail_nomem(err, "a step program", p->n_units * p->n_micro * sizeof(struct mt_instr));
    }
    return 0;
}

/* Of the pools in host memory; all are multiples of a page, as the disk wants them. */
static void host_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS])
{
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        int c = mt_program_pool_class(p, u);
        size_t piece = MT_MIN(p->piece_elems, mt_align_up(s->grad_elems, MT_PIECE_ALIGN));
        size_t staged = mt_align_up(s->grad_elems, MT_PIECE_ALIGN) * s->staged_elem_bytes;
        bytes[MT_POOL_STAGED + c] = MT_MAX(bytes[MT_POOL_STAGED + c], staged);
        if (s->trainable)
            bytes[MT_POOL_STATE] = MT_MAX(bytes[MT_POOL_STATE], piece * s->state_elem_bytes);
        if (s->trainable && s->grad_on_disk)
            bytes[MT_POOL_GRAD_OUT + c] =
                MT_MAX(bytes[MT_POOL_GRAD_OUT + c], mt_align_up(s->grad_elems * p->grad_bytes, 4096));
    }
    if (p->spill_disk) {
        bytes[MT_POOL_SPILLED] = mt_align_up(bytes[MT_POOL_BOUNDARY], 4096);
        bytes[MT_POOL_SPILLED_RECORD] = mt_align_up(bytes[MT_POOL_RECORD], 4096);
    }
}

void mt_program_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS])
{
    for (int i = 0; i < MT_N_POOLS; i++)
        bytes[i] = 0;
    for (size_t u = 0; u < p->n_units; u++) {
        int c = mt_program_pool_class(p, u);
        bytes[MT_POOL_WEIGHTS + c] = MT_MAX(bytes[MT_POOL_WEIGHTS + c], p->units[u].weight_bytes);
        if (!has_gradient(p, u))
            continue;
        size_t g = p->units[u].grad_elems;
        bytes[MT_POOL_GRAD + c] = MT_MAX(bytes[MT_POOL_GRAD + c], g * 4);
        if (p->cast)
            bytes[MT_POOL_CAST + c] = MT_MAX(bytes[MT_POOL_CAST + c], g * p->grad_bytes);
    }
    bytes[MT_POOL_BOUNDARY] = p->boundary_bytes;
    for (size_t u = 0; u < p->n_units; u++)
        if (p->mode == MT_MODE_TRAIN && p->units[u].kind == MT_SHAPE_LAYER && !p->units[u].recompute)
            bytes[MT_POOL_RECORD] = MT_MAX(bytes[MT_POOL_RECORD], p->units[u].record_bytes);
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
        n[i] = bytes[i] ? 1 : 0;
    n[MT_POOL_WEIGHTS] = 2; /* a ring of one cannot prefetch */
    n[MT_POOL_BOUNDARY] = 2;
    const int rings[] = {MT_POOL_STATE, MT_POOL_STAGED, MT_POOL_SPILLED, MT_POOL_SPILLED_RECORD};
    for (size_t i = 0; i < MT_ARRAY_LEN(rings); i++)
        n[rings[i]] = bytes[rings[i]] ? 2 : 0;
}

void mt_program_max_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS], n_mb = p->n_micro, between = p->n_units - 2, saved = 0;
    int count[3] = {0};
    bool train = p->mode == MT_MODE_TRAIN;
    mt_program_buffer_bytes(p, bytes);
    for (size_t u = 0; u < p->n_units; u++) {
        count[mt_program_pool_class(p, u)]++;
        saved += p->units[u].kind == MT_SHAPE_LAYER && !p->units[u].recompute;
    }
    for (int c = 0; c < 3; c++) {
        n[MT_POOL_WEIGHTS + c] = count[c];
        /* by layers, two gradients at once are enough; by micro-batches, all live to the end */
        n[MT_POOL_GRAD + c] = p->microbatch ? count[c] : MT_MIN(count[c], 2);
        n[MT_POOL_CAST + c] = MT_MIN(count[c], 2);
        n[MT_POOL_STAGED + c] = count[c];
        n[MT_POOL_GRAD_OUT + c] = MT_MIN(count[c], 2);
    }
    n[MT_POOL_STATE] = 6; /* two each on their way in, in Adam's hands and on their way out */
    n[MT_POOL_SPILLED] = (int)((between + 2) * n_mb + n_mb);
    n[MT_POOL_SPILLED_RECORD] = (int)(saved * n_mb);
    n[MT_POOL_BOUNDARY] = (int)((train ? between + 2 : 2) * n_mb);
    n[MT_POOL_RECORD] = (int)(saved * n_mb);
    int least[MT_N_POOLS];
    mt_program_min_buffers(p, least);
    for (int i = 0; i < MT_N_POOLS; i++) /* an operand's buffer is an int16_t */
        n[i] = bytes[i] ? MT_MIN(MT_MAX(n[i], least[i]), INT16_MAX) : 0;
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
