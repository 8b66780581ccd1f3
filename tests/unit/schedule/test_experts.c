/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs with units that run once a step between units that run by micro-batch. They are built, checked, simulated, and
 * run: each queue advances as its waits allow, in a random order, over buffers of numbers. An operation's result is a hash
 * of what it reads, so any wrong read changes the result.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../plan/shapes.h"
#include "base/mem.h"
#include "made_experts.h"
#include "plan/sim.h"
#include "test.h"

enum { MAX_MB = 4, MAX_BUFFERS = 64, MAX_OBJECTS = 512 };

/* An object's content; of a step's object, a number for each micro-batch. */
struct content {
    uint64_t part[MAX_MB];
};

struct machine {
    const struct experts *e;
    const struct mt_program *p;
    struct content buffer[MT_N_POOLS][MAX_BUFFERS], home[MAX_OBJECTS];
    uint64_t weights[MAX_E_UNITS], result[MAX_E_UNITS + 1]; /* gradients; the sum of losses */
    bool loaded; /* objects that stay on the device are loaded */
};

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

static struct content *content_of(struct machine *m, const struct mt_operand *o)
{
    return &m->buffer[m->p->objects[o->object].pool][o->buffer];
}

static bool is_of_step(const struct machine *m, const struct mt_operand *o)
{
    enum mt_object_kind kind = m->p->objects[o->object].kind;
    return kind == MT_OBJ_ROWS || kind == MT_OBJ_SUM || kind == MT_OBJ_ROUTING;
}

static bool runs_once(const struct machine *m, const struct mt_instr *in)
{
    const struct mt_unit_shape *u = &m->e->units[in->unit];
    return (in->op == MT_OP_BACKWARD ? u->backward : u->forward).scope == MT_SCOPE_GROUP;
}

static void compute(struct machine *m, const struct mt_instr *in)
{
    bool once = runs_once(m, in);
    uint64_t h = mix(mix(in->op, (uint64_t)in->unit), (uint64_t)in->mb);
    for (int k = 0; k < in->n_operands; k++) {
        const struct mt_operand *o = &in->operand[k];
        const struct content *c = content_of(m, o);
        bool all = once && is_of_step(m, o);
        for (int i = 0; o->access & MT_READ && !(o->access & MT_PART) && i < (all ? (int)m->p->n_micro : 1); i++)
            h = mix(h, c->part[all ? i : is_of_step(m, o) ? in->mb : 0]);
    }
    for (int k = 0; k < in->n_operands; k++) {
        const struct mt_operand *o = &in->operand[k];
        struct content *c = content_of(m, o);
        if (!(o->access & MT_WRITE))
            continue;
        if (!(o->access & MT_PART))
            for (int i = 0; i < (once && is_of_step(m, o) ? (int)m->p->n_micro : 1); i++)
                c->part[i] = mix(h, (uint64_t)(1 + i));
        else if (!is_of_step(m, o))
            c->part[0] = (o->access & MT_READ ? c->part[0] : 0) + mix(h, 2); /* a gradient */
        else
            for (int i = once ? 0 : in->mb; i <= (once ? (int)m->p->n_micro - 1 : in->mb); i++)
                c->part[i] = (once && o->access & MT_READ ? c->part[i] : 0) + mix(h, (uint64_t)(3 + i));
    }
    if (in->op == MT_OP_HEAD)
        m->result[MAX_E_UNITS] += mix(h, 99);
}

