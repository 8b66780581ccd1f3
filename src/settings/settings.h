/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/noise.h"

/**
 * The settings of a step, as two structs that are assigned whole: what decides the bits of the result, and what
 * does not. The configuration parses its keys directly into them (config/schema.c), plan/resolve.h replaces each `auto`
 * by a value, and everything below reads the resolved structs. A new setting is a field here, a row of the schema, and
 * the code that reads it.
 */

#define MT_AUTO (-1) /* a number that is not resolved yet */

/** Updates are cut at multiples of so many elements: whole blocks of every state. */
enum { MT_PIECE_ALIGN = 2048 };

struct mt_optimizer;
enum { MT_OPTIMIZER_SLOTS = 16 };

/** Numbers of optimizers' states: of 32 or 16 bits, or blocks of 32 with 8 bits each and a scale. */
enum mt_state_type { MT_STATE_F32, MT_STATE_BF16, MT_STATE_8BIT };
#define MT_STATE_TYPE_NAMES "f32|bf16|8bit"
enum mt_rounding { MT_ROUND_NEAREST, MT_ROUND_STOCHASTIC };
#define MT_ROUNDING_NAMES "nearest|stochastic"

enum mt_clip { MT_CLIP_GLOBAL, MT_CLIP_UNIT };
#define MT_CLIP_NAMES "global|unit"

/** Of products of linear layers in layers. Auto: as mt_numerics.dtype says. FP8: operands in E4M3, sums in FP32. */
enum mt_compute { MT_COMPUTE_AUTO, MT_COMPUTE_BF16, MT_COMPUTE_FP8 };
#define MT_COMPUTE_NAMES "auto|bf16|fp8"

/** The learning rate after its warm-up. */
enum mt_lr_schedule { MT_LR_CONSTANT, MT_LR_LINEAR, MT_LR_COSINE, MT_LR_WSD };

/**
 * Training with the weights that the merged model will have: when a unit is loaded, its matrices with adapters become
 * Q(g (W + s B A)) (device/ops.h, mt_merge_adapter), and gradients are those of Q = 1. Q rounds to bf16, or encodes in
 * the named format, which must be the base's. Blocks have the scales of the base, or those of the merged values.
 */
enum mt_merge_aware { MT_MERGE_OFF, MT_MERGE_BF16, MT_MERGE_NF4, MT_MERGE_MXFP4, MT_MERGE_FP8, MT_MERGE_INT4,
                      MT_MERGE_NVFP4 };
#define MT_MERGE_AWARE_NAMES "off|bf16|nf4|mxfp4|fp8|int4|nvfp4"
enum mt_merge_scale { MT_SCALES_FROZEN, MT_SCALES_RECOMPUTED };
#define MT_MERGE_SCALE_NAMES "frozen|recomputed"

struct mt_objective;

/**
 * Blocks that generation has of its sequences, by kinds of layers. Those that see all tokens: keys and values of so
 * many tokens each, which sequences take as they grow. Those with a window: each of `slots` sequences has `ld` of its
 * own, used again in turn. Recurrences: each has one, of what it carries on. n: blocks of a layer; ld: the most of a
 * sequence.
 */
enum mt_cache_kind { MT_CACHE_ALL, MT_CACHE_WINDOW, MT_CACHE_STATES, MT_N_CACHE_KINDS };
struct mt_cache_shape {
    size_t slots, block; /* slots 0: there is no cache */
    size_t piece;        /* new tokens of a sequence at once, at most */
    size_t n[MT_N_CACHE_KINDS], ld[MT_N_CACHE_KINDS];
};

/**
 * Groups of a step's micro-batches: of a whole step's `of`, micro-batch i is in group i * n / of. A gradient is summed
 * in each group apart, in the order of its micro-batches; then the groups' sums are added by a balanced binary tree:
 * ((0 + 1) + (2 + 3)) + ... A group that has none in a short step adds nothing. The tree depends on n alone, so the sum
 * is the same wherever the groups are computed.
 */
