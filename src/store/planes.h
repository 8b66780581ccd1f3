/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/pool.h"
#include "hw/host.h"
#include "store/disk.h"

/**
 * The training state: for each unit, one contiguous 4 KiB-aligned plane of each kind. A kind of plane belongs to one
 * kind of range and has only its parameters.
 *
 * A kind is an index into a table of descriptors: its properties are in its row, and its number means nothing.
 */
enum { MT_MAX_STATES = 5 }; /* optimizer states of an element */
enum mt_plane_kind {
    MT_PLANE_HI,        /* trained parameters: bf16, rounded from the FP32 master */
    MT_PLANE_LO,        /* the rest of the master */
    MT_PLANE_FROZEN,    /* frozen parameters stored as bf16: unchanged */
    MT_PLANE_IN_FILE,   /* the same, of large tensors that can be read in place from the model's files */
    MT_PLANE_FROZEN_HI, /* frozen parameters stored wider: like hi */
    MT_PLANE_FROZEN_LO, /* and like lo */
    MT_PLANE_IN_FILE_HI, /* the same two, of large tensors that can be read in place */
    MT_PLANE_IN_FILE_LO,
    MT_PLANE_PACKED,    /* frozen packed parameters: bytes, as in files */
    MT_PLANE_STATE,     /* the first of up to MT_MAX_STATES optimizer states */
    MT_PLANE_GRAD = MT_PLANE_STATE + MT_MAX_STATES,
    MT_N_PLANES,
    MT_NO_PLANE = MT_N_PLANES,
};

enum mt_plane_role { MT_ROLE_WEIGHT, MT_ROLE_STATE, MT_ROLE_GRADIENT };

/** Parameters that have the same kinds of planes. */
enum mt_range_kind {
    MT_RANGE_TRAINED,
    MT_RANGE_FROZEN,      /* stored as bf16 */
    MT_RANGE_IN_FILE,     /* stored as bf16, large, and so that it can be read in place from the model's files */
    MT_RANGE_FROZEN_WIDE, /* stored as f16 or f32: kept as the two halves of an FP32 master */
    MT_RANGE_IN_FILE_WIDE, /* the same, large, and so that it can be read in place */
    MT_RANGE_PACKED,      /* kept in a packed format (base/packed.h): its plane has bytes, not elements */
    MT_N_RANGE_KINDS,
};

/** What the bytes of a tensor's state may depend on. */
struct mt_state_shape {
    int n_dims;
    bool matrix;          /* one of those that optimizers of matrices are for: optimizer.matrices */
    size_t rows, cols, n; /* of a vector: n rows */
    size_t rank;          /* of an optimizer that projects matrices: its key `rank`; 0: it has none */
};

struct mt_plane_desc {
    const char *use;      /* for the memory table and messages: "first moments" */
    const char *saved_as; /* states: suffix of the tensor's name in checkpoints, "exp_avg" */
    enum mt_plane_role role;
    enum mt_range_kind range; /* range of its parameters */
    enum mt_dtype dtype;
    size_t block, block_bytes; /* elements that are encoded together, and their bytes; block 0: no such kind */
    size_t (*bytes)(const struct mt_state_shape *t); /* states: bytes of a tensor; NULL: its blocks, for all tensors */
    bool apart; /* an element of the plane is a byte; it has those of the tensors that have any, end to end, and is
                   always in host memory */
    bool on_device; /* states: devices read and write them, and updates do not; always in host memory */
};

/** Bytes of n elements. */
static inline size_t mt_plane_desc_bytes(const struct mt_plane_desc *d, size_t n)
{
    return d->block ? mt_div_up(n, d->block) * d->block_bytes : 0;
}

/** A set of kinds of planes: bit k is kind k. */
typedef uint32_t mt_plane_bits;

enum { MT_PLANE_WINDOW = 8 << 20 }; /* default bytes of a window */

/** Elements of a unit's planes, by kind; 0: the unit has none. */
struct mt_plane_elems {
    size_t n[MT_N_PLANES];
};

/** Bytes [at, at + n) of a plane that another host has, from mem with `write`, else to it; and what moves them. */
struct mt_plane_part {
    size_t unit, at, n;
    enum mt_plane_kind kind;
    bool write;
    void *mem;
};
struct mt_plane_move {
    int (*fn)(void *ctx, const struct mt_plane_part *part, struct mt_err *err);
    void *ctx;
};