static void carry_out(struct machine *m, const struct mt_instr *in)
{
    struct content *a = in->n_operands ? content_of(m, &in->operand[0]) : NULL;
    struct content *b = in->n_operands > 1 ? content_of(m, &in->operand[1]) : NULL;
    int32_t object = in->n_operands ? in->operand[0].object : 0;
    if (in->once && m->loaded)
        return;
    switch (in->op) {
    case MT_OP_UPDATE:
        m->weights[in->unit] = mix(m->weights[in->unit], 7);
        break;
    case MT_OP_LOAD:
        if (mt_object_is_of_planes(&m->p->objects[object]))
            *a = (struct content){{m->weights[in->unit]}};
        else
            *a = b ? *b : m->home[object];
        break;
    case MT_OP_STORE:
        *(b ? b : &m->home[object]) = *a;
        break;
    case MT_OP_READ:
        *a = m->home[object];
        break;
    case MT_OP_WRITE:
        m->home[object] = *a;
        break;
    case MT_OP_ZERO:
        *a = (struct content){{0}};
        break;
    case MT_OP_POISON:
        memset(a, 0xa5, sizeof(*a));
        break;
    case MT_OP_GRAD_CAST:
        (b ? b : a)->part[0] = mix(a->part[0], 5);
        break;
    case MT_OP_STORE_GRAD:
        m->result[in->unit] = a->part[0];
        break;
    case MT_OP_STATS:
    case MT_OP_JOIN:
        break;
    default:
        compute(m, in);
    }
}

static bool may_start(const struct mt_instr *in, const int32_t ended[MT_N_QUEUES])
{
    for (int q = 0; q < MT_N_QUEUES; q++)
        if (in->wait[q] > ended[q])
            return false;
    return true;
}

/* Runs the program; at each step, a random queue of those that are ready advances. */
static void run(struct machine *m, const struct experts *e, const struct mt_program *p, unsigned seed)
{
    size_t next[MT_N_QUEUES] = {0}, left = p->n_instrs;
    int32_t ended[MT_N_QUEUES];
    struct content kept[MAX_BUFFERS];
    bool loaded = m->loaded;
    memcpy(kept, m->buffer[MT_POOL_ADAPTERS], sizeof(kept));
    memset(m, 0x5a, sizeof(*m)); /* nothing starts as zero */
    m->loaded = loaded;
    if (loaded)
        memcpy(m->buffer[MT_POOL_ADAPTERS], kept, sizeof(kept));
    memset(m->result, 0, sizeof(m->result));
    m->e = e;
    m->p = p;
    for (int u = 0; u < MAX_E_UNITS; u++)
        m->weights[u] = mix(11, (uint64_t)u);
    for (int q = 0; q < MT_N_QUEUES; q++)
        ended[q] = -1;
    for (int idle = 0; left; idle++) {
        seed = seed * 1103515245u + 12345u;
        int q = (int)(seed >> 16) % MT_N_QUEUES;
        while (next[q] < p->n_instrs && p->instrs[next[q]].queue != q)
            next[q]++;
        if (idle > 100000)
            fail_msg("the queues wait for each other");
        if (next[q] == p->n_instrs || !may_start(&p->instrs[next[q]], ended))
            continue;
        carry_out(m, &p->instrs[next[q]]);
        ended[q] = (int32_t)next[q]++;
        left--;
        idle = 0;
    }
}

static void simulate(const struct mt_program *p)
{
    struct mt_machine machine = make_machine(24, 64, 1);
    struct mt_sim_graph g = {.n = p->n_instrs};
    struct mt_sim_result r;
    double compute_seconds = 0;
    g.tasks = calloc(p->n_instrs, sizeof(*g.tasks));
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        struct mt_sim_task *t = &g.tasks[i];
        *t = (struct mt_sim_task){.queue = in->queue, .op = in->op, .unit = in->unit, .mb = in->mb, .cause = -1, .seconds = 1};
        memcpy(t->wait, in->wait, sizeof(t->wait));
        compute_seconds += in->queue == MT_Q_COMPUTE;
        if (mt_opcodes[in->op].ends_forward)
            g.turn = i;
    }
    MUST(mt_sim_run, &r, &g, &(struct mt_sim_params){.machine = &machine});
    assert_true(r.busy[MT_Q_COMPUTE] > compute_seconds - 1e-6 && r.makespan >= r.busy[MT_Q_COMPUTE]);
    free(g.tasks);
}

static void build(struct experts *e, struct mt_program *p)
{
    MUST(mt_program_build, p, &e->p);
    MUST(mt_program_check, p);
}

