/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/noise.h"
#include "base/strbuf.h"
#include "device/device.h"
#include "optim/isa.h"
#include "settings/key.h"
#include "settings/settings.h"
#include "store/planes.h"

/** A state that an optimizer keeps of the trained tensors. */
struct mt_optimizer_state {
    const char *name; /* in checkpoints, appended to the tensor's name: "exp_avg" */
    const char *use;  /* in the memory table: "first moments" */
    enum mt_dtype dtype; /* of an element; blocks of several elements are bytes */
    size_t block, block_bytes; /* elements that are encoded together (a divisor of the grain), and their bytes */
    size_t (*bytes)(const struct mt_state_shape *t); /* of a tensor, 0: it has no such state; NULL: its blocks, for all
                                                        tensors. If not apart, it is either none or all blocks */
    bool apart; /* few bytes, or of few tensors: its plane holds one tensor's after the other's, in host memory. Else
                   a block has the same place in its plane as its elements have in those of the weights */
    bool on_device; /* direct() reads and writes it; its planes stay in host memory, and are copied to the device and
                       back once a step */
};

/** A gradient that is a sum of a tensor's noise of several samples, g[i] z_i, which is made again (base/noise.h). */
enum { MT_MAX_SAMPLES = 32 };
struct mt_along {
    enum mt_noise_kind kind;
    uint64_t seed, stream;
    size_t n;
    float g[MT_MAX_SAMPLES];
    uint32_t limit; /* of mt_noise_takes(): 0 for other weights */
};

/**
 * An update, in place and on the calling thread, of consecutive parameters of one tensor, which begin at a multiple of
 * the optimizer's grain from its first. The weight is the split master (hi, lo), as `master` says; only optimizers with
 * lean_masters see others than MT_MASTER_F32.
 *
 * Memory   host pointers, borrowed; any alignment; planes do not overlap.
 */
struct mt_update {
    size_t n;
    enum mt_master master;
    uint16_t *hi, *lo;
    uint8_t *lo8; /* of 24 bits, instead of lo */
    void *state[MT_MAX_STATES]; /* NULL: the tensor has no such state; apart and on the device: the tensor's first */
    const void *grad;
    enum mt_dtype grad_dtype;
    const double *keys;      /* values of the optimizer's own keys, in its order */
    double lr, weight_decay; /* weight_decay: 0 for tensors that do not decay */
    uint64_t t;              /* number of the update, from 1 */
    uint64_t t0;             /* of the last update before its states were new: bias corrections count from there */
    float clip;              /* factor of the gradient, 1 = none */
    bool stochastic;         /* states in bf16 are rounded by chance: by seed, t, tensor and element */
    uint64_t seed, tensor, first; /* tensor: its index in the layout; first: the first element, of the tensor's */
    const struct mt_along *along; /* of a zeroth-order optimizer, in place of grad; else NULL */
};

/** A tensor's gradient that becomes a direction, on the device's compute stream. A vector has one column. */
struct mt_direction {
    mt_device *dev;
    size_t rows, cols;
    enum mt_dtype dtype;  /* of w */
    float *g;             /* in: the gradient; out: what leaves the device in its place */
    const void *w;        /* weights before the update, as computed with */
    void *state[MT_MAX_STATES]; /* those on the device; NULL: the tensor has no such state */
    const double *keys;   /* as in mt_update */
    uint64_t t;
    uint64_t seed, tensor; /* as in mt_update, for random numbers */
    size_t rank;          /* mt_state_shape.rank */
    void *scratch;        /* direct_scratch() bytes */
};

/** A number that an optimizer reads: a key of the section [optimizer]. Optimizers with keys of one name share the key
 * of the first of them, with its help and bounds; each has its own default. */
