/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/mem.h"
#include "hw/hw.h"
#include "model/model.h"
#include "plan/search.h"

static const uint64_t gib = (uint64_t)1 << 30;

static uint64_t size_of(const struct mt_size *s, uint64_t whole, uint64_t when_auto)
{
    return s->is_auto ? when_auto : s->is_ratio ? (uint64_t)((double)whole * s->ratio) : s->bytes;
}

/* What a process may take: of this machine, what is free now; of another, its memory. */
static int host_memory(uint64_t *bytes, const struct mt_machine *m, bool local, struct mt_err *err)
{
    struct mt_hw_memory hw;
    *bytes = (uint64_t)(m->rate[MT_RATE_HOST_GIB].value * (double)gib);
    if (!local)
        return 0;
    int rc = mt_hw_memory(&hw, "", err);
    if (!rc)
        *bytes = MT_MIN(MT_MIN(hw.available, hw.cgroup_free), hw.address_space);
    return rc;
}

/* Drives that may be used: of this machine those that are named, of another all it has. */
static int count_drives(int *drives, const struct mt_config *c, const struct mt_machine *m, bool local,
                        struct mt_err *err)
{
    const struct mt_rate *rate = m->rate;
    bool rated = rate[MT_RATE_READ].value > 0 && rate[MT_RATE_WRITE].value > 0;
    *drives = local ? c->memory.nvme_paths.n : rated ? (int)rate[MT_RATE_DRIVES].value : 0;
    if (*drives && !rated)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "the drives of memory.nvme_paths have not been measured: megatrain probe all --dir %s",
                       c->memory.nvme_paths.items[0]);
    return 0;
}

int mt_plan_lay_out(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *c,
                    const struct mt_hf_config *hf, struct mt_err *err)
{
    struct mt_layout_params p = {
        .freeze = (const char *const *)c->model.freeze.items,
        .n_freeze = (size_t)c->model.freeze.n,
        .decay_embeddings = c->numerics.decay_embeddings,
        .cut = c->placement.unit == MT_CUT_HALVES ? mt_cut_half : mt_cut_layer,
    };
    int rc = mt_layout_create(layout, hf, &p, err);
    *halves = NULL;
    if (rc || c->placement.unit != MT_CUT_AUTO)
        return rc;
    p.cut = mt_cut_half;
    return mt_layout_create(halves, hf, &p, err);
}

const char *mt_plan_device_kind(const struct mt_config *c, struct mt_device_info *gpu)
{
    static const char *const kinds[] = {
        [MT_DEVICE_AUTO] = "auto", [MT_DEVICE_CUDA] = "cuda", [MT_DEVICE_CPU] = "cpu"};
    return mt_device_choose(kinds[c->device.kind], (int)c->device.index, gpu);
}

int mt_plan_request_make(struct mt_plan_request *out, const struct mt_config *c,
                         const struct mt_layout *layout, const struct mt_machine *m, bool local,
                         struct mt_err *err)
{
    uint64_t host, device = (uint64_t)(m->rate[MT_RATE_DEVICE_GIB].value * (double)gib);
    int drives, rc = host_memory(&host, m, local, err);
    if (!rc)
        rc = count_drives(&drives, c, m, local, err);
    if (rc)
        return rc;
    struct mt_plan_request r = {
        .machine = m,
        .layout = layout,
        .numerics = c->numerics,
        .placement = c->placement,
        .docs_per_row = 1,
        .drives = drives,
        .link_gbps = m->cpu ? c->device.link_gbps : 0,
    };
    struct mt_numerics *n = &r.numerics;
    struct mt_placement *p = &r.placement;
    n->rows_per_step = c->train.batch_size ? c->train.batch_size : c->train.tokens_per_step / n->seq_len;
    if (n->rows_per_step < 1)
        n->rows_per_step = MT_MAX((int64_t)65536 / n->seq_len, (int64_t)1);
    if (n->grad_dtype == MT_DTYPE_AUTO)
        n->grad_dtype = n->dtype;
    n->optimizer = mt_optimizer_find(c->optimizer.type, n->state_dtype);
    if (p->threads == MT_AUTO)
        p->threads = (int)m->rate[MT_RATE_CORES].value;
    p->host_budget.bytes = size_of(&c->placement.host_budget, host, (uint64_t)((double)host * 0.9));
    uint64_t spare = device - MT_MIN(device, gib / 2); /* the driver and the display want some */
    p->device_budget.bytes = m->cpu ? size_of(&c->placement.device_budget, p->host_budget.bytes,
                                              p->host_budget.bytes / 4)
                                    : size_of(&c->placement.device_budget, device, spare);
    *out = r;
    return 0;
}
