/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "machine/measure.h"

/** The operations that `probe all` times: products and attention of several shapes, all others of the table in every
 * variant. Widths are multiplied by `scale`; all sizes but the number of heads are divided by `part`. */
struct mt_measure_grid {
    struct mt_metered ops[512];
    size_t n;
    bool failed; /* out of memory, or too many operations */
};
void mt_measure_list_grid(struct mt_measure_grid *g, uint64_t scale, uint64_t part);

/** Times those of the operations that are products of shapes not in the file (products.h), on a device opened for it,
 * and adds them to the file. *n_new: how many there were. */
int mt_products_measure(const struct mt_measure_params *p, const struct mt_metered *ops, size_t n, size_t *n_new,
                        struct mt_err *err);
/** Sorts v. */
double mt_measure_median(double *v, int n);
/** Copies in each direction alone, then in both at once. */
int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
/** On the cpu device: how copies, updates and compute slow each other down. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err);
