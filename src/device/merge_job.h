/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/ops.h"

/**
 * Parts of a merge (struct mt_merge_adapter) with everything in host memory: what the cpu device does, and what gives
 * the codes that the merged weights are, for files. Jobs may run at once.
 */

/** Number of jobs, of at most 16384 elements each, in whole blocks. */
size_t mt_merge_adapter_n_jobs(const struct mt_merge_adapter *a);
/** |x| of n elements, as a row's norm is summed. */
float mt_merge_row_norm(const float *x, size_t n);
/** With DoRA, before any job: sets scale and inverse of a row. */
void mt_merge_adapter_norm(const struct mt_merge_adapter *a, size_t row);
/** codes, scales: of the matrix, in the format's order; NULL: not wanted. Returns how many elements change. */
size_t mt_merge_adapter_job(const struct mt_merge_adapter *a, size_t job, uint8_t *codes, float *scales);
