/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies and fills. Pageable host memory is accessed when CUDA may do so: from it, the bytes are taken at once, whatever
 * the stream still waits for; to it, the call returns when they are there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdatomic.h>

#include "emu.h"

static atomic_size_t n_copies;

size_t mt_emu_copies(void)
{
    return atomic_load(&n_copies);
}

struct copy {
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, rows;
    void *staging; /* of a pageable source */
};

static void run_copy(void *args)
{
    const struct copy *c = args;
    for (size_t i = 0; i < c->rows; i++)
        memcpy(c->dst + i * c->dst_pitch, c->src + i * c->src_pitch, c->width);
}

static void done_copy(void *args)
{
    free(((struct copy *)args)->staging);
}

static const char *const kind_names[] = {"host to host", "host to device", "device to host",
                                         "device to device", "by address"};

enum { HOST = -1 };

/* Whether one side of a copy is where its direction says: on a device, or HOST. Rows must lie in
 * one allocation. */
static bool check_side(const char *what, const char *side, const void *p, const struct copy *c,
                       int device)
{
    char name[128];
    snprintf(name, sizeof(name), "%s, %s", what, side);
    if (device != HOST) {
        size_t pitch = p == c->dst ? c->dst_pitch : c->src_pitch;
        return mt_emu_check_device(name, device, p, (c->rows - 1) * pitch + c->width);
    }
    if (mt_emu_is_device(p) || !p) {
        mt_emu_complain("%s: %p is %s, where host memory belongs", name, p, mt_emu_describe(p));
        return false;
    }
    return true;
}

static enum mt_emu_pin rows_pin_state(int device, const char *p, size_t pitch, size_t width, size_t rows)
{
    return mt_emu_pin_state(device, p, (rows - 1) * pitch + width);
}

/* The bytes of a pageable source, taken now; the copy then comes from `staging`. */
static bool stage(struct copy *c)
{
    char *s = malloc(c->rows * c->width);
    if (!s)
        return false;
    for (size_t i = 0; i < c->rows; i++)
        memcpy(s + i * c->width, c->src + i * c->src_pitch, c->width);
    c->src = c->staging = s;
    c->src_pitch = c->width;
    return true;
}

static cudaError_t submit_copy(const char *call, struct copy c, enum cudaMemcpyKind kind,
                               cudaStream_t stream)
{
    char what[96];
    int device = mt_emu_device_of_stream(stream);
    cudaError_t e = mt_emu_result(cudaSuccess);
    if (e || !c.width || !c.rows)
        return e;
    if ((unsigned)kind > cudaMemcpyDefault)
        return mt_emu_result(cudaErrorInvalidMemcpyDirection);
    if (c.rows > 1 && (c.width > c.dst_pitch || c.width > c.src_pitch))
        return mt_emu_result(cudaErrorInvalidPitchValue);
    bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to = mt_emu_is_device(c.dst);
        from = mt_emu_is_device(c.src);
    }
    snprintf(what, sizeof(what), "%s %s", call, kind_names[kind]);
    if (!check_side(what, "to", c.dst, &c, to ? device : HOST) ||
        !check_side(what, "from", c.src, &c, from ? device : HOST))
        return mt_emu_result(cudaErrorInvalidValue);
    enum mt_emu_pin src =
        from ? MT_EMU_PINNED : rows_pin_state(device, c.src, c.src_pitch, c.width, c.rows);
    enum mt_emu_pin dst =
        to ? MT_EMU_PINNED : rows_pin_state(device, c.dst, c.dst_pitch, c.width, c.rows);
    if (src == MT_EMU_PARTLY_PINNED || dst == MT_EMU_PARTLY_PINNED) {
        mt_emu_complain("%s: the host memory is partly registered and partly not, or not by one call", what);
        return mt_emu_result(cudaErrorInvalidValue);
    }
    if (src == MT_EMU_PAGEABLE && !stage(&c))
        return mt_emu_result(cudaErrorMemoryAllocation);
    atomic_fetch_add(&n_copies, 1);
    e = mt_emu_submit(stream, run_copy, done_copy, &c, sizeof(c));
    if (e)
        free(c.staging);
    if (!e && dst == MT_EMU_PAGEABLE)
        mt_emu_drain(stream);
    return e;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    struct copy c = {.dst = dst, .src = src, .dst_pitch = bytes, .src_pitch = bytes, .width = bytes,
                     .rows = 1};
    return submit_copy("cudaMemcpyAsync", c, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t rows, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    struct copy c = {.dst = dst, .src = src, .dst_pitch = dst_pitch, .src_pitch = src_pitch,
                     .width = width, .rows = rows};
    if (dst_pitch < width || src_pitch < width || dst_pitch > INT32_MAX || src_pitch > INT32_MAX)
        return cudaErrorInvalidPitchValue; /* also of one row: a driver may ask no more */
    return submit_copy("cudaMemcpy2DAsync", c, kind, stream);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    struct copy c = {.dst = dst, .src = src, .dst_pitch = bytes, .src_pitch = bytes, .width = bytes,
                     .rows = 1};
    cudaError_t e = cudaStreamSynchronize(NULL);
    e = e ? e : submit_copy("cudaMemcpy", c, kind, NULL);
    return e ? e : cudaStreamSynchronize(NULL);
}

struct fill {
    void *ptr;
    int value;
    size_t bytes;
};

static void run_fill(void *args)
{
    const struct fill *f = args;
    memset(f->ptr, f->value, f->bytes);
}

cudaError_t cudaMemsetAsync(void *ptr, int value, size_t bytes, cudaStream_t stream)
{
    struct fill f = {ptr, value, bytes};
    if (!bytes)
        return mt_emu_result(cudaSuccess);
    if (!mt_emu_check_device("cudaMemset", mt_emu_device_of_stream(stream), ptr, bytes))
        return mt_emu_result(cudaErrorInvalidValue);
    return mt_emu_submit(stream, run_fill, NULL, &f, sizeof(f));
}

/* Not waited for, as on a GPU: it is ordered with the null stream's work and no other. */
cudaError_t cudaMemset(void *ptr, int value, size_t bytes)
{
    return cudaMemsetAsync(ptr, value, bytes, NULL);
}
