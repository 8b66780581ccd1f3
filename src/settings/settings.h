/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SETTINGS_SETTINGS_H
#define MT_SETTINGS_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

/**
 * The settings of a step, as two structs that are assigned whole: what decides the bits of the result, and what
 * does not. The configuration reads its keys right into them (config/schema.c), resolve() of plan/resolve.h puts
 * values in the place of `auto`, and everything below takes them from there. A new setting is a field here, a row of
 * the schema, and the code that reads it.
 */

#define MT_AUTO (-1) /* of a number: not decided yet */

/** The order of a step. Layered: all micro-batches pass a layer before the next one is loaded. */
enum mt_step_order { MT_SCHEDULE_LAYERED, MT_SCHEDULE_MICROBATCH };
#define MT_STEP_ORDER_NAMES "layered|microbatch"

struct mt_optimizer;

/** What updates read of the configuration. An optimizer uses what it needs. */
struct mt_optimizer_keys {
    double beta1, beta2, eps, weight_decay;
};

/** What decides the bits of losses, weights and moments. The same on every machine, and kept on resume. */
struct mt_numerics {
    enum mt_dtype dtype;         /* of compute */
    enum mt_dtype grad_dtype;    /* of gradients on their way to the host, or MT_DTYPE_AUTO */
    enum mt_step_order schedule;
    int64_t seq_len;             /* tokens of a row */
    int64_t rows_per_step;       /* 0 until it is resolved: from a batch size in rows or in tokens */
    int64_t micro_batch;         /* rows on the device at once, or MT_AUTO */
    int64_t logits_chunk;        /* rows whose logits' gradients are there at once, or MT_AUTO */
    int64_t logits_piece;        /* of them, rows of FP32 logits at once, or MT_AUTO: all */
    double router_aux_loss;      /* of a mixture of experts: coefficient of the loss that balances it; 0: off */
    double grad_clip;            /* largest norm of the whole gradient; 0: off */
    enum mt_dtype state_dtype;   /* of the optimizer's moments */
    const struct mt_optimizer *optimizer; /* NULL until it is resolved: by its type and state_dtype */
    struct mt_optimizer_keys optimizer_keys;
    bool decay_embeddings;       /* as other matrices */
    uint64_t seed;               /* 0 until it is resolved: of random numbers that are drawn in a step */
};

/** How layers are cut into the units that are on the device at once. */
enum mt_unit_cut { MT_CUT_AUTO, MT_CUT_LAYERS, MT_CUT_HALVES };
#define MT_UNIT_CUT_NAMES "auto|layer|half"

/** What happens to the records of layers: what backward needs of forward. */
enum mt_activations { MT_ACT_AUTO, MT_ACT_KEEP, MT_ACT_OFFLOAD, MT_ACT_DISK, MT_ACT_RECOMPUTE };
#define MT_ACTIVATIONS_NAMES "auto|keep|offload|disk|recompute"

/** A layer's record has two parts, which may go different ways. */
enum mt_record_part {
    MT_RECORD_ATTENTION,
    MT_RECORD_REST, /* of the MLP or the router, with the hidden state that it begins with */
    MT_N_RECORD_PARTS,
};

/** Where master weights and moments live. Auto: in host memory, and on the disk as far as that is too small. */
enum mt_states { MT_STATES_AUTO, MT_STATES_DEVICE, MT_STATES_HOST, MT_STATES_DISK };
#define MT_STATES_NAMES "auto|device|host|disk"

/** Where frozen weights live. Auto: as the host's memory allows. Files: read in place from the model's own. */
enum mt_base_home { MT_BASE_AUTO, MT_BASE_HOST, MT_BASE_DISK, MT_BASE_FILES };
#define MT_BASE_NAMES "auto|host|disk|files"

/** Host memory that a GPU copies from and to directly. Auto: all. */
enum mt_pin { MT_PIN_AUTO, MT_PIN_ALL, MT_PIN_STAGING };
#define MT_PIN_NAMES "auto|all|staging"

/** Bytes, a share of what there is, or auto. */
struct mt_size {
    bool is_auto, is_ratio;
    double ratio;
    uint64_t bytes;
};

/** Where things are and what they may take. Never changes a bit of the result. */
struct mt_placement {
    enum mt_unit_cut unit;
    int64_t expert_group;        /* experts of a mixture that are a unit together, or MT_AUTO */
    int64_t slots;               /* weights of so many units on the device at once, or MT_AUTO */
    enum mt_activations activations;
    int64_t keep_layers;         /* with recompute: the last layers whose records stay all the same; or MT_AUTO */
    int64_t offload_layers;      /* with recompute: so many layers' worth of other records leave; or MT_AUTO */
    int64_t offload_attention;   /* the same of the attention's part, or MT_AUTO: as many as offload_layers */
    enum mt_states states;
    enum mt_base_home base;
    int64_t base_blocks;         /* with the base in files: so many blocks have it in host memory; or MT_AUTO */
    enum mt_pin pin;
    bool nvme_checksums;         /* what is on the drives has sums in host memory, checked by every read */
    int64_t threads;             /* of compute and of the optimizer, or MT_AUTO */
    struct mt_size device_budget, host_budget; /* resolved: bytes */
    bool poison;                 /* tests: overwrite dead buffers, so that a stale read becomes a NaN */
    size_t piece_elems;          /* tests: elements of an update from disk, a multiple of MT_PIECE_ALIGN; 0: chosen */
};

#endif
