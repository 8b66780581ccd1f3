/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = x + scale z, z of base/noise.h. A thread takes four elements, which lie in one block of Philox. Bytes moved an
 * element of s bytes: 2 s.
 */
#include "launch.cuh"
#include "philox.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256, EACH = 4;

template <typename T> static __global__ void __launch_bounds__(THREADS) perturb(struct mt_perturb a)
{
    size_t first = (static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x) * EACH;
    uint64_t block = mt_noise_index(a.kind, a.sample, first);
    uint4 r = philox(static_cast<uint32_t>(a.seed), static_cast<uint32_t>(a.seed >> 32),
                     make_uint4(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                                static_cast<uint32_t>(a.stream), static_cast<uint32_t>(a.stream >> 32)));
    for (size_t i = first; i < first + EACH && i < a.n; i++) {
        float x = load(static_cast<const T *>(a.x) + i);
        bool takes = a.scale != 0 && mt_noise_takes(x, a.limit);
        uint32_t word = word_of(r, mt_noise_word(a.kind, i));
        store(static_cast<T *>(a.y) + i, takes ? x + a.scale * mt_noise_of(a.kind, word, i) : x);
    }
}

cudaError_t mt_cuda_perturb(const struct mt_perturb *a, cudaStream_t stream)
{
    return MT_LAUNCH_OF(a->dtype, perturb, grid_of(ceil_div(a->n, THREADS * EACH)), THREADS, 0, stream, *a);
}
