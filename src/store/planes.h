/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_PLANES_H
#define MT_STORE_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"

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
};

/** Planes in host memory: one mapping, zero at first, huge pages where granted.
 * Thread-safety: the pointers are plain memory; who may touch what is the schedule's business. */
typedef struct mt_plane_set mt_plane_set;

int mt_plane_set_create(mt_plane_set **out, const struct mt_plane_set_params *p, struct mt_err *err);
void mt_plane_set_destroy(mt_plane_set **s);
/** Bytes the set takes, page tails included; the same arithmetic that sizes it. */
size_t mt_plane_set_bytes(const struct mt_plane_set_params *p);
/** Of one kind alone, for the memory table. */
size_t mt_plane_set_plane_bytes(const struct mt_plane_set_params *p, enum mt_plane_kind k);
/** First element of a plane; NULL where the unit has none. */
void *mt_plane(const mt_plane_set *s, size_t unit, enum mt_plane_kind k);
size_t mt_plane_elems(const mt_plane_set *s, size_t unit);
enum mt_dtype mt_plane_dtype(const mt_plane_set *s, enum mt_plane_kind k); /* hi, lo: bf16-sized */
/** The whole mapping, to be registered with a device. */
void *mt_plane_set_base(const mt_plane_set *s, size_t *bytes);

/** Anonymous host memory (activations, boundaries, staging), zero at first, huge pages where
 * granted; freed with mt_host_free(). */
int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err);
void mt_host_free(void *p, size_t bytes);

#endif