struct mt_groups {
    size_t n, of; /* n a power of two; 0: one group */
};
enum { MT_MAX_GROUPS = 64 };
static inline size_t mt_groups_n(struct mt_groups g)
{
    return g.n > 1 ? g.n : 1;
}
static inline size_t mt_group_of(struct mt_groups g, size_t mb)
{
    return g.n > 1 ? mb * g.n / g.of : 0;
}
/** The first micro-batch of a group, or of one after it if it has none. */
static inline size_t mt_group_first(struct mt_groups g, size_t group)
{
    if (!group)
        return 0;
    return g.n > 1 ? (group * g.of + g.n - 1) / g.n : SIZE_MAX;
}
/** The most micro-batches of a group, in steps of at most n_micro. */
static inline size_t mt_group_most(struct mt_groups g, size_t n_micro)
{
    return g.n > 1 ? (g.of + g.n - 1) / g.n : n_micro;
}
/** Groups that have micro-batches in a step of so many, if a whole step has at least one in each: the first ones. */
static inline size_t mt_groups_in_use(struct mt_groups g, size_t n_micro)
{
    return n_micro ? mt_group_of(g, n_micro - 1) + 1 : 0;
}

/** What a policy's loss is divided by: its own; the step's tokens; those of the micro-batch, and the micro-batches;
 * each rollout's tokens, and the rollouts; the rollouts times policy.max_tokens. */
enum mt_policy_normalise { MT_BY_AUTO, MT_BY_TOKENS, MT_BY_MICRO, MT_BY_ROWS, MT_BY_CONSTANT };
#define MT_POLICY_NORMALISE_NAMES "auto|tokens|micro|rows|constant"
/** The deviation that rewards less their group's mean are divided by. */
enum mt_policy_scale { MT_SCALE_AUTO, MT_SCALE_GROUP, MT_SCALE_BATCH, MT_SCALE_NONE };
#define MT_POLICY_SCALE_NAMES "auto|group|batch|none"
enum mt_policy_kl { MT_KL_K3, MT_KL_K1, MT_KL_K3_RATIO };
enum mt_policy_old { MT_OLD_BATCH, MT_OLD_FILE };
enum mt_policy_mismatch { MT_MISMATCH_NONE, MT_MISMATCH_TOKEN, MT_MISMATCH_ROW };
enum mt_policy_beyond { MT_BEYOND_CUT, MT_BEYOND_DROP };
enum mt_policy_truncated { MT_TRUNCATED_KEEP, MT_TRUNCATED_MASK, MT_TRUNCATED_DROP };

/** Of [policy]; what is auto until resolved is MT_AUTO. */
struct mt_policy_keys {
    double clip_low, clip_high, dual_clip, kl_weight, beta, tau_positive, tau_negative, mismatch_max, temperature;
    int64_t max_tokens;
    enum mt_policy_normalise normalise;
    enum mt_policy_scale scale;
    enum mt_policy_kl kl;
    enum mt_policy_old old;
    enum mt_policy_mismatch mismatch;
    enum mt_policy_beyond beyond;
    enum mt_policy_truncated truncated;
};

/** Configuration of objectives; each reads the fields that it needs. */
struct mt_objective_keys {
    struct mt_policy_keys policy;
    double beta, gamma, label_smoothing, sft, desirable_weight, undesirable_weight; /* of [preference] */
    int64_t top;     /* tokens of the teacher that are learned from, of each row */
    double share;    /* of the data's own tokens in a loss of a teacher: distill.sft */
    double temperature; /* that the teacher's and the student's probabilities are flattened by: distill.temperature */
};

/** Of [mezo]: what weights are perturbed by, and which. */
struct mt_mezo_keys {
    double eps;
    int64_t samples;
    double layers; /* share of those that are perturbed and updated in a step; the embedding and the head always are */
    double small; /* share of a tensor's weights, the smallest at the start of the run, that are perturbed and updated */
    enum mt_noise_kind noise;
    bool rewards; /* steps follow from rewards of rollouts with the noise (policy.loss = es), and compute nothing */
    bool on_load; /* of generation: weights get the noise of a step whenever they are loaded */
};