/* Placement v: two to five slots; values of a step kept, or leaving for the host or the disk; few buffers or many. */
static void place(struct experts *e, int v)
{
    int least[MT_N_POOLS], most[MT_N_POOLS];
    e->p.spill_disk = v >> 2 & 1;
    e->p.poison = v >> 3 & 1;
    e->p.join = v >> 4 & 1;
    e->p.cast = !(v >> 5 & 1);
    take_fewest_buffers(&e->p, least);
    mt_program_max_buffers(&e->p, most);
    for (int i = 0; i < MT_N_POOLS; i++)
        e->p.n_buffers[0][i] = v >> 6 & 1 ? most[i] : MT_MIN(least[i] + (v >> 7 & 1), MT_MAX(least[i], most[i]));
    e->p.n_buffers[0][MT_POOL_WEIGHTS] = 2 + v % 4;
}

static bool has_weights(size_t unit)
{
    size_t at = (unit - 1) % PER_LAYER + 1;
    return at == ROUTER || (at >= FIRST_EXPERTS && at <= LAST_EXPERTS);
}

TEST(placements_give_one_result)
{
    static struct machine first, m;
    for (size_t layers = 1; layers <= MAX_LAYERS; layers++)
        for (size_t n_micro = 1; n_micro <= MAX_MB; n_micro++)
            for (int v = 0; v < 256; v++) {
                struct experts e;
                struct mt_program p = {0};
                make_experts(&e, layers, n_micro, false);
                place(&e, v);
                build(&e, &p);
                run(v ? &m : &first, &e, &p, (unsigned)(v + 1));
                if (v && memcmp(m.result, first.result, sizeof(m.result)))
                    fail_msg("%zu layers, %zu micro-batches: placement %d computes something else", layers, n_micro, v);
                if (v % 8 == 0)
                    simulate(&p);
                mt_program_finish(&p);
            }
    for (size_t u = 0; u < 2 + MAX_LAYERS * PER_LAYER; u++) /* units with weights */
        assert_true((first.result[u] != 0) == (u == 0 || u == 1 + MAX_LAYERS * PER_LAYER || has_weights(u)));
}

TEST(what_lives_for_the_run_is_loaded_once_and_stays)
{
    static struct machine first, m;
    memset(&first, 0, sizeof(first));
    for (int v = 0; v < 256; v++) {
        struct experts e;
        struct mt_program train = {0}, eval = {0};
        make_experts(&e, 2, 3, true);
        place(&e, v);
        build(&e, &train);
        e.p.mode = MT_MODE_EVAL;
        build(&e, &eval);
        memset(&m, 0, sizeof(m));
        run(&m, &e, &eval, 1); /* loads what stays on the device, before the steps */
        m.loaded = true;
        run(&m, &e, &train, 2);
        run(&m, &e, &train, (unsigned)v);
        if (v == 0)
            run(&first, &e, &train, 3); /* loads everything */
        if (memcmp(m.result, first.result, sizeof(m.result)))
            fail_msg("placement %d computes something else", v);
        mt_program_finish(&train);
        mt_program_finish(&eval);
    }
    assert_true(first.result[ROUTER] && !first.result[ROUTER + PER_LAYER]); /* the trained adapters' gradient, the frozen ones' */
}

TEST(taking_the_buffer_of_what_lives_for_the_run_is_rejected)
{
    struct experts e;
    MT_CLOSED_BY(mt_program_finish) struct mt_program p = {0};
    struct mt_err err = {0};
    make_experts(&e, 2, 2, true);
    place(&e, 0);
    build(&e, &p);
    for (size_t i = 0; i < p.n_instrs; i++)
        for (int k = 0; k < p.instrs[i].n_operands; k++)
            if (p.objects[p.instrs[i].operand[k].object].resident)
                p.instrs[i].operand[k].buffer ^= 1; /* exchange their buffers */
    assert_int_equal(mt_program_check(&p, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "lives for the run"));
    mt_program_finish(&p);
    build(&e, &p);
    for (size_t i = 0; i < p.n_instrs; i++)
        if (p.instrs[i].op == MT_OP_LOAD)
            p.instrs[i].once |= p.instrs[i].unit == ROUTER; /* which is trained */
    assert_int_equal(mt_program_check(&p, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "loads only once"));
}

