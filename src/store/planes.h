/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_PLANES_H
#define MT_STORE_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/mem.h"
#include "store/disk.h"

/**
 * The training state: for each unit, one contiguous 4 KiB-aligned plane of each kind. A kind of plane belongs to one
 * kind of range and holds its parameters alone.
 *
 * A kind is an index into a table of descriptors: what follows from a kind is in its row, never in its number.
 */
enum { MT_MAX_STATES = 4 }; /* optimizer states of an element */
enum mt_plane_kind {
    MT_PLANE_HI,        /* of what is trained: bf16, rounded from the FP32 master */
    MT_PLANE_LO,        /* the rest of the master */
    MT_PLANE_FROZEN,    /* of what is frozen and stored as bf16: the weights as they are */
    MT_PLANE_IN_FILE,   /* the same of large tensors that can be read in place from the model's files */
    MT_PLANE_FROZEN_HI, /* of what is frozen and stored wider: as hi */
    MT_PLANE_FROZEN_LO, /* and as lo */
    MT_PLANE_PACKED,    /* of what is frozen and packed: bytes, as files have them */
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
    MT_RANGE_IN_FILE,     /* stored as bf16, large, and in the model's files as in the plane */
    MT_RANGE_FROZEN_WIDE, /* stored as f16 or f32: kept as the two halves of an FP32 master */
    MT_RANGE_PACKED,      /* kept in a packed format (base/packed.h): its plane has bytes, not elements */
    MT_N_RANGE_KINDS,
};

struct mt_plane_desc {
    const char *use;      /* in the memory table and in messages: "first moments" */
    const char *saved_as; /* of a state: what follows the tensor's name in checkpoints, "exp_avg" */
    enum mt_plane_role role;
    enum mt_range_kind range; /* whose parameters it holds */
    enum mt_dtype dtype;
    size_t block, block_bytes; /* elements that are encoded together, and their bytes; block 0: no such kind */
};

/** Bytes of n elements. */
static inline size_t mt_plane_desc_bytes(const struct mt_plane_desc *d, size_t n)
{
    return d->block ? mt_div_up(n, d->block) * d->block_bytes : 0;
}

/** A set of kinds of planes: bit k is kind k. */
typedef uint32_t mt_plane_bits;

enum mt_tier { MT_TIER_DEVICE, MT_TIER_HOST, MT_TIER_DISK };

enum { MT_PLANE_WINDOW = 8 << 20 }; /* bytes of a window where the parameters do not say */

/** Elements of a unit's planes, by kind; 0: the unit has none. */
struct mt_plane_elems {
    size_t n[MT_N_PLANES];
};

struct mt_plane_set_params {
    size_t n_units;
    struct mt_plane_desc desc[MT_N_PLANES];
    struct mt_plane_elems *elems; /* [n_units], read only */
    const mt_plane_bits *on_disk; /* [n_units] what is on the disk; NULL: all in host memory */
    mt_disk *disk;            /* borrowed; its first mt_plane_set_disk_bytes() are the set's */
    const mt_plane_bits *in_files; /* [n_units] what is read in place from files; NULL: nothing */
    struct mt_file_weights *files; /* those; borrowed; NULL where there are none */
    size_t window_bytes;      /* host memory to reach a plane on the disk through; 0: MT_PLANE_WINDOW */
    bool sums;                /* of what is on the disk are kept, and checked by every read */
    size_t piece_elems;       /* the engine moves planes in pieces of so many elements, or whole; 0: whole alone */
};

/**
 * Planes in host memory (one mapping, zero at first, huge pages where granted), on a disk, and in files that are read
 * in place. The engine moves those on the disk itself, by their offsets, and reads those in files; everybody else goes
 * through mt_planes_read() and mt_planes_write(), which hold no more than a window of each kind in memory. Planes in
 * files cannot be written.
 *
 * Thread-safety: the pointers are plain memory; who may touch what is the schedule's business. Reads and
 * writes: one thread, and no step under way.
 */
typedef struct mt_plane_set mt_plane_set;

int mt_plane_set_create(mt_plane_set **out, const struct mt_plane_set_params *p, struct mt_err *err);
void mt_plane_set_destroy(mt_plane_set **s);
/** Bytes of host memory the set takes, page tails included; the same arithmetic that sizes it. */
size_t mt_plane_set_bytes(const struct mt_plane_set_params *p);
/** Of one kind alone, for the memory table; and of the windows. */
size_t mt_plane_set_plane_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
size_t mt_plane_set_window_bytes(const struct mt_plane_set_params *p);
/** Of the sums of what is on the disk, at most. */
size_t mt_plane_set_sum_bytes(const struct mt_plane_set_params *p);
/** Bytes on the disk, of all kinds and of one. */
uint64_t mt_plane_set_disk_bytes(const struct mt_plane_set_params *p);
uint64_t mt_plane_set_plane_disk_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
/** First element of a plane in host memory; NULL where the unit has none, or has it elsewhere. */
void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
size_t mt_plane_elems(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
/** The kind's row in the set's table; block is 0 where the set has no such kind. */
const struct mt_plane_desc *mt_plane_desc_of(const mt_plane_set *s, enum mt_plane_kind k);
/** Offset of a plane on the disk, or false. A plane begins and ends at a multiple of MT_DISK_ALIGN. */
bool mt_plane_on_disk(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, uint64_t *offset);
/** The sums of a plane on the disk; NULL where none are kept. */
const struct mt_disk_sums *mt_plane_sums(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
/** Does the unit have a plane of that kind, which is read in place from files? */
bool mt_plane_in_files(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);

/** Elements [first, first + n) of a plane, wherever it is. */
int mt_planes_read(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                   void *dst, struct mt_err *err);
int mt_planes_write(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                    const void *src, struct mt_err *err);
/** Brings what was written to the disk and forgets the windows: before somebody else moves the planes. */
int mt_planes_settle(mt_plane_set *s, struct mt_err *err);

/** All planes of a kind that are in host memory, in one range of pages; NULL where there are none. To be
 * registered with a device. */
void *mt_plane_set_range(const mt_plane_set *s, enum mt_plane_kind k, size_t *bytes);

/** Anonymous host memory (planes, activations, boundaries, staging), zero at first, huge pages where granted; freed
 * with mt_host_free(). All pages are there when it returns, so that what does not fit fails here. */
int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err);
/** The same, but pages come when they are first used: for what is mostly not used at all. */
int mt_host_map(void **out, size_t bytes, const char *what, struct mt_err *err);
void mt_host_free(void *p, size_t bytes);

#endif
