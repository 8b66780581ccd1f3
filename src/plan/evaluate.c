/* SPDX-License-Identifier: Apache-2.0 */
/* One placement: its memory in each tier and the time of its step. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "engine/share.h"
#include "kinds/kinds.h"
#include "model/model.h"
#include "model/ranges.h"
#include "plan/evaluate.h"
#include "store/planes.h"
#include "store/guard.h"

void mt_plan_choice_finish(struct mt_plan_choice *c)
{
    mt_engine_plan_finish(&c->engine);
    free(c->tried);
    *c = (struct mt_plan_choice){0};
}

uint64_t mt_plan_host_limit(const struct mt_plan_request *r)
{
    return r->placement.host_budget.bytes + r->more[r->placement.host];
}

int mt_plan_meter(mt_device **dev, const struct mt_plan_request *r, uint64_t budget, struct mt_err *err)
{
    const struct mt_device_kind *kind = mt_device_kind(mt_machine_device_kind(r->machine));
    return mt_device_create_meter(dev,
                                  &(struct mt_meter_params){
                                      .kind = kind,
                                      .name = r->machine->name,
                                      .budget_bytes = (size_t)(budget - MT_MIN(budget, (uint64_t)kind->own_bytes)),
                                      .n_threads = (int)r->placement.threads,
                                      .capability = (int)r->machine->rate[MT_RATE_CAPABILITY].value,
                                  },
                                  err);
}

/* Micro-batches of a step: each learner's last one may have fewer rows. */
static size_t count_micro(const struct mt_plan_request *r, size_t rows)
{
    size_t n = r->n_learners ? 0 : mt_div_up((size_t)r->numerics.rows_per_step, rows);
    for (size_t i = 0; i < r->n_learners; i++)
        n += mt_div_up((size_t)r->learner[i].rows_per_step, rows);
    return n * mt_row_chunks(&r->numerics);
}

/* Mixtures do nothing on one device while the next works on the same layer; adapters have small gradients to add up. */
static enum mt_map map_of(const struct mt_engine_params *p)
{
    bool gains = p->layout->cfg.moe.n_experts || p->layout->n_adapters;
    return gains && p->placement.lanes > 1 && p->numerics.groups >= p->placement.lanes ? MT_MAP_DATA : MT_MAP_UNITS;
}

static int64_t most_streams(const struct mt_engine_params *p, const struct mt_machine *m)
{
    int sides = p->dev ? mt_device_limits(p->dev)->sides : m ? mt_device_kind(mt_machine_device_kind(m))->sides : 0;
    return p->layout->cfg.moe.n_experts && sides > 1 ? sides : 1;
}

enum { OUTPUTS_SHARE = 7, MOST_SUMS = 64 };

/* As few as take a seventh of the device's memory for the outputs that wait. */
static int64_t fewest_sums(const struct mt_engine_params *p, uint64_t budget)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    uint64_t rows = mt_group_most(mt_engine_groups(p), p->max_micro) * p->max_tokens;
    uint64_t bytes = rows * (uint64_t)c->moe.top_k * mt_moe_row(c) * mt_dtype_size(p->numerics.dtype);
    int64_t sums = 1;
    while (c->moe.n_experts && sums < MOST_SUMS && bytes / (uint64_t)sums > budget / OUTPUTS_SHARE)
        sums *= 2;
    return sums;
}

/* How experts run, where it is open: the fastest way. */
static void choose_experts(struct mt_engine_params *p, const struct mt_plan_request *r)
{
    if (p->placement.expert_streams == MT_AUTO)
        p->placement.expert_streams = most_streams(p, r->machine);
    if (p->placement.expert_sums == MT_AUTO)
        p->placement.expert_sums = fewest_sums(p, r->placement.device_budget.bytes);
}

