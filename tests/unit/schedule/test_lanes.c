/* SPDX-License-Identifier: Apache-2.0 */
/* Programs whose units are on several lanes. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_program.h"
#include "test.h"

/* Sizes, placement and what is on drives by the bits of v; all units on one lane. */
static void make_variant(struct fixture *f, int v)
{
    make(f, 1 + (size_t)(v & 3) * 2, 1 + (size_t)(v >> 2 & 1) * 3);
    f->tied = v >> 3 & 1;
    f->p.one_ring = !f->tied && v % 3 == 1;
    f->p.join = v >> 4 & 1;
    f->p.cast = !(v >> 5 & 1);
    f->p.poison = v >> 6 & 1;
    f->p.gather = v % 5 < 2;
    f->p.mode = (enum mt_program_mode)(v % 7 < 4 ? MT_MODE_TRAIN : v % 7 - 3);
    for (size_t u = 0; u < f->p.n_units; u++) {
        f->keeps[u] = !(v >> 7 & 1) && !(u & 1);
        f->units[u].trainable = (v >> 8 & 1) || u > 1;
    }
    if (v >> 9 & 1)
        put_on_disk(f, 1 + (unsigned)v % 15, (size_t)v % 3);
    describe(f);
}

static void take_buffers(struct fixture *f, int more)
{
    size_t bytes[MT_N_POOLS];
    int least[MT_N_POOLS], most[MT_N_POOLS];
    take_lane_buffers(&f->p, more);
    mt_program_size_pools(&f->p, 0, bytes, least, most); /* host pools are all lanes' */
    mt_program_max_buffers(&f->p, most);
    for (int i = 0; i < MT_N_POOLS; i++)
        if (!mt_pools[i].device)
            f->p.n_buffers[0][i] = bytes[i] ? MT_MAX(mt_pools[i].least, least[i]) : 0;
}

/* Whether backward may be on another lane than forward. */
static bool may_part(const struct fixture *f, size_t u)
{
    const struct mt_unit_shape *s = &f->units[u];
    return u + 1 < f->p.n_units && !s->adapter_bytes && !s->makes_lists && !s->follows_lists;
}

/* Units on lanes at random, or in turn, backward of some on another lane. A tied table's gradient may move between lanes, too. */
static void put_on_lanes(struct fixture *f, int lanes, uint32_t *seed)
{
    bool in_turn = next_random(seed) & 1;
    f->p.n_lanes = lanes;
    for (size_t u = 0; u < f->p.n_units; u++)
        f->units[u].lane = (uint8_t)(in_turn ? u % (size_t)lanes : next_random(seed) % (uint32_t)lanes);
    bool apart = next_random(seed) & 1;
    for (size_t u = 0; u < f->p.n_units; u++)
        f->units[u].lane_back =
            apart && may_part(f, u) ? (uint8_t)(next_random(seed) % (uint32_t)lanes) : f->units[u].lane;
}

static void build(struct fixture *f, struct mt_program *prog)
{
    MUST(build_and_check, f, prog);
}

/* Sorted by object, in the order of the program. */
static void sort_by_object(uint64_t *list, size_t n)
{
    for (size_t i = 1; i < n; i++)
        for (size_t k = i; k > 0 && list[k - 1] >> 40 > list[k] >> 40; k--) {
            uint64_t x = list[k];
            list[k] = list[k - 1];
            list[k - 1] = x;
        }
}

TEST(every_map_gives_the_sums_of_one_lane)
{
    static uint64_t one[MOST_WRITES], many[MOST_WRITES];
    uint32_t seed = 1;
    for (int v = 0; v < 1 << 10; v++) {
        struct fixture f;
        struct mt_program prog;
        make_variant(&f, v);
        take_buffers(&f, (int)next_random(&seed) % 4);
        build(&f, &prog);
        size_t n = list_writes(&prog, one, 0);
        sort_by_object(one, n);
        mt_program_finish(&prog);
        for (int k = 0; k < 2; k++) {
            put_on_lanes(&f, 2 + (int)next_random(&seed) % 3, &seed);
            take_buffers(&f, (int)next_random(&seed) % 4);
            build(&f, &prog);
            assert_int_equal(list_writes(&prog, many, 0), n);
            sort_by_object(many, n);
            assert_memory_equal(one, many, n * sizeof(*one));
            mt_program_finish(&prog);
        }
    }
}

/* A step that trains on three lanes, with few buffers. */
static void make_three(struct fixture *f, unsigned disk, struct mt_program *prog)
{
    make(f, 5, 3);
    for (size_t u = 0; u < f->p.n_units; u++) {
        f->keeps[u] = true;
        f->units[u].lane = (uint8_t)(u % 3);
        f->units[u].lane_back = (uint8_t)((u + may_part(f, u)) % 3);
    }
    f->p.n_lanes = 3;
    if (disk)
        put_on_disk(f, disk, 0);
    describe(f);
    take_buffers(f, 0);
    build(f, prog);
}

/* A lane's work that waits for a copy out of another lane's device. */
static bool is_across(const struct mt_instr *in, int q)
{
    return mt_queues[in->queue].device && mt_queue_kind(q) == MT_Q_D2H && mt_queue_lane(q) != in->lane;
}

