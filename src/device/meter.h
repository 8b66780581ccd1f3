/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_METER_H
#define MT_DEVICE_METER_H

#include "device/ops.h"

/**
 * A device that computes nothing and tells what it was asked to: each operation goes to a callback as its
 * kind, shape, floating-point operations and least memory traffic. Buffers are addresses without memory,
 * so a model of any size can be driven through it; the planner's costs come from there, and so from the
 * very code that trains.
 */
enum mt_meter_kind {
    MT_METER_GEMM_NT, /* dims m, n, k: a linear layer */
    MT_METER_GEMM_NN, /* its input gradient */
    MT_METER_GEMM_TN, /* its weight gradient */
    MT_METER_ATTENTION, /* n, mean length a query sees its document at, query heads, key heads, head_dim */
    MT_METER_ATTENTION_BWD,
    MT_METER_EMBEDDING,     /* n, c */
    MT_METER_EMBEDDING_BWD, /* n, c, runs */
    MT_METER_RMSNORM,       /* n, c */
    MT_METER_RMSNORM_BWD,
    MT_METER_BIAS_BWD,
    MT_METER_QK_ROPE, /* n, heads, head_dim */
    MT_METER_QK_ROPE_BWD,
    MT_METER_GLU, /* n, f */
    MT_METER_GLU_BWD,
    MT_METER_CROSS_ENTROPY, /* n, vocab */
    MT_METER_GATHER_ROWS,   /* n, c */
    MT_METER_SCATTER_ROWS,  /* n_dst, c */
    MT_METER_ADD,           /* n */
    MT_METER_GRAD_CAST,
    MT_METER_JOIN,
    MT_METER_ZERO, /* bytes */
    MT_METER_CAST,
    MT_N_METER_KINDS,
};
const char *mt_meter_kind_name(enum mt_meter_kind k);

/** Variants of an operation that cost differently at the same shape. */
enum {
    MT_METER_ADDS = 1,      /* gemm: a C or bias is added */
    MT_METER_F32_OUT = 2,   /* gemm: D is f32 where A and B are not */
    MT_METER_NORM = 4,      /* qk_rope: with QK-norm */
    MT_METER_LOSS_ONLY = 8, /* cross-entropy: no gradient */
};
enum { MT_METER_DIMS = 5 };

struct mt_metered {
    enum mt_meter_kind kind;
    enum mt_dtype dtype;
    unsigned flags;
    int n_dims;
    uint64_t dim[MT_METER_DIMS];
    double flops; /* of matrix products; 0 for the memory-bound rest */
    double bytes; /* least traffic with memory */
};

typedef void (*mt_meter_fn)(void *ctx, const struct mt_metered *op);

struct mt_meter_params {
    const char *kind;    /* "cpu" or "cuda": whose workspaces and alignment are reported */
    const char *name;
    size_t budget_bytes;
    int n_threads;
    bool native_bf16;
    mt_meter_fn fn;      /* may be NULL; called on the submitting thread */
    void *ctx;
};
int mt_device_create_meter(mt_device **out, const struct mt_meter_params *p, struct mt_err *err);

#endif