/* With experts in the fastest way. */
static struct mt_engine_params params_of(const struct mt_plan_request *r, mt_device *dev)
{
    struct mt_engine_params p = {
        .dev = dev,
        .layout = r->layout,
        .numerics = r->numerics,
        .learner = r->learner,
        .n_learners = r->n_learners,
        .placement = r->placement,
        .train = r->train,
        .top = r->top,
        .may_use_disk = r->drives > 0,
        .drive_bytes = mt_plan_drive_bytes(r->layout),
    };
    struct mt_numerics *n = &p.numerics;
    n->micro_batch = MT_MIN(n->micro_batch == MT_AUTO ? 1 : n->micro_batch, n->rows_per_step);
    if (n->logits_chunk == MT_AUTO)
        n->logits_chunk = (int64_t)mt_model_auto_logits_chunk(r->layout);
    p.placement.keep_layers = MT_MAX(p.placement.keep_layers, 0);
    p.placement.offload_layers = MT_MAX(p.placement.offload_layers, 0);
    if (p.placement.offload_attention == MT_AUTO)
        p.placement.offload_attention = p.placement.offload_layers;
    p.max_len = (size_t)n->seq_len;
    p.max_tokens = (size_t)n->micro_batch * p.max_len / mt_row_chunks(n);
    p.max_docs = MT_MIN((size_t)n->micro_batch * MT_MAX(r->docs_per_row, (size_t)1), p.max_tokens);
    size_t read = count_micro(r, (size_t)n->micro_batch), times = mt_engine_times(&p);
    p.max_micro = MT_MAX(read * times, (size_t)1);
    p.draws = r->draws > 0;
    p.cache = r->cache;
    if (r->cache.slots && r->train) {
        p.max_docs = MT_MAX(p.max_docs, r->cache.slots);
    } else if (r->cache.slots) {
        p.max_tokens = r->draws;
        p.max_docs = r->cache.slots;
        p.max_micro = 1;
    }
    if (p.placement.embedding == MT_EMBEDDING_AUTO)
        p.placement.embedding = MT_EMBEDDING_DEVICE;
    p.placement.map = p.placement.map == MT_MAP_AUTO ? map_of(&p) : p.placement.map;
    if (p.placement.adapters == MT_ADAPTERS_AUTO)
        p.placement.adapters = MT_ADAPTERS_STREAMED;
    if (p.placement.update == MT_UPDATE_AUTO)
        p.placement.update = MT_UPDATE_FORWARD;
    if (p.placement.update == MT_UPDATE_BACKWARD && p.placement.update_pending == MT_AUTO)
        p.placement.update_pending = 1;
    uint64_t process = mt_plan_process_bytes(r, (times ? p.max_micro : read) * p.max_tokens);
    uint64_t host = r->placement.host_budget.bytes;
    p.host_bytes = host - MT_MIN(host, process);
    memcpy(p.more, r->more, sizeof(p.more));
    memcpy(p.drive_room, r->drive_room, sizeof(p.drive_room));
    choose_experts(&p, r);
    return p;
}

/* Takes what experts had chosen for them and could do without; false: nothing more. */
static bool spare(struct mt_engine_params *p, const struct mt_plan_request *r)
{
    struct mt_placement *to = &p->placement;
    if (!p->layout->cfg.moe.n_experts)
        return false;
    if (r->placement.expert_sums == MT_AUTO && to->expert_sums != MOST_SUMS)
        to->expert_sums = MOST_SUMS;
    else if (r->placement.expert_streams == MT_AUTO && to->expert_streams != 1)
        to->expert_streams = 1;
    else
        return false;
    return true;
}

struct mt_engine_params mt_plan_engine_params(const struct mt_plan_request *r, mt_device *dev)
{
    struct mt_engine_params p = params_of(r, dev), less = p;
    while (dev && spare(&less, r) && !mt_engine_fits(&p))
        p = less;
    return p;
}

int mt_plan_divide(struct mt_engine_plan *out, struct mt_engine_params *p, const struct mt_plan_request *r,
                   mt_device *dev, struct mt_err *err)
{
    struct mt_engine_params less = params_of(r, dev);
    bool more;
    int rc;
    do {
        *p = less;
        more = spare(&less, r);
        rc = mt_engine_divide(out, p, more ? NULL : err);
    } while (rc && more);
    return rc;
}

bool mt_plan_fits_device(const struct mt_plan_request *r)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    struct mt_engine_params p;
    return !mt_plan_meter(&dev, r, r->placement.device_budget.bytes, NULL) && !mt_plan_divide(&plan, &p, r, dev, NULL);
}

struct mt_plan_request mt_plan_request_as(const struct mt_plan_request *r, const struct mt_plan_choice *c)
{
    struct mt_plan_request t = *r;
    t.layout = c->layout;
    t.halves = NULL;
    t.numerics = c->numerics;
    t.placement = c->placement;
    return t;
}

/* --- host memory and disk ------------------------------------------------------------------------ */