static bool copies_weights(const struct mt_program *p, const struct mt_instr *in)
{
    enum mt_object_kind kind = p->objects[in->operand[0].object].kind;
    return in->op == MT_OP_JOIN || ((in->op == MT_OP_LOAD || in->op == MT_OP_READ) &&
                                    (kind == MT_OBJ_WEIGHTS || kind == MT_OBJ_STAGED));
}

/* Frozen experts whose weights are on a drive. */
static void put_experts_away(struct experts *e)
{
    for (size_t u = 0; u < e->p.n_units; u++)
        if (e->units[u].follows_lists) {
            e->units[u].trainable = false;
            e->units[u].staged_bytes = 4096;
        }
}

/* Logits: weights of experts are read and loaded after the layer's lists, so that those of idle experts are skipped. */
TEST(weights_of_idle_experts_can_be_skipped)
{
    for (int v = 0; v < 256; v++) {
        struct experts e;
        struct mt_program p = {0};
        make_experts(&e, 2, 1, v & 1);
        if (v & 2)
            put_experts_away(&e);
        place(&e, v);
        e.p.mode = MT_MODE_LOGITS;
        build(&e, &p); /* checks the program */
        for (size_t i = 0; i < p.n_instrs; i++)
            if (copies_weights(&p, &p.instrs[i]))
                assert_int_equal(p.instrs[i].if_rows, e.units[p.instrs[i].unit].follows_lists);
        mt_program_finish(&p);
    }
}

/* Marks the first such copies of experts that come before the lists. */
static bool mark_early(const struct experts *e, struct mt_program *p, enum mt_opcode op)
{
    for (size_t i = 0; i < p->n_instrs; i++) {
        struct mt_instr *in = &p->instrs[i];
        if (e->units[in->unit].makes_lists)
            return false;
        if (in->op == op && e->units[in->unit].follows_lists && copies_weights(p, in))
            return in->if_rows = true;
    }
    return false;
}

TEST(skipping_before_the_rows_are_known_is_rejected)
{
    size_t rejected[MT_N_OPCODES] = {0};
    for (int v = 0; v < 256; v++)
        for (int k = 0; k < 2; k++) {
            enum mt_opcode op = k ? MT_OP_READ : MT_OP_LOAD;
            struct experts e;
            struct mt_program p = {0};
            struct mt_err err = {0};
            make_experts(&e, 2, 2, false);
            put_experts_away(&e);
            place(&e, v);
            e.p.mode = MT_MODE_EVAL;
            build(&e, &p);
            if (mark_early(&e, &p, op)) {
                assert_int_equal(mt_program_check(&p, &err), -EPROTO);
                assert_non_null(strstr(err.msg, k ? "may not have been read" : "rows of experts were known"));
                rejected[op]++;
            }
            mt_program_finish(&p);
        }
    assert_true(rejected[MT_OP_LOAD] && rejected[MT_OP_READ]);
}

static size_t count(const struct mt_program *p, enum mt_opcode op, enum mt_object_kind kind)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == op && p->instrs[i].n_operands && p->objects[p->instrs[i].operand[0].object].kind == kind;
    return n;
}

