/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/generate.h"

/** Drawing a token by its logits. Thread-safety: one thread. */

struct mt_candidate {
    float logit;
    uint32_t id;
};
struct mt_drawing {
    const struct mt_generation *g;
    size_t vocab, of;               /* of: ids that may be drawn */
    struct mt_candidate *candidate; /* [of] */
    double *weight;                 /* [of] */
};
int mt_drawing_init(struct mt_drawing *d, const struct mt_generation *g, size_t vocab, struct mt_err *err);
void mt_drawing_finish(struct mt_drawing *d);

/**
 * A token of softmax(logits / temperature), of those that top_k, top_p (Holtzman et al. 2020) and min_p (Nguyen et al.
 * 2024) leave, in that order; temperature 0: the likeliest, of equal ones the first. Random by (seed, stream, at)
 * alone.
 */
size_t mt_draw_token(struct mt_drawing *d, const float *logits, uint64_t stream, size_t at);
