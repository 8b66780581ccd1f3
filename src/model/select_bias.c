/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Biases for choosing experts, on the device in FP32 for the whole run: their units have them in the compute dtype,
 * which may round them and so change the choice.
 */

#include "base/mem.h"
#include "model/part.h"
#include "model/ranges.h"
#include "model/state.h"

size_t mt_select_bias_bytes(const struct mt_layout *l)
{
    const struct mt_moe *moe = &l->cfg.moe;
    return moe->select_bias ? (size_t)(l->cfg.n_layers * moe->n_experts) * sizeof(float) : 0;
}

const float *mt_model_select_bias(const mt_model *m, int layer)
{
    int64_t at = mt_layer_sharing(layer, m->layout->share) * m->layout->cfg.moe.n_experts;
    return m->select_bias ? m->select_bias + at : NULL;
}

/* Copies each layer's bias to its row. */
static int read_all(const struct mt_layout *l, mt_plane_set *planes, float *rows, struct mt_err *err)
{
    int rc = 0;
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && !rc; t++) {
        const struct mt_unit *u = &l->units[t->unit];
        for (size_t k = u->first_part; k < u->first_part + u->n_parts && !rc; k++)
            if (l->parts[k].kind->routes && t->param == &l->parts[k].param[MT_ROUTER_SELECT_BIAS])
                rc = mt_tensor_read_masters(planes, t, 0, t->n, rows + (int64_t)u->layer * l->cfg.moe.n_experts, err);
    }
    return rc;
}

static int load(mt_model *m, mt_plane_set *planes, struct mt_err *err)
{
    size_t bytes = mt_select_bias_bytes(m->layout);
    if (!bytes)
        return 0;
    MT_FREED float *rows = mt_calloc(1, bytes);
    if (!rows)
        return mt_fail_nomem(err, "biases that choose experts", bytes);
    int rc = read_all(m->layout, planes, rows, err)
          ?: mt_device_copy(m->dev, MT_STREAM_COMPUTE, &(struct mt_copy){m->select_bias, bytes, rows, bytes, bytes, 1},
                            err);
    int sync = mt_device_sync(m->dev, rc ? NULL : err);
    return rc ?: sync;
}

int mt_model_load_constants(mt_model *m, mt_plane_set *planes, struct mt_err *err)
{
    int rc = m->constants_loaded ? 0 : mt_layer_scalars_load(m, planes, err);
    if (!rc && !m->constants_loaded)
        rc = load(m, planes, err);
    m->constants_loaded = !rc;
    return rc;
}
