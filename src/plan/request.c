/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/mem.h"
#include "hw/hw.h"
#include "model/model.h"
#include "plan/search.h"

static const uint64_t gib = (uint64_t)1 << 30;

static uint64_t size_of(const struct mt_cfg_size *s, uint64_t whole, uint64_t when_auto)
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
        .decay_embeddings = c->optimizer.decay_embeddings,
        .cut = c->memory.unit == MT_CUT_HALVES ? mt_cut_half : mt_cut_layer,
    };
    int rc = mt_layout_create(layout, hf, &p, err);
    *halves = NULL;
    if (rc || c->memory.unit != MT_CUT_AUTO)
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
    int64_t len = c->data.seq_len;
    int64_t rows = c->train.batch_size ? c->train.batch_size : c->train.tokens_per_step / len;
    if (rows < 1)
        rows = MT_MAX((int64_t)65536 / len, (int64_t)1);
    struct mt_plan_request r = {
        .machine = m,
        .layout = layout,
        .dtype = c->model.dtype == MT_CFG_F32 ? MT_F32 : MT_BF16,
        .seq_len = (size_t)len,
        .rows_per_step = (size_t)rows,
        .docs_per_row = 1,
        .micro_batch = c->train.micro_batch == MT_CFG_AUTO ? 0 : (size_t)c->train.micro_batch,
        .logits_chunk = c->memory.logits_chunk == MT_CFG_AUTO ? 0 : (size_t)c->memory.logits_chunk,
        .slots = (int)c->memory.slots,
        .keep_layers = (int)c->memory.keep_layers,
        .activations = c->memory.activations,
        .states = c->memory.states,
        .microbatch = c->memory.schedule == MT_SCHEDULE_MICROBATCH,
        .threads = c->device.cpu_threads == MT_CFG_AUTO ? (int)m->rate[MT_RATE_CORES].value
                                                         : (int)c->device.cpu_threads,
        .drives = drives,
        .link_gbps = m->cpu ? c->device.link_gbps : 0,
    };
    r.grad_dtype = c->optimizer.grad_dtype == MT_CFG_DTYPE_AUTO  ? r.dtype
                   : c->optimizer.grad_dtype == MT_CFG_DTYPE_F32 ? MT_F32
                                                                 : MT_BF16;
    r.optimizer = mt_optimizer_find(c->optimizer.type, c->optimizer.state_dtype == MT_CFG_F32 ? MT_F32 : MT_BF16);
    r.host_budget = size_of(&c->memory.host_budget, host, (uint64_t)((double)host * 0.9));
    uint64_t spare = device - MT_MIN(device, gib / 2); /* the driver and the display want some */
    r.device_budget = m->cpu ? size_of(&c->memory.device_budget, r.host_budget, r.host_budget / 4)
                             : size_of(&c->memory.device_budget, device, spare);
    *out = r;
    return 0;
}
