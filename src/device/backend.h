/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_BACKEND_H
#define MT_DEVICE_BACKEND_H

#include "device/device.h"
#include "device/ops.h"

/**
 * What a device implements. Only device.c calls these, after it has checked the arguments; backends
 * trust them. Signatures are those of the public functions; `mt_device` is the first member of the
 * backend's own struct.
 *
 * The operations are listed once, as an X-macro: op(name, argument type).
 */
#define MT_DEVICE_OPS(X)                                                                           \
    X(embedding, struct mt_embedding)                                                              \
    X(embedding_bwd, struct mt_embedding_bwd)                                                      \
    X(rmsnorm, struct mt_rmsnorm)                                                                  \
    X(rmsnorm_bwd, struct mt_rmsnorm_bwd)                                                          \
    X(gemm, struct mt_gemm)                                                                        \
    X(bias_bwd, struct mt_bias_bwd)                                                                \
    X(qk_rope, struct mt_qk_rope)                                                                  \
    X(qk_rope_bwd, struct mt_qk_rope_bwd)                                                          \
    X(attention, struct mt_attention)                                                              \
    X(attention_bwd, struct mt_attention_bwd)                                                      \
    X(glu, struct mt_glu)                                                                          \
    X(glu_bwd, struct mt_glu_bwd)                                                                  \
    X(cross_entropy, struct mt_cross_entropy)                                                      \
    X(gather_rows, struct mt_rows)                                                                 \
    X(scatter_rows, struct mt_rows)                                                                \
    X(add, struct mt_add)                                                                          \
    X(grad_cast, struct mt_grad_cast)                                                              \
    X(join, struct mt_join)                                                                        \
    X(zero, struct mt_zero)                                                                        \
    X(cast, struct mt_cast)

struct mt_join {
    void *buf;
    size_t n;
};

struct mt_zero {
    void *ptr;
    size_t bytes;
};

struct mt_device_backend {
    void (*destroy)(mt_device *dev);
    int (*alloc)(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err);
    void (*free)(mt_device *dev, void *ptr);
    size_t (*bytes_used)(const mt_device *dev);
    size_t (*bytes_peak)(const mt_device *dev);
    void (*poison)(mt_device *dev, void *ptr, size_t bytes);
    int (*register_host)(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err);
    void (*unregister_host)(mt_device *dev, void *ptr);

    int (*event_create)(mt_device *dev, mt_event **out, struct mt_err *err);
    void (*event_destroy)(mt_event *ev);
    int (*event_record)(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
    int (*event_wait)(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
    int (*event_sync)(mt_device *dev, mt_event *ev, struct mt_err *err);
    int64_t (*event_time_ns)(mt_event *ev);
    int (*copy)(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err);
    int (*sync)(mt_device *dev, struct mt_err *err);
    int (*status)(mt_device *dev, struct mt_err *err);
    /* Optional. `name` NULL: the end of the calling thread's innermost range. */
    void (*range)(mt_device *dev, const char *name);

    size_t (*rmsnorm_bwd_workspace)(mt_device *dev, size_t n, size_t c);
    size_t (*bias_bwd_workspace)(mt_device *dev, size_t n, size_t c);
    size_t (*qk_rope_bwd_workspace)(mt_device *dev, size_t n, size_t n_q, size_t n_kv,
                                    size_t head_dim);
    size_t (*attention_workspace)(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                  size_t head_dim, enum mt_dtype dtype);

#define MT_BACKEND_OP(name, type) int (*name)(mt_device *dev, const type *a, struct mt_err *err);
    MT_DEVICE_OPS(MT_BACKEND_OP)
#undef MT_BACKEND_OP
};

struct mt_device {
    const struct mt_device_backend *backend;
    struct mt_device_limits limits;
};

/** First member of every backend's event. */
struct mt_event {
    mt_device *dev;
};

/* The factory's parts: each fills *out or says why it cannot. */
int mt_cpu_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err);
int mt_cuda_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err);
/* mt_device_probe() for GPUs. */
void mt_cuda_probe(struct mt_device_info *out, int index);

#endif
