/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_PLANES_H
#define MT_STORE_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "store/disk.h"

/**
 * The training state: for each unit, one contiguous 4 KiB-aligned plane of each kind over all its
 * elements. Element i of every plane of a unit belongs to the same parameter.
 */
enum mt_plane_kind { MT_PLANE_HI, MT_PLANE_LO, MT_PLANE_M, MT_PLANE_V, MT_PLANE_GRAD, MT_N_PLANES };
const char *mt_plane_name(enum mt_plane_kind k);

enum mt_tier { MT_TIER_DEVICE, MT_TIER_HOST, MT_TIER_DISK };

struct mt_plane_set_params {
    size_t n_units;
    const size_t *n_elems;    /* [n_units] */
    const bool *trainable;    /* [n_units] false: no m, v, grad */
    enum mt_dtype state_dtype, grad_dtype;
    const uint8_t *on_disk;   /* [n_units] bit k: plane k is on the disk; NULL: all in host memory */
    mt_disk *disk;            /* borrowed; its first mt_plane_set_disk_bytes() are the set's */
    size_t window_bytes;      /* host memory to reach a plane on the disk through; 0: 8 MiB */
};

/**
 * Planes in host memory (one mapping, zero at first, huge pages where granted) and on a disk. The engine
 * moves those on the disk itself, by their offsets; everybody else goes through mt_planes_read() and
 * mt_planes_write(), which hold no more than a window of each kind in memory.
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
/** Bytes on the disk, of all kinds and of one. */
uint64_t mt_plane_set_disk_bytes(const struct mt_plane_set_params *p);
uint64_t mt_plane_set_plane_disk_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
/** First element of a plane in host memory; NULL where the unit has none, or has it on the disk. */
void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
size_t mt_plane_elems(const mt_plane_set *s, size_t unit);
enum mt_dtype mt_plane_dtype(const mt_plane_set *s, enum mt_plane_kind k); /* hi, lo: bf16-sized */
/** Offset of a plane on the disk, or false. A plane begins and ends at a multiple of MT_DISK_ALIGN. */
bool mt_plane_on_disk(const mt_plane_set *s, size_t unit, enum mt_plane_kind k, uint64_t *offset);

/** Elements [first, first + n) of a plane, wherever it is. */
int mt_planes_read(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                   void *dst, struct mt_err *err);
int mt_planes_write(mt_plane_set *s, size_t unit, enum mt_plane_kind k, size_t first, size_t n,
                    const void *src, struct mt_err *err);
/** Splits FP32 masters into elements of the hi and lo planes. */
int mt_planes_write_masters(mt_plane_set *s, size_t unit, size_t first, size_t n,
                            const float *masters, struct mt_err *err);
/** Brings what was written to the disk and forgets the windows: before somebody else moves the planes. */
int mt_planes_settle(mt_plane_set *s, struct mt_err *err);

/** All planes of a kind that are in host memory, in one range of pages; NULL where there are none. To be
 * registered with a device. */
void *mt_plane_set_range(const mt_plane_set *s, enum mt_plane_kind k, size_t *bytes);

/** Anonymous host memory (activations, boundaries, staging), zero at first, huge pages where
 * granted; freed with mt_host_free(). */
int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err);
void mt_host_free(void *p, size_t bytes);

#endif