TEST(a_unit_of_the_step_runs_once_each_way)
{
    struct experts e;
    MT_CLOSED_BY(mt_program_finish) struct mt_program p = {0};
    make_experts(&e, 2, 3, false);
    build(&e, &p);
    for (int32_t u = 0; u < (int32_t)e.p.n_units; u++) {
        bool lists = e.units[u].makes_lists; /* it has no backward operation */
        size_t forward = 0, backward = 0, want = e.units[u].forward.scope == MT_SCOPE_GROUP ? 1 : 3;
        for (size_t i = 0; i < p.n_instrs; i++) {
            forward += p.instrs[i].unit == u && p.instrs[i].op == MT_OP_FORWARD;
            backward += p.instrs[i].unit == u && p.instrs[i].op == MT_OP_BACKWARD;
        }
        bool layer = e.units[u].forward.op == MT_OP_FORWARD;
        assert_int_equal(forward, layer ? want : 0);
        assert_int_equal(backward, layer && !lists ? want : 0);
    }
    assert_int_equal(count(&p, MT_OP_STORE_GRAD, MT_OBJ_CAST), 2 + 2 * (1 + EXPERTS));
}

TEST(values_of_a_step_leave_the_device_where_they_must)
{
    for (int keep = 0; keep < 2; keep++) {
        struct experts e;
        struct mt_program p = {0};
        make_experts(&e, 3, 2, false);
        place(&e, keep ? 64 : 0);
        build(&e, &p);
        assert_true((count(&p, MT_OP_STORE, MT_OBJ_ROWS) > 0) == !keep);
        assert_true((count(&p, MT_OP_LOAD, MT_OBJ_ROWS) > 0) == !keep);
        assert_true((count(&p, MT_OP_STORE, MT_OBJ_ROUTING) > 0) == !keep);
        mt_program_finish(&p);
    }
}

/* The position of the nth operation of a unit. */
static size_t find(const struct mt_program *p, enum mt_opcode op, int32_t unit, int nth)
{
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].op == op && p->instrs[i].unit == unit && nth-- == 0)
            return i;
    fail_msg("no such instruction");
    return 0;
}

/* Exchanges two operations, a before b; both get the waits of both, if these come before them. */
static void exchange(struct mt_program *p, size_t a, size_t b)
{
    struct mt_instr x = p->instrs[a], y = p->instrs[b];
    p->instrs[a] = y;
    p->instrs[b] = x;
    for (int q = 0; q < MT_N_QUEUES; q++) {
        p->instrs[a].wait[q] = y.wait[q] < (int32_t)a ? MT_MAX(x.wait[q], y.wait[q]) : x.wait[q];
        p->instrs[b].wait[q] = MT_MAX(x.wait[q], y.wait[q]);
    }
    p->instrs[a].signals = x.signals;
    p->instrs[b].signals = y.signals;
}

TEST(reading_a_sum_before_its_last_addition_is_rejected)
{
    const struct {
        enum mt_opcode op;
        int32_t early, late; /* units: `late` reads what `early` completes */
        int nth_early;
    } faults[] = {
        {MT_OP_FORWARD, LAST_EXPERTS, COMBINE, 0},  /* the sum, without the last expert */
        {MT_OP_FORWARD, ROUTER, LISTS, 2},          /* the step's routing, without the last micro-batch's */
        {MT_OP_FORWARD, ROUTER, FIRST_EXPERTS, 2},  /* and its rows */
        {MT_OP_BACKWARD, FIRST_EXPERTS, ROUTER, 0}, /* the gradient that experts add into */
        {MT_OP_BACKWARD, COMBINE, LAST_EXPERTS, 2}, /* the rows of the experts' gradient */
    };
    for (size_t k = 0; k < MT_ARRAY_LEN(faults); k++) {
        struct experts e;
        struct mt_program p = {0};
        struct mt_err err = {0};
        make_experts(&e, 1, 3, false);
        place(&e, 64); /* everything stays on the device: there are no copies between them */
        e.p.n_buffers[0][MT_POOL_WEIGHTS] = 5;
        build(&e, &p);
        exchange(&p, find(&p, faults[k].op, faults[k].early, faults[k].nth_early),
                 find(&p, faults[k].op, faults[k].late, 0));
        assert_int_equal(mt_program_check(&p, &err), -EPROTO);
        if (!strstr(err.msg, "not complete"))
            fail_msg("fault %zu: %s", k, err.msg);
        mt_program_finish(&p);
    }
}

