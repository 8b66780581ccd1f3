/* SPDX-License-Identifier: Apache-2.0 */
/* What rmsnorm.cu and layernorm.cu share: rows that a block's threads hold in registers. */
#pragma once

#include "launch.cuh"
#include "scalar.cuh"

/* Of backward's blocks: a thread holds more there than in forward. */
static constexpr size_t MAX_BACKWARD_THREADS = 512;

/* 1 over the square root of the mean of c squares, of which `squares` is the sum. */
MT_DEVICE float rstd_of(float squares, size_t c, float eps)
{
    return 1.0f / sqrtf(squares / static_cast<float>(c) + eps);
}

/* Loads this thread's V vectors of a row of `vecs` vectors; 0 beyond its end. */
template <typename T, int V> MT_DEVICE void load_row(const T *row, unsigned vecs, uint4 (&x)[V])
{
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        unsigned i = v * blockDim.x + threadIdx.x;
        x[v] = i < vecs ? load16(row + i * VEC<T>) : make_uint4(0, 0, 0, 0);
    }
}
