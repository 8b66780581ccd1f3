/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients that are summed in groups of micro-batches: what a program computes, evaluated with numbers. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_experts.h"
#include "made_program.h"
#include "test.h"

enum { MOST_OBJECTS = 4096, MOST_MICRO = 24 };

/* What an operation adds to a unit's gradient: numbers whose sums are rounded. */
static float contribution(int unit, int op, int mb)
{
    uint32_t seed = (uint32_t)(unit * 1000003 + op * 10007 + mb * 101 + 7);
    next_random(&seed);
    return (float)(next_random(&seed) % 20011) / 131.0f + 0.001f;
}

/* Sums as a program makes them: of each object, and of each unit's gradient when it is cast. */
struct sums {
    float of[MOST_OBJECTS], cast[MAX_E_UNITS];
    size_t n_cast, n_adds;
};

static void add_operand(struct sums *s, const struct mt_program *p, const struct mt_instr *in, const struct mt_operand *op)
{
    const struct mt_object *o = &p->objects[op->object];
    float x = contribution(o->unit, in->op, in->mb);
    if (in->op == MT_OP_ZERO)
        s->of[op->object] = 0;
    else if (op->access == MT_FILL)
        s->of[op->object] = x;
    else if (op->access == MT_ADD)
        s->of[op->object] += x;
    else if (in->op == MT_OP_GRAD_CAST) {
        s->cast[o->unit] = s->of[op->object];
        s->n_cast++;
    }
}

static void evaluate(struct sums *s, const struct mt_program *p)
{
    assert_true(p->n_objects < MOST_OBJECTS);
    memset(s, 0, sizeof(*s));
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (in->op == MT_OP_ADD_GROUP) {
            s->of[in->operand[0].object] += s->of[in->operand[1].object];
            s->n_adds++;
            continue;
        }
        for (int k = 0; k < in->n_operands && in->queue == MT_Q_COMPUTE; k++)
            if (p->objects[in->operand[k].object].kind == MT_OBJ_GRAD)
                add_operand(s, p, in, &in->operand[k]);
    }
}

/* The sum of groups [first, end), without empty ones: halves apart. n_ops: operations that contribute, in order. */
static float tree(const struct mt_program_params *p, int unit, const int *ops, int n_ops, size_t first, size_t end)
{
    float sum = 0;
    size_t middle = (first + end) / 2, begin = mt_group_first(p->groups, first), stop = mt_group_first(p->groups, first + 1);
    if (end - first > 1 && mt_group_first(p->groups, middle) < p->n_micro)
        return tree(p, unit, ops, n_ops, first, middle) + tree(p, unit, ops, n_ops, middle, end);
    if (end - first > 1)
        return tree(p, unit, ops, n_ops, first, middle);
    for (int i = 0; i < n_ops; i++)
        for (size_t mb = begin; mb < MT_MIN(stop, p->n_micro); mb++)
            sum = i || mb > begin ? sum + contribution(unit, ops[i], (int)mb) : contribution(unit, ops[i], (int)mb);
    return sum;
}

/* The operations that contribute to a unit's gradient. */
static int list_ops(const struct mt_program_params *p, bool tied, size_t unit, int ops[2])
{
    int n = 0;
    if (unit + 1 == p->n_units || (tied && !unit))
        ops[n++] = MT_OP_HEAD;
    if (unit + 1 < p->n_units)
        ops[n++] = unit ? MT_OP_BACKWARD : MT_OP_EMBED_BWD;
    return n;
}

static void take_buffers(struct mt_program_params *p, int more)
{
    size_t bytes[MT_N_POOLS];
    int least[MT_N_POOLS], most[MT_N_POOLS];
    take_lane_buffers(p, more);
    mt_program_size_pools(p, 0, bytes, least, most); /* host pools are all lanes' */
    for (int i = 0; i < MT_N_POOLS; i++)
        if (!mt_pools[i].device)
            p->n_buffers[0][i] = bytes[i] ? MT_MAX(mt_pools[i].least, least[i]) : 0;
}

static void build(const struct mt_program_params *p, struct mt_program *prog)
{
    MUST(mt_program_build, prog, p);
    MUST(mt_program_check, prog);
}

static void compare(const struct mt_program_params *p, bool tied, const struct sums *s)
{
    size_t n = 0;
    for (size_t u = 0; u < p->n_units; u++) {
        int ops[2], n_ops = list_ops(p, tied, u, ops);
        if (!p->units[u].trainable)
            continue;
        float want = tree(p, (int)u, ops, n_ops, 0, mt_groups_n(p->groups));
        if (memcmp(&want, &s->cast[u], sizeof(want)))
            fail_msg("unit %zu: %.9g, not %.9g (%zu groups, %zu of %zu micro-batches)", u, (double)s->cast[u], (double)want,
                     p->groups.n, p->n_micro, p->groups.of);
        n++;
    }
    assert_int_equal(s->n_cast, n);
}

