/* SPDX-License-Identifier: Apache-2.0 */
/* Where rows of experts' outputs are until they are summed: each place in the buffer once, in either direction. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/outputs.h"
#include "test.h"

enum { N = 96, C = 4 };
static float rows[N * C];

static mt_model model_of(void)
{
    static const struct mt_layout layout = {.cfg = {.hidden = C}};
    mt_model m = {.layout = &layout, .dt = MT_F32, .outputs = {.rows = rows, .n = N}};
    return m;
}

/* Row of the buffer that a place has. */
static ptrdiff_t row_of(const mt_model *m, size_t place)
{
    return ((float *)mt_outputs_at(m, place) - rows) / C;
}

static void expect_within(const mt_model *m)
{
    assert_true(row_of(m, m->outputs.first) >= 0);
    assert_true(row_of(m, m->outputs.end) <= N);
}

TEST(they_follow_each_other_upwards)
{
    mt_model m = model_of();
    assert_true(mt_outputs_take(&m.outputs, 1000, 32, false));
    assert_true(mt_outputs_take(&m.outputs, 1032, 64, false));
    expect_within(&m);
    assert_int_equal(row_of(&m, 1000), 0);
    assert_int_equal(row_of(&m, 1095), N - 1);
    assert_false(mt_outputs_take(&m.outputs, 1096, 1, false));
    assert_int_equal(m.outputs.first, 1000); /* and nothing changed */
    assert_int_equal(m.outputs.end, 1096);
}

TEST(they_follow_each_other_downwards)
{
    mt_model m = model_of();
    assert_true(mt_outputs_take(&m.outputs, 64, 32, true));
    assert_true(mt_outputs_take(&m.outputs, 0, 64, true));
    expect_within(&m);
    assert_int_equal(row_of(&m, 95), N - 1);
    assert_false(mt_outputs_take(&m.outputs, 96, 32, true)); /* behind those that began */
}

/* Tiles of an expert that has more rows than fit go upwards in backward, too. */
TEST(tiles_that_do_not_fit_begin_again)
{
    mt_model m = model_of();
    assert_true(mt_outputs_take(&m.outputs, 200, 64, true));
    assert_false(mt_outputs_take(&m.outputs, 264, 64, true));
    m.outputs.first = m.outputs.end = 0;
    assert_true(mt_outputs_take(&m.outputs, 264, 64, true));
    expect_within(&m);
    assert_false(mt_outputs_take(&m.outputs, 100, 64, true)); /* a gap counts: places are where they are */
}
