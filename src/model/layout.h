/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/packed.h"
#include "hf/hf_config.h"
#include "model/adapter.h"
#include "schedule/port.h"
#include "settings/settings.h"
#include "store/planes.h"

/** Elements: parameters begin at multiples of the first, lengths of planes are multiples of the second. */
enum { MT_PARAM_ALIGN = 64, MT_RANGE_ALIGN = 2048 };

enum { MT_TENSOR_NAME = 128, MT_STORED_NAME = MT_TENSOR_NAME + 32 };
struct mt_param;
struct mt_adapter;

/**
 * Where a tensor lies in a tensor of the model's files: element (r, c) is element
 * first + r * row_step + c * col_step of the stored one.
 */
struct mt_tensor_place {
    size_t stored; /* index into mt_layout.stored */
    size_t first, row_step, col_step;
    size_t paired_rows; /* not 0: in each group of so many rows, rows of both halves alternate in the file */
    size_t group_rows;  /* from one such group to the next; 0: they follow each other */
};

/** A tensor of the model's files, or of PEFT's: one of the layout's, or several that are fused. */
struct mt_stored {
    char name[MT_STORED_NAME];
    int n_dims;
    int64_t shape[3];
    size_t n;       /* elements */
    bool is_f32;    /* F32 in a file of bf16 */
    bool fused;     /* one expert's share after the other's */
    size_t source;  /* index of the stored tensor that has its pieces: its own, or one of the first of layers that share
                       weights */
    size_t first_piece, n_pieces; /* of mt_layout.pieces */
};

/** A Hugging Face tensor, its place in its unit and in the planes. */
struct mt_tensor {
    char name[MT_TENSOR_NAME];
    const char *usual;      /* its name in most families, mt_param_tensor.usual */
    int n_dims;
    int64_t shape[2];
    int64_t head_rows;      /* mt_param_tensor.head_rows */
    size_t unit;
    struct mt_tensor_place place;
    struct mt_param *param; /* the parameter that it is, or is a piece of */
    int expert;             /* index of the expert in its layer, or -1 */
    size_t first, n;  /* elements [first, first + n) of the unit */
    bool trainable;   /* not frozen */
    int learner;      /* trainable: whose it is, an index of the run's learners */
    size_t number;    /* its index in the layout of its learner alone: of the random numbers that its updates draw */
    bool saved_along; /* a constant of a module that adapter.train_also names: PEFT's files have it beside what is
                         trained */
    bool waits;       /* frozen only while another block is trained */
    bool decay;       /* weight decay applies */
    bool matrix;      /* for optimizers of matrices (mt_layout_params.matrices) */
    size_t rank;      /* mt_layout_params.rank */
    float start;      /* random weights: of a vector, all elements */
    float log_to;           /* mt_param_tensor.log_to */
    const struct mt_adapter *adapter; /* that it belongs to; NULL: it is of the model's files */
    double lr_scale;  /* factor of the learning rate */
    bool is_bf16;     /* frozen: its masters are exact in bf16 */
    bool in_base;     /* frozen, and from the model's files: checkpoints may hold only its sum. With adapters all such
                         tensors; else those in bf16 that are one tensor of the files, under the same name */
    bool in_file;     /* frozen, and stored in the model's files so that it can be read in place: large, or packed */
    size_t file_elem; /* in_file, not bf16: bytes of an element there */
    enum mt_packed packed; /* the format that it is kept in while it is frozen */
    enum mt_scale scale; /* packed: the type of its scales */
    uint16_t note_bytes; /* size in files of NF4's quant_state, or of the shape that INT4 has beside it */
    enum mt_range_kind kind;
    size_t at;        /* first element in each plane of its kind of range; packed: first byte of its codes */
    size_t aux;       /* packed: first byte of its scales and the like */
    size_t grad;      /* trainable: first element in the unit's FP32 gradient on the device */
    size_t apart[MT_MAX_STATES]; /* trainable: first byte in the plane of each state that is kept apart */
};

