/* SPDX-License-Identifier: Apache-2.0 */
#include "schedule/program.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "schedule/build.h"

struct mt_instr mt_instr_make(enum mt_opcode op, size_t unit, size_t mb)
{
    return (struct mt_instr){
        .op = op, .queue = mt_opcodes[op].queue, .unit = (int32_t)unit, .mb = (int32_t)mb, .wait = MT_NO_WAITS};
}

bool mt_program_gathers(const struct mt_program_params *p)
{
    return p->gather && p->units[0].trainable && !mt_program_uses_disk(p);
}

size_t mt_program_part_elems(const struct mt_program_params *p, size_t unit)
{
    enum { PARTS = 32 };
    size_t n = p->units[unit].update_elems;
    bool parts = unit == 1 && !p->units[1].adapter_bytes && p->mode == MT_MODE_TRAIN && mt_program_gathers(p);
    return parts ? mt_align_up(mt_div_up(n, (size_t)PARTS), MT_PIECE_ALIGN) : n;
}

bool mt_program_compacts(const struct mt_program_params *p, size_t unit)
{
    return mt_program_gathers(p) && p->cast && p->units[unit].grad_row_bytes;
}

bool mt_program_uses_disk(const struct mt_program_params *p)
{
    bool any = p->spill_disk;
    for (size_t u = 0; u < p->n_units && !any; u++)
        any = p->units[u].staged_bytes || p->units[u].state_bytes || p->units[u].grad_on_disk;
    return any;
}

bool mt_program_has_ring(const struct mt_program_params *p)
{
    bool any = false;
    for (size_t u = 0; u < p->n_units && !any; u++)
        any = p->units[u].grad_in_ring;
    return any && p->mode == MT_MODE_TRAIN;
}

const struct mt_call *mt_forward_call(const struct mt_program_params *p, size_t unit)
{
    const struct mt_unit_shape *u = &p->units[unit];
    if (u->gather.n_uses && mt_program_gathers(p))
        return &u->gather;
    return p->mode == MT_MODE_ZEROTH && u->perturbs ? &u->perturbed : &u->forward;
}

const struct mt_call *mt_perturb_call(const struct mt_program_params *p, size_t unit)
{
    static const struct mt_call none = {.n_uses = 0};
    return p->mode == MT_MODE_ZEROTH && p->units[unit].perturbs ? &p->units[unit].perturb : &none;
}

void mt_program_finish(struct mt_program *p)
{
    free(p->objects);
    free(p->instrs);
    *p = (struct mt_program){0};
}

void mt_program_add_home(struct mt_program *p, struct mt_object *o)
{
    const bool disk = o->kind == MT_OBJ_SPILLED, sum = !disk && mt_pools[o->pool].spilled == MT_NO_POOL;
    size_t *end = disk ? &p->disk_spill_bytes : &p->spill_bytes, bytes = mt_align_up(o->bytes, 4096);
    o->spill = (int64_t)*end;
    *end += bytes;
    p->sum_bytes += sum ? bytes : 0;
}

bool mt_instr_returns(const struct mt_program *p, const struct mt_instr *in)
{
    return in->op == MT_OP_STORE && mt_kinds[p->objects[in->operand[0].object].kind].returns;
}

bool mt_instr_makes_lists(const struct mt_instr *in)
{
    bool makes = false;
    for (int k = 0; k < in->n_operands && in->queue == MT_Q_COMPUTE; k++)
        makes |= in->operand[k].role == MT_ROLE_ROUTING && in->operand[k].access == MT_UPDATE;
    return makes;
}

size_t mt_program_link_bytes(const struct mt_program *p, enum mt_queue q)
{
    size_t sum = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].queue == q && !p->instrs[i].once)
            sum += p->instrs[i].bytes;
    return sum;
}

enum mt_disk_use mt_instr_disk_use(const struct mt_program *p, const struct mt_instr *in)
{
    return mt_kinds[p->objects[in->operand[0].object].kind].disk_use;
}