struct mt_optimizer_key {
    struct mt_key key;
    double def;
};
#define MT_OPTIMIZER_KEY(...) MT_OPTIMIZER_KEY_OF(MT_KEY_REAL, __VA_ARGS__)
#define MT_OPTIMIZER_WHOLE_KEY(...) MT_OPTIMIZER_KEY_OF(MT_KEY_WHOLE, __VA_ARGS__)
#define MT_OPTIMIZER_KEY_OF(type_, name_, def_, min_, max_, help_)                                                 \
    {                                                                                                              \
        {.section = "optimizer", .name = name_, .role = MT_NUMERICS, .type = type_,                                \
         .offset = MT_KEY_NO_OFFSET, .def = "auto", .min = min_, .max = max_, .help = help_},                      \
            def_                                                                                                   \
    }

/**
 * An optimizer: all that the rest of the program knows of it. Planes, tiers, memory table, traffic, simulator,
 * checkpoints and the configuration read this row; only update() computes.
 *
 * The update of an element depends on the elements of its grain alone: on itself, on those of its block, or on its
 * tensor. Where the program cuts anything (planes, pieces, chunks), it cuts between grains, so that threads,
 * instruction sets, pieces and tiers do not change a bit.
 */
struct mt_optimizer {
    const char *type;  /* optimizer.type in the configuration */
    const char *title; /* the printed name */
    enum mt_state_type state_type; /* optimizer.state_dtype */
    size_t grain; /* elements from a tensor's first, a divisor of MT_PIECE_ALIGN; or MT_GRAIN_TENSOR */
    int n_states;
    struct mt_optimizer_state state[MT_MAX_STATES];
    int n_keys;
    const struct mt_optimizer_key *keys; /* [n_keys] */
    bool matrices;     /* tensors that optimizer.matrices names have a rule of their own (mt_state_shape.matrix) */
    bool lean_masters; /* update() takes masters of 24 bits and bf16 */
    bool zeroth;       /* steps follow from losses of perturbed weights alone: there are no gradients */
    const struct mt_optimizer *if_zero; /* the row to use instead if the first key is 0; NULL: this */
    double thread_ns; /* a parameter, of a thread of a core of 2023, from its cache; 0: bytes alone decide */
    /** Returns the number of elements whose new weight is not finite or has an infinite `hi` (0 = good). */
    uint64_t (*update)(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa);
    /**
     * With states on the device: makes a direction of the gradient of a tensor that has any, while all of it is there.
     * update() gets it as its gradient. If the gradient is not finite, states are kept; its block is skipped. Needs no
     * norm of the whole gradient: train.grad_clip is 0.
     */
    int (*direct)(const struct mt_optimizer *o, const struct mt_direction *d, struct mt_err *err);
    size_t (*direct_scratch)(const struct mt_direction *d); /* bytes, by the shape and dtype */
};
#define MT_GRAIN_TENSOR SIZE_MAX

/** Defines an optimizer of the list in optimizer.c, by its type's name and its variants by state_type. */
#define MT_OPTIMIZER(type, ...)                                    \
    extern const struct mt_optimizer *const mt_optimizer_##type[]; \
    const struct mt_optimizer *const mt_optimizer_##type[] = {__VA_ARGS__, NULL}

/** AdamW with f32 moments. With bf16 gradients, it is what a machine's optimizer rate is measured with. */
extern const struct mt_optimizer mt_adamw;
/** optimizer.type = mezo with mezo.small below 1: it keeps a limit of each tensor. */
extern const struct mt_optimizer mt_mezo_small;

/** The types, each after a bar: "|adamw". */
extern const char mt_optimizer_types[];
/** Finds an optimizer by the configuration's values; NULL: there is no such variant. slots NULL: defaults. */
const struct mt_optimizer *mt_optimizer_find(const char *type, enum mt_state_type state_type,
                                             const double slots[MT_OPTIMIZER_SLOTS]);