static enum mt_unit_tier tier_of(mt_plane_bits on_disk)
{
    return on_disk & mt_loaded_planes(MT_BF16) ? MT_UNIT_ON_DISK : on_disk ? MT_UNIT_STATES_ON_DISK : MT_UNIT_ON_HOST;
}

/* Memory of the planes, by the functions that later allocate them. */
static int measure_planes(struct mt_plan_choice *c, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plane_set_params pp;
    const struct mt_numerics *n = &r->numerics;
    int rc = mt_layout_plane_params(&pp, r->layout, r->train ? n->optimizer : NULL, n->grad_dtype, err);
    if (rc)
        return rc;
    mt_engine_plan_trim(&c->engine, &pp);
    for (size_t u = 0; u < pp.n_units; u++)
        c->n_tier[tier_of(pp.on_disk[u])]++;
    for (enum mt_plane_kind k = 0; k < MT_N_PLANES; k++)
        c->plane[k] = (struct mt_plan_plane){pp.desc[k].use, mt_plane_set_plane_bytes(&pp, k),
                                             mt_plane_set_plane_disk_bytes(&pp, k)};
    pp.sums = r->placement.nvme_checksums;
    c->windows_bytes = mt_plane_set_window_bytes(&pp);
    c->sums_bytes = mt_plane_set_sum_bytes(&pp);
    c->guard_bytes = r->train && r->placement.verify == MT_VERIFY_ALL ? mt_guard_bytes(&pp, true) : 0;
    c->disk_bytes = mt_plane_set_disk_bytes(&pp) + c->engine.disk_spill_bytes;
    free(pp.elems);
    return 0;
}

static void add_pools(struct mt_memory_rows *rows, const struct mt_engine_plan *p, const char *tier, bool device)
{
    for (int i = 0; i < MT_N_POOLS; i++)
        if (mt_pools[i].device == device)
            mt_memory_add_row(rows, tier, mt_pools[i].name, p->pool_bytes[i]);
}

void mt_plan_add_rows(struct mt_memory_rows *rows, const struct mt_plan_choice *c)
{
    const struct mt_engine_plan *p = &c->engine;
    size_t lanes = (size_t)mt_program_own_lanes(&p->program);
    add_pools(rows, p, "device", true);
    mt_memory_add_row(rows, "device", "scratch", lanes * p->scratch);
    mt_memory_add_row(rows, "device", "logits", lanes * p->logits);
    mt_memory_add_row(rows, "device", "inputs", lanes * p->inputs);
    mt_memory_add_row(rows, "device", "rotary tables", lanes * p->tables);
    for (int k = 0; k < MT_N_PLANES; k++)
        mt_memory_add_row(rows, "host", c->plane[k].use, c->plane[k].host_bytes);
    mt_memory_add_row(rows, "host", "windows to drives and hosts", c->windows_bytes);
    mt_memory_add_row(rows, "host", "sums of the drives' planes", c->sums_bytes);
    mt_memory_add_row(rows, "host", "sums of host memory's planes", c->guard_bytes);
    add_pools(rows, p, "host", false);
    mt_memory_add_row(rows, "host", "boundaries and activations", p->spill_bytes);
    mt_memory_add_row(rows, "host", "staging", p->staging_bytes);
    mt_memory_add_row(rows, "host", "blocks read from files", p->file_bytes);
    mt_memory_add_row(rows, "host", "a teacher's tokens", p->top_bytes);
    mt_memory_add_row(rows, "host", "process", c->process_bytes);
    for (int k = 0; k < MT_N_PLANES; k++)
        mt_memory_add_row(rows, "nvme", c->plane[k].use, c->plane[k].disk_bytes);
    mt_memory_add_row(rows, "nvme", "boundaries and activations", p->disk_spill_bytes);
}

static int fail_host(const struct mt_plan_request *r, uint64_t budget, uint64_t need, struct mt_err *err)
{
    char a[32], b[32], c[32];
    uint64_t lacks = need - budget;
    int rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                     "the host budget of %s is short by %s: %s are needed%s",
                     mt_format_bytes(a, sizeof(a), budget),
                     mt_format_need(b, sizeof(b), lacks), mt_format_need(c, sizeof(c), need),
                     r->drives > 0 ? "" : ", and there is no drive for states");
    if (err)
        err->short_host = lacks;
    return rc;
}

