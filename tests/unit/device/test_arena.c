/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/philox.h"
#include "device/arena.h"
#include "test.h"

enum { KIB = 1024, N = 40 };

/* One at a time, in memory that is not touched before it is used. */
static struct mt_arena *arena(size_t budget)
{
    static _Alignas(MT_ARENA_ALIGNMENT) char memory[(size_t)256 << 20];
    struct mt_arena *a = NULL;
    assert_true(mt_arena_span(budget) <= sizeof(memory));
    assert_int_equal(mt_arena_create(&a, memory, budget, NULL), 0);
    return a;
}

TEST(the_budget_is_exact)
{
    struct mt_arena *a = arena(64 * KIB);
    void *p[3] = {0};
    struct mt_err err = {0};
    assert_int_equal(mt_arena_alloc(a, 32 * KIB, "one", &p[0], &err), 0);
    assert_int_equal(mt_arena_alloc(a, 32 * KIB, "two", &p[1], &err), 0);
    assert_int_equal(mt_arena_used(a), 64 * KIB);
    assert_int_equal(mt_arena_alloc(a, 1, "three", &p[2], &err), -ENOMEM);
    assert_null(p[2]);
    mt_arena_free(a, p[0]);
    assert_int_equal(mt_arena_used(a), 32 * KIB);
    assert_int_equal(mt_arena_alloc(a, 32 * KIB + 1, "three", &p[2], &err), -ENOMEM);
    assert_int_equal(mt_arena_alloc(a, 32 * KIB, "three", &p[2], &err), 0);
    mt_arena_destroy(&a);
    assert_null(a);
}

TEST(running_out_tells_what_holds_the_memory)
{
    MT_CLOSED_BY(mt_arena_destroy) struct mt_arena *a = arena(64 * KIB);
    void *p;
    struct mt_err err = {0};
    assert_int_equal(mt_arena_alloc(a, SIZE_MAX - 5, "far too much", &p, &err), -ENOMEM);
    assert_non_null(strstr(err.msg, "nothing"));
    for (int i = 0; i < 3; i++)
        assert_int_equal(mt_arena_alloc(a, 8 * KIB, i == 1 ? "scratch" : "weights", &p, &err), 0);
    assert_int_equal(mt_arena_alloc(a, 48 * KIB, "more", &p, &err), -ENOMEM);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(err.msg, "48.00 KiB for more"));
    assert_non_null(strstr(err.msg, "64.00 KiB"));
    assert_non_null(strstr(err.msg, "weights 16.00 KiB"));
    assert_non_null(strstr(err.msg, "scratch 8.00 KiB"));
}

/* Random sizes in random order: each keeps its own bytes, and all room comes back. */
TEST(allocations_never_overlap_and_merge_when_freed)
{
    MT_CLOSED_BY(mt_arena_destroy) struct mt_arena *a = arena(256 * KIB);
    unsigned char *p[N] = {0};
    size_t size[N] = {0}, held = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        struct mt_philox r = mt_philox(1, 2, i);
        size_t k = r.v[0] % N, n = r.v[1] % (16 * KIB);
        if (p[k]) {
            for (size_t b = 0; b < size[k]; b++)
                assert_int_equal(p[k][b], k);
            held -= mt_align_up(size[k] ? size[k] : 1, MT_ARENA_ALIGNMENT);
            mt_arena_free(a, p[k]);
            p[k] = NULL;
        } else {
            void *out = NULL;
            if (mt_arena_alloc(a, n, "x", &out, NULL))
                continue; /* full, or in pieces */
            assert_int_equal((uintptr_t)out % MT_ARENA_ALIGNMENT, 0);
            p[k] = out;
            size[k] = n;
            held += mt_align_up(n ? n : 1, MT_ARENA_ALIGNMENT);
            memset(out, (int)k, n);
        }
        assert_int_equal(mt_arena_used(a), held);
        assert_true(held <= 256 * KIB);
    }
    for (size_t k = 0; k < N; k++)
        if (p[k])
            mt_arena_free(a, p[k]);
    void *whole = NULL;
    assert_int_equal(mt_arena_used(a), 0);
    assert_int_equal(mt_arena_alloc(a, 256 * KIB, "whole", &whole, NULL), 0);
    memset(whole, 1, 256 * KIB);
}

TEST(odd_budgets_and_sizes_work)
{
    MT_CLOSED_BY(mt_arena_destroy) struct mt_arena *a = arena(0);
    void *p = NULL;
    assert_int_equal(mt_arena_alloc(a, 1, "x", &p, NULL), -ENOMEM);
    mt_arena_destroy(&a);
    a = arena(1000);
    assert_int_equal(mt_arena_alloc(a, 0, "empty", &p, NULL), 0);
    assert_non_null(p);
    mt_arena_free(a, p);
    assert_int_equal(mt_arena_alloc(a, 1000, "all", &p, NULL), 0);
    memset(p, 1, 1000);
    int stranger;
    mt_arena_free(a, &stranger); /* not ours: nothing happens */
    assert_int_equal(mt_arena_used(a), 1024);
    mt_arena_destroy(&a);
}

/* A step of tens of thousands of micro-batches has as many boundaries. */
TEST(thousands_of_allocations_take_no_time)
{
    enum { MANY = 60000 };
    MT_CLOSED_BY(mt_arena_destroy) struct mt_arena *a = arena((size_t)MANY * 2 * KIB);
    void **p = mt_calloc(MANY, sizeof(*p)), *again = NULL;
    clock_t start = clock();
    for (size_t i = 0; i < MANY; i++)
        assert_int_equal(mt_arena_alloc(a, KIB, "x", &p[i], NULL), 0);
    mt_arena_free(a, p[MANY / 2]); /* the first that fits */
    assert_int_equal(mt_arena_alloc(a, KIB / 2, "x", &again, NULL), 0);
    assert_ptr_equal(again, p[MANY / 2]);
    for (size_t i = MANY; i-- > 0;)
        mt_arena_free(a, p[i]);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    assert_int_equal(mt_arena_used(a), 0);
    if (seconds > 0.5) /* seconds if each looks at all */
        fail_msg("%d allocations took %.2f s", MANY, seconds);
    free(p);
}
