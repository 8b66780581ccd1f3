/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_MEASURE_PRIV_H
#define MT_PLAN_MEASURE_PRIV_H

#include "plan/measure.h"

/** A product's description as the meter gives it: a layer, its input gradient, its weight gradient. */
struct mt_metered mt_measure_gemm(enum mt_meter_kind k, enum mt_dtype t, uint64_t m, uint64_t n,
                                  uint64_t kk);
/** Sequential reads and writes past the page cache in p->disk_dir, alone and together. */
int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);

#endif
