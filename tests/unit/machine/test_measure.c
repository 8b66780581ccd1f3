/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "machine/measure.h"

static const struct mt_measure_params here = {.device_kind = "cpu", .n_threads = 2};

/* One of every kind, of odd shapes. Bytes that are far too few: an operand may be larger than what goes from one to the
 * next. */
static size_t one_of_each(struct mt_metered *ops, enum mt_dtype t)
{
    static const uint64_t dims[MT_N_METER_KINDS][MT_METER_DIMS] = {
        [MT_METER_GEMM_NT] = {33, 47, 65}, [MT_METER_GEMM_NN] = {33, 47, 65}, [MT_METER_GEMM_TN] = {33, 47, 65},
        [MT_METER_ATTENTION] = {70, 31, 4, 2, 16}, [MT_METER_ATTENTION_BWD] = {70, 31, 4, 2, 16},
        [MT_METER_EMBEDDING] = {37, 24}, [MT_METER_EMBEDDING_BWD] = {37, 24, 11}, [MT_METER_RMSNORM] = {37, 24},
        [MT_METER_RMSNORM_BWD] = {37, 24}, [MT_METER_BIAS_BWD] = {37, 24}, [MT_METER_QK_ROPE] = {37, 3, 16},
        [MT_METER_QK_ROPE_BWD] = {37, 3, 16}, [MT_METER_GLU] = {37, 40}, [MT_METER_GLU_BWD] = {37, 40},
        [MT_METER_CROSS_ENTROPY] = {19, 320}, [MT_METER_GATHER_ROWS] = {37, 24}, [MT_METER_SCATTER_ROWS] = {37, 24},
        [MT_METER_ADD] = {1001}, [MT_METER_GRAD_CAST] = {1001}, [MT_METER_JOIN] = {1001}, [MT_METER_ZERO] = {1001},
        [MT_METER_CAST] = {1001}};
    for (int k = 0; k < MT_N_METER_KINDS; k++) {
        ops[k] = (struct mt_metered){.kind = (enum mt_meter_kind)k, .dtype = t, .bytes = k % 2 ? 100000 : 64};
        memcpy(ops[k].dim, dims[k], sizeof(dims[k]));
        while (ops[k].n_dims < MT_METER_DIMS && ops[k].dim[ops[k].n_dims])
            ops[k].n_dims++;
    }
    return MT_N_METER_KINDS;
}

static void every_operation_is_timed_in_turn(void **state)
{
    (void)state;
    struct mt_metered ops[MT_N_METER_KINDS];
    for (int t = MT_F32; t <= MT_BF16; t++) {
        double seconds[MT_N_METER_KINDS] = {0};
        struct mt_err err = {0};
        size_t n = one_of_each(ops, (enum mt_dtype)t);
        assert_int_equal(mt_measure_in_turn(seconds, &here, ops, n, &err), 0);
        for (size_t i = 0; i < n; i++)
            assert_true(seconds[i] > 0 && seconds[i] < 1);
    }
}

static void more_work_takes_longer(void **state)
{
    (void)state;
    struct mt_metered ops[2] = {{.kind = MT_METER_GEMM_NT, .dtype = MT_F32, .n_dims = 3, .dim = {64, 64, 64}},
                                {.kind = MT_METER_GEMM_NT, .dtype = MT_F32, .n_dims = 3, .dim = {256, 256, 512}}};
    double seconds[2];
    struct mt_err err = {0};
    for (int i = 0; i < 2; i++) {
        ops[i].flops = 2.0 * (double)(ops[i].dim[0] * ops[i].dim[1] * ops[i].dim[2]);
        ops[i].bytes = 4e6;
    }
    assert_int_equal(mt_measure_in_turn(seconds, &here, ops, 2, &err), 0);
    assert_true(seconds[1] > 3 * seconds[0]); /* 128 times the work */
}

static void all_is_timed_where_something_is_not_known(void **state)
{
    (void)state;
    struct mt_metered ops[2] = {{.kind = MT_METER_ZERO, .dtype = MT_F32, .n_dims = 1, .dim = {4096}, .bytes = 4096},
                                {.kind = MT_METER_ZERO, .dtype = MT_F32, .n_dims = 1, .dim = {8192}, .bytes = 8192}};
    struct mt_machine m = {.cpu = true};
    struct mt_err err = {0};
    assert_true(mt_machine_add_sample(&m, &ops[0], 42));
    assert_int_equal(mt_measure_operations(&m, &here, ops, 2, &err), 0);
    assert_int_equal(m.n_samples, 2);
    assert_true(m.samples[0].seconds < 1 && m.samples[1].seconds < 1);
    assert_true(mt_machine_add_sample(&m, &ops[0], 42) && mt_machine_add_sample(&m, &ops[1], 43));
    assert_int_equal(mt_measure_operations(&m, &here, ops, 2, &err), 0);
    assert_int_equal(m.n_samples, 2);
    assert_true(m.samples[0].seconds == 42 && m.samples[1].seconds == 43); /* nothing was missing */
    mt_machine_finish(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_is_timed_in_turn),
        cmocka_unit_test(more_work_takes_longer),
        cmocka_unit_test(all_is_timed_where_something_is_not_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