/** Row i of all, in the order of the list; NULL: there are fewer. */
const struct mt_optimizer *mt_optimizer_at(size_t i);
/** Whether the row's update() takes such masters. */
bool mt_optimizer_takes(const struct mt_optimizer *o, enum mt_master master);
/** What the time of an update depends on, besides gradients. */
struct mt_update_form {
    const struct mt_optimizer *optimizer;
    enum mt_master master;
    bool stochastic; /* states in bf16 are rounded by chance */
};
/** Form i of all that can be configured; false: there are fewer. */
bool mt_update_form_at(size_t i, struct mt_update_form *f);
/** "adamw/8bit", "sgd/none", "lion/bf16/24bit/stochastic": the row, masters other than f32, rounding by chance. */
enum { MT_OPTIMIZER_NAME = 48 };
void mt_update_form_name(const struct mt_update_form *f, char name[MT_OPTIMIZER_NAME]);

/** Of optimizers with `zeroth`: the variants of a step's weights, with both signs of the noise of each sample: 2s is
 * w + eps z of sample s, and 2s + 1 is w - eps z. */
static inline size_t mt_mezo_variants(const struct mt_mezo_keys *k)
{
    return 2 * (size_t)k->samples;
}
/** How many of them a step computes with; 0: none, since it has a gradient. Where it computes nothing (mezo.rewards) 1,
 * as if it did. */
static inline size_t mt_optimizer_variants(const struct mt_numerics *n)
{
    return !n->optimizer || !n->optimizer->zeroth ? 0 : n->mezo.rewards ? 1 : mt_mezo_variants(&n->mezo);
}
/** FLOPs of a step as a part of those of forward and backward, which is twice forward. */
static inline double mt_optimizer_flops_share(const struct mt_numerics *n)
{
    return n->mezo.rewards            ? 0
           : mt_optimizer_variants(n) ? (double)mt_optimizer_variants(n) / 3
                                      : 1;
}
/** Whether a layer takes part in a step (LeZO, arXiv 2410.09823): as many as the share says, at least one, drawn by
 * seed and step. layer: -1: it is none. */
bool mt_mezo_takes(const struct mt_numerics *n, uint64_t step, int layer, int n_layers);

/** Slots: the names of all optimizers' own keys, in the order of mt_numerics.optimizer_keys; the row of the first. */
size_t mt_optimizer_n_slots(void);
const struct mt_optimizer_key *mt_optimizer_slot(size_t slot);
size_t mt_optimizer_slot_of(const char *key);
/** Appends the defaults of a slot: "adamw 0.9, lion 0.95". */
void mt_optimizer_defaults(size_t slot, struct mt_str *out);
/** The default that a type has for a key; false: it has no such key. */
bool mt_optimizer_default(const char *type, const char *key, double *def);
/** The value of a key, or its default where it is MT_AUTO or slots is NULL; 0: the optimizer has none, or is NULL. */
double mt_optimizer_key(const struct mt_optimizer *o, const double slots[MT_OPTIMIZER_SLOTS], const char *name);
/** Replaces MT_AUTO by the optimizer's defaults. -EINVAL: a key is set that it does not have. */
int mt_optimizer_resolve_keys(const struct mt_optimizer *o, double slots[MT_OPTIMIZER_SLOTS], struct mt_err *err);
/** From slots to the optimizer's own order; the rest stays as it is. */
void mt_optimizer_own_keys(const struct mt_optimizer *o, const double slots[MT_OPTIMIZER_SLOTS],
                           double own[MT_OPTIMIZER_SLOTS]);

/** Bytes of the states of an element of a matrix. */
double mt_optimizer_state_bytes(const struct mt_optimizer *o);
/** Bytes that the update of an element moves: master and states are read and written, a gradient is read. */
double mt_optimizer_bytes(const struct mt_optimizer *o, enum mt_master master, enum mt_dtype grad_dtype);
/** Nanoseconds of its instructions for an element, as thread_ns; masters of bf16 take random numbers. */
double mt_optimizer_thread_ns(const struct mt_optimizer *o, enum mt_master master);

/** Whether a slice of MT_PIECE_ALIGN elements of a matrix can be updated in a copy of it: at most
 * MT_GATHER_STATE_BYTES of each state an element, and nothing else. */
enum { MT_GATHER_STATE_BYTES = 4 };
bool mt_optimizer_gathers(const struct mt_optimizer *o);
