/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"
#include "model/layout.h"

/**
 * Sums of models that this machine has read twice alike, kept in the folder of caches (sums/, one file a model). A
 * model is known again by the paths, sizes and times of its files; with any of them changed it is not. A later run
 * compares what it loads with these sums at its first read, and needs no second one. Packed tensors are known as they
 * are packed: where they are decoded, the bytes that are summed are others.
 */

/** Sets sum[i], of the layout's tensors, where it is known; leaves the others. The sums are those of mt_base_sums.all.
 * What cannot be read is not known: there are no errors. */
void mt_known_sums_get(uint64_t *sum, const struct mt_layout *l, const struct mt_st_model *st);
/** Keeps those that are not 0, with what is known already. Where that is not possible, mt_info() says why. */
void mt_known_sums_keep(const uint64_t *sum, const struct mt_layout *l, const struct mt_st_model *st);
/** The file in which the sums of this model are, or would be kept; "" if its path is too long. */
void mt_known_sums_path(char *path, size_t size, const struct mt_st_model *st);
