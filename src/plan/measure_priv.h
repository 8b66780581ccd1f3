/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_MEASURE_PRIV_H
#define MT_PLAN_MEASURE_PRIV_H

#include "plan/measure.h"

/** A product's description as the meter gives it: a layer, its input gradient, its weight gradient. */
struct mt_metered mt_measure_gemm(enum mt_meter_kind k, enum mt_dtype t, uint64_t m, uint64_t n,
                                  uint64_t kk);
/** How long a round of an operation lasts. */
int64_t mt_measure_round_ns(const struct mt_measure_params *p);
/** Sorts. */
double mt_measure_median(double *v, int n);
/** Copies each way alone and both ways at once. */
int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** On the cpu device: what copies, updates and compute leave of each other. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** Sequential reads and writes past the page cache in p->disk_dir, alone and together. */
int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);

#endif
