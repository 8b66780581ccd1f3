/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor cores, ldmatrix and cp.async, which no kernel of the program uses yet: a product of 64 x 64 matrices, and one
 * head of causal attention by tiles with an online softmax (Dao 2023), against sums in double. It shows that the
 * translation of these instructions is right, and faults.py puts faults into it.
 *   tc product|attention
 */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

static constexpr int SIDE = 64, THREADS = 128; /* of a tile; 4 warps of 16 rows */

static __device__ __forceinline__ unsigned shared_address(const void *p)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

/* A tile is 64 rows of 128 bytes; its 16-byte chunks are swizzled, so that eight rows' lie in different banks. */
static __device__ __forceinline__ unsigned chunk_at(unsigned tile, int row, int chunk)
{
    return tile + row * 128 + ((chunk ^ (row & 7)) << 4);
}

static __device__ __forceinline__ void copy_async(unsigned to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void wait_but()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], unsigned address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
static __device__ __forceinline__ void load_transposed(uint32_t (&r)[4], unsigned address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
static __device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ uint32_t pair(float lo, float hi)
{
    uint32_t p;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(hi), "f"(lo));
    return p;
}

/* Rows behind the first `rows` become zeros. */
static __device__ __forceinline__ void fetch(unsigned tile, const uint16_t *from, int rows)
{
    for (int i = threadIdx.x; i < SIDE * 8; i += THREADS) {
        int row = i / 8, chunk = i % 8;
        bool there = row < rows;
        copy_async(chunk_at(tile, row, chunk), from + (there ? row * SIDE + chunk * 8 : 0), there ? 16 : 0);
    }
}