TEST(dropping_a_wait_is_rejected)
{
    for (unsigned disk = 0; disk < 16; disk++) {
        struct fixture f;
        struct mt_program prog;
        make_three(&f, disk, &prog);
        size_t across = drop_each_wait(&prog, is_across, "drives", disk);
        assert_true(across || disk & SPILLS); /* there a load may wait for the drive, or for a store's newer content */
        mt_program_finish(&prog);
    }
}

enum fault { DROPPED, SWAPPED, OTHER_LANE, TWICE, N_FAULTS };

static bool hands_over(const struct mt_program *p, const struct mt_instr *in)
{
    if (in->op != MT_OP_STORE && in->op != MT_OP_LOAD)
        return false;
    enum mt_object_kind kind = p->objects[in->operand[0].object].kind;
    return kind == MT_OBJ_BOUNDARY || kind == MT_OBJ_DX;
}

/* Makes the fault at instruction i; false: it cannot be made there. */
static bool seed_fault(struct mt_program *p, size_t i, enum fault what)
{
    struct mt_instr *in = &p->instrs[i];
    size_t k = i + 1;
    switch (what) {
    case DROPPED:
        take_out(p, i);
        return true;
    case SWAPPED: /* with the next copy of its queue: each moves the other's object */
        while (k < p->n_instrs && (mt_instr_queue(&p->instrs[k]) != mt_instr_queue(in) || !hands_over(p, &p->instrs[k])))
            k++;
        if (k == p->n_instrs || in->operand[0].object == p->instrs[k].operand[0].object)
            return false;
        int32_t object = in->operand[0].object;
        in->operand[0].object = p->instrs[k].operand[0].object;
        p->instrs[k].operand[0].object = object;
        return true;
    case OTHER_LANE:
        in->lane = (uint8_t)((in->lane + 1) % p->n_lanes);
        return true;
    default: /* the computation after it, twice */
        while (k < p->n_instrs && p->instrs[k].op != MT_OP_BACKWARD)
            k++;
        if (k == p->n_instrs)
            return false;
        memmove(p->instrs + k + 1, p->instrs + k, (p->n_instrs - k) * sizeof(*p->instrs));
        p->n_instrs++;
        for (size_t j = k + 1; j < p->n_instrs; j++)
            for (int w = 0; w < MT_MAX_QUEUES; w++)
                p->instrs[j].wait[w] += p->instrs[j].wait[w] >= (int32_t)k;
        return true;
    }
}

TEST(a_fault_in_the_hand_over_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    size_t n[N_FAULTS] = {0};
    make_three(&f, 0, &prog);
    for (size_t i = 0; i < prog.n_instrs; i++)
        for (enum fault what = 0; what < N_FAULTS && hands_over(&prog, &prog.instrs[i]); what++) {
            struct mt_program bad = copy_of(&prog);
            char line[512];
            if (seed_fault(&bad, i, what)) {
                mt_instr_format(line, sizeof(line), &prog, i);
                n[what]++;
                if (mt_program_check(&bad, NULL) != -EPROTO)
                    fail_msg("fault %d at {%s} was not noticed", what, line);
            }
            mt_program_finish(&bad);
        }
    for (int i = 0; i < N_FAULTS; i++)
        assert_true(n[i] >= 20);
    mt_program_finish(&prog);
}

/* Micro-batch 1 of a unit does not wait for all of the unit before it: lanes work at the same time. */
TEST(micro_batches_follow_each_other)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 8);
    f.p.n_lanes = 2;
    for (size_t u = 0; u < f.p.n_units; u++)
        f.units[u].lane = f.units[u].lane_back = (uint8_t)(u % 2);
    take_buffers(&f, 3);
    build(&f, &prog);
    size_t begin = 0, end = 0; /* of unit 2's first, and of unit 1's last micro-batch */
    for (size_t i = 0; i < prog.n_instrs; i++) {
        const struct mt_instr *in = &prog.instrs[i];
        if (in->op == MT_OP_FORWARD && in->unit == 2 && in->mb == 0)
            begin = i;
        if (in->op == MT_OP_FORWARD && in->unit == 1 && in->mb == 7)
            end = i;
    }
    assert_true(begin && begin < end);
    mt_program_finish(&prog);
}

TEST(experts_apart_from_their_lists_are_refused)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 1);
    f.p.n_lanes = 2;
    f.units[1].makes_lists = f.units[2].follows_lists = true;
    f.units[2].lane = f.units[2].lane_back = 1;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "lists of experts"));
    f.units[2].follows_lists = false;
    f.units[2].lane = 2;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "lane 2 of 2"));
    f.units[2].lane = 1;
    f.units[2].lane_back = 2;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "backward of unit 2 cannot be on lane 2 of 2"));
    f.units[2].lane_back = 0;
    f.units[2].makes_lists = true;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "backward of unit 2"));
}

TEST(queues_have_numbers)
{
    for (int lane = 0; lane < MT_MAX_LANES; lane++)
        for (int kind = 0; kind < MT_N_QUEUES; kind++) {
            int q = mt_queue_number(lane, (enum mt_queue)kind);
            assert_true(q < mt_n_queues(lane + 1));
            assert_int_equal(mt_queue_kind(q), kind);
            assert_int_equal(mt_queue_lane(q), mt_queues[kind].device ? lane : 0);
        }
    assert_int_equal(mt_n_queues(MT_MAX_LANES), MT_MAX_QUEUES);
}
