/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"

/* What a layer computes, in words and figures: for people who compare it with a paper. */

/** An operation of a recipe, or a part without one. */
struct mt_layer_line {
    const struct mt_part_kind *part;
    char text[240];    /* "q = linear(cq)"; NAME[3..5]: columns 3 and 4; NAME[8 x 64 of 192 at 128]: 8 pieces of 64
                          elements, each 192 after the one before, from 128 on. A part without a recipe: its name */
    char tensors[320]; /* "self_attn.q_b_proj.weight [24576, 1536]": what lies end to end as the device has it */
    const char *kept;  /* the segment of the record that keeps the result; NULL: backward makes it again */
    size_t elems;      /* of a token, that it makes; 0 without a recipe */
    size_t bytes;      /* of these */
    size_t params;     /* elements of its tensors; of all experts */
    double flops;      /* of a token's forward pass, in documents of seq_len tokens */
};
/** Calls `line` for each, in the order of the forward pass. dtype: of activations. */
void mt_layer_lines(const struct mt_layout *l, int layer, enum mt_dtype dtype, size_t seq_len,
                    void (*line)(void *ctx, const struct mt_layer_line *line), void *ctx);