/**
 * Neighbouring tensors of a unit that are kept, moved and updated alike: from the first element of the first tensor to
 * the last of the last; the whole unit, if all its tensors are alike. On the device a unit is in the order of `first`;
 * a plane holds the ranges of its kind end to end. The trained tensors of a range are one learner's, and each begins at
 * a multiple of the optimizer's grain in its planes: where its place in the unit does not give that, it begins a range.
 * Further differences between tensors (format of the planes, compute dtype, scale of the learning rate, count of
 * updates, tier) belong here.
 */
struct mt_range {
    enum mt_range_kind kind;
    int learner;     /* trained: whose */
    size_t first, n; /* elements [first, first + n) of the unit, in the order of the device */
    size_t at;       /* first element in each plane of its kind */
    size_t grad;     /* trained: first element in the unit's FP32 gradient on the device */
};

/**
 * A matrix or vector as the device uses it: one tensor, or several that lie end to end (q, k, v; gate,
 * up), so that one matrix product serves them. `at` is the first element in the unit.
 */
struct mt_param {
    size_t at, n;   /* n = 0: the model has none */
    bool trainable; /* any of its tensors is */
    bool linear;    /* the weight of a linear layer, which its products alone read, and DoRA's norms */
    size_t grad;    /* trainable: first element in the unit's FP32 gradient, which holds all its tensors */
    size_t plane;   /* of an adapter: first element in the planes of what is trained */
    struct mt_adapter *adapter; /* of a linear layer with adapters: the first learner's; else NULL. The layout's */
};

/**
 * The adapters of one linear layer. If the layer is made of several tensors (q, k, v), each may have one: their A are
 * stored end to end, so that one product serves them, and each adds to its own columns of the layer's output.
 */
enum { MT_ADAPTER_MAX_TARGETS = 4 };
struct mt_adapter {
    int learner;             /* whose: an index of the run's learners */
    struct mt_adapter *next; /* of the same layer, another learner's */
    size_t in, out;    /* of the layer */
    const struct mt_fused_tensor *whole; /* PEFT has one adapter for all experts, on this parameter of theirs, and this
                                            is an expert's share; NULL: each target is a module */
    size_t n_outer;    /* whole: parameters of the same module that PEFT wraps around it, each adding "base_layer" to
                          its names */
    size_t rank;       /* of all targets together */
    bool dora;
    bool merged;       /* the weights that are used have it in them (enum mt_merge_aware) */
    double dropout;    /* share of the elements of x that training zeroes before A */
    struct mt_param a; /* [rank, in] */
    size_t n_targets;
    struct mt_adapter_target {
        size_t tensor;     /* the tensor that it adapts, or the first of several: index in mt_layout.tensors */
        size_t col, out;   /* columns [col, col + out) of the layer's output */
        size_t row, rank;  /* rows [row, row + rank) of A */
        uint32_t key;      /* hash of its module's name, for random numbers */
        float scale;
        double alpha;
        struct mt_param b; /* [out, rank] */
        struct mt_param magnitude; /* [out] with DoRA; n = 0: none */
        size_t norm;       /* merged, with DoRA: first of the unit's factors of rows, mt_unit_norms() */
    } target[MT_ADAPTER_MAX_TARGETS];
};

struct mt_part_kind; /* model/part.h */
enum { MT_PART_MAX_PARAMS = 13, MT_EXPERT_MAX_PARAMS = 4 };

/** A part of the model: one step of the computation (attention, MLP, ...) of one layer, with its parameters. */
struct mt_part {
    const struct mt_part_kind *kind;
    int layer;                                  /* decoder layer, or -1 */
    const struct mt_layer_spec *spec;           /* of that layer, in the layout's cfg; NULL: it is of no layer */
    const struct mt_recipe *recipe;             /* the layout's; NULL: its kind has none */
    struct mt_param param[MT_PART_MAX_PARAMS];  /* by the kind's roles */
    int first_expert, n_experts;                /* a group of a mixture's experts; n_experts 0: another part */
    struct mt_param (*expert)[MT_EXPERT_MAX_PARAMS]; /* [n_experts] parameters of each, by the kind's roles */
};

struct mt_optimizer; /* optim/optimizer.h */

#define MT_NO_TENSOR SIZE_MAX
enum mt_unit_kind { MT_UNIT_EMBED, MT_UNIT_LAYER, MT_UNIT_HEAD };

