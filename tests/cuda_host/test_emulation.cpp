/* SPDX-License-Identifier: Apache-2.0 */
/* The emulation itself: what a kernel, a stream, an event, a copy and a matrix product do in CUDA. */
#include <cstdlib>
#include <ctime>
#include <vector>

extern "C" {
#include "test.h"
}
#include <cublasLt.h>
#include <cuda_emu_launch.h>
#include <semaphore.h>

static constexpr size_t MEMORY = size_t(64) << 20;

static cudaStream_t make_stream()
{
    cudaStream_t s;
    assert_int_equal(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}

template <class T> static T *make_device(size_t n)
{
    T *p = nullptr;
    assert_int_equal(cudaMalloc(&p, n * sizeof(T)), cudaSuccess);
    return p;
}

template <class T> static T *make_pinned(size_t n)
{
    void *p = nullptr;
    assert_int_equal(cudaMallocHost(&p, n * sizeof(T)), cudaSuccess);
    return static_cast<T *>(p);
}

template <class T> static std::vector<T> get(const T *device, size_t n)
{
    std::vector<T> v(n);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(cudaMemcpy(v.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return v;
}

template <class T> static T *put(const std::vector<T> &v)
{
    T *p = make_device<T>(v.size());
    assert_int_equal(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    return p;
}

/* --- kernels -------------------------------------------------------------------------------- */

__global__ static void count_visits(unsigned *visits)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    visits[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + block;
}

TEST(every_thread_of_every_block_runs_once)
{
    const unsigned threads = 3 * 5 * 2, blocks = 4 * 3 * 2;
    unsigned *d = put(std::vector<unsigned>(threads * blocks, 0));
    assert_int_equal(MT_LAUNCH(count_visits, dim3(4, 3, 2), dim3(3, 5, 2), 0, nullptr, d), cudaSuccess);
    std::vector<unsigned> got = get(d, threads * blocks);
    for (unsigned i = 0; i < threads * blocks; i++)
        assert_int_equal(got[i], 1 + i / threads);
    cudaFree(d);
}

/* Prefix sums by doubling: two barriers a round, each of them needed. */
__global__ static void prefix_sums(const int *in, int *out)
{
    __shared__ int sums[1024];
    int i = static_cast<int>(threadIdx.x), base = static_cast<int>(blockIdx.x * blockDim.x);
    sums[i] = in[base + i];
    for (int d = 1; d < static_cast<int>(blockDim.x); d *= 2) {
        __syncthreads();
        int v = i >= d ? sums[i - d] : 0;
        __syncthreads();
        sums[i] += v;
    }
    out[base + i] = sums[i];
}

TEST(barriers_separate_what_is_before_and_behind)
{
    const unsigned sizes[] = {1, 33, 256, 1024};
    for (unsigned n : sizes) {
        std::vector<int> v(8 * n);
        for (size_t i = 0; i < v.size(); i++)
            v[i] = static_cast<int>(i * 7 % 31);
        int *in = put(v), *out = make_device<int>(v.size());
        assert_int_equal(MT_LAUNCH(prefix_sums, 8, n, 0, nullptr, in, out), cudaSuccess);
        std::vector<int> got = get(out, v.size());
        for (size_t i = 0, sum = 0; i < v.size(); i++) {
            sum = (i % n ? sum : 0) + static_cast<size_t>(v[i]);
            assert_int_equal(got[i], sum);
        }
        cudaFree(in);
        cudaFree(out);
    }
}

/* Shared memory is a block's own: each block writes all of it, waits, and reads another thread's word. */
__global__ static void exchange(int *out, int rounds)
{
    MT_SHARED_DYNAMIC(int, words);
    __shared__ int words2[64];
    int i = static_cast<int>(threadIdx.x), bad = words[i] != -1; /* begins as 0xFF bytes */
    for (int r = 0; r < rounds; r++) {
        words[i] = words2[i] = static_cast<int>(blockIdx.x) * 1000 + r + i;
        __syncthreads();
        int j = (i + 17) % 64;
        bad += words[j] != static_cast<int>(blockIdx.x) * 1000 + r + j || words[j] != words2[j];
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = bad;
}

TEST(shared_memory_belongs_to_a_block)
{
    int *out = make_device<int>(50 * 64);
    assert_int_equal(MT_LAUNCH(exchange, 50, 64, 64 * sizeof(int), nullptr, out, 5), cudaSuccess);
    for (int bad : get(out, 50 * 64))
        assert_int_equal(bad, 0);
    cudaFree(out);
}

enum { SHFL, UP, DOWN, XOR, BALLOT, ANY, ALL, OPS };

template <class T> __global__ static void collective(T *out, int op, unsigned mask, int arg, int width)
{
    unsigned lane = threadIdx.x % 32;
    T v = static_cast<T>(100 + threadIdx.x);
    if (mask >> lane & 1) {
        T r = v;
        switch (op) {
        case SHFL: r = __shfl_sync(mask, v, arg + static_cast<int>(lane), width); break;
        case UP: r = __shfl_up_sync(mask, v, static_cast<unsigned>(arg), width); break;
        case DOWN: r = __shfl_down_sync(mask, v, static_cast<unsigned>(arg), width); break;
        case XOR: r = __shfl_xor_sync(mask, v, arg, width); break;
        case BALLOT: r = static_cast<T>(__ballot_sync(mask, static_cast<int>(lane) % (arg + 1) == 0)); break;
        case ANY: r = static_cast<T>(__any_sync(mask, static_cast<int>(lane) == arg)); break;
        case ALL: r = static_cast<T>(__all_sync(mask, static_cast<int>(lane) != arg)); break;
        }
        v = r;
    }
    out[threadIdx.x] = v;
}

/* The definition of the CUDA C++ guide, for full warps and masks of whole groups. */
static unsigned expected(int op, unsigned mask, int lane, int warp, int arg, int width)
{
    int first = lane / width * width, src = lane;
    unsigned ballot = 0;
    if (!(mask >> lane & 1))
        return static_cast<unsigned>(100 + warp * 32 + lane);
    if (op == SHFL)
        src = first + (arg + lane) % width;
    if (op == UP && lane - arg >= first)
        src = lane - arg;
    if (op == DOWN && lane + arg < first + width)
        src = lane + arg;
    if (op == XOR && (lane ^ arg) < first + width)
        src = lane ^ arg;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && i % (arg + 1) == 0)
            ballot |= 1u << i;
    if (op == BALLOT)
        return ballot;
    if (op == ANY)
        return mask >> arg & 1;
    if (op == ALL)
        return !(mask >> arg & 1);
    return static_cast<unsigned>(100 + warp * 32 + src);
}

template <class T> static void check_collectives()
{
    T *out = make_device<T>(96);
    for (int op = 0; op < OPS; op++)
        for (int width = 32; width >= 1; width /= 2)
            for (int arg : {0, 1, 2, 5, 16, 31})
                for (unsigned mask : {0xffffffffu, 0x0000ffffu}) {
                    bool votes = op >= BALLOT;
                    if ((votes && width < 32) || (mask != 0xffffffffu && (width > 16 || op == XOR)))
                        continue;
                    assert_int_equal(MT_LAUNCH(collective<T>, 1, 96, 0, nullptr, out, op, mask, arg, width),
                                     cudaSuccess);
                    std::vector<T> got = get(out, 96);
                    for (int i = 0; i < 96; i++) {
                        unsigned want = expected(op, mask, i % 32, i / 32, arg, width);
                        if (got[i] != static_cast<T>(want))
                            fail_msg("operation %d, width %d, argument %d, mask %x, lane %d: %g, not %u", op,
                                     width, arg, mask, i, static_cast<double>(got[i]), want);
                    }
                }
    cudaFree(out);
}

TEST(collectives_follow_the_definition)
{
    check_collectives<int>();
    check_collectives<unsigned long long>();
    check_collectives<float>();
    check_collectives<double>();
}

/* Two halves of a warp in collectives of their own, at different speed. */
__global__ static void halves(int *out)
{
    unsigned lane = threadIdx.x;
    int v = static_cast<int>(lane);
    if (lane < 16)
        for (int d = 8; d; d /= 2)
            v += __shfl_xor_sync(0x0000ffffu, v, d);
    else
        v = __shfl_sync(0xffff0000u, v, 20);
    __syncwarp();
    out[lane] = v + __shfl_sync(0xffffffffu, v, 31);
}

TEST(halves_of_a_warp_go_their_own_way)
{
    int *out = make_device<int>(32);
    assert_int_equal(MT_LAUNCH(halves, 1, 32, 0, nullptr, out), cudaSuccess);
    std::vector<int> got = get(out, 32);
    for (int i = 0; i < 32; i++)
        assert_int_equal(got[i], (i < 16 ? 120 : 20) + 20);
    cudaFree(out);
}

TEST(impossible_launches_are_refused)
{
    float *p = make_device<float>(1);
    const size_t big = 100 << 10;
    assert_int_equal(MT_LAUNCH(count_visits, 0, 32, 0, nullptr, nullptr), cudaErrorInvalidConfiguration);
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* MT_LAUNCH has read it */
    assert_int_equal(MT_LAUNCH(count_visits, 1, 1025, 0, nullptr, nullptr), cudaErrorInvalidConfiguration);
    assert_int_equal(MT_LAUNCH(count_visits, dim3(1, 65536), 1, 0, nullptr, nullptr),
                     cudaErrorInvalidConfiguration);
    assert_int_equal(MT_LAUNCH(collective<int>, 1, 32, big, nullptr, nullptr, 0, ~0u, 0, 32),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaFuncSetAttribute(collective<float>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(big)),
                     cudaSuccess);
    float *out = make_device<float>(32);
    assert_int_equal(MT_LAUNCH(collective<float>, 1, 32, big, nullptr, out, 0, ~0u, 0, 32), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    cudaGetLastError();
    cudaFree(out);
    cudaFree(p);
}

/* --- streams and events --------------------------------------------------------------------- */

/* Holds a stream up until it is opened. */
struct gate {
    sem_t sem;
    gate() { sem_init(&sem, 0, 0); }
    ~gate() { sem_destroy(&sem); }
    static void wait(void *self) { sem_wait(&static_cast<gate *>(self)->sem); }
    void hold(cudaStream_t s) { assert_int_equal(cudaLaunchHostFunc(s, wait, this), cudaSuccess); }
    void open() { sem_post(&sem); }
};

__global__ static void set_value(int *p, int v)
{
    *p = v;
}

__global__ static void copy_value(const int *from, int *to)
{
    *to = *from;
}

TEST(a_stream_waits_for_the_record_that_was_newest)
{
    cudaStream_t s1 = make_stream(), s2 = make_stream();
    cudaEvent_t ev;
    int *value = put(std::vector<int>{0}), *seen = put(std::vector<int>{-1, -1});
    gate first, second;
    assert_int_equal(cudaEventCreateWithFlags(&ev, cudaEventDisableTiming), cudaSuccess);
    assert_int_equal(cudaEventQuery(ev), cudaSuccess); /* never recorded: nothing to wait for */
    assert_int_equal(cudaStreamWaitEvent(s2, ev, 0), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(s2), cudaSuccess);

    first.hold(s1);
    assert_int_equal(MT_LAUNCH(set_value, 1, 1, 0, s1, value, 1), cudaSuccess);
    assert_int_equal(cudaEventRecord(ev, s1), cudaSuccess);
    assert_int_equal(cudaStreamWaitEvent(s2, ev, 0), cudaSuccess);
    assert_int_equal(MT_LAUNCH(copy_value, 1, 1, 0, s2, value, seen), cudaSuccess);
    second.hold(s1);
    assert_int_equal(cudaEventRecord(ev, s1), cudaSuccess); /* s2 does not wait for this one */
    assert_int_equal(cudaStreamQuery(s2), cudaErrorNotReady);
    assert_int_equal(cudaEventQuery(ev), cudaErrorNotReady);
    cudaGetLastError();
    first.open();
    assert_int_equal(cudaStreamSynchronize(s2), cudaSuccess);
    assert_int_equal(cudaEventQuery(ev), cudaErrorNotReady);
    cudaGetLastError();
    second.open();
    assert_int_equal(cudaEventSynchronize(ev), cudaSuccess);
    assert_int_equal(cudaEventQuery(ev), cudaSuccess);
    assert_int_equal(cudaEventDestroy(ev), cudaSuccess);
    assert_int_equal(get(seen, 1)[0], 1);
    cudaStreamDestroy(s1);
    cudaStreamDestroy(s2);
    cudaFree(value);
    cudaFree(seen);
}

TEST(the_null_stream_and_blocking_streams_wait_for_each_other)
{
    cudaStream_t blocking, apart = make_stream();
    gate held, held_apart;
    int *p = put(std::vector<int>{0, 0});
    assert_int_equal(cudaStreamCreate(&blocking), cudaSuccess);
    held.hold(blocking);
    assert_int_equal(MT_LAUNCH(set_value, 1, 1, 0, blocking, p, 1), cudaSuccess);
    assert_int_equal(MT_LAUNCH(copy_value, 1, 1, 0, nullptr, p, p + 1), cudaSuccess);
    assert_int_equal(cudaStreamQuery(apart), cudaSuccess);
    assert_int_equal(cudaStreamQuery(nullptr), cudaErrorNotReady);
    cudaGetLastError();
    held.open();
    held_apart.hold(apart); /* which the null stream does not wait for */
    assert_int_equal(cudaStreamSynchronize(nullptr), cudaSuccess);
    held_apart.open();
    assert_int_equal(get(p, 2)[1], 1);
    cudaStreamDestroy(blocking);
    cudaStreamDestroy(apart);
    cudaFree(p);
}

TEST(a_launch_reports_what_was_left_on_its_thread)
{
    cudaStream_t s = make_stream();
    int *p = put(std::vector<int>{0});
    gate held;
    held.hold(s);
    assert_int_equal(cudaStreamQuery(s), cudaErrorNotReady);
    assert_int_equal(cudaPeekAtLastError(), cudaErrorNotReady);
    assert_int_equal(MT_LAUNCH(set_value, 1, 1, 0, s, p, 1), cudaErrorNotReady);
    assert_int_equal(MT_LAUNCH(set_value, 1, 1, 0, s, p, 2), cudaSuccess);
    held.open();
    assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    assert_int_equal(get(p, 1)[0], 2);
    cudaStreamDestroy(s);
    cudaFree(p);
}

TEST(events_measure_time)
{
    cudaStream_t s = make_stream();
    cudaEvent_t from, to, untimed;
    gate held;
    float ms = -1;
    assert_int_equal(cudaEventCreate(&from), cudaSuccess);
    assert_int_equal(cudaEventCreate(&to), cudaSuccess);
    assert_int_equal(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
    assert_int_equal(cudaEventRecord(from, s), cudaSuccess);
    assert_int_equal(cudaEventSynchronize(from), cudaSuccess);
    held.hold(s);
    assert_int_equal(cudaEventRecord(to, s), cudaSuccess);
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    struct timespec pause = {0, 3000000};
    nanosleep(&pause, nullptr);
    held.open();
    assert_int_equal(cudaEventSynchronize(to), cudaSuccess);
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
    assert_true(ms >= 3.0f);
    assert_int_equal(cudaEventRecord(untimed, s), cudaSuccess);
    assert_int_equal(cudaEventElapsedTime(&ms, from, untimed), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaEventDestroy(untimed);
    cudaStreamDestroy(s);
}

static void call_cuda(void *result)
{
    *static_cast<cudaError_t *>(result) = cudaDeviceSynchronize();
}

TEST(host_functions_may_not_call_cuda)
{
    cudaStream_t s = make_stream();
    cudaError_t result = cudaSuccess;
    assert_int_equal(cudaLaunchHostFunc(s, call_cuda, &result), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    assert_int_equal(result, cudaErrorNotPermitted);
    cudaStreamDestroy(s);
}

/* --- memory and copies ---------------------------------------------------------------------- */

TEST(device_memory_is_bounded_and_begins_as_nan)
{
    size_t free0, free1, total;
    float *p = make_device<float>(1000), *q = nullptr;
    assert_int_equal(cudaMemGetInfo(&free0, &total), cudaSuccess);
    assert_int_equal(total, MEMORY);
    for (float v : get(p, 1000))
        assert_true(v != v);
    assert_int_equal(cudaMalloc(&q, MEMORY), cudaErrorMemoryAllocation);
    assert_null(q);
    cudaGetLastError();
    assert_int_equal(cudaMalloc(&q, free0), cudaSuccess);
    assert_int_equal(cudaMemGetInfo(&free1, &total), cudaSuccess);
    assert_int_equal(free1, 0);
    assert_int_equal(cudaFree(q), cudaSuccess);
    assert_int_equal(cudaFree(p), cudaSuccess);
    assert_int_equal(cudaFree(p), cudaErrorInvalidValue);
    cudaGetLastError();
}

TEST(copies_of_two_dimensions_leave_the_gaps_alone)
{
    const size_t rows = 7, width = 24, host_pitch = 40, device_pitch = 32;
    cudaStream_t s = make_stream();
    unsigned char *host = make_pinned<unsigned char>(rows * host_pitch);
    for (size_t i = 0; i < rows * host_pitch; i++)
        host[i] = static_cast<unsigned char>(i);
    unsigned char *d = put(std::vector<unsigned char>(rows * device_pitch, 0xEE));
    assert_int_equal(cudaMemcpy2DAsync(d, device_pitch, host, host_pitch, width, rows,
                                       cudaMemcpyHostToDevice, s),
                     cudaSuccess);
    std::vector<unsigned char> got = get(d, rows * device_pitch);
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < device_pitch; k++)
            assert_int_equal(got[i * device_pitch + k],
                             k < width ? static_cast<unsigned char>(i * host_pitch + k) : 0xEE);
    for (size_t i = 0; i < rows * host_pitch; i++)
        host[i] = 0xDD;
    assert_int_equal(cudaMemcpy2DAsync(host, host_pitch, d, device_pitch, width, rows,
                                       cudaMemcpyDeviceToHost, s),
                     cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < host_pitch; k++)
            assert_int_equal(host[i * host_pitch + k],
                             k < width ? static_cast<unsigned char>(i * host_pitch + k) : 0xDD);
    assert_int_equal(cudaMemcpy2DAsync(host, width - 1, d, device_pitch, width, rows,
                                       cudaMemcpyDeviceToHost, s),
                     cudaErrorInvalidPitchValue);
    cudaGetLastError();
    cudaFreeHost(host);
    cudaFree(d);
    cudaStreamDestroy(s);
}

TEST(pageable_sources_are_read_at_once_and_pinned_ones_later)
{
    cudaStream_t s = make_stream();
    int *d = make_device<int>(2), *pinned = make_pinned<int>(1);
    std::vector<int> pageable{1};
    gate held;
    assert_int_equal(cudaMemcpyAsync(d, pageable.data(), sizeof(int), cudaMemcpyHostToDevice, s),
                     cudaSuccess);
    pageable[0] = 2;
    *pinned = 1;
    held.hold(s);
    assert_int_equal(cudaMemcpyAsync(d + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, s), cudaSuccess);
    *pinned = 2;
    held.open();
    std::vector<int> got = get(d, 2);
    assert_int_equal(got[0], 1);
    assert_int_equal(got[1], 2);
    /* to pageable memory: there when the call returns */
    assert_int_equal(cudaMemcpyAsync(pageable.data(), d, sizeof(int), cudaMemcpyDeviceToHost, s),
                     cudaSuccess);
    assert_int_equal(pageable[0], 1);
    cudaFreeHost(pinned);
    cudaFree(d);
    cudaStreamDestroy(s);
}

TEST(host_memory_is_registered_wholly_or_not_at_all)
{
    std::vector<char> host(4096);
    char *d = make_device<char>(4096);
    assert_int_equal(cudaHostRegister(host.data(), 2048, 0), cudaSuccess);
    assert_int_equal(cudaHostRegister(host.data() + 1024, 2048, 0), cudaErrorHostMemoryAlreadyRegistered);
    assert_int_equal(cudaMemcpyAsync(d, host.data(), 4096, cudaMemcpyHostToDevice, nullptr),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaHostRegister(host.data() + 2048, 2048, 0), cudaSuccess);
    assert_int_equal(cudaMemcpyAsync(d, host.data(), 4096, cudaMemcpyHostToDevice, nullptr),
                     cudaErrorInvalidValue); /* by two calls */
    assert_int_equal(cudaMemcpy2DAsync(d, 512, host.data() + 1024, 512, 512, 3, cudaMemcpyHostToDevice, nullptr),
                     cudaErrorInvalidValue); /* no row lies in both */
    assert_int_equal(cudaMemcpyAsync(d, host.data() + 2048, 2048, cudaMemcpyHostToDevice, nullptr), cudaSuccess);
    assert_int_equal(cudaHostUnregister(host.data()), cudaSuccess);
    assert_int_equal(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered);
    assert_int_equal(cudaHostUnregister(host.data() + 2048), cudaSuccess);
    cudaGetLastError();
    cudaFree(d);
}

/* --- matrix products ------------------------------------------------------------------------ */

struct product {
    int m, n, k, batch;
    bool ta, tb, bf16, bf16_out, bias;
    float alpha, beta;
};

static uint16_t to_bf16(float f)
{
    uint32_t u = __float_as_uint(f);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t h)
{
    return __uint_as_float(static_cast<uint32_t>(h) << 16);
}

/* Small integers and halves: every product and sum below is exact in FP32. */
static std::vector<float> numbers(size_t n, unsigned seed)
{
    std::vector<float> v(n);
    for (float &f : v)
        f = static_cast<float>(static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 28) - 8) / 2;
    return v;
}

static void *upload(const std::vector<float> &v, bool bf16)
{
    if (!bf16)
        return put(v);
    std::vector<uint16_t> h;
    for (float f : v)
        h.push_back(to_bf16(f));
    return put(h);
}

static cublasLtMatrixLayout_t make_layout(bool bf16, int rows, int cols, int ld, int batch, int64_t stride)
{
    cublasLtMatrixLayout_t l;
    int32_t n = batch;
    assert_int_equal(cublasLtMatrixLayoutCreate(&l, bf16 ? CUDA_R_16BF : CUDA_R_32F, uint64_t(rows),
                                                uint64_t(cols), ld), 0);
    assert_int_equal(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof(n)), 0);
    assert_int_equal(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                      sizeof(stride)), 0);
    return l;
}

static void check_product(cublasLtHandle_t lt, const product &p)
{
    int ar = p.ta ? p.k : p.m, ac = p.ta ? p.m : p.k, br = p.tb ? p.n : p.k, bc = p.tb ? p.k : p.n;
    int lda = ar + 3, ldb = br + 1, ldd = p.m + 2;
    int64_t sa = lda * ac + 8, sb = ldb * bc, sd = ldd * p.n + 4;
    std::vector<float> a = numbers(size_t(sa * p.batch), 1), b = numbers(size_t(sb * p.batch), 2);
    std::vector<float> c = numbers(size_t(sd * p.batch), 3), bias = numbers(size_t(p.m), 4);
    void *da = upload(a, p.bf16), *db = upload(b, p.bf16), *dc = upload(c, p.bf16_out);
    void *dbias = upload(bias, p.bf16_out), *workspace = make_device<char>(1 << 20);
    cublasOperation_t ta = p.ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb = p.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t found[4];
    uint64_t bytes = 1 << 20;
    uint32_t align = 2; /* the matrices of a batch follow one another */
    int n = 0;
    assert_int_equal(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof(ta)), 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof(tb)), 0);
    if (p.bias) {
        assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                                        sizeof(epilogue)), 0);
        assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &dbias,
                                                        sizeof(dbias)), 0);
    }
    cublasLtMatrixLayout_t la = make_layout(p.bf16, ar, ac, lda, p.batch, sa);
    cublasLtMatrixLayout_t lb = make_layout(p.bf16, br, bc, ldb, p.batch, sb);
    cublasLtMatrixLayout_t ld = make_layout(p.bf16_out, p.m, p.n, ldd, p.batch, sd);
    assert_int_equal(cublasLtMatmulPreferenceCreate(&pref), 0);
    assert_int_equal(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                          &bytes, sizeof(bytes)), 0);
    for (auto what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        assert_int_equal(cublasLtMatmulPreferenceSetAttribute(pref, what, &align, sizeof(align)), 0);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, la, lb, ld, ld, pref, 4, found, &n), 0);
    assert_true(n >= 1);
    assert_int_equal(cublasLtMatmul(lt, desc, &p.alpha, da, la, db, lb, &p.beta, dc, ld, dc, ld, &found[0].algo,
                                    static_cast<char *>(workspace) + 16, bytes - 16, nullptr),
                     CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(cublasLtMatmul(lt, desc, &p.alpha, da, la, db, lb, &p.beta, dc, ld, dc, ld, &found[0].algo,
                                    workspace, bytes, nullptr), 0);
    std::vector<float> got;
    if (p.bf16_out)
        for (uint16_t h : get(static_cast<uint16_t *>(dc), c.size()))
            got.push_back(from_bf16(h));
    else
        got = get(static_cast<float *>(dc), c.size());
    for (int q = 0; q < p.batch; q++)
        for (int j = 0; j < p.n; j++)
            for (int i = 0; i < ldd; i++) {
                size_t at = size_t(q * sd + j * ldd + i);
                double want = double(c[at]);
                if (i < p.m) {
                    double sum = 0;
                    for (int x = 0; x < p.k; x++)
                        sum += double(a[size_t(q * sa + (p.ta ? i * lda + x : x * lda + i))]) *
                               double(b[size_t(q * sb + (p.tb ? x * ldb + j : j * ldb + x))]);
                    want = double(p.alpha) * sum + double(p.beta) * want + (p.bias ? double(bias[size_t(i)]) : 0);
                    want = p.bf16_out ? double(from_bf16(to_bf16(float(want)))) : want;
                }
                if (!(double(got[at]) == want))
                    fail_msg("%d x %d x %d%s%s, batch %d, (%d, %d): %g, not %g", p.m, p.n, p.k,
                             p.ta ? ", A'" : "", p.tb ? ", B'" : "", q, i, j, double(got[at]), want);
            }
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(ld);
    cublasLtMatmulPreferenceDestroy(pref);
    cublasLtMatmulDescDestroy(desc);
    for (void *q : {da, db, dc, dbias, workspace})
        cudaFree(q);
}

