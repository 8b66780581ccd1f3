/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies are split where host memory changes from locked to not locked, or from one locked piece to the next; each part
 * then goes directly to a copy engine, or through the staging ring. Small copies of locked memory on COMPUTE, such as
 * the number of each expert's rows, which the host waits for, are kernels: GPUs may have one copy engine for a direction, in
 * which megabytes of other streams would be ahead.
 */
#include "base/lock.h"
#include "cuda_priv.h"
#include "kernels.h"

enum { SMALL_BYTES = 64 << 10 };

struct job {
    struct mt_cuda_device *d;
    enum mt_stream s;
    bool to_device;
};

static const void *host_side(const struct job *j, const struct mt_copy *c)
{
    return j->to_device ? c->src : c->dst;
}

static size_t host_pitch(const struct job *j, const struct mt_copy *c)
{
    return j->to_device ? c->src_pitch : c->dst_pitch;
}

static cudaError_t direct(const struct job *j, const struct mt_copy *c)
{
    return mt_cuda_copy_rows(c, j->to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, j->d->streams[j->s]);
}

static bool is_small(const struct job *j, const struct mt_copy *c)
{
    uintptr_t words = (uintptr_t)c->dst | (uintptr_t)c->src | c->width;
    return j->s == MT_STREAM_COMPUTE && c->rows == 1 && c->width <= SMALL_BYTES && words % sizeof(uint32_t) == 0;
}

/* The device may know host memory by another address. */
static cudaError_t by_kernel(const struct job *j, struct mt_copy c)
{
    void *there = NULL;
    cudaError_t rc = cudaHostGetDevicePointer(&there, (void *)host_side(j, &c), 0);
    if (rc != cudaSuccess) {
        (void)cudaGetLastError();
        return direct(j, &c);
    }
    if (j->to_device)
        c.src = there;
    else
        c.dst = there;
    return mt_cuda_small_copy(c.dst, c.src, c.width, j->d->streams[j->s]);
}

/*
 * Not even the ring's buffers can be locked: CUDA's own copy. It may read pageable memory when it is called, when what
 * the stream waits for has not written it yet.
 */
static cudaError_t unstaged(const struct job *j, const struct mt_copy *c)
{
    cudaError_t rc = cudaSuccess;
    (void)cudaGetLastError();
    if (j->to_device)
        rc = cudaStreamSynchronize(j->d->streams[j->s]);
    return rc == cudaSuccess ? direct(j, c) : rc;
}

static cudaError_t staged(const struct job *j, const struct mt_copy *c)
{
    struct mt_cuda_ring **ring = &j->d->rings[j->s];
    MT_LOCKED(&j->d->staging[j->s]);
    if (!*ring && mt_cuda_ring_create(ring, j->d->n_threads, NULL))
        return unstaged(j, c);
    return mt_cuda_ring_copy(*ring, j->d->streams[j->s], c, j->to_device);
}

static cudaError_t part(const struct job *j, const struct mt_copy *c, bool locked)
{
    return !locked ? staged(j, c) : is_small(j, c) ? by_kernel(j, *c) : direct(j, c);
}

/* Copies rows within one piece of host memory by one call, and a row across a boundary of pieces in parts. */
static cudaError_t cut(const struct job *j, struct mt_copy c)
{
    cudaError_t rc = cudaSuccess;
    while (c.rows && rc == cudaSuccess) {
        size_t run, pitch = host_pitch(j, &c), rows = 1;
        bool locked = mt_cuda_pinned(host_side(j, &c), &run);
        struct mt_copy sub = c;
        if (run < c.width) {
            for (size_t at = 0; at < c.width && rc == cudaSuccess; at += sub.width) {
                sub = (struct mt_copy){.dst = (char *)c.dst + at,
                                       .src = (const char *)c.src + at,
                                       .width = c.width - at,
                                       .rows = 1};
                locked = mt_cuda_pinned(host_side(j, &sub), &run);
                sub.width = MT_MIN(sub.width, run);
                rc = part(j, &sub, locked);
            }
        } else {
            if (c.rows > 1)
                rows = MT_MIN(c.rows, (run - c.width) / pitch + 1);
            sub.rows = rows;
            rc = part(j, &sub, locked);
        }
        c.dst = (char *)c.dst + rows * c.dst_pitch;
        c.src = (const char *)c.src + rows * c.src_pitch;
        c.rows -= rows;
    }
    return rc;
}

int mt_cuda_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return rc;
    bool to = mt_cuda_is_device_memory(d, c->dst), from = mt_cuda_is_device_memory(d, c->src);
    if (to && from && s == MT_STREAM_COMPUTE)
        return mt_cuda_check(d, mt_cuda_copy_rows(c, cudaMemcpyDeviceToDevice, mt_cuda_stream(d, s)), err,
                             "copy of %zu rows of %zu bytes in the device", c->rows, c->width);
    if (to == from || (s == MT_STREAM_H2D && !to) || (s == MT_STREAM_D2H && !from) ||
        (s == MT_STREAM_COMPUTE && d->turned))
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL,
                       "copy: neither from host to device nor from device to host, or on the wrong stream, such as a side "
                       "stream");
    struct job j = {d, s, to};
    return mt_cuda_check(d, cut(&j, *c), err, "copy of %zu rows of %zu bytes %s the device", c->rows,
                         c->width, to ? "to" : "from");
}
