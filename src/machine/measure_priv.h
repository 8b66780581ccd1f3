/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MACHINE_MEASURE_PRIV_H
#define MT_MACHINE_MEASURE_PRIV_H

#include "machine/measure.h"

/** A product's description as the counting device gives it; MT_GEMM_*. A weight gradient adds to one in f32. */
struct mt_metered mt_measure_gemm(unsigned variant, enum mt_dtype t, uint64_t m, uint64_t n, uint64_t k);
/** How long a round of an operation lasts. */
int64_t mt_measure_round_ns(const struct mt_measure_params *p);

/** The operations that `probe all` times: products and attention by shape, all others of the table in every variant.
 * Widths are multiplied by `scale`, and all but the number of heads divided by `part`. */
struct mt_measure_grid {
    struct mt_metered ops[512];
    size_t n;
    bool failed; /* there was no memory, or there are more */
};
void mt_measure_list_grid(struct mt_measure_grid *g, uint64_t scale, uint64_t part);

/** Sorts. */
double mt_measure_median(double *v, int n);
/** Copies each way alone and both ways at once. */
int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** On the cpu device: how copies, updates and compute slow each other down. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** Sequential reads and writes past the page cache in p->disk_dir, alone and together. */
int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);

#endif
