/* SPDX-License-Identifier: Apache-2.0 */
/* A step that several hosts share: what each of them runs, and the messages between them. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_hosts.h"
#include "made_program.h"
#include "test.h"

static int compare(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void make_variant(struct fixture *f, uint32_t *seed, int hosts, int own)
{
    make(f, 1 + next_random(seed) % 4, (size_t)(hosts * own) + next_random(seed) % 6);
    f->tied = next_random(seed) & 1;
    f->p.cast = next_random(seed) & 1;
    f->p.poison = next_random(seed) & 1;
    f->p.owned = next_random(seed) & 1;
    f->p.gather = next_random(seed) & 1 && !f->p.owned;
    f->p.join = next_random(seed) & 1;
    f->p.n_lanes = hosts * own;
    f->p.by_data = true;
    f->p.groups = (struct mt_groups){4, MT_MAX(f->p.n_micro, (size_t)8)};
    while (f->p.groups.n < (size_t)f->p.n_lanes)
        f->p.groups.n *= 2;
    f->p.groups.of = MT_MAX(f->p.groups.of, f->p.groups.n);
    uint32_t mode = next_random(seed) % 6;
    f->p.mode = mode == 4 ? MT_MODE_EVAL : mode == 5 ? MT_MODE_UPDATE : MT_MODE_TRAIN;
    for (size_t u = 0; u < f->p.n_units; u++) {
        f->units[u].lane = f->units[u].lane_back = (uint8_t)(next_random(seed) % (uint32_t)f->p.n_lanes);
        f->units[u].trainable = u > 1 || next_random(seed) % 3;
        f->units[u].moment_bytes = f->units[u].trainable && next_random(seed) % 3 == 0 ? 64 : 0;
        f->keeps[u] = next_random(seed) & 1;
    }
    describe(f);
    uint32_t away = next_random(seed) % 32; /* each host has drives of its own */
    if (away & 1)
        put_on_disk(f, away >> 1 & (f->p.owned ? STATES | WEIGHTS | GRADS | SPILLS : STATES | WEIGHTS | SPILLS),
                    next_random(seed) % 3);
    for (size_t u = 0; u < f->p.n_units; u++) /* of some a part is frozen, which no owner sends */
        f->units[u].staged_bytes += f->units[u].staged_bytes && next_random(seed) & 1 ? 4096 : 0;
    take_lane_buffers(&f->p, (int)(next_random(seed) % 4));
    for (int i = 0; i < MT_N_POOLS; i++)
        f->p.n_buffers[0][i] = mt_pools[i].device ? f->p.n_buffers[0][i] : 1 + (int)(next_random(seed) % 4);
}

static size_t count_all(const struct step *s, enum mt_opcode op)
{
    size_t n = 0;
    for (int i = 0; i < s->n; i++)
        n += count(&s->of[i], op);
    return n;
}

/* What all hosts must have: gradients, and states that a direction has changed. */
static size_t count_shared(const struct mt_program *p)
{
    size_t n = count(p, MT_OP_STORE_GRAD);
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == MT_OP_STORE && p->objects[p->instrs[i].operand[0].object].kind == MT_OBJ_MOMENTS;
    return n;
}

/* Reads or writes of a kind of object in host staging. */
static size_t count_of(const struct mt_program *p, enum mt_opcode op, enum mt_object_kind kind)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == op && p->objects[p->instrs[i].operand[0].object].kind == kind;
    return n;
}

static size_t count_all_of(const struct step *s, enum mt_opcode op, enum mt_object_kind kind)
{
    size_t n = 0;
    for (int i = 0; i < s->n; i++)
        n += count_of(&s->of[i], op, kind);
    return n;
}

/* Weights that come leave what is frozen of a buffer, which has been read then. Returns how many do. */
static size_t count_kept(const struct mt_program *p, const struct mt_unit_shape *units)
{
    size_t n = 0;
    for (const struct mt_instr *in = p->instrs; in < p->instrs + p->n_instrs; in++) {
        bool keeps = units[in->unit].staged_bytes != units[in->unit].staged_bytes_written;
        if (in->op != MT_OP_RENEW || in->sends || !in->n_operands)
            continue;
        assert_int_equal(in->operand[0].access, keeps ? MT_UPDATE : MT_WRITE);
        n += keeps;
    }
    return n;
}

