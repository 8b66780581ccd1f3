/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/packed_model.h"

#include <stdlib.h>

#include "base/mem.h"
#include "hw/hw.h"
#include "model/ranges.h"
#include "weights/peft.h"
#include "weights/weights.h"

static int check_memory(const struct mt_plane_set_params *p, struct mt_err *err)
{
    struct mt_hw_memory hw;
    char want[32], have[32];
    size_t bytes = mt_plane_set_bytes(p);
    int rc = mt_hw_memory(&hw, "", err);
    if (!rc && bytes > MT_MIN(hw.available, hw.cgroup_free))
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "packing needs %s of host memory, %s are free",
                     mt_format_bytes(want, sizeof(want), bytes),
                     mt_format_bytes(have, sizeof(have), MT_MIN(hw.available, hw.cgroup_free)));
    return rc;
}

int mt_packed_model_load(struct mt_packed_model *m, const char *dir, enum mt_packed format, const char *adapters,
                         struct mt_adapter_spec *spec, struct mt_err *err)
{
    *m = (struct mt_packed_model){.layout = NULL};
    int rc = mt_weights_layout(&m->layout, dir, true, spec, err);
    rc = rc ?: mt_weights_mark_stored(m->layout, dir, format, NULL, NULL, err)
            ?: mt_layout_plane_params(&m->params, m->layout, NULL, MT_BF16, err)
            ?: check_memory(&m->params, err)
            ?: mt_plane_set_create(&m->planes, &m->params, err)
            ?: mt_weights_load(m->layout, m->planes, dir, NULL, err);
    if (!rc && adapters)
        rc = mt_peft_load(m->layout, m->planes, adapters, err);
    return rc;
}

void mt_packed_model_finish(struct mt_packed_model *m)
{
    mt_plane_set_destroy(&m->planes);
    mt_layout_destroy(&m->layout);
    free(m->params.elems);
    *m = (struct mt_packed_model){.layout = NULL};
}