/** Consecutive parts of the model and their parameters, which are streamed together. */
struct mt_unit {
    enum mt_unit_kind kind;
    int layer;                   /* of MT_UNIT_LAYER, else -1 */
    int block;                   /* 0: embed; 1 and up: layers, those that share weights as one; last: head. The same
                                    for every cut */
    size_t weights;              /* the unit whose tensors it uses: itself, or one of the first of layers that share
                                    them; then it has none of its own, and its parts' parameters are that unit's */
    bool per_step;               /* runs once a group, over the rows of all its micro-batches; else once for each */
    char name[48];               /* "embed", "layer 7", "layer 7 mlp", "layer 7 experts 0-7", "head" */
    size_t n_elems;              /* on the device: params aligned to 64 elements, end padded to
                                    MT_JOIN_BLOCK */
    size_t n_params;             /* without padding */
    size_t first_tensor, n_tensors;
    size_t first_part, n_parts;
    size_t first_range, n_ranges;
    size_t f32_tensor;           /* tensor that is used in FP32 whatever the compute dtype; MT_NO_TENSOR: none */
    size_t n_grad;               /* elements of its FP32 gradient: parameters with a trained tensor */
    size_t n_in_planes[MT_N_RANGE_KINDS]; /* elements of the planes of each kind of range */
    size_t n_apart[MT_MAX_STATES]; /* bytes of the plane of each state that is kept apart */
    bool has_state[MT_MAX_STATES]; /* any trained tensor has it */
    bool trainable;              /* any of its tensors is */
    size_t wide_file_bytes;      /* in files, of its ranges of kind MT_RANGE_IN_FILE_WIDE */
    bool packed_in_files;        /* it has packed tensors, and all of them are packed in the model's files */
    bool adapters_alone;         /* all that is trained of it are adapters, not of the embedding's table, and each of
                                    their parameters is in one range: they can have a buffer of their own, in the
                                    order of the trained plane (memory.adapters). Merged ones cannot */
    size_t n_norms;              /* rows of merged matrices with DoRA */
    bool codes_stay;             /* it has packed tensors, and runs once a group without adapters, or it is one of
                                    mt_layout_keep_codes(): in bf16 compute its packed plane stays in its buffer
                                    (model/packing.h) */
};

/**
 * How the parts of a decoder layer are divided into n_units units: unit i has the next n_parts[i] parts, the last unit
 * all remaining ones. In a mixture of experts, this divides the parts before the first that runs once a group; each
 * of those is a unit of its own, and the parts after them are one unit. This is placement: tensors, their
 * order and every result are the same for each cut.
 */
enum { MT_CUT_MAX_UNITS = 4 };
struct mt_cut {
    const char *name;  /* value of memory.unit, for messages */
    size_t n_units;
    uint8_t n_parts[MT_CUT_MAX_UNITS];
    size_t expert_group; /* experts in a unit; 0: as many as fit MT_EXPERT_GROUP_BYTES in bf16 */
};
/** Default size of a group of experts in bf16: some 10 ms of a PCIe link. */
enum { MT_EXPERT_GROUP_BYTES = 256 << 20 };
/** One unit for each layer; one for its first part (attention) and one for the rest. */
extern const struct mt_cut mt_cut_layer, mt_cut_half;

/**
 * A segment of a unit's activation record: of one of its parts, with the hidden state between that part and the one
 * before it in the first of them. Each is kept, offloaded or made again by itself.
 */
struct mt_segment {
    const struct mt_part_kind *kind;
    size_t of_part; /* which of the part's */
    size_t bytes;   /* for a micro-batch; 0: none */
};
enum { MT_MAX_SEGMENT_KINDS = 8 };