TEST(products_match_a_loop)
{
    cublasLtHandle_t lt;
    assert_int_equal(cublasLtCreate(&lt), 0);
    for (int t = 0; t < 4; t++)
        for (int type = 0; type < 3; type++)
            for (int batch : {1, 3})
                for (int bias = 0; bias < 2; bias++) {
                    product p = {18, 9, 23, batch, (t & 1) != 0, (t & 2) != 0, type > 0, type == 2, bias != 0,
                                 bias ? 1.0f : 0.5f, batch == 1 ? 1.0f : 0.0f};
                    check_product(lt, p);
                }
    check_product(lt, {1, 1, 1, 1, false, false, false, false, false, 1, 0});
    check_product(lt, {64, 1, 130, 2, true, false, true, false, true, 1, 1});
    cublasLtDestroy(lt);
}

TEST(unknown_kinds_of_products_are_not_supported)
{
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t f = make_layout(false, 4, 4, 4, 1, 0), h = make_layout(true, 4, 4, 4, 1, 0);
    cublasLtMatmulHeuristicResult_t found;
    cublasLtMatrixLayout_t odd = make_layout(false, 3, 4, 4, 1, 0);
    cublasLtEpilogue_t gelu = CUBLASLT_EPILOGUE_GELU, bias = CUBLASLT_EPILOGUE_BIAS;
    int n = 0;
    assert_int_equal(cublasLtCreate(&lt), 0);
    assert_int_equal(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_16F, CUDA_R_16F),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &n, sizeof(n)),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, f, f, f, f, nullptr, 1, &found, &n), 0);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, f, h, f, f, nullptr, 1, &found, &n),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, f, f, h, h, nullptr, 1, &found, &n),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(n, 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof(bias)), 0);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, odd, f, odd, odd, nullptr, 1, &found, &n),
                     CUBLAS_STATUS_NOT_SUPPORTED); /* a bias of an odd length */
    assert_int_equal(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &gelu, sizeof(gelu)), 0);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt, desc, f, f, f, f, nullptr, 1, &found, &n),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    cublasLtMatmulDescDestroy(desc);
    cublasLtMatrixLayoutDestroy(f);
    cublasLtMatrixLayoutDestroy(h);
    cublasLtMatrixLayoutDestroy(odd);
    cublasLtDestroy(lt);
}