/** What decides the bits of losses, weights and moments. The same on every machine, and kept on resume. */
struct mt_numerics {
    enum mt_dtype dtype;         /* of compute */
    enum mt_compute compute;     /* not auto: with dtype bf16 */
    enum mt_dtype grad_dtype;    /* of gradients on their way to the host, or MT_DTYPE_AUTO */
    int64_t seq_len;             /* tokens in a row */
    int64_t rows_per_step;       /* 0 until resolved from the batch size in rows or in tokens */
    int64_t micro_batch;         /* rows on the device at once, or MT_AUTO */
    int64_t chunk;               /* tokens of a row on the device at once, which divide seq_len; 0: all */
    int64_t groups;              /* of a step's micro-batches (struct mt_groups), a power of two; 0: one */
    int64_t logits_chunk;        /* rows whose gradients of logits are on the device at once, or MT_AUTO */
    int64_t logits_piece;        /* rows of a chunk with FP32 logits at once, or MT_AUTO */
    double router_aux_loss;      /* mixtures of experts: coefficient of the load-balancing loss; 0: off */
    double grad_clip;            /* largest norm of what is clipped at once; 0: off */
    enum mt_clip clip;           /* the whole gradient, or each block (the embedding, a layer, the head) by itself */
    enum mt_state_type state_type; /* of the optimizer's states: optimizer.state_dtype */
    enum mt_rounding rounding;   /* of states in bf16 */
    enum mt_master master;       /* of trained weights */
    const struct mt_optimizer *optimizer; /* NULL until resolved from its type and state_dtype */
    double optimizer_keys[MT_OPTIMIZER_SLOTS]; /* of the optimizers' own keys (optim/optimizer.h), by slot; MT_AUTO
                                    until resolved, and in those that the optimizer does not have */
    struct mt_mezo_keys mezo;    /* with optimizer.type = mezo */
    double weight_decay;         /* decoupled; of tensors that decay */
    const struct mt_objective *objective; /* what is minimized; NULL until resolved, and then cross-entropy */
    struct mt_objective_keys objective_keys;
    bool decay_embeddings;       /* weight decay on embeddings and head, as on other matrices */
    uint64_t seed;               /* of random numbers that a step draws; 0 until resolved */
};

/** Chunks of a row, each a micro-batch; 1: rows are whole. */
static inline size_t mt_row_chunks(const struct mt_numerics *n)
{
    return n->chunk > 0 && n->chunk < n->seq_len ? (size_t)(n->seq_len / n->chunk) : 1;
}

/** Whether blocks are clipped, and skipped if not finite, each by itself, without the norm of all. */
static inline bool mt_clips_by_block(const struct mt_numerics *n)
{
    return n->clip == MT_CLIP_UNIT || !(n->grad_clip > 0);
}

/** model.compute, with what auto is; with dtype f32 that has no other name. */
static inline enum mt_compute mt_settled_compute(const struct mt_numerics *n)
{
    return n->compute == MT_COMPUTE_AUTO && n->dtype == MT_BF16 ? MT_COMPUTE_BF16 : n->compute;
}

/** What it computes in, for messages. */
static inline const char *mt_numerics_name(const struct mt_numerics *n)
{
    if (n->compute != MT_COMPUTE_FP8)
        return mt_dtype_name(n->dtype);
    return n->dtype == MT_F32 ? "f32, products in fp8" : "bf16, products in fp8";
}

/** How layers are cut into units, which are loaded as a whole. */
enum mt_unit_cut { MT_CUT_AUTO, MT_CUT_LAYERS, MT_CUT_HALVES };
#define MT_UNIT_CUT_NAMES "auto|layer|half"

/** What happens to the records of layers: the activations that backward needs of forward. */
enum mt_activations { MT_ACT_AUTO, MT_ACT_KEEP, MT_ACT_OFFLOAD, MT_ACT_DISK, MT_ACT_RECOMPUTE };
#define MT_ACTIVATIONS_NAMES "auto|keep|offload|disk|recompute"

/** Where master weights and moments live. Auto: in host memory, and on the disk what does not fit there. */
enum mt_states { MT_STATES_AUTO, MT_STATES_HOST, MT_STATES_DISK };
#define MT_STATES_NAMES "auto|host|disk"

/** Where frozen weights live. Auto: in host memory if they fit. Files: read in place from the model's own files. */
enum mt_base_place { MT_BASE_AUTO, MT_BASE_HOST, MT_BASE_DISK, MT_BASE_FILES };
#define MT_BASE_NAMES "auto|host|disk|files"

/** Which planes in host memory are checked for bits that have changed by themselves (store/guard.h). */
enum mt_verify { MT_VERIFY_FROZEN, MT_VERIFY_ALL, MT_VERIFY_OFF };
#define MT_VERIFY_NAMES "frozen|all|off"

/** Where forward takes rows of a trained embedding. Auto: on the device, or where the search finds it faster. */
enum mt_embedding_place { MT_EMBEDDING_AUTO, MT_EMBEDDING_DEVICE, MT_EMBEDDING_HOST };
#define MT_EMBEDDING_NAMES "auto|device|host"