/** Units in forward order: embed, layers, head. A tied head has no table of its own. */
struct mt_layout {
    struct mt_arrays arrays;   /* units, parts, experts, adapters and names */
    struct mt_hf_config cfg;
    struct mt_cut cut;
    int share;                 /* mt_layout_params.share, at least 1 */
    struct mt_unit *units;
    size_t n_units;
    struct mt_part *parts;     /* grouped by unit, in forward order */
    size_t n_parts;
    struct mt_recipe **recipes; /* [n_recipes] of its parts, one for each kind in each specification */
    size_t n_recipes, cap_recipes;
    struct mt_tensor *tensors; /* grouped by unit, in plane order */
    size_t n_tensors;
    size_t n_partials;         /* partial sums of squares of all gradients (device/ops.h) */
    struct mt_stored *stored;  /* the tensors of the model's files, by layer; after them those of adapters in PEFT's */
    size_t n_stored, n_adapter_stored;
    bool codes_stay;           /* of any unit that runs once a group */
    bool f32_routers;          /* some units have an f32_tensor: routers that are F32 in files of bf16 */
    size_t *pieces;            /* [n_tensors] indices of tensors, grouped by stored tensor */
    const struct mt_tensor **by_name; /* [n_tensors] sorted */
    struct mt_param (*experts)[MT_EXPERT_MAX_PARAMS]; /* mt_part.expert points into it */
    struct mt_range *ranges;   /* grouped by unit, in plane order; mt_layout_set_ranges() */
    size_t n_ranges;
    struct mt_segment segment[MT_MAX_SEGMENT_KINDS]; /* the kinds of its records' segments; their bytes mean nothing */
    size_t n_segments;
    struct mt_adapter *adapters;
    size_t n_adapters;
    struct mt_adapter_spec adapter_default; /* only with adapters; of the first learner's. Its lists are whoever gave it */
    const struct mt_optimizer *optimizer; /* borrowed; NULL: unknown, its grain is an element and no state is apart */
    enum mt_master master;     /* of trained tensors */
    uint64_t n_trained;        /* trained parameters, including those of adapters */
    uint64_t n_params;         /* of the model, without padding; a tied table counts once */
    uint64_t n_active;         /* parameters used by one token: of the experts those it is sent to; without the
                                  embedding, unless its table is also the head's */
    bool tied;
    bool by_blocks;            /* what is frozen is all in the model's files, and was or will be trained: checkpoints
                                  name it */
};

struct mt_layout_params {
    const char *const *freeze; /* [n_freeze] globs of the names of tensors that are not trained; borrowed */
    size_t n_freeze;
    const char *const *matrices; /* [n_matrices] globs of the names of tensors for optimizers of matrices; borrowed.
                                  0: the matrices of layers but for routers, with sides of 8 or more */
    size_t n_matrices;
    size_t rank;               /* of projected matrices: the optimizer's key `rank`; 0: it has none */
    bool by_blocks;            /* [first_layer, end_layer) are trained, one of train.blocks, and what `always` has */
    int first_layer, end_layer;
    const char *const *always; /* [n_always] globs; borrowed */
    size_t n_always;
    bool decay_embeddings;     /* embed_tokens and lm_head decay; biases and norms never do */
    struct mt_cut cut;
    int share;                 /* so many neighbouring layers, at the end fewer, have the weights of their first (Lin et
                                  al. 2021, M6-10T: Pseudo-to-Real); 0 and 1: each has its own */
    const struct mt_optimizer *optimizer; /* of the run, borrowed; NULL: nothing will be trained, or by elements */
    enum mt_master master;     /* of trained tensors */
    struct mt_adapter_spec *adapter; /* [n_learners] borrowed; their items are marked as used. NULL or off: none */
    size_t n_learners;         /* that train adapters of their own on this base, all with adapters; 0: one */
};

/**
 * Lays the model out, frozen tensors as if they were stored in f32. With adapters all other tensors are frozen, except
 * those of spec.train_also. -EINVAL (MT_ERR_USAGE): a glob that matches no tensor, or nothing left to train.
 */
int mt_layout_create(struct mt_layout **out, const struct mt_hf_config *cfg, const struct mt_layout_params *p,
                     struct mt_err *err);