static uint64_t disk_space(const struct mt_plan_request *r)
{
    double gib = r->machine->rate[MT_RATE_DISK_GIB].value * r->drives;
    uint64_t all = r->disk_budget ? r->disk_budget : (uint64_t)(gib * (double)(1 << 30));
    uint64_t own = r->drive_room[r->placement.host];
    return own && (!all || own < all) ? own : all;
}

static int check_memory(const struct mt_plan_choice *c, const struct mt_plan_request *r, struct mt_err *err)
{
    if (c->host_bytes > mt_plan_host_limit(r))
        return fail_host(r, mt_plan_host_limit(r), c->host_bytes, err);
    uint64_t space = disk_space(r);
    char a[32], b[32];
    return !space || c->disk_bytes <= space
               ? 0
               : mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "the drives' space of %s is short by %s",
                         mt_format_bytes(a, sizeof(a), space),
                         mt_format_bytes(b, sizeof(b), c->disk_bytes - space));
}

/* --- the whole ----------------------------------------------------------------------------------- */

static void take_settings(struct mt_plan_choice *c, const struct mt_plan_request *r, const struct mt_engine_params *p)
{
    c->layout = r->layout;
    c->numerics = p->numerics;
    c->placement = p->placement;
    size_t times = mt_engine_times(p);
    c->n_micro = times ? p->max_micro / times : count_micro(r, (size_t)p->numerics.micro_batch);
}

/* Weight slots with which the same program is planned again: those of the lane with fewest for its layers; a lane that
 * holds all its layers is short of none. */
static int slots_of(const struct mt_program_params *p)
{
    int fewest = INT_MAX, greatest = 2;
    for (int lane = 0; lane < mt_program_lanes(p); lane++) {
        size_t bytes[MT_N_POOLS];
        int least[MT_N_POOLS], most[MT_N_POOLS], n = p->n_buffers[lane][MT_POOL_WEIGHTS];
        mt_program_size_pools(p, lane, bytes, least, most);
        greatest = MT_MAX(greatest, n);
        if (n > 1 && n < most[MT_POOL_WEIGHTS]) /* one: its weights stay, as others do elsewhere */
            fewest = MT_MIN(fewest, n);
    }
    return fewest < INT_MAX ? fewest : greatest;
}

/* Takes over the engine's decisions and memory; device_in_host: the device's memory is host memory. */
static int take_plan(struct mt_plan_choice *c, const struct mt_plan_request *r, bool device_in_host, struct mt_err *err)
{
    c->placement.unit = r->layout->cut.n_units > 1 ? MT_CUT_HALVES : MT_CUT_LAYERS;
    if (r->layout->cut.expert_group)
        c->placement.expert_group = (int64_t)r->layout->cut.expert_group;
    c->placement.activations = c->engine.activations;
    if (c->engine.uses_files) {
        c->placement.base = MT_BASE_FILES;
        c->placement.base_blocks = c->engine.base_blocks;
    }
    c->placement.slots = slots_of(&c->engine.program);
    int rc = measure_planes(c, r, err);
    uint64_t tokens = (uint64_t)(c->numerics.micro_batch * c->numerics.seq_len) / mt_row_chunks(&c->numerics);
    c->process_bytes = mt_plan_process_bytes(r, c->n_micro * tokens) +
                       (c->engine.uses_disk || c->engine.uses_files ? mt_plan_drive_bytes(r->layout) : 0);
    c->host_bytes = c->windows_bytes + c->sums_bytes + c->guard_bytes + c->engine.spill_bytes +
                    c->engine.staging_bytes + c->engine.file_bytes + c->engine.top_bytes + c->process_bytes +
                    (device_in_host ? c->engine.device_bytes : 0);
    for (int k = 0; k < MT_N_PLANES; k++)
        c->host_bytes += c->plane[k].host_bytes;
    for (int i = 0; i < MT_N_POOLS; i++)
        c->host_bytes += mt_pools[i].device ? 0 : c->engine.pool_bytes[i];
    return rc;
}

/* Builds the step's program and computes all memory. */
static int place(struct mt_plan_choice *c, struct mt_program *prog, const struct mt_plan_request *r,
                 struct mt_err *err)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    int rc = mt_plan_meter(&dev, r, r->placement.device_budget.bytes, err);
    if (rc)
        return rc;
    struct mt_engine_params p;
    uint64_t host = 0, budget = r->placement.host_budget.bytes;
    rc = mt_plan_divide(&c->engine, &p, r, dev, err);
    take_settings(c, r, &p);
    rc = rc ?: mt_engine_plan_step(&c->engine, prog, &host, &p, err);
    if (rc && host > p.host_bytes)
        return fail_host(r, budget, host + budget - p.host_bytes, err);
    return rc ?: take_plan(c, r, r->machine->cpu, err)
              ?: check_memory(c, r, err);
}