/* c = a b, all [64, 64], a and b bf16. */
static __global__ void __launch_bounds__(THREADS) product(const uint16_t *a, const uint16_t *b, float *c)
{
    __shared__ __align__(128) uint16_t tiles[2][SIDE * SIDE];
    unsigned of_a = shared_address(tiles[0]), of_b = shared_address(tiles[1]);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
    fetch(of_a, a, SIDE);
    fetch(of_b, b, SIDE);
    commit();
    wait_but<0>();
    __syncthreads();
    float d[8][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t fa[4], fb[4];
        load_matrices(fa, chunk_at(of_a, row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            load_transposed(fb, chunk_at(of_b, 16 * k + lane % 16, 2 * n + lane / 16));
            multiply_add(d[2 * n], fa, fb[0], fb[1]);
            multiply_add(d[2 * n + 1], fa, fb[2], fb[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        for (int e = 0; e < 4; e++)
            c[(row + lane / 4 + e / 2 * 8) * SIDE + 8 * n + lane % 4 * 2 + e % 2] = d[n][e];
}

/* The weights of a tile's scores under the rows' new maxima; what was summed before shrinks. */
static __device__ __forceinline__ void soften(float (&s)[8][4], float (&o)[8][4], float (&max)[2], float (&sum)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = max[h], part = 0;
#pragma unroll
        for (int n = 0; n < 8; n++)
            m = fmaxf(m, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float shrink = exp2f(max[h] - m);
#pragma unroll
        for (int n = 0; n < 8; n++)
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                s[n][e] = exp2f(s[n][e] - m);
                part += s[n][e];
                o[n][e] *= shrink;
            }
        sum[h] = sum[h] * shrink + part;
        max[h] = m;
    }
}

/* q, k, v, o: [n, 64] bf16 of one head; blocks of 64 queries. */
static __global__ void __launch_bounds__(THREADS)
    attention(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint32_t *o, int n, float scale)
{
    __shared__ __align__(128) uint16_t of_q[SIDE * SIDE], of_k[2][SIDE * SIDE], of_v[2][SIDE * SIDE];
    int lane = threadIdx.x % 32, first = blockIdx.x * SIDE, row = threadIdx.x / 32 * 16;
    int tiles = blockIdx.x + 1;
    fetch(shared_address(of_q), q + first * SIDE, n - first);
    fetch(shared_address(of_k[0]), k, n);
    fetch(shared_address(of_v[0]), v, n);
    commit();
    float out[8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (int t = 0; t < tiles; t++) {
        int next = (t + 1) * SIDE;
        if (t + 1 < tiles) {
            fetch(shared_address(of_k[(t + 1) % 2]), k + next * SIDE, n - next);
            fetch(shared_address(of_v[(t + 1) % 2]), v + next * SIDE, n - next);
        }
        commit();
        wait_but<1>();
        __syncthreads();
        unsigned tile_q = shared_address(of_q), tile_k = shared_address(of_k[t % 2]), tile_v = shared_address(of_v[t % 2]);
        float s[8][4] = {};
#pragma unroll
        for (int d = 0; d < 4; d++) {
            uint32_t fq[4], fk[4];
            load_matrices(fq, chunk_at(tile_q, row + lane % 16, 2 * d + lane / 16));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                load_matrices(fk, chunk_at(tile_k, 16 * j + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
                multiply_add(s[2 * j], fq, fk[0], fk[1]);
                multiply_add(s[2 * j + 1], fq, fk[2], fk[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            for (int e = 0; e < 4; e++) {
                int query = first + row + lane / 4 + e / 2 * 8, key = t * SIDE + 8 * j + lane % 4 * 2 + e % 2;
                s[j][e] = key <= query ? s[j][e] * scale * 1.44269504f : -INFINITY;
            }
        soften(s, out, max, sum);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t p[4] = {pair(s[2 * j][0], s[2 * j][1]), pair(s[2 * j][2], s[2 * j][3]),
                             pair(s[2 * j + 1][0], s[2 * j + 1][1]), pair(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
            for (int d = 0; d < 4; d++) {
                uint32_t fv[4];
                load_transposed(fv, chunk_at(tile_v, 16 * j + lane % 16, 2 * d + lane / 16));
                multiply_add(out[2 * d], p, fv[0], fv[1]);
                multiply_add(out[2 * d + 1], p, fv[2], fv[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float all = sum[h];
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        int query = first + row + lane / 4 + 8 * h;
        if (query < n)
            for (int d = 0; d < 8; d++)
                o[(query * SIDE + 8 * d) / 2 + lane % 4] = pair(out[d][2 * h] / all, out[d][2 * h + 1] / all);
    }
}

/* --- on the host --------------------------------------------------------------------------------------------- */

static float value(uint16_t x)
{
    uint32_t u = static_cast<uint32_t>(x) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static std::vector<uint16_t> numbers(size_t n, uint32_t seed)
{
    std::vector<uint16_t> x(n);
    for (uint16_t &v : x) {
        seed = seed * 1664525u + 1013904223u;
        float f = static_cast<float>(static_cast<int32_t>(seed)) / 1.0e9f;
        uint32_t u;
        memcpy(&u, &f, 4);
        v = static_cast<uint16_t>(u >> 16);
    }
    return x;
}

static void *on_device(const void *from, size_t bytes)
{
    void *p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess || (from && cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess))
        exit(2);
    return p;
}

static uint16_t *on_device(const std::vector<uint16_t> &x)
{
    return static_cast<uint16_t *>(on_device(x.data(), x.size() * sizeof(x[0])));
}

/* 0 where the relative L2 error is within the tolerance. */
static int compare(const char *name, const std::vector<double> &got, const std::vector<double> &want, double tolerance)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        diff += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = sqrt(diff / norm);
    bool ok = error <= tolerance;
    printf("%s%s: relative L2 %.3g, tolerance %.3g\n", ok ? "" : "FAIL ", name, error, tolerance);
    return !ok;
}

static int test_product()
{
    std::vector<uint16_t> a = numbers(SIDE * SIDE, 1), b = numbers(SIDE * SIDE, 2);
    std::vector<float> c(SIDE * SIDE);
    float *out = static_cast<float *>(on_device(nullptr, c.size() * sizeof(c[0])));
    product<<<1, THREADS>>>(on_device(a), on_device(b), out);
    if (cudaMemcpy(c.data(), out, c.size() * sizeof(c[0]), cudaMemcpyDeviceToHost) != cudaSuccess)
        return 2;
    std::vector<double> got(c.begin(), c.end()), want(c.size());
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++)
            for (int k = 0; k < SIDE; k++)
                want[i * SIDE + j] += static_cast<double>(value(a[i * SIDE + k])) * value(b[k * SIDE + j]);
    return compare("product", got, want, 1e-6);
}

static int test_attention(int n)
{
    size_t all = static_cast<size_t>(n) * SIDE;
    std::vector<uint16_t> q = numbers(all, 3), k = numbers(all, 4), v = numbers(all, 5), o(all);
    uint32_t *out = static_cast<uint32_t *>(on_device(nullptr, all * sizeof(o[0])));
    float scale = 0.125f;
    attention<<<(n + SIDE - 1) / SIDE, THREADS>>>(on_device(q), on_device(k), on_device(v), out, n, scale);
    if (cudaMemcpy(o.data(), out, all * sizeof(o[0]), cudaMemcpyDeviceToHost) != cudaSuccess)
        return 2;
    std::vector<double> got(all), want(all), p(n);
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j <= i; j++) {
            double s = 0;
            for (int d = 0; d < SIDE; d++)
                s += static_cast<double>(value(q[i * SIDE + d])) * value(k[j * SIDE + d]);
            p[j] = exp(s * scale);
            sum += p[j];
        }
        for (int j = 0; j <= i; j++)
            for (int d = 0; d < SIDE; d++)
                want[i * SIDE + d] += p[j] / sum * value(v[j * SIDE + d]);
    }
    for (size_t i = 0; i < all; i++)
        got[i] = value(o[i]);
    return compare("attention", got, want, 4e-3); /* p and o are rounded to bf16 */
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "product"))
        return test_product();
    if (argc > 1 && !strcmp(argv[1], "attention"))
        return test_attention(64) | test_attention(200);
    fprintf(stderr, "usage: tc product|attention\n");
    return 2;
}
