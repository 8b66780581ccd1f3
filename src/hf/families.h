/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_FAMILIES_H
#define MT_HF_FAMILIES_H

#include "hf/family.h"

/** The rows of the table of families, by kind: dense ones (families_dense.c), and mixtures of experts
 * (families_mixtures.c), which may have dense layers, too; and those of the gated delta rule, of both
 * kinds (families_delta.c). */
struct mt_families {
    const struct mt_family *row;
    size_t n;
};
extern const struct mt_families mt_dense_families, mt_mixture_families, mt_delta_families;

#endif
