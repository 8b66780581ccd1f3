/* SPDX-License-Identifier: Apache-2.0 */
/* Which lane adds up the gradient of each unit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "engine/map.h"

enum { LAYERS = 8, ATTENTION = 3, MLP = 9 };

/* Attention and MLPs take turns: so would lanes if units were dealt out one by one, and one would have all the MLPs. */
static void lanes_add_up_equal_shares_in_the_order_of_backward(void **state)
{
    (void)state;
    for (int n_lanes = 1; n_lanes <= 4; n_lanes++) {
        struct mt_unit_shape units[2 * LAYERS] = {0};
        size_t load[4] = {0};
        for (size_t u = 0; u < 2 * LAYERS; u++)
            units[u].grad_elems = u % 2 ? MLP : ATTENTION;
        mt_map_gradients(units, 2 * LAYERS, n_lanes);
        for (size_t u = 2 * LAYERS; u-- > 0;) {
            size_t most = 0, least = SIZE_MAX;
            assert_true(units[u].lane_back < n_lanes);
            assert_int_equal(units[u].lane, units[u].lane_back);
            load[units[u].lane_back] += units[u].grad_elems;
            for (int lane = 0; lane < n_lanes; lane++) {
                most = MT_MAX(most, load[lane]);
                least = MT_MIN(least, load[lane]);
            }
            assert_true(most - least <= MLP);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lanes_add_up_equal_shares_in_the_order_of_backward)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
