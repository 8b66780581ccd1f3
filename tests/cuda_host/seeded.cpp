/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults put here on purpose: `seeded-cuda FAULT` commits one, and test_faults.py expects the emulation, or the
 * sanitizer it was built with, to say so. `clean` does the same things rightly. Exit 0: nobody noticed;
 * 3: a call returned an error; 4: the result was wrong.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_emu_launch.h>

enum { N = 256, WARP = 32 };

__global__ static void fill(float *p, int n, float v)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        p[i] = v;
}

/* out = in turned round, by way of shared memory. */
__global__ static void turn(const float *in, float *out, bool barrier, unsigned extra)
{
    __shared__ float tile[N];
    tile[threadIdx.x + extra] = in[threadIdx.x];
    if (barrier)
        __syncthreads();
    out[threadIdx.x] = tile[N - 1 - threadIdx.x];
}

__global__ static void turn_dynamic(const float *in, float *out, int extra)
{
    MT_SHARED_DYNAMIC(float, tile);
    tile[threadIdx.x + extra] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[N - 1 - threadIdx.x];
}

__global__ static void two_barriers(float *p, unsigned border)
{
    if (threadIdx.x < border) {
        __syncthreads();
        p[threadIdx.x] = 1;
    } else {
        __syncthreads();
    }
}

__global__ static void leave_early(float *p, unsigned border)
{
    if (threadIdx.x >= border)
        return;
    __syncthreads();
    p[threadIdx.x] = 1;
}

__global__ static void sum_lanes(float *p, unsigned mask, unsigned border)
{
    float v = p[threadIdx.x];
    if (threadIdx.x < border)
        v += __shfl_xor_sync(mask, v, 1);
    p[threadIdx.x] = v;
}

struct arguments {
    int n;
    float *p;
};

__global__ static void fill_struct(arguments a)
{
    if (threadIdx.x < static_cast<unsigned>(a.n))
        a.p[threadIdx.x] = 1;
}

/* The block's last writer wins: which one that is, is nobody's business. */
__global__ static void last_writer(float *p)
{
    __shared__ float who;
    __syncthreads();
    who = static_cast<float>(threadIdx.x);
    __syncthreads();
    p[threadIdx.x] = who;
}

__global__ static void add_one(const float *in, float *out)
{
    out[threadIdx.x] = in[threadIdx.x] + 1;
}

static void must(cudaError_t e)
{
    if (e) {
        fprintf(stderr, "returned %s\n", cudaGetErrorName(e));
        exit(3);
    }
}

static cudaStream_t stream;
static float *a, *b, *pinned;

static void read_back(float *host, const float *device)
{
    must(cudaMemcpyAsync(pinned, device, N * sizeof(float), cudaMemcpyDeviceToHost, stream));
    must(cudaStreamSynchronize(stream));
    memcpy(host, pinned, N * sizeof(float));
}

/*
 * A slot is filled on one stream and read on another, with or without an event between. Recording the event would take
 * the first stream's lock after the copy, which orders what nothing else orders. One warp reads: ThreadSanitizer knows
 * the last accesses of 256 threads, and the threads of a larger block would push out the copy's.
 */
