/* SPDX-License-Identifier: Apache-2.0 */
/* A block handles up to 256 columns of some rows. Bytes moved per element: those of C and D; the bias is cached. */
#include "launch.cuh"
#include "scalar.cuh"

template <typename B, typename D>
static __global__ void __launch_bounds__(256) fill_bias(mt_cuda_bias_rows a)
{
    size_t j = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= a.n)
        return;
    float bias = load(static_cast<const B *>(a.bias) + j);
    for (size_t i = blockIdx.y; i < a.m; i += gridDim.y)
        store(static_cast<D *>(a.d) + i * a.ldd + j,
              a.c ? bias + load(static_cast<const D *>(a.c) + i * a.ldc + j) : bias);
}

cudaError_t mt_cuda_fill_bias(const mt_cuda_bias_rows *a, cudaStream_t stream)
{
    dim3 grid(static_cast<unsigned>(ceil_div(a->n, 256)), static_cast<unsigned>(a->m < 1024 ? a->m : 1024), 1);
    return for_dtypes(a->dtype, a->d_dtype, [=](auto bias, auto d) {
        return MT_LAUNCH((fill_bias<decltype(bias), decltype(d)>), grid, 256, 0, stream, *a);
    });
}
