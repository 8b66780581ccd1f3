/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "cuda_priv.h"

enum { N_BUFFERS = 2, BUFFER_BYTES = 8 << 20, PIECE = 1 << 20, MOST_THREADS = 4 };

/* A host function's arguments. CUDA drops host functions after a fatal error: the ring then frees them. */
struct move {
    struct mt_cuda_ring *ring;
    struct move *next, **link;
    struct mt_copy c;
};

struct mt_cuda_ring {
    cudaStream_t host; /* runs the host functions, in order */
    mt_pool *pool;     /* they divide their copies */
    char *buf[N_BUFFERS];
    cudaEvent_t full[N_BUFFERS], empty[N_BUFFERS], turn;
    size_t next;
    pthread_mutex_t lock;
    struct move *moves; /* in flight, under lock */
};

int mt_cuda_ring_create(struct mt_cuda_ring **out, int n_threads, struct mt_err *err)
{
    struct mt_pool_params team = {"copies", MT_CLAMP(n_threads / 4, 1, MOST_THREADS), NULL, NULL};
    struct mt_cuda_ring *r = mt_calloc(1, sizeof(*r));
    if (!r)
        return mt_fail_nomem(err, "a staging ring", sizeof(*r));
    pthread_mutex_init(&r->lock, NULL);
    if (mt_pool_create(&r->pool, &team, NULL))
        r->pool = NULL; /* the host function's thread copies alone */
    cudaError_t rc = cudaStreamCreateWithFlags(&r->host, cudaStreamNonBlocking)
                         ?: cudaEventCreateWithFlags(&r->turn, cudaEventDisableTiming);
    for (int i = 0; i < N_BUFFERS && rc == cudaSuccess; i++)
        rc = cudaMallocHost((void **)&r->buf[i], BUFFER_BYTES)
            ?: cudaEventCreateWithFlags(&r->full[i], cudaEventDisableTiming)
            ?: cudaEventCreateWithFlags(&r->empty[i], cudaEventDisableTiming);
    if (rc != cudaSuccess) {
        char text[160];
        mt_cuda_ring_destroy(&r);
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "cannot lock %d staging buffers of %d bytes: %s",
                       N_BUFFERS, BUFFER_BYTES, mt_cuda_error_text(text, sizeof(text), rc));
    }
    *out = r;
    return 0;
}

void mt_cuda_ring_destroy(struct mt_cuda_ring **ring)
{
    struct mt_cuda_ring *r = *ring;
    if (!r)
        return;
    if (r->host)
        cudaStreamSynchronize(r->host);
    while (r->moves) {
        struct move *m = r->moves;
        r->moves = m->next;
        free(m);
    }
    for (int i = 0; i < N_BUFFERS; i++) {
        if (r->full[i])
            cudaEventDestroy(r->full[i]);
        if (r->empty[i])
            cudaEventDestroy(r->empty[i]);
        if (r->buf[i])
            cudaFreeHost(r->buf[i]);
    }
    if (r->turn)
        cudaEventDestroy(r->turn);
    if (r->host)
        cudaStreamDestroy(r->host);
    mt_pool_destroy(&r->pool);
    pthread_mutex_destroy(&r->lock);
    free(r);
    *ring = NULL;
}

/* Piece i of a copy: some rows, or a part of one. */
static void copy_piece(void *ctx, size_t i, int)
{
    const struct mt_copy *c = ctx;
    size_t in_row = mt_div_up(c->width, PIECE), rows = in_row > 1 ? 1 : PIECE / c->width;
    size_t row = i / in_row * rows, at = i % in_row * PIECE, end = MT_MIN(row + rows, c->rows);
    for (; row < end; row++)
        memcpy((char *)c->dst + row * c->dst_pitch + at, (const char *)c->src + row * c->src_pitch + at,
               MT_MIN(c->width - at, (size_t)PIECE));
}

static size_t n_pieces(const struct mt_copy *c)
{
    size_t in_row = mt_div_up(c->width, PIECE);
    return in_row > 1 ? c->rows * in_row : mt_div_up(c->rows, PIECE / c->width);
}

