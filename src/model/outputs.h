/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/moe.h"

/**
 * Outputs of a layer's experts, or gradients of their inputs, until they are summed by tokens: each expert's rows at the
 * places of its list (mt_route_lists.places). The more experts there are between two sums, the fewer times the sum is
 * read and written. A token's entries are summed in the order of experts, whenever that is done, so bits do not depend on
 * how many rows fit (memory.expert_sums).
 *
 * struct mt_outputs is in the model's state. Experts of a layer follow each other in one direction, and the last one
 * that has rows sums what is left.
 */

/** Rows that fit: a share of all entries of a group, at least an expert's tile. 0: no mixture. */
size_t mt_outputs_rows(const struct mt_model_params *p, mt_device *dev);
size_t mt_outputs_bytes(const struct mt_model_params *p, mt_device *dev);

/** Makes room for rows at places [place, place + n), next to those that there are; down: the next ones are before them.
 * false: what is there must be summed first. */
bool mt_outputs_take(struct mt_outputs *o, size_t place, size_t n, bool down);
/** Where the row of such a place is. */
void *mt_outputs_at(const mt_model *m, size_t place);

/** Of a micro-batch's group, where its outputs are added, and whether they are weighted. */
struct mt_outputs_sum {
    size_t mb;
    struct mt_routing routing;
    bool weighted, down;
    float *sum; /* [rows of the group, mt_moe_row()] */
};
/** On the stream that is turned to, which has waited for all rows. Then there are none. */
int mt_outputs_sum(mt_model *m, const struct mt_outputs_sum *s, struct mt_err *err);
/** For estimates: the share of a layer's sums that `rows` rows have. */
int mt_outputs_assume(mt_model *m, const struct mt_outputs_sum *s, size_t rows, struct mt_err *err);