/* Units with a pending update. */
static size_t count_updated(const struct mt_program *p)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == MT_OP_UPDATE && !p->instrs[i].piece;
    return n;
}

/* Steps of fewer micro-batches do with the memory of the largest, as a rule; *more: of how many they do not. */
static void build_smaller(const struct step *full, struct mt_program_params p, size_t *more)
{
    for (size_t n = p.n_micro; n-- > 1;)
        for (p.n_micro = n, p.host = 0; p.host < full->n; p.host++) {
            struct mt_program prog;
            p.most_spill = full->of[p.host].spill_bytes;
            MUST(mt_program_build, &prog, &p);
            *more += prog.spill_bytes > p.most_spill;
            assert_true(prog.spill_bytes <= p.most_spill + 8192);
            mt_program_finish(&prog);
        }
}

TEST(hosts_together_compute_what_one_would)
{
    static uint64_t one[MOST_WRITES], many[MOST_WRITES];
    uint32_t seed = 7;
    size_t passed = 0, reads = 0, idle = 0, spills = 0, more = 0, kept = 0;
    for (int v = 0; v < 600; v++) {
        struct fixture f;
        struct mt_program whole;
        struct step s;
        int hosts = v % 40 ? 2 + v % 3 : MT_MAX_LANES, own = v % 40 ? 1 + (v / 3 & 1) : 1;
        make_variant(&f, &seed, hosts, own);
        assert_int_equal(build_and_check(&f, &whole, NULL), 0);
        f.p.n_hosts = hosts;
        build_hosts(&s, f.p);
        if (f.p.mode == MT_MODE_TRAIN)
            build_smaller(&s, f.p, &more);
        const bool owned = f.p.owned;
        size_t n = list_writes(&whole, one, 0), m = 0;
        for (int i = 0; i < hosts; i++)
            m = list_writes(&s.of[i], many, m);
        assert_int_equal(n, m);
        qsort(one, n, sizeof(*one), compare);
        qsort(many, n, sizeof(*many), compare);
        assert_memory_equal(one, many, n * sizeof(*one));
        assert_int_equal(count_all(&s, MT_OP_SHARE), owned ? 0 : (size_t)hosts * count_shared(&whole));
        assert_int_equal(count_all(&s, MT_OP_RENEW), owned ? (size_t)hosts * count_updated(&whole) : 0);
        const size_t each = owned ? 1 : (size_t)hosts; /* hosts that update a unit */
        assert_int_equal(count_all(&s, MT_OP_UPDATE), each * count(&whole, MT_OP_UPDATE));
        const struct {
            enum mt_object_kind kind;
            size_t hosts; /* that write it */
        } written[] = {{MT_OBJ_STAGED, (size_t)hosts}, {MT_OBJ_STATE, each}, {MT_OBJ_GRAD_OUT, 1}};
        for (size_t k = 0; k < MT_ARRAY_LEN(written); k++)
            assert_int_equal(count_all_of(&s, MT_OP_WRITE, written[k].kind),
                             written[k].hosts * count_of(&whole, MT_OP_WRITE, written[k].kind));
        spills += count_all_of(&s, MT_OP_WRITE, MT_OBJ_SPILLED);
        passed += count_all(&s, MT_OP_PASS);
        for (int i = 0; i < hosts; i++) {
            kept += count_kept(&s.of[i], f.units);
            const size_t here = count_of(&s.of[i], MT_OP_READ, MT_OBJ_STAGED) + count_of(&s.of[i], MT_OP_READ, MT_OBJ_STATE);
            const size_t all = count_of(&whole, MT_OP_READ, MT_OBJ_STAGED) + count_of(&whole, MT_OP_READ, MT_OBJ_STATE);
            if (f.p.spill_disk) /* each host has buffers for its own, so others are left for longer, or not */
                continue;
            assert_true(here <= all);
            idle += all - here;
            reads += here;
        }
        mt_program_finish(&whole);
        finish(&s);
    }
    assert_true(more < 10 && kept > 100);
    assert_true(passed > 1000 && reads > 1000 && idle > 10 && spills > 1000);
}