static void CUDART_CB run_move(void *arg)
{
    struct move *m = arg;
    mt_pool_run(m->ring->pool, copy_piece, &m->c, n_pieces(&m->c));
    pthread_mutex_lock(&m->ring->lock);
    *m->link = m->next;
    if (m->next)
        m->next->link = m->link;
    pthread_mutex_unlock(&m->ring->lock);
    free(m);
}

static cudaError_t submit_move(struct mt_cuda_ring *r, const struct mt_copy *c)
{
    struct move *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return cudaErrorMemoryAllocation;
    *m = (struct move){.ring = r, .link = &r->moves, .c = *c};
    pthread_mutex_lock(&r->lock);
    m->next = r->moves;
    if (m->next)
        m->next->link = &m->next;
    r->moves = m;
    pthread_mutex_unlock(&r->lock);
    return cudaLaunchHostFunc(r->host, run_move, m);
}

cudaError_t mt_cuda_copy_rows(const struct mt_copy *c, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (c->rows == 1) /* whose pitch may be 0, or over the driver's limit */
        return cudaMemcpyAsync(c->dst, c->src, c->width, kind, stream);
    return cudaMemcpy2DAsync(c->dst, c->dst_pitch, c->src, c->src_pitch, c->width, c->rows, kind, stream);
}

/* Fills a buffer on the ring's stream, then copies it to the device on the caller's. */
static cudaError_t push(struct mt_cuda_ring *r, cudaStream_t stream, size_t k, struct mt_copy c)
{
    struct mt_copy fill = {r->buf[k], c.width, c.src, c.src_pitch, c.width, c.rows};
    c.src = r->buf[k];
    c.src_pitch = c.width;
    return cudaStreamWaitEvent(r->host, r->empty[k], 0)
        ?: submit_move(r, &fill)
        ?: cudaEventRecord(r->full[k], r->host)
        ?: cudaStreamWaitEvent(stream, r->full[k], 0)
        ?: mt_cuda_copy_rows(&c, cudaMemcpyHostToDevice, stream)
        ?: cudaEventRecord(r->empty[k], stream);
}

/* Copies from the device to a buffer on the caller's stream, then empties the buffer on the ring's. */
static cudaError_t pull(struct mt_cuda_ring *r, cudaStream_t stream, size_t k, struct mt_copy c)
{
    struct mt_copy drain = {c.dst, c.dst_pitch, r->buf[k], c.width, c.width, c.rows};
    c.dst = r->buf[k];
    c.dst_pitch = c.width;
    return cudaStreamWaitEvent(stream, r->empty[k], 0)
        ?: mt_cuda_copy_rows(&c, cudaMemcpyDeviceToHost, stream)
        ?: cudaEventRecord(r->full[k], stream)
        ?: cudaStreamWaitEvent(r->host, r->full[k], 0)
        ?: submit_move(r, &drain)
        ?: cudaEventRecord(r->empty[k], r->host);
}

cudaError_t mt_cuda_ring_copy(struct mt_cuda_ring *r, cudaStream_t stream, const struct mt_copy *c,
                              bool to_device)
{
    size_t width = MT_MIN(c->width, (size_t)BUFFER_BYTES);
    size_t rows = MT_MIN(c->rows, BUFFER_BYTES / width);
    /* earlier work of the stream (such as a wait for an event) must end before the host memory is accessed */
    cudaError_t rc = cudaEventRecord(r->turn, stream) ?: cudaStreamWaitEvent(r->host, r->turn, 0);
    for (size_t i = 0; i < c->rows && rc == cudaSuccess; i += rows)
        for (size_t at = 0; at < c->width && rc == cudaSuccess; at += width) {
            struct mt_copy sub = *c;
            sub.dst = (char *)c->dst + i * c->dst_pitch + at;
            sub.src = (const char *)c->src + i * c->src_pitch + at;
            sub.width = MT_MIN(width, c->width - at);
            sub.rows = MT_MIN(rows, c->rows - i);
            rc = (to_device ? push : pull)(r, stream, r->next++ % N_BUFFERS, sub);
        }
    /* and the stream continues after the last access to host memory */
    return rc ?: cudaEventRecord(r->turn, r->host) ?: cudaStreamWaitEvent(stream, r->turn, 0);
}