struct mt_disk_traffic mt_program_disk_traffic(const struct mt_program *p)
{
    struct mt_disk_traffic t = {{0}, {0}};
    for (const struct mt_instr *in = p->instrs; in < p->instrs + p->n_instrs; in++) {
        if (in->op == MT_OP_READ && !in->once)
            t.read[mt_instr_disk_use(p, in)] += in->bytes;
        if (in->op == MT_OP_WRITE)
            t.written[mt_instr_disk_use(p, in)] += in->bytes;
    }
    return t;
}

void mt_instr_format(char *buf, size_t len, const struct mt_program *p, size_t i)
{
    const struct mt_instr *in = &p->instrs[i];
    char lane[16] = "";
    if (p->n_lanes > 1 && mt_queues[in->queue].device)
        snprintf(lane, sizeof(lane), " lane %d", in->lane);
    /* an instruction has a micro-batch or a piece; the other is 0 */
    int at = snprintf(buf, len, "%zu %s%s unit %d mb %d [", i, mt_opcodes[in->op].name, lane, in->unit,
                      in->mb + in->piece);
    for (int k = 0; k < in->n_operands && at >= 0 && (size_t)at < len; k++) {
        const struct mt_object *o = &p->objects[in->operand[k].object];
        at += snprintf(buf + at, len - (size_t)at, "%s%s%d.%d@%d", k ? " " : "",
                       mt_kinds[o->kind].name, o->unit, o->mb + o->piece, in->operand[k].buffer);
    }
    if (at >= 0 && (size_t)at < len)
        at += snprintf(buf + at, len - (size_t)at, "]");
    for (int q = 0; q < mt_n_queues(p->n_lanes) && at >= 0 && (size_t)at < len; q++)
        if (in->wait[q] >= 0)
            at += snprintf(buf + at, len - (size_t)at, " waits %s %d", mt_queues[mt_queue_kind(q)].name, in->wait[q]);
}

/* What is known of ended instructions when `in` starts, from its queue's predecessor (NULL: none) and its waits: drops
 * waits that the others imply. clock: of all instructions, n entries each; own: the instruction's. ended: the newest of
 * its queue that has ended then, as far as the predecessor knows. */
static void prune(struct mt_instr *in, int n, const int32_t *clock, const int32_t *before, int32_t ended, int32_t *own)
{
    for (int q = 0; q < n; q++)
        own[q] = before ? before[q] : MT_NO_WAIT;
    own[mt_instr_queue(in)] = ended;
    for (int q = 0; q < n; q++) {
        bool known = in->wait[q] <= own[q];
        for (int k = 0; k < n && !known; k++)
            known = k != q && in->wait[k] >= 0 && clock[(size_t)in->wait[k] * (size_t)n + (size_t)q] >= in->wait[q];
        if (known)
            in->wait[q] = MT_NO_WAIT;
    }
    for (int q = 0; q < n; q++)
        for (int k = 0; k < n && in->wait[q] >= 0; k++)
            own[k] = MT_MAX(own[k], clock[(size_t)in->wait[q] * (size_t)n + (size_t)k]);
}

int mt_program_prune_waits(struct mt_program *out, struct mt_err *err)
{
    size_t n = (size_t)mt_n_queues(out->n_lanes);
    MT_FREED int32_t *clock = mt_calloc(out->n_instrs, n * sizeof(*clock));
    int32_t last[MT_MAX_QUEUES] = MT_NO_WAITS;
    int32_t ended[MT_MAX_QUEUES] = MT_NO_WAITS; /* by queue: what is known to have ended when the next one starts */
    if (!clock)
        return mt_fail_nomem(err, "a step program", out->n_instrs * n * sizeof(*clock));
    for (size_t i = 0; i < out->n_instrs; i++) {
        struct mt_instr *in = &out->instrs[i];
        int own = mt_instr_queue(in);
        prune(in, (int)n, clock, last[own] < 0 ? NULL : clock + (size_t)last[own] * n, ended[own], clock + i * n);
        ended[own] = mt_queues[in->queue].ends_in_order ? (int32_t)i : clock[i * n + (size_t)own];
        clock[i * n + (size_t)own] = (int32_t)i; /* an instruction that waits for i knows that i has ended */
        last[own] = (int32_t)i;
        for (size_t q = 0; q < n; q++)
            if (in->wait[q] >= 0)
                out->instrs[in->wait[q]].signals = true;
    }
    return 0;
}