/* Other tests have one device: the second is used only if MT_EMU_DEVICES says that there is one. */
TEST(what_is_of_a_device_stays_with_it)
{
    int n = 0;
    float ms;
    cudaDeviceProp prop;
    assert_int_equal(cudaGetDeviceCount(&n), cudaSuccess);
    assert_int_equal(cudaSetDevice(n), cudaErrorInvalidDevice);
    (void)cudaGetLastError();
    if (n < 2)
        return;
    assert_int_equal(cudaGetDeviceProperties(&prop, 1), cudaSuccess);
    assert_int_equal(prop.pciBusID, 1);
    cudaStream_t first = make_stream();
    unsigned *of_first = make_device<unsigned>(64), *host = make_pinned<unsigned>(64);
    cudaEvent_t event;
    assert_int_equal(cudaEventCreate(&event), cudaSuccess);
    size_t free_before, free_now, total;
    assert_int_equal(cudaSetDevice(1), cudaSuccess);
    assert_int_equal(cudaMemGetInfo(&free_before, &total), cudaSuccess);
    cudaStream_t second = make_stream();
    unsigned *of_second = make_device<unsigned>(64);
    assert_int_equal(cudaMemGetInfo(&free_now, &total), cudaSuccess);
    assert_true(free_now < free_before);

    /* events are recorded on their own device, and waited for on any */
    assert_int_equal(cudaEventRecord(event, second), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaEventRecord(event, first), cudaSuccess);
    assert_int_equal(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
    cudaEvent_t other;
    assert_int_equal(cudaEventCreate(&other), cudaSuccess);
    assert_int_equal(cudaEventRecord(other, second), cudaSuccess);
    assert_int_equal(cudaEventSynchronize(other), cudaSuccess);
    assert_int_equal(cudaEventElapsedTime(&ms, event, other), cudaErrorInvalidResourceHandle);

    /* copies and fills go to a stream's device, and launches to the current one */
    assert_int_equal(cudaMemsetAsync(of_first, 0, 256, second), cudaErrorInvalidValue);
    assert_int_equal(cudaMemsetAsync(of_first, 0, 256, first), cudaSuccess);
    assert_int_equal(cudaMemcpyAsync(host, of_first, 256, cudaMemcpyDeviceToHost, second),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpyAsync(host, of_second, 256, cudaMemcpyDeviceToHost, second),
                     cudaSuccess);
    assert_int_equal(MT_LAUNCH(count_visits, 1, 64, 0, first, of_second),
                     cudaErrorInvalidResourceHandle);
    (void)cudaGetLastError();
    assert_int_equal(MT_LAUNCH(count_visits, 1, 64, 0, second, of_second), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(second), cudaSuccess);

    assert_int_equal(cudaFree(of_second), cudaSuccess);
    assert_int_equal(cudaStreamDestroy(second), cudaSuccess);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    assert_int_equal(cudaFree(of_first), cudaSuccess);
    assert_int_equal(cudaStreamDestroy(first), cudaSuccess);
    assert_int_equal(cudaEventDestroy(event), cudaSuccess);
    assert_int_equal(cudaEventDestroy(other), cudaSuccess);
    assert_int_equal(cudaFreeHost(host), cudaSuccess);
}

int main()
{
    setenv("MT_EMU_MEMORY", "64M", 1);
    return test_run();
}
