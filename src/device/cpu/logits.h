/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/**
 * Rows of logits in host memory, for drawing tokens: FP32, n > 0 of them. Thread-safety: pure. The same bits for any
 * instruction set.
 */

/** The likeliest: of equal ones the first. A NaN is none, unless all are. */
size_t mt_logits_best(const float *logit, size_t n);

enum { MT_LOGITS_BLOCK = 512 };
/** sum[n / MT_LOGITS_BLOCK, rounded up] = of each block of logits the sum of their weights. */
void mt_logits_sums(double *sum, const float *logit, size_t n, float best, float temperature);
/** e^((logit - best) / temperature), best being the largest: an error of some 1e-6 at most; 0 below 2^-125. */
float mt_logits_weight(float logit, float best, float temperature);