/* A step of three hosts that has all kinds of messages, of units with owners or without. */
static void make_three(struct step *s, bool owned)
{
    struct fixture f;
    make(&f, 4, 8);
    f.p.n_lanes = f.p.n_hosts = 3;
    f.p.by_data = true;
    f.p.groups = (struct mt_groups){8, 8};
    f.p.owned = owned;
    for (size_t u = 0; u < f.p.n_units; u++) {
        f.units[u].lane = f.units[u].lane_back = (uint8_t)(u % 3);
        f.units[u].moment_bytes = f.units[u].trainable ? 64 : 0;
    }
    describe(&f);
    take_lane_buffers(&f.p, 3);
    build_hosts(s, f.p);
}

static void insert_again(struct mt_program *p, size_t i)
{
    memmove(p->instrs + i + 1, p->instrs + i, (p->n_instrs - i) * sizeof(*p->instrs));
    p->n_instrs++;
    for (size_t k = i + 1; k < p->n_instrs; k++)
        for (int w = 0; w < MT_MAX_QUEUES; w++)
            p->instrs[k].wait[w] += p->instrs[k].wait[w] >= (int32_t)i;
}

static size_t find(const struct mt_program *p, const struct mt_instr *message, int host)
{
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (in->op == message->op && !in->sends && in->hosts == 1u << host && in->unit == message->unit &&
            in->operand[0].object == message->operand[0].object)
            return i;
    }
    fail_msg("a message of unit %d has no other side", message->unit);
    return 0;
}

enum fault { NOT_SENT, NOT_RECEIVED, LOST, SENT_TWICE, TWICE, SWAPPED, OTHER_HOST, OTHER_OBJECT, SHORT, TO_NOBODY, N_FAULTS };

/* The next one with the same hosts: the order of others may not matter. */
static size_t next_message(const struct mt_program *p, size_t i)
{
    uint16_t hosts = p->instrs[i].hosts;
    while (++i < p->n_instrs && (p->instrs[i].queue != MT_Q_NET || p->instrs[i].hosts != hosts))
        ;
    return i;
}

/* Two messages, exchanged. */
static bool swap_with_next(struct mt_program *p, size_t i)
{
    size_t k = next_message(p, i);
    if (k == p->n_instrs)
        return false;
    struct mt_instr *a = &p->instrs[i], *b = &p->instrs[k], was = *a;
    memcpy(was.wait, b->wait, sizeof(was.wait));
    was.signals = b->signals;
    struct mt_instr now = *b;
    memcpy(now.wait, a->wait, sizeof(now.wait));
    now.signals = a->signals;
    *a = now;
    *b = was;
    return true;
}

/* Makes the fault at message i, which the host sends; false: it cannot be made there. */
static bool seed_fault(struct step *s, int host, size_t i, enum fault what)
{
    struct mt_instr *in = &s->of[host].instrs[i];
    int to = 0;
    while (!(in->hosts & 1u << to))
        to++;
    size_t k = find(&s->of[to], in, host);
    switch (what) {
    case NOT_SENT:
        take_out(&s->of[host], i);
        return true;
    case NOT_RECEIVED:
        take_out(&s->of[to], k);
        return true;
    case LOST: /* by both, for once; a gradient is received by others, too */
        if (in->op != MT_OP_PASS)
            return false;
        take_out(&s->of[host], i);
        take_out(&s->of[to], k);
        return true;
    case SENT_TWICE:
        insert_again(&s->of[host], i);
        return true;
    case TWICE:
        if (in->op != MT_OP_PASS)
            return false;
        insert_again(&s->of[host], i);
        insert_again(&s->of[to], k);
        return true;
    case SWAPPED:
        return swap_with_next(&s->of[host], i);
    case OTHER_HOST:
        in->hosts = (uint16_t)(7 & ~(1u << host) & ~(1u << to));
        return true;
    case OTHER_OBJECT:
        if (in->op == MT_OP_RENEW)
            return false;
        in->operand[0].object = (in->operand[0].object + 1) % (int)s->of[host].n_objects;
        return true;
    case SHORT:
        in->bytes /= 2;
        return true;
    default:
        in->hosts = 0;
        return true;
    }
}