void mt_layout_destroy(struct mt_layout **l);
/** The first of the layers that have the weights of `layer` if each `share` of them do: the layer that names them. */
static inline int mt_layer_sharing(int layer, int share)
{
    return layer < 0 ? layer : layer - layer % share;
}
/** The block of a unit of that kind and layer. */
static inline int mt_block_of(enum mt_unit_kind kind, int layer, int64_t n_layers, int share)
{
    return kind == MT_UNIT_EMBED ? 0 : 1 + (kind == MT_UNIT_HEAD ? (int)n_layers + share - 1 : layer) / share;
}
/** Blocks of the model: its embedding, layers (those that share weights are one), and head. */
static inline size_t mt_layout_n_blocks(const struct mt_layout *l)
{
    return (size_t)l->units[l->n_units - 1].block + 1;
}
/**
 * Lets the layout of one learner alone say where its tensors, and the base's, are in the planes of a layout of several
 * learners: to load and save them. -EINVAL: it is not that learner's.
 */
int mt_layout_share(struct mt_layout *alone, const struct mt_layout *shared, int learner, struct mt_err *err);
/** Divides units into ranges again, after tensors' trainable, is_bf16, in_file or packed was changed. */
int mt_layout_set_ranges(struct mt_layout *l, struct mt_err *err);
/** The unit's tensor that is FP32 on the device although its weights are in `dtype`; NULL: none, or all are FP32. */
const struct mt_tensor *mt_unit_f32_tensor(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** NULL: no tensor has that name. */
const struct mt_tensor *mt_layout_find(const struct mt_layout *l, const char *name);
/** The unit's tensor that holds its element `at`. */
const struct mt_tensor *mt_unit_tensor_at(const struct mt_layout *l, size_t unit, size_t at);

/** Whether two units are the same computation on the same shapes, so that both take the same time. */
bool mt_layout_alike(const struct mt_layout *l, size_t a, size_t b);

/** In the order of MT_ROLE_RECORD_0 and following; returns how many. */
size_t mt_unit_segments(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens,
                        struct mt_segment segment[MT_MAX_SEGMENTS]);
/** What generation keeps of earlier tokens for a unit. */
struct mt_unit_cache {
    enum mt_cache_kind kind;
    size_t window; /* tokens that it sees; 0: all */
    size_t bytes;  /* of a block: keys and values of so many tokens, or what a recurrence carries (struct mt_delta_kept)
                      and its convolution's last inputs; 0: the unit needs nothing of earlier tokens */
    size_t inputs; /* where these begin, in bytes */
};
struct mt_unit_cache mt_unit_cache(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t block);
/** What a row that is computed in chunks keeps of a unit: keys and values of all its tokens, or what a recurrence and
 * its convolution hand on after each chunk but the last; and gradients of these, or those that two chunks hand on. */
struct mt_unit_row {
    size_t bytes, gradient_bytes; /* 0: nothing */
};
struct mt_unit_row mt_unit_row(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t tokens,
                               size_t chunks);
/** Whether a cache is all that texts of up to max_len tokens need of their earlier ones: no rotary embedding depends on
 * such a length. */
bool mt_layout_caches(const struct mt_layout *l, size_t max_len);
/** What keeps rows of up to max_len tokens from being computed in chunks; NULL: nothing. */
const char *mt_layout_unchunked(const struct mt_layout *l, size_t max_len);
/** Which of mt_layout.segment it is; n_segments: none. */
size_t mt_segment_find(const struct mt_layout *l, const struct mt_segment *s);
/** "attention.qkv", "mlp": its name in memory.offload. */
void mt_segment_name(const struct mt_segment *s, char *buf, size_t len);
/** Does memory.offload_attention count it, not memory.offload_layers? */
bool mt_segment_attends(const struct mt_segment *s);

/**
 * What a unit's operations use, beside its record and its adapters, from the ports of its parts; group_rows: tokens of
 * a group. A hidden state between two of its parts is not among it. Returns how many.
 */
size_t mt_unit_ports(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens, size_t group_rows,
                     struct mt_port port[MT_MAX_PORTS]);
/** Bytes of the largest value of that role that the units' ports say. */
size_t mt_layout_value_bytes(const struct mt_layout *l, enum mt_role role, enum mt_dtype dtype, size_t max_tokens,
                             size_t group_rows);

/**
 * Floating-point operations of a token's forward and backward in documents of seq_len tokens, without
 * recomputation, attention included: the basis of utilisation.
 */
double mt_layout_flops_per_token(const struct mt_layout *l, size_t seq_len);
