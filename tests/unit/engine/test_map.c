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
        mt_map_gradients(shape, &l, n_lanes, false, NULL);
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

/* Two hosts of two lanes, one of which has room for the embedding and two layers alone. */
TEST(units_go_to_hosts_with_room_for_their_states)
{
    struct mt_unit_shape shape[UNITS];
    struct mt_unit unit[UNITS];
    struct mt_layout l;
    uint64_t bytes[UNITS][MT_N_MAP_PLACES], owned[2] = {0}, all = 0;
    make(shape, unit, &l, ATTENTION, MLP);
    const uint64_t small = 12 * (TABLE + 2 * (ATTENTION + MLP));
    for (int i = 0; i < 2 * MT_N_MAP_PLACES; i++) {
        const int least = i % 2, place = i / 2;
        for (int u = all = 0; u < UNITS; u++) {
            all += bytes[u][place] = 12 * shape[u].grad_elems;
            bytes[u][!place] = 0;
        }
        struct mt_map_room room = {.own_lanes = 2, .bytes = bytes};
        size_t load[4] = {0};
        room.of[!least][place] = all;
        room.of[least][place] = small;
        owned[0] = owned[1] = 0;
        mt_map_gradients(shape, &l, 4, true, &room);
        for (int u = 0; u < UNITS; u++) {
            owned[shape[u].lane_back / 2] += bytes[u][place];
            load[shape[u].lane_back] += shape[u].grad_elems;
        }
        assert_true(owned[least] <= small && owned[least] > small - 12 * MLP);
        assert_int_equal(owned[!least], all - owned[least]);
        assert_int_equal(room.of[least][place], small - owned[least]);
        assert_true(load[2 * !least] < load[2 * !least + 1] + TABLE && load[2 * !least + 1] < load[2 * !least] + TABLE);
    }
    struct mt_map_room none = {.own_lanes = 2, .bytes = bytes}; /* of nobody: as if nobody asked */
    mt_map_gradients(shape, &l, 4, true, &none);
    for (int u = owned[0] = owned[1] = 0; u < UNITS; u++)
        owned[shape[u].lane_back / 2] += bytes[u][MT_MAP_DRIVES];
    assert_true(owned[0] < owned[1] + 12 * TABLE && owned[1] < owned[0] + 12 * TABLE);
}

TEST(lanes_take_turns_at_equal_units)
{
    struct mt_unit_shape shape[UNITS];
    struct mt_unit unit[UNITS];
    struct mt_layout l;
    make(shape, unit, &l, MLP, MLP);
    mt_map_gradients(shape, &l, 3, false, NULL);
    for (size_t u = 0; u < UNITS; u++)
        assert_int_equal(shape[u].lane_back, u % 3);
}
