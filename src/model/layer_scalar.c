/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The number that a layer's output is multiplied by (Gemma 4): it is never trained, and is read once from the masters.
 */
#include <string.h>

#include "model/part.h"
#include "model/ranges.h"
#include "model/state.h"

void mt_layout_add_scalar(struct mt_layout_builder *b, struct mt_part *p, int role)
{
    const struct mt_param_tensor scalar = {.usual = p->spec->scalar_name, .rows = 1, .constant = true, .start = 1};
    if (p->spec->scalar_name)
        mt_layout_add_param(b, p, role, 0, 1, &scalar);
}

int mt_layer_scalars_load(mt_model *m, mt_plane_set *planes, struct mt_err *err)
{
    const struct mt_layout *l = m->layout;
    int rc = 0;
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && !rc; t++) {
        int layer = l->units[t->unit].layer;
        const char *name = layer < 0 ? NULL : mt_layer_of(&l->cfg, layer)->scalar_name;
        if (name && !t->adapter && !strcmp(t->usual, name))
            rc = mt_tensor_read_masters(planes, t, 0, 1, &m->scalars[layer], err);
    }
    return rc;
}

int mt_layer_scale(const struct mt_part_run *r, void *h, struct mt_err *err)
{
    const mt_model *m = r->m;
    if (!r->part->spec->scalar_name)
        return 0;
    struct mt_add a = {.n = r->in->n_tokens * m->c, .dtype = m->dt, .b = h, .out = h,
                       .scale = m->scalars[mt_layer_sharing(r->part->layer, m->layout->share)]};
    if (a.scale == 0) /* which would be read as 1 */
        return mt_op_zero(m->dev, &(struct mt_zero){h, a.n * mt_dtype_size(m->dt)}, err);
    return mt_op_add(m->dev, &a, err);
}