TEST(every_placement_sums_by_the_tree)
{
    static struct sums s;
    uint32_t seed = 3;
    size_t adds = 0;
    for (int v = 0; v < 600; v++) {
        struct fixture f;
        struct mt_program prog;
        make(&f, 1 + next_random(&seed) % 5, 1 + next_random(&seed) % MOST_MICRO);
        f.tied = next_random(&seed) & 1;
        f.p.cast = next_random(&seed) & 1;
        f.p.poison = next_random(&seed) & 1;
        f.p.n_lanes = 1 + (int)(next_random(&seed) % 4);
        f.p.groups = (struct mt_groups){1u << next_random(&seed) % 4, f.p.n_micro};
        while (f.p.groups.n > f.p.n_micro)
            f.p.groups.n /= 2;
        f.p.by_data = f.p.groups.n >= (size_t)f.p.n_lanes && next_random(&seed) & 1;
        if (next_random(&seed) & 1) /* a last step */
            f.p.n_micro = 1 + next_random(&seed) % f.p.n_micro;
        for (size_t u = 0; u < f.p.n_units; u++) {
            bool parts = u + 1 < f.p.n_units && next_random(&seed) & 1;
            f.units[u].lane = (uint8_t)(next_random(&seed) % (uint32_t)f.p.n_lanes);
            f.units[u].lane_back = parts ? (uint8_t)(next_random(&seed) % (uint32_t)f.p.n_lanes) : f.units[u].lane;
            f.units[u].trainable = u > 1 || v % 3;
            f.keeps[u] = v & 4;
        }
        f.p.gather = v % 7 == 0;
        if (v % 5 == 0)
            put_on_disk(&f, 1 + (unsigned)v % 15, (size_t)v % 3);
        describe(&f);
        take_buffers(&f.p, (int)next_random(&seed) % 4);
        build(&f.p, &prog);
        evaluate(&s, &prog);
        compare(&f.p, f.tied, &s);
        adds += s.n_adds;
        mt_program_finish(&prog);
    }
    assert_true(adds > 1000);
}

/* Experts run once a group, by its first micro-batch. */
TEST(experts_run_once_a_group)
{
    static struct sums s;
    for (int v = 0; v < 32; v++) {
        struct experts e;
        struct mt_program prog;
        size_t runs = 0, groups = 4, n = 0;
        make_mixture(&e, 4 + (size_t)v % 5, groups);
        e.p.n_lanes = 1 + v / 16 * 3;
        e.p.by_data = v & 16;
        for (size_t u = 0; u < e.p.n_units && e.p.by_data; u++)
            e.units[u].lane = e.units[u].lane_back = (uint8_t)(u % 4);
        e.p.n_micro -= v % 4;
        e.p.poison = v & 8;
        take_buffers(&e.p, v % 4);
        build(&e.p, &prog);
        evaluate(&s, &prog);
        size_t in_use = mt_groups_in_use(e.p.groups, e.p.n_micro);
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            runs += in->op == MT_OP_FORWARD && in->unit == FIRST_EXPERTS;
            assert_false(in->if_rows && in_use > 1); /* rows of later groups are not known */
        }
        assert_int_equal(runs, in_use);
        for (size_t u = 0; u < e.p.n_units; u++) {
            int ops[2], n_ops = list_ops(&e.p, false, u, ops);
            bool once = e.units[u].scope == MT_SCOPE_GROUP;
            if (!e.units[u].trainable || once)
                continue;
            assert_true(s.cast[u] == tree(&e.p, (int)u, ops, n_ops, 0, groups));
            n++;
        }
        assert_true(n > 2);
        mt_program_finish(&prog);
    }
}

/* In a step of one group the rows of experts are known; their directions want all their weights nevertheless. */
TEST(weights_by_which_a_direction_is_made_are_never_skipped)
{
    size_t rejected = 0;
    for (int v = 0; v < 32; v++) {
        struct experts e;
        struct mt_program prog;
        struct mt_err err = {0};
        make_mixture(&e, 4, 4);
        e.p.n_micro = 1;
        for (size_t u = 0; u < e.p.n_units; u++)
            e.units[u].moment_bytes = e.units[u].trainable ? 64 : 0;
        take_buffers(&e.p, v % 4);
        build(&e.p, &prog);
        for (size_t i = prog.n_instrs; i-- > 0;)
            assert_false(prog.instrs[i].if_rows);
        for (size_t i = 0; i < prog.n_instrs; i++) {
            struct mt_instr *in = &prog.instrs[i];
            in->if_rows = in->op == MT_OP_LOAD && e.units[in->unit].follows_lists &&
                          prog.objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS && i > prog.n_instrs / 2;
        }
        rejected += mt_program_check(&prog, &err) == -EPROTO && strstr(err.msg, "a direction by weights that may have been skipped");
        mt_program_finish(&prog);
    }
    assert_true(rejected > 0);
}

