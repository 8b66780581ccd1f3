/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_BINDING_H
#define MT_ENGINE_BINDING_H

#include "device/device.h"
#include "model/model.h"
#include "model/ranges.h"
#include "schedule/program.h"
#include "store/disk.h"
#include "store/file_weights.h"
#include "store/planes.h"

/** What the names in a program stand for: the device, the model, buffers and planes. */
struct mt_binding {
    mt_device *dev; /* borrowed, as layout and planes */
    const struct mt_layout *layout;
    mt_plane_set *planes; /* NULL: the COMPUTE queue alone */
    enum mt_dtype dtype, grad_dtype;
    size_t piece_elems;     /* of updates from disk */
    uint64_t disk_spill_at; /* spill space of the disk begins there */
    mt_model *model;
    void **buffers[MT_N_POOLS];
    char *spill;
    float *host_logits; /* of LOGITS */
};

/* exec_ops.c: submits one instruction of a device queue. */
int mt_exec_submit(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err);

/* disk_ops.c: where objects of host staging lie on the disk, and planes in them. */

/** Fills spans and direction of the transfer that a READ or WRITE is, and what of a READ comes from files. `spilled`:
 * sums of spilled objects, by object; NULL: none are kept. */
void mt_disk_op_fill(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                     const struct mt_disk_sums *spilled, struct mt_disk_request *r, struct mt_file_request *f);
/** A unit's plane as a load or an update sees it: element i at data + (i - first) * size. */
struct mt_plane_view {
    char *data;
    size_t first;
};
/** `state` and `staged` are the instruction's buffers, or NULL; `piece` is the update's. */
struct mt_plane_view mt_plane_view(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, size_t piece,
                                   char *state, char *staged);

#endif