/** Where adapters' weights are while a step runs. Resident: all on the device, sent once a step. Auto: where the search
 * finds it faster, else with the weights of their layer, each time these are loaded. */
enum mt_adapters_place { MT_ADAPTERS_AUTO, MT_ADAPTERS_STREAMED, MT_ADAPTERS_RESIDENT };
#define MT_ADAPTERS_NAMES "auto|streamed|resident"

/** When a step's updates are made. Forward: under the forward pass of the next step. Backward: each as soon as its
 * gradient has arrived, but for those of the first blocks. Auto: forward, or backward if the search finds it better. */
enum mt_update_order { MT_UPDATE_AUTO, MT_UPDATE_FORWARD, MT_UPDATE_BACKWARD };
#define MT_UPDATE_ORDER_NAMES "auto|forward|backward"

/** What several devices share. Units: the layers, whose micro-batches follow each other from device to device.
 * Data: the groups of micro-batches; each device loads all units. Auto: data for mixtures and adapters, if there are
 * enough groups. */
enum mt_map { MT_MAP_AUTO, MT_MAP_UNITS, MT_MAP_DATA };
#define MT_MAP_NAMES "auto|units|data"

/** What several hosts keep of the state. Owned: each unit's states are on one of them, which updates it and sends the
 * others its weights. Whole: all are on each, which update all. */
enum mt_host_states { MT_HOST_STATES_OWNED, MT_HOST_STATES_WHOLE };
#define MT_HOST_STATES_NAMES "owned|whole"

/** Which host memory is pinned, so that a GPU copies from and to it directly. Auto: all. */
enum mt_pin { MT_PIN_AUTO, MT_PIN_ALL, MT_PIN_STAGING };
#define MT_PIN_NAMES "auto|all|staging"

enum { MT_OFFLOAD_TEXT = 128 };

/** Bytes, a share of what is available, or auto. */
struct mt_size {
    bool is_auto, is_ratio;
    double ratio;
    uint64_t bytes;
};

/** Where things are and what they may take. Never changes a bit of the result. */
enum { MT_MAX_DEVICES = 8 };

struct mt_placement {
    enum mt_unit_cut unit;
    int64_t expert_group;        /* experts of a mixture that form a unit, or MT_AUTO */
    int64_t expert_streams;      /* side streams of the device that experts run on; 1: none; or MT_AUTO */
    int64_t expert_sums;         /* times a layer that experts' outputs are summed, about; MT_AUTO; 0: for each unit */
    int64_t slots;               /* number of units whose weights are on the device at once, or MT_AUTO */
    enum mt_activations activations;
    int64_t keep_layers;         /* with recompute: number of last layers whose records are kept, or MT_AUTO */
    int64_t offload_layers;      /* with recompute: records offloaded from other layers, in layers; or MT_AUTO */
    int64_t offload_attention;   /* the same for attention's segments, or MT_AUTO: as offload_layers */
    char offload[MT_OFFLOAD_TEXT]; /* the same for segments by name, "attention.out:12, mlp:3"; "": none named */
    enum mt_embedding_place embedding;
    enum mt_adapters_place adapters;
    enum mt_states states;
    enum mt_base_place base;
    int64_t base_blocks;         /* with the base in files: so many blocks have it in host memory; or MT_AUTO */
    enum mt_update_order update;
    int64_t update_pending;      /* with updates under backward: first layers whose update is pending, or MT_AUTO */
    enum mt_pin pin;
    enum mt_verify verify;
    bool nvme_checksums;         /* checksums, in host memory, of what is on the drives; every read is checked */
    int64_t lanes;               /* devices that share the work, at most MT_MAX_DEVICES; 0: one */
    enum mt_map map;             /* how they do */
    int64_t hosts;               /* that share the groups, each with so many lanes; 0: one */
    int64_t host;                /* which of them this is */
    enum mt_host_states host_states;
    int64_t threads;             /* of compute and of the optimizer, or MT_AUTO */
    struct mt_size device_budget, host_budget; /* in bytes once resolved */
    bool poison;                 /* tests: overwrite dead buffers, so that a stale read becomes a NaN */
    size_t piece_elems;          /* tests: elements of a piece of an update from disk, a multiple of MT_PIECE_ALIGN;
                                    0: the engine chooses */
};