static int streams_meet(bool wait)
{
    cudaStream_t h2d;
    cudaEvent_t ready;
    float out[N];
    int rc = 0;
    must(cudaStreamCreateWithFlags(&h2d, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    for (int round = 0; round < 20 && !rc; round++) {
        for (int i = 0; i < N; i++)
            pinned[i] = static_cast<float>(round);
        must(cudaMemcpyAsync(a, pinned, N * sizeof(float), cudaMemcpyHostToDevice, h2d));
        if (wait) {
            must(cudaEventRecord(ready, h2d));
            must(cudaStreamWaitEvent(stream, ready, 0));
        }
        must(MT_LAUNCH(add_one, 1, WARP, 0, stream, a, b));
        must(cudaDeviceSynchronize());
        read_back(out, b);
        rc = out[WARP / 2] == static_cast<float>(round + 1) ? 0 : 4;
    }
    must(cudaEventDestroy(ready));
    must(cudaStreamDestroy(h2d));
    return rc;
}

static int clean()
{
    float out[N];
    must(MT_LAUNCH(fill, 1, 64, 0, stream, a, N, 3.0f));
    must(MT_LAUNCH(turn, 1, N, 0, stream, a, b, true, 0));
    must(MT_LAUNCH(turn_dynamic, 1, N, N * sizeof(float), stream, b, a, 0));
    must(MT_LAUNCH(two_barriers, 1, N, 0, stream, a, static_cast<unsigned>(N)));
    must(MT_LAUNCH(leave_early, 1, N, 0, stream, a, static_cast<unsigned>(N)));
    must(MT_LAUNCH(sum_lanes, 1, N, 0, stream, a, 0xffffffffu, static_cast<unsigned>(N)));
    must(MT_LAUNCH(fill_struct, 1, N, 0, stream, (arguments{16, b})));
    read_back(out, a);
    if (out[0] != 2 || out[N - 1] != 2)
        return 4;
    read_back(out, b);
    return out[0] == 1 && out[16] == 3 ? streams_meet(true) : 4;
}

static int commit(const char *fault)
{
    float host[N] = {};
    if (!strcmp(fault, "clean"))
        return clean();
    if (!strcmp(fault, "overrun"))
        must(MT_LAUNCH(fill, 1, 64, 0, stream, b, N + 1, 1.0f));
    else if (!strcmp(fault, "shared-overrun"))
        must(MT_LAUNCH(turn_dynamic, 1, N, N * sizeof(float), stream, a, b, 1));
    else if (!strcmp(fault, "static-shared-overrun"))
        must(MT_LAUNCH(turn, 1, N, 0, stream, a, b, true, 1));
    else if (!strcmp(fault, "barrier"))
        must(MT_LAUNCH(two_barriers, 1, N, 0, stream, a, 100u));
    else if (!strcmp(fault, "early-exit"))
        must(MT_LAUNCH(leave_early, 1, N, 0, stream, a, 100u));
    else if (!strcmp(fault, "lane"))
        must(MT_LAUNCH(sum_lanes, 1, 32, 0, stream, a, 0xffffffffu, 31u));
    else if (!strcmp(fault, "own-mask"))
        must(MT_LAUNCH(sum_lanes, 1, 32, 0, stream, a, 0xffffu, 32u));
    else if (!strcmp(fault, "no-lane"))
        must(MT_LAUNCH(sum_lanes, 1, 16, 0, stream, a, 0xffffffffu, 16u));
    else if (!strcmp(fault, "host-pointer"))
        must(MT_LAUNCH(fill, 1, 64, 0, stream, host, N, 1.0f));
    else if (!strcmp(fault, "pinned-pointer"))
        must(MT_LAUNCH(fill_struct, 1, 64, 0, stream, (arguments{4, pinned})));
    else if (!strcmp(fault, "missed-copy"))
        must(cudaMemcpyAsync(a, b, N * sizeof(float), cudaMemcpyHostToDevice, stream));
    else if (!strcmp(fault, "long-copy"))
        must(cudaMemcpyAsync(a, pinned, N * sizeof(float) + 1, cudaMemcpyHostToDevice, stream));
    else if (!strcmp(fault, "host-reads-device"))
        return *static_cast<volatile float *>(a) > 0 ? 0 : 4;
    else if (!strcmp(fault, "freed")) {
        must(cudaFree(b));
        must(MT_LAUNCH(fill, 1, 64, 0, stream, b, N, 1.0f));
    } else if (!strcmp(fault, "race")) {
        must(MT_LAUNCH(turn, 1, N, 0, stream, a, b, false, 0));
    } else if (!strcmp(fault, "stream-race")) {
        return streams_meet(false);
    } else if (!strcmp(fault, "order")) {
        must(MT_LAUNCH(last_writer, 1, N, 0, stream, a));
        read_back(host, a);
        printf("%g\n", static_cast<double>(host[0]));
    } else {
        return 2;
    }
    must(cudaDeviceSynchronize());
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must(cudaMalloc(&a, N * sizeof(float)));
    must(cudaMalloc(&b, N * sizeof(float)));
    must(cudaMallocHost(reinterpret_cast<void **>(&pinned), N * sizeof(float)));
    int rc = commit(argv[1]);
    must(cudaDeviceSynchronize());
    must(cudaFreeHost(pinned));
    must(cudaFree(a));
    if (strcmp(argv[1], "freed"))
        must(cudaFree(b));
    must(cudaStreamDestroy(stream));
    return rc;
}
