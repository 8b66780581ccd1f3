/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_BUILD_H
#define MT_ENGINE_BUILD_H

#include "engine/program.h"

/**
 * A program before placement: what is computed, in order, over objects without buffers. Loads, stores
 * and joins are not in it; a STORE_GRAD stands right after what it takes.
 */
struct mt_draft {
    const struct mt_program_params *params;
    struct mt_program prog; /* objects and pools filled; instrs are the draft */
};

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *params, struct mt_err *err);
int mt_draft_place(struct mt_program *out, struct mt_draft *d, struct mt_err *err);

#endif
