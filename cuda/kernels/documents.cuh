/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "launch.cuh"
#include "scalar.cuh"

/** The document of a row, of n_docs that have the rows [cu_seqlens[doc], cu_seqlens[doc + 1]). */
MT_DEVICE size_t document_of(const int32_t *cu_seqlens, size_t n_docs, size_t row)
{
    size_t lo = 0, hi = n_docs;
    MT_UNROLL(1)
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (static_cast<size_t>(cu_seqlens[mid]) <= row)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}