int mt_plan_place(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev, struct mt_err *err)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_engine_params p = mt_plan_engine_params(r, dev);
    take_settings(&c, r, &p);
    int rc = mt_engine_plan(&c.engine, &p, err)
          ?: take_plan(&c, r, mt_device_limits(dev)->shares_host_memory, err);
    if (!rc)
        *out = MT_GIVE(c);
    return rc;
}

bool mt_plan_orders(const struct mt_plan_request *r)
{
    struct mt_engine_params p = {.train = r->train, .numerics = r->numerics, .learner = r->learner,
                                 .n_learners = r->n_learners};
    return r->placement.update == MT_UPDATE_AUTO && mt_engine_may_update_under_backward(&p);
}

static int fits_in_order(const struct mt_plan_request *r, struct mt_err *err)
{
    bool cut = r->halves && !mt_plan_fits_device(r);
    struct mt_plan_request t = cut ? mt_plan_request_in_halves(r) : *r;
    MT_CLOSED_BY(mt_program_finish) struct mt_program prog = {0};
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    return place(&c, &prog, &t, err);
}

int mt_plan_fits(const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_request t = *r;
    int rc = fits_in_order(r, err);
    if (rc != -ENOSPC || !mt_plan_orders(r))
        return rc;
    t.placement.update = MT_UPDATE_BACKWARD;
    return fits_in_order(&t, NULL) ? rc : 0;
}

static int simulate(struct mt_plan_choice *c, const struct mt_program *prog,
                    const struct mt_plan_request *r, mt_cost_table *costs, struct mt_sim_graph *graph,
                    struct mt_err *err)
{
    MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph g = {0};
    bool passes = r->cache.slots && !r->train; /* of one token of each text */
    if (c->engine.uses_files && !(r->machine->rate[MT_RATE_READ].value > 0))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "the model's files would be read in place, and the rate of their drive is not known: name it "
                       "(plan --nvme 7GB/s), or measure it (megatrain probe all --dir and their folder)");
    struct mt_sim_params sp = {.machine = r->machine, .numerics = &r->numerics,
                               .update_threads = (int)r->placement.threads, .drives = r->drives,
                               .link_gbps = r->link_gbps, .net = r->net, .cache = &r->cache,
                               .tokens = (double)(r->numerics.rows_per_step * (passes ? 1 : r->numerics.seq_len))};
    const struct mt_moe *moe = &c->layout->cfg.moe;
    if (passes && moe->n_experts) {
        sp.idle = pow(1 - (double)moe->top_k / (double)moe->n_experts, (double)r->cache.slots);
        sp.idle_groups = pow(sp.idle, (double)MT_MAX(c->layout->cut.expert_group, (size_t)1));
    }
    int rc = mt_sim_graph_build(&g, prog, costs, &sp, err)
          ?: mt_sim_run(&c->sim, &g, &sp, err);
    if (!rc && graph)
        *graph = MT_GIVE(g);
    return rc;
}

int mt_plan_with_costs(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_cost_table *costs,
                       struct mt_sim_graph *graph, struct mt_err *err)
{
    MT_CLOSED_BY(mt_program_finish) struct mt_program prog = {0};
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    int rc = place(&c, &prog, r, err)
          ?: mt_cost_table_as(&costs, costs, &c.placement, err)
          ?: simulate(&c, &prog, r, costs, graph, err);
    if (!rc)
        *out = MT_GIVE(c);
    return rc;
}

int mt_plan_costs(mt_cost_table **out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_engine_params p = mt_plan_engine_params(r, NULL);
    return mt_cost_table_create(out, &(struct mt_cost_params){.engine = &p, .machine = r->machine}, err);
}

int mt_plan_evaluate(struct mt_plan_choice *out, const struct mt_plan_request *r,
                     struct mt_sim_graph *graph, struct mt_err *err)
{
    MT_CLOSED_BY(mt_cost_table_destroy) mt_cost_table *costs = NULL;
    return mt_plan_costs(&costs, r, err) ?: mt_plan_with_costs(out, r, costs, graph, err);
}