TEST(adding_to_a_sum_that_was_read_is_rejected)
{
    struct experts e;
    MT_CLOSED_BY(mt_program_finish) struct mt_program p = {0};
    struct mt_err err = {0};
    make_experts(&e, 1, 2, false);
    place(&e, 64);
    build(&e, &p);
    size_t expert = find(&p, MT_OP_FORWARD, LAST_EXPERTS, 0), finish = find(&p, MT_OP_FORWARD, COMBINE, 0);
    p.instrs[finish] = p.instrs[expert]; /* a second time */
    memset(p.instrs[finish].wait, 0xff, sizeof(p.instrs[finish].wait));
    assert_int_equal(mt_program_check(&p, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "is complete"));
}

/* Gives an object of a step the buffer of another that is still to be read. */
TEST(reusing_a_buffer_of_the_step_early_is_rejected)
{
    static const enum mt_object_kind kinds[] = {MT_OBJ_ROWS, MT_OBJ_ROUTING};
    for (size_t k = 0; k < MT_ARRAY_LEN(kinds); k++) {
        struct experts e;
        struct mt_program p = {0};
        struct mt_err err = {0};
        make_experts(&e, 2, 2, false);
        place(&e, 64);
        build(&e, &p);
        int16_t first = -1, moved = -1;
        for (size_t i = 0; i < p.n_instrs; i++)
            for (int o = 0; o < p.instrs[i].n_operands; o++) {
                struct mt_operand *op = &p.instrs[i].operand[o];
                if (p.objects[op->object].kind != kinds[k])
                    continue;
                first = first < 0 ? op->buffer : first;
                moved = moved < 0 && op->buffer != first ? op->buffer : moved;
                op->buffer = op->buffer == moved ? first : op->buffer;
            }
        assert_true(moved >= 0);
        assert_int_equal(mt_program_check(&p, &err), -EPROTO);
        if (!strstr(err.msg, "holds something else") && !strstr(err.msg, "still read"))
            fail_msg("%s: %s", mt_kinds[kinds[k]].name, err.msg);
        mt_program_finish(&p);
    }
}

/* All sums share one buffer; the next layer's is written before the last micro-batch has read this layer's. */
TEST(beginning_a_sum_in_a_buffer_still_to_be_read_is_rejected)
{
    struct experts e;
    MT_CLOSED_BY(mt_program_finish) struct mt_program p = {0};
    struct mt_err err = {0};
    make_experts(&e, 2, 2, false);
    place(&e, 64);
    e.p.n_buffers[0][MT_POOL_SUM] = 1;
    e.p.n_buffers[0][MT_POOL_WEIGHTS] = 5;
    build(&e, &p);
    exchange(&p, find(&p, MT_OP_FORWARD, PER_LAYER, 1), find(&p, MT_OP_FORWARD, PER_LAYER + 1, 0));
    assert_int_equal(mt_program_check(&p, &err), -EPROTO);
    if (!strstr(err.msg, "holds something else"))
        fail_msg("%s", err.msg);
}

TEST(dropping_a_wait_is_rejected)
{
    for (int v = 0; v < 8; v++) {
        struct experts e;
        struct mt_program p = {0};
        make_experts(&e, 2, 3, false);
        place(&e, v);
        build(&e, &p);
        drop_each_wait(&p, NULL, "placement", (unsigned)v);
        mt_program_finish(&p);
    }
}

TEST(what_cannot_be_scheduled_is_refused)
{
    struct experts e;
    struct mt_program p = {0};
    struct mt_err err = {0};
    make_experts(&e, 1, 2, false);
    e.values[e.units[0].backward.use[1].value].life = MT_LIFE_RUN; /* the embedding's gradient */
    assert_int_equal(mt_program_build(&p, &e.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "live for the run"));
    make_experts(&e, 1, 2, false);
    e.units[FIRST_EXPERTS].forward.use[1] = e.units[ROUTER].forward.use[1]; /* a micro-batch's boundary */
    assert_int_equal(mt_program_build(&p, &e.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "once a group"));
}
