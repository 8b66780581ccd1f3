/* SPDX-License-Identifier: Apache-2.0 */
/* Which lane adds up the gradient of each unit. */

#include "base/mem.h"
#include "engine/map.h"
#include "test.h"

enum { LAYERS = 8, ATTENTION = 3, MLP = 9, TABLE = 40, UNITS = 2 * LAYERS + 2 };

/* An embedding, layers of two units and a head. */
static void make(struct mt_unit_shape *shape, struct mt_unit *unit, struct mt_layout *l, size_t attention, size_t mlp)
{
    *l = (struct mt_layout){.units = unit, .n_units = UNITS};
    l->cfg.n_layers = LAYERS;
    for (int u = 0; u < UNITS; u++) {
        bool table = u == 0 || u == UNITS - 1;
        unit[u] = (struct mt_unit){.layer = u == 0 ? -1 : (u - 1) / 2};
        shape[u] = (struct mt_unit_shape){.grad_elems = table ? TABLE : u % 2 ? attention : mlp};
    }
}

TEST(lanes_add_up_equal_shares_in_the_order_of_backward)
{
    for (int n_lanes = 1; n_lanes <= 4; n_lanes++) {
        struct mt_unit_shape shape[UNITS];
        struct mt_unit unit[UNITS];
        struct mt_layout l;
        size_t load[4] = {0};
        make(shape, unit, &l, ATTENTION, MLP);
        mt_map_gradients(shape, &l, n_lanes, false);
        for (size_t u = UNITS - 2; u > 0; u--) {
            size_t most = 0, least = SIZE_MAX;
            assert_true(shape[u].lane_back < n_lanes);
            assert_int_equal(shape[u].lane, shape[u].lane_back);
            load[shape[u].lane_back] += shape[u].grad_elems;
            for (int lane = 0; lane < n_lanes; lane++) {
                most = MT_MAX(most, load[lane]);
                least = MT_MIN(least, load[lane]);
            }
            assert_true(most - least <= MLP);
        }
    }
}

TEST(lanes_take_turns_at_equal_units)
{
    struct mt_unit_shape shape[UNITS];
    struct mt_unit unit[UNITS];
    struct mt_layout l;
    make(shape, unit, &l, MLP, MLP);
    mt_map_gradients(shape, &l, 3, false);
    for (size_t u = 0; u < UNITS; u++)
        assert_int_equal(shape[u].lane_back, u % 3);
}
