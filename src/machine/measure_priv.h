/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MACHINE_MEASURE_PRIV_H
#define MT_MACHINE_MEASURE_PRIV_H

#include "machine/measure.h"

/** A product's description as the meter gives it: a layer, its input gradient, its weight gradient. */
struct mt_metered mt_measure_gemm(enum mt_meter_kind k, enum mt_dtype t, uint64_t m, uint64_t n,
                                  uint64_t kk);
/** How long a round of an operation lasts. */
int64_t mt_measure_round_ns(const struct mt_measure_params *p);

/** What goes from one operation to the next: a buffer on the device that several read and none writes. */
struct mt_flow {
    void *data; /* freed with mt_device_free() */
    size_t bytes;
};
int mt_flow_create(struct mt_flow *out, mt_device *dev, size_t bytes, struct mt_err *err);

/**
 * An operation that can be run again and again, on buffers of its own with random data in them. With `flow`
 * (borrowed, or NULL) it reads there what in a step the operation before it has just written.
 */
struct mt_trial;
int mt_trial_create(struct mt_trial **out, mt_device *dev, const struct mt_metered *op,
                    const struct mt_flow *flow, struct mt_err *err);
/** Waits for the device; accepts NULL; sets *t to NULL. */
void mt_trial_destroy(struct mt_trial **t);
int mt_trial_submit(struct mt_trial *t, struct mt_err *err);

/** Sorts. */
double mt_measure_median(double *v, int n);
/** Copies each way alone and both ways at once. */
int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** On the cpu device: what copies, updates and compute leave of each other. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** Sequential reads and writes past the page cache in p->disk_dir, alone and together. */
int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);

#endif
