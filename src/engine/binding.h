/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "device/device.h"
#include "model/model.h"
#include "model/ranges.h"
#include "schedule/program.h"
#include "store/disk.h"
#include "store/files/file_weights.h"
#include "store/planes.h"

/** The step whose noise weights are perturbed by, and the variant that the first group has of it. */
struct mt_perturbing {
    const struct mt_numerics *numerics;
    uint64_t step;
    size_t variant;
};

/** Of a tensor's weights, of mt_noise_takes(). */
static inline uint32_t mt_noise_limit(const struct mt_numerics *n, const mt_plane_set *planes,
                                      const struct mt_tensor *t)
{
    const enum mt_plane_kind k = MT_PLANE_STATE;
    float limit;
    if (n->optimizer->n_states == 0)
        return MT_NOISE_ALL;
    size_t at = mt_tensor_span(t, mt_plane_desc_of(planes, k), k).at;
    memcpy(&limit, (const char *)mt_plane(planes, t->unit, k) + at, sizeof(limit));
    return mt_f32_to_bf16(limit);
}

/** What a program's objects and opcodes refer to: the device, the model, buffers and planes. */
struct mt_binding {
    mt_device *dev; /* borrowed, like layout and planes */
    const struct mt_layout *layout;
    mt_plane_set *planes; /* NULL: only the COMPUTE queue is used */
    enum mt_dtype dtype, grad_dtype;
    size_t n_late;          /* sums of squares of the first so many tensors leave at the end of the step, others' with
                               their gradient */
    bool adapters_stay;     /* in buffers of their own, where a unit's can (mt_unit.adapters_alone) */
    size_t piece_elems, piece_align; /* of updates from disk */
    uint64_t disk_spill_at; /* offset of the spill space on the disk */
    mt_model *model;
    void **buffers[MT_N_POOLS];
    char *spill;
    const struct mt_batch *batch; /* of a run with a cache: its micro-batch */
    const struct mt_perturbing *perturbing; /* of a zeroth-order optimizer's step; borrowed */
    bool noisy_loads;       /* what is trained has its noise after each load (mt_mezo_keys.on_load) */
};

/* exec_ops.c: submits one instruction of a device queue. */
int mt_exec_submit(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err);

/* disk_ops.c: where objects of host staging are on the disk, and where planes are in them. */

/** Fills the disk request of a READ or WRITE (spans and direction), and for a READ the planes that come from files.
 * `spilled`: sums of spilled objects, by object; NULL: no sums. */
void mt_disk_op_fill(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                     const struct mt_disk_sums *spilled, struct mt_disk_request *r, struct mt_file_request *f);
/** A unit's plane in host memory for a load or an update: element i is at data + (i - first) * element size. */
struct mt_plane_view {
    char *data;
    size_t first;
};
/** `state` and `staged` are the instruction's buffers, or NULL; `piece` is the update's. */
struct mt_plane_view mt_plane_view(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, size_t piece,
                                   char *state, char *staged);
