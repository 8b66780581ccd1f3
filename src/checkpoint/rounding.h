/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** What rounding to bf16 leaves of an update: of what training has changed, or adapters add. Zero-initialise. */
struct mt_rounded {
    double update, kept, lost; /* sums of update^2, (rounded - was) update, (rounding's error)^2 */
};
/** n weights that were `was` and are `now`, written as `rounded`. */
void mt_rounded_add(struct mt_rounded *r, const float *was, const float *now, const uint16_t *rounded, size_t n);
/**
 * *kept: the part of the update that is left, <rounded - was, update> / |update|^2; 1: all.
 * *error: |rounded - now| / |update|. False: there was no update.
 */
bool mt_rounded_share(const struct mt_rounded *r, double *kept, double *error);
