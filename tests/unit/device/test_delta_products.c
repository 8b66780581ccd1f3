/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/mem.h"
#include "device/cpu/delta_products.h"
#include "test.h"

enum { WIDE = 80, LD = 96, ALL = LD * LD }; /* the most rows, columns and steps; rows of all matrices are LD apart */

static float a[ALL], b[ALL], d[ALL], want[ALL];

/* Functions of an instruction set; of a lesser one if this CPU does not have it. */
static const struct mt_cpu_products *products_of(const char *isa)
{
    MT_CLOSED_BY(mt_cpu_gemm_destroy) struct mt_cpu_gemm *g = NULL;
    assert_int_equal(setenv("MEGATRAIN_CPU_GEMM", isa, 1), 0);
    assert_int_equal(mt_cpu_gemm_create(&g, 1, NULL), 0);
    const struct mt_cpu_products *p = mt_cpu_products(g);
    return p;
}

static const char *const sets[] = {"plain", "avx2", "avx512"};

/* A matrix that is 0 where x says so. */
static void fill_a(const struct product *x)
{
    mt_philox_normal(a, ALL, 0, 1, 0, 1);
    for (size_t i = 0; i < x->m; i++)
        for (size_t k = 0; k < x->k; k++)
            if ((x->lower && k > i) || (x->upper && k < i))
                a[i * x->rs + k * x->cs] = 0;
}

static void multiply_plainly(const struct product *x)
{
    memcpy(want, d, sizeof(d));
    for (size_t i = 0; i < x->m; i++)
        for (size_t j = 0; j < x->n; j++) {
            float sum = 0, *to = want + i * x->ldd + j;
            for (size_t k = 0; k < x->k; k++)
                sum += x->a[i * x->rs + k * x->cs] * x->b[k * x->ldb + j];
            *to = x->adds ? *to + x->sign * sum : x->sign * sum;
        }
}

/* Equal bits; nothing beside D is written. */
static void check(const struct product *x)
{
    for (size_t i = 0; i < ALL; i++) {
        size_t row = i / LD, col = i % LD;
        if (!x->half || row >= x->m || col >= x->n || col <= row)
            assert_memory_equal(&d[i], &want[i], sizeof(*d));
    }
}

TEST(products_have_the_same_bits_with_each_instruction_set)
{
    static const size_t sizes[][3] = {{64, 64, 64}, {1, 16, 5}, {7, 48, 33}, {WIDE, WIDE, WIDE}};
    for (size_t i = 0; i < 3 * MT_ARRAY_LEN(sizes) * 32; i++) {
        const size_t *size = sizes[i / 32 / 3], flags = i % 32;
        const struct mt_cpu_products *p = products_of(sets[i / 32 % 3]);
        struct product x = {size[0], size[1], size[2], a, flags & 1 ? 1 : LD, flags & 1 ? LD : 1, b, LD, d, LD,
                            flags & 2 ? -1 : 1, flags & 4, .lower = (flags & 24) == 8, .upper = (flags & 24) == 16,
                            .half = (flags & 24) == 24};
        fill_a(&x);
        mt_philox_normal(b, ALL, 0, 1, 1, 1);
        mt_philox_normal(d, ALL, 0, 1, 2, 1);
        multiply_plainly(&x);
        p->multiply(&x);
        check(&x);
    }
}

TEST(substitution_has_the_same_bits_with_each_instruction_set)
{
    static const size_t rows[] = {1, 5, 64, WIDE};
    for (size_t s = 0; s < 3 * MT_ARRAY_LEN(rows); s++) {
        const struct mt_cpu_products *p = products_of(sets[s % 3]);
        mt_philox_normal(a, ALL, 0, 2, 0, 0.1f);
        mt_philox_normal(d, ALL, 0, 2, 1, 1);
        memcpy(want, d, sizeof(d));
        for (size_t i = 0; i < rows[s / 3]; i++)
            for (size_t c = 0; c < WIDE; c++) {
                float sum = 0;
                for (size_t j = 0; j < i; j++)
                    sum += a[i * LD + j] * want[j * LD + c];
                want[i * LD + c] -= sum;
            }
        p->substitute(&(struct substitution){rows[s / 3], WIDE, a, LD, d, LD});
        assert_memory_equal(d, want, sizeof(d));
    }
}