/* One group is no group: the same instructions as without. */
TEST(one_group_is_the_whole_step)
{
    struct fixture f;
    struct mt_program a, b;
    make(&f, 4, 5);
    build(&f.p, &a);
    f.p.groups = (struct mt_groups){1, 5};
    build(&f.p, &b);
    assert_int_equal(a.n_instrs, b.n_instrs);
    assert_memory_equal(a.instrs, b.instrs, a.n_instrs * sizeof(*a.instrs));
    mt_program_finish(&a);
    mt_program_finish(&b);
}

enum fault { DROPPED, TURNED, TWICE, CHAINED, OTHER_TERM, OTHER_UNIT, OTHER_GROUP, N_FAULTS };

/* Another addition after i, whose instruction a fault exchanges terms with; NULL: none. */
static struct mt_instr *next_add(struct mt_program *p, size_t i, bool same_unit)
{
    for (size_t k = i + 1; k < p->n_instrs; k++)
        if (p->instrs[k].op == MT_OP_ADD_GROUP && (p->instrs[k].unit == p->instrs[i].unit) == same_unit)
            return &p->instrs[k];
    return NULL;
}

static void exchange(struct mt_operand *a, struct mt_operand *b)
{
    struct mt_operand was = *a;
    a->object = b->object;
    a->buffer = b->buffer;
    b->object = was.object;
    b->buffer = was.buffer;
}

/* Makes the fault at instruction i; false: it cannot be made there. */
static bool seed_fault(struct mt_program *p, size_t i, enum fault what)
{
    struct mt_instr *in = &p->instrs[i], *other;
    bool adds = in->op == MT_OP_ADD_GROUP;
    switch (what) {
    case DROPPED: /* instead a computation without effect */
        if (adds)
            in->n_operands = 0, in->op = MT_OP_ZERO;
        return adds;
    case TURNED:
        if (adds)
            exchange(&in->operand[0], &in->operand[1]);
        return adds;
    case TWICE: /* the term is added again instead of the next one */
        other = adds ? next_add(p, i, true) : NULL;
        if (other)
            other->operand[1] = in->operand[1];
        return other;
    case CHAINED: /* added to what the next addition adds to, instead of before that */
        other = adds ? next_add(p, i, true) : NULL;
        if (other)
            in->operand[0] = other->operand[0];
        return other;
    case OTHER_TERM:
    case OTHER_UNIT:
        other = adds ? next_add(p, i, what == OTHER_TERM) : NULL;
        if (other)
            exchange(&in->operand[1], &other->operand[1]);
        return other;
    default:
        if (in->op == MT_OP_BACKWARD)
            in->mb = (in->mb + 2) % (int)p->n_micro;
        return in->op == MT_OP_BACKWARD;
    }
}

TEST(a_fault_in_the_tree_is_rejected)
{
    size_t n[N_FAULTS] = {0};
    for (int v = 1; v < 8; v++) {
        struct fixture f;
        struct mt_program prog;
        int lanes = v & 3 ? v & 3 : 4;
        make(&f, 3, 8);
        f.p.by_data = v & 4;
        f.p.groups = (struct mt_groups){8, 8};
        f.p.n_lanes = lanes;
        for (size_t u = 0; u < f.p.n_units; u++)
            f.units[u].lane = f.units[u].lane_back = (uint8_t)(u % (size_t)lanes);
        take_buffers(&f.p, 3);
        build(&f.p, &prog);
        for (size_t i = 0; i < prog.n_instrs; i++)
            for (enum fault what = 0; what < N_FAULTS; what++) {
                struct mt_program bad = copy_of(&prog);
                if (seed_fault(&bad, i, what)) {
                    n[what]++;
                    if (mt_program_check(&bad, NULL) != -EPROTO)
                        fail_msg("fault %d at instruction %zu was not noticed, %d lanes", (int)what, i, lanes);
                }
                mt_program_finish(&bad);
            }
        mt_program_finish(&prog);
    }
    for (int i = 0; i < N_FAULTS; i++)
        assert_true(n[i] >= 20);
}
