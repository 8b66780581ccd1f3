/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/program.h"

/** An operation of the step: a call for a micro-batch, or for a group, by its first micro-batch. */
struct mt_turn {
    const struct mt_call *call;
    size_t unit, mb;
    int lane;
};

struct mt_turns {
    struct mt_turn *of;
    size_t n, cap;
};

/** Units that a lane has under way, at most, in each direction. */
enum { MT_TURNS_OPEN = 3 };

/** The lane of one of the unit's calls, for a micro-batch. */
static inline int mt_call_lane(const struct mt_program_params *p, size_t unit, const struct mt_call *c, size_t mb)
{
    if (p->by_data)
        return mt_micro_lane(p, mb);
    return c == &p->units[unit].backward ? p->units[unit].lane_back : p->units[unit].lane;
}

/**
 * On entry in the order in which one lane runs them; then in about the order in which several lanes do, where
 * micro-batches follow each other through the units of different lanes. Operations that use an object keep their order,
 * so a sum's terms do. A lane has as many units under way as it has buffers for: while one waits for the head, which is
 * slow, another one's micro-batches are computed. -ENOMEM.
 */
int mt_turns_order(struct mt_turns *t, const struct mt_program_params *p, struct mt_err *err);
