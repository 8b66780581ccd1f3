/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * How the CUDA device divides its workspaces: functions of the shape alone, so that the planner knows them without a
 * GPU (cuda_kind.c), and so that a buffer's size never changes bits. No CUDA in here.
 */

/** Workspace of cuBLASLt for all products, as much as Hopper's algorithms need. Part of the numerics. */
enum { MT_CUDA_BLAS_BYTES = 32 << 20 };

/** Rows of a block in sums over rows: each block stores one partial row of floats. */
size_t mt_cuda_sum_rows(size_t n);
/** The same where a row has few columns. */
size_t mt_cuda_more_sum_rows(size_t n);
size_t mt_cuda_bias_bwd_rows(size_t n, size_t c);
size_t mt_cuda_short_conv_bwd_rows(size_t n);
/** Each warp of a block of gated_norm stores a partial row. */
enum { MT_CUDA_GATED_NORM_WARPS = 4 };

/** Tokens of a block that sorts entries by expert; each block stores e + 1 counts. */
enum { MT_CUDA_ROUTE_TOKENS = 256 };

/** The workspace of every operation that has one. For attention: the largest of its
 * implementations', so that a plan fits each, on GPUs of any kind. */
#define MT_CUDA_WITHOUT(ID, name, type)
#define MT_CUDA_WORKSPACE(ID, name, type) size_t mt_cuda_##name##_workspace(const type *a);
MT_DEVICE_OPS(MT_CUDA_WITHOUT, MT_CUDA_WORKSPACE)
#undef MT_CUDA_WITHOUT
#undef MT_CUDA_WORKSPACE
/** On a GPU of that compute capability; 0: of any. */
size_t mt_cuda_workspace(int capability, enum mt_dev_op op, const void *args);

/* --- the gated delta rule ---------------------------------------------------------------------- */

#ifdef MT_CUDA_SMALL_TILES /* for tests: few blocks, and few heads at a time */
enum { MT_CUDA_DELTA_SLOTS = 3, MT_CUDA_DELTA_STATES = 1 << 15 };
#else
enum { MT_CUDA_DELTA_SLOTS = 192, MT_CUDA_DELTA_STATES = 1 << 29 };
#endif

/** The workspace's parts: a slot a block, at most MT_CUDA_DELTA_SLOTS of them; for backward, in MT_CUDA_DELTA_STATES bytes
 * or what one job takes, the states before each `every`-th chunk, [chunk / every][group][wk, wv], and those between,
 * which a block makes again, [block][every - 1][heads of a job][wk, wv]; sums of dq and dk, if key heads have several
 * jobs (mt_delta_jobs()). A job is [document][key head][job of the key head]. */
struct mt_cuda_delta_buffers {
    int wk, wv;     /* widths of heads, padded */
    struct mt_delta_jobs jobs;
    size_t n_jobs;  /* of a document */
    size_t group;   /* value heads whose states are kept at a time: those of whole jobs */
    size_t every;
    size_t n_slots, slot_floats;
    float *slots, *states, *between, *dq, *dk; /* the last two [jobs of a key head][n][key heads][k.dim], or NULL */
    struct mt_delta_kept kept; /* of what is carried */
    size_t bytes;
};
/** Divides the arguments' workspace; if that is NULL only the sizes are valid. `bytes` grows with n alone. */
struct mt_cuda_delta_buffers mt_cuda_delta_buffers_of(const struct mt_delta_rule *a);

/* --- tiled attention --------------------------------------------------------------------------- */

#ifdef MT_CUDA_SMALL_TILES /* for tests: even small shapes have several tiles in each direction */
enum {
    MT_CUDA_TILE_ROWS = 32, MT_CUDA_MIN_TILE_ROWS = 8, MT_CUDA_TILE_SCORES = 1 << 12, MT_CUDA_TILED_LEN = 1 << 10
};
#else
enum {
    MT_CUDA_TILE_ROWS = 512, MT_CUDA_MIN_TILE_ROWS = 32, MT_CUDA_TILE_SCORES = 1 << 24, MT_CUDA_TILED_LEN = 1 << 15
};
#endif
enum { MT_CUDA_COLUMN_ALIGN = 8 };

/** The longest document that there is room for. Where kernels of our own take the shape, tiles are what these are
 * compared with, and a document of MT_CUDA_TILED_LEN tokens is enough for that: on longer ones they are trusted. */
size_t mt_cuda_tiled_len(const struct mt_attention *a);
/** Queries of a tile in forward, which has all of their keys; in backward always MT_CUDA_TILE_ROWS. */
size_t mt_cuda_tile_rows(size_t len, size_t n_q);
/** Keys of a tile in backward: a multiple of MT_CUDA_COLUMN_ALIGN. */
size_t mt_cuda_tile_keys(size_t n_q);

/** The workspace's parts: scores, of which dp and ds have room for a tile of backward alone, then in f32 dQ of a tile, dK
 * and dV of a document; heads outermost. */
struct mt_cuda_tiled_buffers {
    float *s, *dp, *dq, *dk, *dv;
    void *p, *ds; /* in f32 the same as s and dp */
    size_t bytes;
};
/** Divides the arguments' workspace; if that is NULL only `bytes` is valid. */
struct mt_cuda_tiled_buffers mt_cuda_tiled_buffers_of(const struct mt_attention *a);

/* --- attention of our own (kernels.h) ------------------------------------------------------------ */

/** Whether its kernels take the shape, whatever the layout. */
bool mt_cuda_flash_takes(const struct mt_attention *a);
/** Whether it comes before cuDNN's on GPUs of a compute capability (89 for 8.9; 0: not known): where mma.sync is what
 * tensor cores are fed by. By MEGATRAIN_ATTENTION, if that is set. */
bool mt_cuda_own_first(int capability);

struct mt_cuda_flash_buffers {
    void *tiles;  /* 16 bytes each, at most one a row of keys */
    float *delta; /* [q.n, n] */
    size_t bytes;
};
/** Divides the arguments' workspace; if that is NULL only `bytes` is valid. `bytes` grows with n. */
struct mt_cuda_flash_buffers mt_cuda_flash_buffers_of(const struct mt_attention *a);

/* --- fused attention --------------------------------------------------------------------------- */

enum { MT_CUDA_FUSED_TABLES = 8 }; /* of ragged offsets */

/** Rounds a length up to one of 16, 32, 48, 64, 80, 96, 112, 128, 160, ... (by at most a quarter from 64 on). */
size_t mt_cuda_padded_len(size_t len);
size_t mt_cuda_next_power(size_t n);
/** Workspace of cuDNN's deterministic backward, computed as its front end does: at most the sum of both. Of `a`, the
 * widths of heads count. */
size_t mt_cuda_fused_quadratic_bytes(size_t batch, size_t len, size_t n_q);
size_t mt_cuda_fused_linear_bytes(size_t tokens, size_t n_q, const struct mt_attention *a);
/** Rows that a ragged backward is planned for: those of the call, rounded up like lengths, at most most_n. */
size_t mt_cuda_fused_total(const struct mt_attention *a);

struct mt_cuda_fused_buffers {
    size_t pad_tokens;
    float *stats;
    int32_t *lens;
    int64_t *tables;
    char *padded; /* q, o, d_o, dq of pad_tokens rows; then k, v, dk, dv */
    char *lib;
    size_t lib_bytes, bytes;
};
/** Divides the arguments' workspace; if that is NULL only the sizes are valid. `bytes` grows with n and max_len. */
struct mt_cuda_fused_buffers mt_cuda_fused_buffers_of(const struct mt_attention *a);

#ifdef __cplusplus
}
#endif
