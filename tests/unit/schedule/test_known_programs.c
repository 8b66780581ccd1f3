/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs of a few placements must equal, instruction for instruction, those with which results were compared between
 * placements on real models. A difference is no error by itself, but it must be intended: it changes the order of
 * copies, and a new order of MT_Q_COMPUTE changes the bits.
 */
#include <stdio.h>
#include <string.h>

#include "made_program.h"
#include "test.h"

enum { TIED = 1, ONE_RING = 2, JOIN = 4, IN_PLACE = 8, POISON = 32, RECORDS = 64, FROZEN = 128 };

struct known {
    unsigned flags, disk; /* disk: of put_on_disk(), from the second unit on */
    enum mt_program_mode mode;
    int layers, micro, more; /* buffers of each pool beyond the fewest */
    size_t n_instrs;
    uint64_t hash;
};

static const struct known known[] = {
    {0, 0, MT_MODE_TRAIN, 4, 3, 0, 130, 0x03f9859e8fbec835},
    {TIED, 0, MT_MODE_TRAIN, 3, 2, 0, 75, 0x27f2007a325695e8},
    {TIED | JOIN | RECORDS, 0, MT_MODE_TRAIN, 5, 4, 1, 212, 0x26b610c845662bee},
    {ONE_RING | IN_PLACE, 0, MT_MODE_TRAIN, 5, 2, 1, 79, 0x5ed07932d177ee19},
    {POISON | RECORDS, 0, MT_MODE_TRAIN, 4, 3, 1, 200, 0x0154a52825bfb2cc},
    {FROZEN | JOIN, 0, MT_MODE_TRAIN, 4, 2, 0, 81, 0x065c17ae4902d524},
    {TIED | FROZEN | RECORDS, 0, MT_MODE_TRAIN, 3, 3, 1, 65, 0x085a4abed3c3e31e},
    {JOIN, 0, MT_MODE_EVAL, 6, 3, 1, 59, 0x7913dbb32cffbd4c},
    {TIED, 0, MT_MODE_LOGITS, 4, 1, 0, 13, 0x49be8db0fe8b7d77},
    {RECORDS, 15, MT_MODE_TRAIN, 4, 3, 0, 296, 0x7a610432cfe89cfc},
    {TIED | JOIN | POISON, 15, MT_MODE_TRAIN, 3, 2, 1, 144, 0xc9ca134a79609915},
    {ONE_RING | RECORDS, 3, MT_MODE_TRAIN, 5, 2, 0, 226, 0x8b1c712d55735370},
    {0, 13, MT_MODE_TRAIN, 3, 4, 2, 167, 0xdb78968f74580640},
    {FROZEN, 7, MT_MODE_UPDATE, 5, 2, 0, 82, 0x2156637d714913b3},
    {JOIN, 2, MT_MODE_EVAL, 4, 2, 0, 46, 0x2dbcfbf9af633c7e},
};

static uint64_t hash_text(uint64_t h, const char *text)
{
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 1099511628211u; /* FNV-1a */
    return h;
}

static uint64_t hash_program(const struct mt_program *p)
{
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < p->n_instrs; i++) {
        char line[512];
        mt_instr_format(line, sizeof(line), p, i);
        h = hash_text(h, line);
    }
    return h;
}

static void make_known(struct fixture *f, const struct known *k)
{
    make(f, (size_t)k->layers, (size_t)k->micro);
    f->tied = k->flags & TIED;
    f->p.one_ring = k->flags & ONE_RING;
    f->p.join = k->flags & JOIN;
    f->p.cast = !(k->flags & IN_PLACE);
    f->p.poison = k->flags & POISON;
    f->p.mode = k->mode;
    for (size_t u = 0; u < f->p.n_units; u++) {
        f->keeps[u] = k->flags & RECORDS;
        f->units[u].trainable = !(k->flags & FROZEN) || u > 1;
    }
    if (k->disk)
        put_on_disk(f, k->disk, 1);
    describe(f);
    take_fewest_buffers(&f->p, f->p.n_buffers[0]);
    for (int i = 0; i < MT_N_POOLS; i++)
        f->p.n_buffers[0][i] += f->p.n_buffers[0][i] ? k->more : 0;
}

TEST(known_placements_give_the_same_programs)
{
    for (size_t n = 0; n < sizeof(known) / sizeof(known[0]); n++) {
        struct fixture f;
        struct mt_program prog = {0};
        struct mt_err err = {0};
        make_known(&f, &known[n]);
        if (build_and_check(&f, &prog, &err))
            fail_msg("program %zu: %s", n, err.msg);
        uint64_t h = hash_program(&prog);
        if (h != known[n].hash || prog.n_instrs != known[n].n_instrs)
            fail_msg("program %zu has %zu instructions, hash 0x%016llx; known are %zu, 0x%016llx", n, prog.n_instrs,
                     (unsigned long long)h, known[n].n_instrs, (unsigned long long)known[n].hash);
        mt_program_finish(&prog);
    }
}

/* Places with all planes in host memory and no host buffers, then completes with planes and buffers as they are. */
static int build_in_two(struct fixture *f, struct mt_program *prog, struct mt_err *err)
{
    struct fixture was = *f;
    for (size_t u = 0; u < f->p.n_units; u++) {
        struct mt_unit_shape *s = &f->units[u];
        s->staged_bytes = s->staged_bytes_written = s->state_bytes = s->state_bytes_written = 0;
        s->grad_on_disk = false;
    }
    for (int i = 0; i < MT_N_POOLS; i++)
        f->p.n_buffers[0][i] *= mt_pools[i].device;
    unsigned placed_for = mt_program_placed_for(&f->p);
    int rc = mt_program_place(prog, &f->p, err);
    memcpy(f->units, was.units, sizeof(f->units));
    memcpy(f->p.n_buffers, was.p.n_buffers, sizeof(f->p.n_buffers));
    assert_int_equal(mt_program_placed_for(&f->p), placed_for);
    return rc ? rc : mt_program_complete(prog, &f->p, err);
}

TEST(programs_that_are_placed_before_planes_move_are_the_same)
{
    for (size_t n = 0; n < sizeof(known) / sizeof(known[0]); n++) {
        struct fixture f;
        struct mt_program prog = {0};
        struct mt_err err = {0};
        make_known(&f, &known[n]);
        if (build_in_two(&f, &prog, &err))
            fail_msg("program %zu: %s", n, err.msg);
        assert_int_equal(hash_program(&prog), known[n].hash);
        mt_program_finish(&prog);
    }
}

TEST(spills_and_gathering_need_a_new_placement)
{
    struct fixture f;
    make(&f, 3, 2);
    f.p.gather = true;
    unsigned gathers = mt_program_placed_for(&f.p);
    f.units[2].staged_bytes = 4096;
    unsigned planes = mt_program_placed_for(&f.p);
    f.p.spill_disk = true;
    assert_int_not_equal(planes, gathers);
    assert_int_not_equal(mt_program_placed_for(&f.p), planes);
}
