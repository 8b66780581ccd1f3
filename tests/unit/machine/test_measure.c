/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "device/op.h"
#include "machine/measure_priv.h"
#include "test.h"

static const struct mt_measure_params here = {.device_kind = "cpu", .n_threads = 2};

enum { MAX_EXAMPLES = 256 };

/* Every operation in each of its variants, of odd shapes. Bytes that are far too few: an operand may be larger than what
 * goes from one to the next. */
static size_t one_of_each(struct mt_metered *ops, enum mt_dtype t)
{
    static const struct mt_op_sizes sizes = {{
        [MT_SIZE_ROWS] = 70, [MT_SIZE_HIDDEN] = 65, [MT_SIZE_FFN] = 47, [MT_SIZE_LOSS_ROWS] = 19,
        [MT_SIZE_VOCAB] = 320, [MT_SIZE_RUNS] = 11, [MT_SIZE_HEADS] = 4, [MT_SIZE_KV_HEADS] = 2,
        [MT_SIZE_ALL_HEADS] = 3, [MT_SIZE_HEAD_DIM] = 16, [MT_SIZE_LENGTH] = 32, [MT_SIZE_ELEMENTS] = 1001,
        [MT_SIZE_EXPERTS] = 13, [MT_SIZE_TOP_K] = 3}};
    size_t n = 0;
    for (int id = 0; id < MT_N_DEV_OPS; id++)
        for (unsigned which = 0; n < MAX_EXAMPLES; which++, n++) {
            int rc = mt_metered_example(&ops[n], (enum mt_dev_op)id, which, &sizes, t);
            if (rc == -ERANGE)
                break;
            assert_int_equal(rc, 0);
            ops[n].bytes = n % 2 ? 100000 : 64;
        }
    assert_true(n > MT_N_DEV_OPS && n < MAX_EXAMPLES);
    return n;
}

TEST(every_operation_is_timed_in_turn)
{
    struct mt_metered ops[MAX_EXAMPLES];
    for (int t = MT_F32; t <= MT_BF16; t++) {
        double seconds[MAX_EXAMPLES] = {0};
        size_t n = one_of_each(ops, (enum mt_dtype)t);
        MUST(mt_measure_in_turn, seconds, &here, ops, n);
        for (size_t i = 0; i < n; i++)
            assert_true(seconds[i] > 0 && seconds[i] < 1);
    }
}

/* When values had the width of keys, profiles did not say it. */
TEST(a_profile_without_the_width_of_values_is_read)
{
    struct mt_metered old, now;
    assert_true(mt_operation_parse(&old, "attention_bwd.bf16.0.2048x129x8x4x64:1e9:1e6"));
    assert_true(mt_operation_parse(&now, "attention_bwd.bf16.0.2048x129x8x4x64x64:1e9:1e6"));
    assert_true(mt_same_operation(&old, &now));
    assert_true(mt_operation_parse(&now, "attention_bwd.bf16.0.2048x129x8x4x64x32:1e9:1e6"));
    assert_false(mt_same_operation(&old, &now));
}

/* And its name in a profile reads back. */
TEST(every_operation_is_in_the_grid)
{
    static struct mt_measure_grid g;
    struct mt_metered back;
    char text[160];
    for (uint64_t part = 1; part <= 16; part *= 16) {
        int found[MT_N_DEV_OPS][MT_OP_VARIANTS][2] = {{{0}}};
        mt_measure_list_grid(&g, 4, part);
        assert_false(g.failed);
        for (size_t i = 0; i < g.n; i++) {
            found[g.ops[i].op][g.ops[i].variant][g.ops[i].dtype == MT_BF16]++;
            mt_operation_format(text, sizeof(text), &g.ops[i]);
            assert_true(mt_operation_parse(&back, text) && mt_same_operation(&back, &g.ops[i]));
        }
        for (int op = 0; op < MT_N_DEV_OPS; op++)
            for (unsigned v = 0; mt_dev_op((enum mt_dev_op)op)->name[v]; v++)
                for (int t = 0; t < 2; t++)
                    assert_true(found[op][v][t] > 0 || (t ? mt_dev_op((enum mt_dev_op)op)->f32_only
                                                          : mt_dev_op((enum mt_dev_op)op)->bf16_only));
    }
}

TEST(more_work_takes_longer)
{
    struct mt_metered ops[2] = {{.op = MT_DEV_GEMM, .dtype = MT_F32, .n_dims = 3, .dim = {64, 64, 64}},
                                {.op = MT_DEV_GEMM, .dtype = MT_F32, .n_dims = 3, .dim = {256, 256, 512}}};
    double seconds[2];
    for (int i = 0; i < 2; i++) {
        ops[i].flops = 2.0 * (double)(ops[i].dim[0] * ops[i].dim[1] * ops[i].dim[2]);
        ops[i].bytes = 4e6;
    }
    MUST(mt_measure_in_turn, seconds, &here, ops, 2);
    assert_true(seconds[1] > 3 * seconds[0]); /* 128 times the work */
}

TEST(all_is_timed_where_something_is_not_known)
{
    struct mt_metered ops[2] = {{.op = MT_DEV_ZERO, .dtype = MT_F32, .n_dims = 1, .dim = {4096}, .bytes = 4096},
                                {.op = MT_DEV_ZERO, .dtype = MT_F32, .n_dims = 1, .dim = {8192}, .bytes = 8192}};
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {.cpu = true};
    assert_true(mt_machine_add_sample(&m, &ops[0], 42));
    MUST(mt_measure_operations, &m, &here, ops, 2);
    assert_int_equal(m.n_samples, 2);
    assert_true(m.samples[0].seconds < 1 && m.samples[1].seconds < 1);
    assert_true(mt_machine_add_sample(&m, &ops[0], 42) && mt_machine_add_sample(&m, &ops[1], 43));
    MUST(mt_measure_operations, &m, &here, ops, 2);
    assert_int_equal(m.n_samples, 2);
    assert_true(m.samples[0].seconds == 42 && m.samples[1].seconds == 43); /* nothing was missing */
}
