/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces on side streams (model/sides.h) that share rows of scratch, of random sizes: their results are summed with the
 * bits of one after the other. A wait that is missing shows as a data race, or with delays as another sum.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_side.h"
#include "test.h"

#include "base/mem.h"
#include "kinds/kinds.h"
#include "model/sides.h"

enum { C = 8, ROWS = 12, MOST = 6, PIECES = 60 };

struct work {
    mt_device *dev;
    mt_model m;
    float *x, *scratch, *sum; /* [MOST, C], [ROWS, C], [MOST, C] */
    int32_t *places;          /* [MOST] */
    uint32_t random;
};

static uint32_t next(struct work *w)
{
    w->random = w->random * 1664525u + 1013904223u;
    return w->random >> 16;
}

static void must(int rc)
{
    assert_int_equal(rc, 0);
}

static void *upload(struct work *w, const void *host, size_t bytes, const char *tag)
{
    void *p = take(w->dev, bytes, tag);
    must_copy(w->dev, MT_STREAM_COMPUTE, &(struct mt_copy){p, bytes, host, bytes, bytes, 1});
    must(mt_device_sync(w->dev, NULL));
    return p;
}

static void open_work(struct work *w, mt_device *dev, int n_sides)
{
    float x[MOST * C];
    int32_t places[MOST];
    *w = (struct work){.dev = dev, .m = {.dev = dev, .n_sides = n_sides}, .random = 7};
    for (int i = 0; i < MOST * C; i++)
        x[i] = 1.0f / (float)(i + 3);
    for (int i = 0; i < MOST; i++)
        places[i] = i;
    w->x = upload(w, x, sizeof(x), "x");
    w->places = upload(w, places, sizeof(places), "places");
    w->scratch = take(dev, ROWS * C * sizeof(float), "scratch");
    w->sum = take(dev, MOST * C * sizeof(float), "sum");
    w->m.side_memory = take(dev, (size_t)n_sides * mt_device_limits(dev)->side_bytes, "sides");
    must(mt_model_sides_create(&w->m, NULL));
}

/* scratch = (piece + 1) x, by additions, on the side; then sum += scratch. */
static void run_piece(struct work *w, struct mt_sides *s, size_t i)
{
    size_t first, n = 1 + next(w) % MOST, bytes = n * C * sizeof(float);
    mt_sides_turn(s, i);
    must(mt_sides_take_rows(s, n, &first, NULL));
    assert_true(first + n <= ROWS);
    float *mine = w->scratch + first * C;
    must(mt_op_zero(w->dev, &(struct mt_zero){mine, bytes}, NULL));
    for (size_t k = 0; k <= i; k++)
        must(mt_op_add(w->dev, &(struct mt_add){n * C, MT_F32, mine, w->x, mine}, NULL));
    must(mt_sides_follow(s, NULL));
    must(mt_op_moe_combine(w->dev, &(struct mt_moe_combine){.n = n, .c = C, .k = 1, .rows = n, .dtype = MT_F32,
                                                            .places = w->places, .src = mine, .sum = w->sum}, NULL));
    must(mt_sides_give_rows(s, NULL));
}

static void sums(float out[MOST * C], int n_sides)
{
    struct work w;
    struct mt_sides s;
    const size_t bytes = MOST * C * sizeof(float);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(160 * MIB);
    open_work(&w, dev, n_sides);
    must(mt_op_zero(dev, &(struct mt_zero){w.sum, bytes}, NULL));
    for (int fork = 0; fork < 2; fork++) {
        must(mt_sides_fork(&s, &w.m, ROWS, NULL));
        for (size_t i = 0; i < PIECES / 2; i++)
            run_piece(&w, &s, i);
        must(mt_sides_join(&s, NULL));
    }
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){out, bytes, w.sum, bytes, bytes, 1});
    must(mt_device_sync(dev, NULL));
    mt_model_sides_destroy(&w.m);
}

TEST(sums_have_the_bits_of_one_after_the_other)
{
    float want[MOST * C], got[MOST * C];
    sums(want, 0);
    assert_true(want[0] > 0);
    for (int n = 2; n <= 3; n++) {
        sums(got, n);
        assert_memory_equal(got, want, sizeof(want));
    }
}

TEST(more_than_there_are_is_refused)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    struct mt_err err = {0};
    assert_int_equal(mt_device_open_sides(dev, mt_device_limits(dev)->sides + 1, NULL, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "side streams"));
}