struct mt_plane_set_params {
    size_t n_units;
    struct mt_plane_desc desc[MT_N_PLANES];
    struct mt_plane_elems *elems; /* [n_units], read only */
    const mt_plane_bits *on_disk; /* [n_units] planes on the disk; NULL: none */
    mt_disk *disk;            /* borrowed; its first mt_plane_set_disk_bytes() are the set's */
    const mt_plane_bits *in_files; /* [n_units] planes read in place from files; NULL: none */
    struct mt_file_weights *files; /* the files; borrowed; NULL: none */
    const mt_plane_bits *elsewhere; /* [n_units] planes that another host has; NULL: none. None in files is */
    struct mt_plane_move move;      /* to and from those; fn NULL: they cannot be reached */
    size_t window_bytes;      /* host memory to read and write planes on the disk; 0: MT_PLANE_WINDOW */
    bool sums;                /* keep checksums of planes on the disk and check every read */
    const struct mt_numa *numa; /* homes of planes in host memory; copied; NULL: the system places them */
    size_t piece_elems;       /* the engine transfers planes whole or in pieces of so many elements; 0: only whole */
};

/**
 * Planes in host memory (one mapping of each kind, zero at first, huge pages if available), on a disk, in files
 * that are read in place, and on other hosts. The engine transfers planes on the disk itself, by their offsets, and
 * reads those in files; all other code uses mt_planes_read() and mt_planes_write(), which hold at most a window of each
 * kind in memory. Planes in files cannot be written.
 *
 * Thread-safety: pointers from mt_plane() are plain memory, and the step's program orders the engine's accesses. Reads
 * and writes: one thread, with no step under way.
 */
typedef struct mt_plane_set mt_plane_set;

int mt_plane_set_create(mt_plane_set **out, const struct mt_plane_set_params *p, struct mt_err *err);
void mt_plane_set_destroy(mt_plane_set **s);
/** Bytes of host memory of the set, with the padding of last pages; the same arithmetic that allocates it. */
size_t mt_plane_set_bytes(const struct mt_plane_set_params *p);
/** Of one kind, for the memory table; and of the windows. */
size_t mt_plane_set_plane_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
size_t mt_plane_set_window_bytes(const struct mt_plane_set_params *p);
/** Upper bound of the bytes of sums of planes on the disk. */
size_t mt_plane_set_sum_bytes(const struct mt_plane_set_params *p);
/** Bytes on the disk, of all kinds and of one. */
uint64_t mt_plane_set_disk_bytes(const struct mt_plane_set_params *p);
uint64_t mt_plane_set_plane_disk_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
/** First element of a plane in host memory; NULL if the unit has none, or not in host memory. */
void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
size_t mt_plane_elems(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
/** The kind's row in the set's table; block is 0 if the set has no such kind. */
const struct mt_plane_desc *mt_plane_desc_of(const mt_plane_set *s, enum mt_plane_kind k);
/** Offset of a plane on the disk; false if it is not there. Planes begin and end at multiples of MT_DISK_ALIGN. */
bool mt_plane_on_disk(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, uint64_t *offset);
/** The sums of a plane on the disk; NULL: none. */
const struct mt_disk_sums *mt_plane_sums(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
/** Whether another host has it. */
bool mt_plane_is_elsewhere(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
/** Whether the unit has a plane of that kind that is read in place from files. */
bool mt_plane_in_files(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);

/** Reads and writes elements [first, first + n) of a plane in any tier; `first` begins a block. */
int mt_planes_read(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                   void *dst, struct mt_err *err);
int mt_planes_write(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                    const void *src, struct mt_err *err);
/** The same for bytes. */
int mt_planes_read_bytes(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err);
int mt_planes_write_bytes(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n, const void *src,
                          struct mt_err *err);
/** Writes changed windows to the disk and drops all windows. Call it before the engine transfers planes. */
int mt_planes_settle(mt_plane_set *s, struct mt_err *err);

/**
 * Homes: the elements of all units' trained planes of a kind are one row, which is divided into stripes of
 * MT_PLANE_STRIPE elements (more, if a plane's stripe would be less than a huge page); stripe s is at home s modulo the
 * homes. So whatever an update of an element reads and writes in host memory is at one home: but for kinds of which
 * other units are on a drive, where a huge page may lie across the border of two stripes.
 */
enum { MT_PLANE_STRIPE = 1 << 20, MT_PLANE_CHUNK = 1 << 16 };
const struct mt_numa *mt_plane_set_numa(const mt_plane_set *s);
int mt_plane_home(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t element);
/**
 * Calls fn(ctx, first, n) for elements [first, first + n) of the unit's trained planes, on the pool's threads, in
 * chunks within MT_PLANE_CHUNK elements of the row. A thread takes the chunks at its own home first, if the pool's
 * lanes are homes (mt_numa_lanes()).
 */
void mt_planes_run(const mt_plane_set *s, size_t unit, size_t first, size_t n, mt_pool *pool,
                   void (*fn)(void *ctx, size_t first, size_t n), void *ctx);

/** The range of pages with all planes of a kind in host memory, to be registered with a device; NULL: none. */
void *mt_plane_set_range(const mt_plane_set *s, enum mt_plane_kind k, size_t *bytes);
