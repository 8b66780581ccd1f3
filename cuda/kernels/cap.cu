/* SPDX-License-Identifier: Apache-2.0 */
/* x = cap tanh(x / cap) in place: a thread takes elements of a row at a distance of the block's size. Bytes moved an
 * element: 8. */
#include "launch.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

static __global__ void __launch_bounds__(THREADS) cap_rows(struct mt_cap a)
{
    float *row = a.x + static_cast<size_t>(blockIdx.x) * a.ld;
    for (size_t i = threadIdx.x; i < a.c; i += THREADS)
        row[i] = a.cap * tanhf(row[i] / a.cap);
}

cudaError_t mt_cuda_cap(const struct mt_cap *a, cudaStream_t stream)
{
    return MT_LAUNCH(cap_rows, grid_of(a->n), THREADS, 0, stream, *a);
}
