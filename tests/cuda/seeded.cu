/* SPDX-License-Identifier: Apache-2.0 */
/* What machine_code.py must find: an array in local memory, a call, a kernel of packs that moves single words. */
struct bf16 {
    unsigned short x;
};

template <typename T, int N, int KIND> __global__ void glu_forward(float *p)
{
    p[threadIdx.x] *= 2;
}
template __global__ void glu_forward<bf16, 8, 0>(float *);

__global__ void keep_an_array(const unsigned *at, unsigned *out)
{
    unsigned a[64];
    for (unsigned i = 0; i < 64; i++)
        a[at[i] % 64] = i;
    out[threadIdx.x] = a[at[threadIdx.x] % 64];
}

__global__ void divide(unsigned long long *p)
{
    p[threadIdx.x] /= p[threadIdx.x + 32];
}