static void seed_all(bool owned)
{
    struct step s;
    size_t n[N_FAULTS] = {0};
    make_three(&s, owned);
    for (int host = 0; host < s.n; host++)
        for (size_t i = 0; i < s.of[host].n_instrs; i++)
            for (enum fault what = 0; what < N_FAULTS && s.of[host].instrs[i].sends; what++) {
                struct step bad = {.n = s.n};
                for (int k = 0; k < s.n; k++)
                    bad.of[k] = copy_of(&s.of[k]);
                if (seed_fault(&bad, host, i, what)) {
                    n[what]++;
                    if (check(&bad, NULL) != -EPROTO)
                        fail_msg("fault %d at instruction %zu of host %d was not noticed", what, i, host);
                }
                finish(&bad);
            }
    for (int i = 0; i < N_FAULTS; i++)
        assert_true(n[i] >= 5);
    finish(&s);
}

TEST(a_fault_in_a_message_is_rejected)
{
    seed_all(false);
    seed_all(true);
}

/* A wait of a message, or for one, that no other implies. */
static void drop_waits(bool owned)
{
    struct step s;
    size_t tried = 0;
    make_three(&s, owned);
    for (int host = 0; host < s.n; host++)
        for (size_t i = 0; i < s.of[host].n_instrs; i++)
            for (int q = 0; q < MT_MAX_QUEUES; q++) {
                struct mt_instr *in = &s.of[host].instrs[i];
                int32_t w = in->wait[q];
                if (w < 0 || (in->queue != MT_Q_NET && q != MT_Q_NET))
                    continue;
                in->wait[q] = MT_NO_WAIT;
                char line[512];
                mt_instr_format(line, sizeof(line), &s.of[host], i);
                if (check(&s, NULL) != -EPROTO)
                    fail_msg("host %d {%s} without its wait for queue %d was not noticed", host, line, q);
                in->wait[q] = w;
                tried++;
            }
    assert_true(tried >= 20);
    finish(&s);
}

TEST(dropping_a_wait_is_rejected)
{
    drop_waits(false);
    drop_waits(true);
}

/* Hosts that wait for each other: each sends what the other receives later. */
TEST(a_circle_is_rejected)
{
    struct step s;
    struct mt_err err = {0};
    size_t circles = 0;
    make_three(&s, false);
    for (int host = 0; host < s.n; host++)
        for (size_t i = 0; i < s.of[host].n_instrs; i++) {
            struct mt_program was = copy_of(&s.of[host]);
            const struct mt_instr *in = &s.of[host].instrs[i];
            size_t k = next_message(&was, i);
            bool turn = in->queue == MT_Q_NET && k < was.n_instrs && in->sends != was.instrs[k].sends;
            if (turn && swap_with_next(&s.of[host], i)) {
                circles++;
                assert_int_equal(check(&s, &err), -EPROTO);
            }
            mt_program_finish(&s.of[host]);
            s.of[host] = was;
        }
    assert_true(circles >= 5);
    finish(&s);
}

TEST(gradients_on_drives_are_refused)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 4);
    f.p.n_lanes = f.p.n_hosts = 2;
    f.p.by_data = true;
    f.p.groups = (struct mt_groups){4, 4};
    put_on_disk(&f, STATES | GRADS, 0);
    describe(&f);
    take_lane_buffers(&f.p, 3);
    f.p.n_buffers[0][MT_POOL_STATE] = 4;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "drives"));
}
