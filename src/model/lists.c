/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows of a group go to which expert: the router's choices, sorted by expert. No parameters. */
#include "model/moe.h"
#include "model/part.h"

static struct mt_route_lists arguments(const struct mt_moe *moe, size_t n)
{
    return (struct mt_route_lists){.n = n, .e = (size_t)moe->n_experts, .k = (size_t)moe->top_k};
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *dev)
{
    struct mt_route_lists a = arguments(&p->layout->cfg.moe, mt_model_group_rows(p));
    return mt_op_route_lists_workspace(dev, &a);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    struct mt_route_lists a = arguments(moe, mt_model_rows_in_use(m, r->of->mb));
    struct mt_routing t;
    (void)y; /* the lists are in the routing */
    mt_routing_layout(&t, moe, mt_model_group_rows(&m->p), mt_value(r, MT_ROLE_ROUTING));
    a.ids = t.ids;
    a.weights = t.weights;
    a.counts = t.counts;
    a.starts = t.starts;
    a.list = t.list;
    a.places = t.places;
    a.bucket = mt_device_limits(m->dev)->row_bucket;
    a.workspace = m->own.workspace;
    int rc = mt_op_route_lists(m->dev, &a, err);
    return rc ?: mt_model_take_counts(m, r->part->layer, r->of->mb, &t, err);
}

const struct mt_part_kind mt_part_lists = {
    .name = "lists",
    .per_step = true,
    .port = {{MT_ROLE_ROUTING, MT_UPDATE, MT_NO_ACCESS}},
    .workspace_bytes = workspace_bytes,
    .finish = finish,
};
