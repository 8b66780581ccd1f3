/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * An engine of fused causal attention in bf16: cuDNN's (attention_cudnn.cc, a module of its own, so that the
 * program runs without cuDNN), or that of the tests. It handles batches of sequences; fused.c maps documents to
 * them, pads, and chooses between the kinds of call.
 *
 * A tensor x is [batch, heads, len, width] with heads x.stride apart in rows x.ld apart; the width of q and k is dim,
 * that of v and o is dim_v. A sequence's rows follow each other. Fixed: sequence i begins at row i * len. Ragged: it begins at element
 * off_x[i] and has lens[i] <= len rows. stats: log-sum-exps, f32: fixed [batch, n_q, len]; ragged [rows, n_q],
 * sequence i from off_stats[i]. A window of 0 means none; else it includes the token itself. Backward is
 * deterministic.
 */
struct mt_fused_tensor {
    int64_t ld, stride;
};
struct mt_fused_shape {
    /* all fields have one type, so that there is no padding: shapes are compared as bytes */
    int64_t backward, ragged;
    int64_t batch, n_q, n_kv, len, dim, dim_v, window;
    int64_t total; /* ragged backward: the largest total number of rows; else 0 */
    int64_t scale_bits; /* bits of the f32 scale */
    struct mt_fused_tensor q, k, v, o, dq, dk, dv; /* gradients: 0 in forward */
};

/* The tensors, in the order of ragged offset tables. */
enum { MT_FUSED_Q, MT_FUSED_K, MT_FUSED_V, MT_FUSED_O, MT_FUSED_STATS, MT_FUSED_DQ, MT_FUSED_DK,
       MT_FUSED_DV, MT_FUSED_N_TABLES };

struct mt_fused_call {
    const void *q, *k, *v, *d_o; /* d_o has o's layout */
    void *o, *dq, *dk, *dv;
    float *stats;
    const int32_t *lens;                           /* ragged: [batch] */
    const int64_t *offsets[MT_FUSED_N_TABLES];     /* ragged: [batch + 1] each */
    void *workspace;
};

/** open, plan, run and supports return 0, or a negative value with the reason in `why` (at least 256 bytes). */
struct mt_fused_engine {
    /** "cuDNN 9.19.0". */
    void (*describe)(char *buf, size_t len);
    int (*open)(void **ctx, cudaStream_t stream, char *why, size_t why_len);
    void (*close)(void *ctx);
    /** Makes the plan of a shape, in a tenth of a second or more; the caller drops it before it closes ctx. -ENOMEM:
     * memory ran short; else failing is a property of the shape. */
    int (*plan)(void *ctx, const struct mt_fused_shape *s, void **plan, size_t *workspace_bytes,
                char *why, size_t why_len);
    /** All runs of the plan must have ended. */
    void (*drop)(void *ctx, void *plan);
    int (*run)(void *ctx, void *plan, const struct mt_fused_call *c, char *why, size_t why_len);
    /**
     * Whether a GPU of compute capability `sm` (90 for 9.0) would run the shape; `text` is then the engine that it
     * would use, with its notes, else the reason. `properties`: the GPU's description as JSON for cuDNN. Needs no GPU.
     */
    int (*supports)(const struct mt_fused_shape *s, int sm, const char *properties, char *text, size_t len);
};

/**
 * Builds the first of n candidates that can be built; they have different bits, so which one it is must not depend on
 * the memory that is free now: the first failure for lack of memory (-ENOMEM) is final. Returns the last failure.
 */
static inline int mt_fused_build_first(int64_t n, int (*build)(void *ctx, int64_t i), void *ctx)
{
    int rc = -1;
    for (int64_t i = 0; i < n && rc && rc != -ENOMEM; i++)
        rc = build(ctx, i);
    return rc;
}

/** Whether this program was built with an engine, so that a missing one is worth a warning. */
bool mt_cuda_fused_built(void);
/** The engine of this build, or NULL with the reason in `why`. */
const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len);

#ifdef __cplusplus
}
#endif
