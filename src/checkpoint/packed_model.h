/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "store/planes.h"

/** A whole model in host memory, the matrices of its layers packed. */
struct mt_packed_model {
    struct mt_layout *layout;
    mt_plane_set *planes;
    struct mt_plane_set_params params;
};
/**
 * format: of matrices that are not packed yet; MT_PACKED_NONE: they stay plain. adapters: a PEFT folder whose
 * adapters the planes have, too, laid out by `spec`; NULL: none. -ENOMEM (MT_ERR_NO_FIT): it does not fit into
 * memory. Must be finished in any case.
 */
int mt_packed_model_load(struct mt_packed_model *m, const char *dir, enum mt_packed format, const char *adapters,
                         struct mt_adapter_spec *spec, struct mt_err *err);
void mt_packed_model_finish(struct mt_packed_model *m);
