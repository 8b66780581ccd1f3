/* SPDX-License-Identifier: Apache-2.0 */
#include "train/session_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "model/ranges.h"

uint64_t mt_session_host_budget(const struct mt_config *c, const struct mt_hw_memory *hw)
{
    uint64_t have = MT_MIN(MT_MIN(hw->available, hw->cgroup_free), hw->address_space);
    const struct mt_size *b = &c->placement.host_budget;
    if (b->is_auto)
        return (uint64_t)((double)have * 0.9);
    return b->is_ratio ? (uint64_t)((double)have * b->ratio) : b->bytes;
}

uint64_t mt_session_process_bytes(const struct mt_session *s)
{
    return mt_plan_process_bytes(&(struct mt_plan_process){
        .resident = s->resident,
        .layout = s->layout,
        .threads = (int)s->placement.threads,
        .tokens_per_step = (uint64_t)(s->numerics.micro_batch * s->numerics.seq_len) * s->n_micro,
    });
}

static uint64_t subtract(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Of a GPU's free memory, for what CUDA itself takes later on. */
static const uint64_t GPU_RESERVE = (uint64_t)512 << 20;

/* The kind to open, and of what memory the budget is a share: the GPU's own, or the host's. */
static const char *choose_device(const struct mt_config *c, uint64_t host, uint64_t *memory)
{
    struct mt_device_info gpu;
    const char *kind = mt_plan_device_kind(c, &gpu);
    *memory = gpu.present ? gpu.free_bytes : host;
    return kind;
}

/* Products end the program where they are refused memory: none before it is known that there is enough. */
static const uint64_t WARM_NEEDS = (uint64_t)256 << 20;

static int open_device(struct mt_session *s, struct mt_err *err)
{
    struct mt_hw_memory hw;
    const struct mt_config *c = s->cfg;
    const struct mt_size *b = &c->placement.device_budget;
    uint64_t memory = 0;
    int n = 0, rc = mt_hw_memory(&hw, "", err);
    if (!rc)
        rc = mt_hw_cores(&s->cpus, &n, err);
    if (rc)
        return rc;
    if (s->placement.threads == MT_AUTO)
        s->placement.threads = n;
    if (s->placement.threads > n) { /* more threads than cores are not bound */
        free(s->cpus);
        s->cpus = NULL;
    }
    const char *kind = choose_device(c, mt_session_host_budget(c, &hw), &memory);
    uint64_t budget = b->is_auto    ? !strcmp(kind, "cuda") ? subtract(memory, GPU_RESERVE) : memory / 4
                      : b->is_ratio ? (uint64_t)((double)memory * b->ratio)
                                    : b->bytes;
    bool warm = subtract(MT_MIN(hw.address_space, hw.cgroup_free), budget) > WARM_NEEDS;
    rc = mt_device_create(&s->dev,
                          &(struct mt_device_params){
                              .kind = kind,
                              .index = (int)c->device.index,
                              .budget_bytes = (size_t)budget,
                              .n_threads = (int)s->placement.threads,
                              .cpus = s->cpus,
                              .link_gbps = c->device.link_gbps,
                              .warm = warm,
                          },
                          err);
    return rc || !warm ? rc : mt_hw_resident(&s->resident, err);
}

/* From here on the model is in halves of layers. */
static void cut_layers(struct mt_session *s)
{
    mt_layout_destroy(&s->layout);
    s->layout = s->halves;
    s->halves = NULL;
    s->request.layout = s->layout;
    s->request.halves = NULL;
}

/* It is decided. */
static void forget_halves(struct mt_session *s)
{
    mt_layout_destroy(&s->halves);
    s->request.halves = NULL;
}

/* Where this machine has been measured, `auto` is what the search says; elsewhere the engine's rules. */
static int search_plan(struct mt_session *s, struct mt_err *err)
{
    const struct mt_device_limits *lim = mt_device_limits(s->dev);
    struct mt_hw_memory hw;
    struct mt_err why = {0};
    int rc = mt_machine_load_cached(&s->machine, lim->kind, lim->name, (int)s->placement.threads, &why);
    if (rc) {
        if (rc != -ENOENT)
            mt_warn("no prediction: %s", why.msg);
        return 0;
    }
    s->has_machine = true;
    rc = mt_plan_request_make(&s->request, s->cfg, s->layout, &s->machine, true, &why);
    if (rc == -ENOENT) { /* its drives were not measured */
        mt_warn("no prediction: %s", why.msg);
        return 0;
    }
    if (!rc)
        rc = mt_hw_memory(&hw, "", &why);
    if (rc) {
        *err = why;
        return rc;
    }
    s->request.placement.device_budget.bytes = lim->budget_bytes;
    s->request.resident = s->resident;
    s->request.placement.host_budget.bytes = mt_session_host_budget(s->cfg, &hw);
    s->request.docs_per_row = (size_t)s->numerics.seq_len; /* at most: how many is not known yet */
    s->request.placement.poison = s->placement.poison;
    s->request.halves = s->halves;
    rc = mt_plan_search(&s->choice, &s->request, &why);
    s->has_choice = !rc;
    if (rc)
        return 0;
    if (s->choice.layout == s->halves)
        cut_layers(s);
    s->numerics = s->choice.numerics;
    s->placement = s->choice.placement;
    return 0; /* what does not fit is told by the engine's plan */
}

/* The placement as it is run, all of it fixed. */
static int request_as_run(const struct mt_session *s, struct mt_plan_request *r, struct mt_err *err)
{
    if (!s->has_choice)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       s->has_machine ? "the search found no placement"
                                      : "this machine has not been measured: megatrain probe all");
    *r = mt_plan_request_as(&s->request, &s->choice);
    return 0;
}

int mt_session_predict(const struct mt_session *s, struct mt_sim_graph *graph, struct mt_err *err)
{
    struct mt_plan_choice c;
    struct mt_plan_request r;
    int rc = request_as_run(s, &r, err);
    if (!rc)
        rc = mt_plan_evaluate(&c, &r, graph, err);
    if (!rc)
        mt_plan_choice_finish(&c);
    return rc;
}

int mt_session_operations(const struct mt_session *s, struct mt_metered **ops, size_t *n, struct mt_err *err)
{
    struct mt_plan_request r;
    int rc = request_as_run(s, &r, err);
    return rc ? rc : mt_plan_operations(ops, n, &r, err);
}

static int make_plan(struct mt_session *s, struct mt_err *err)
{
    const struct mt_config *c = s->cfg;
    struct mt_hw_memory hw;
    int rc = mt_hw_memory(&hw, "", err);
    if (rc)
        return rc;
    size_t docs = s->sampler ? mt_sampler_max_docs_per_row(s->sampler) : 1;
    if (s->eval_sampler)
        docs = MT_MAX(docs, mt_sampler_max_docs_per_row(s->eval_sampler));
    if (s->numerics.logits_chunk == MT_AUTO)
        s->numerics.logits_chunk = (int64_t)mt_model_auto_logits_chunk(s->layout);
    size_t micro = (size_t)s->numerics.micro_batch, len = (size_t)s->numerics.seq_len;
    s->engine_params = (struct mt_engine_params){
        .dev = s->dev,
        .layout = s->layout,
        .numerics = s->numerics,
        .placement = s->placement,
        .max_tokens = micro * len,
        .max_docs = micro * docs,
        .max_len = len,
        .max_micro = s->n_micro,
        .train = s->train,
        .adam_cpus = s->cpus,
        .may_use_disk = c->memory.nvme_paths.n > 0,
        .host_bytes = subtract(mt_session_host_budget(c, &hw), mt_session_process_bytes(s)),
        .drive_bytes = mt_plan_drive_bytes(s->layout),
    };
    const char *isa = getenv("MEGATRAIN_ADAM_ISA");
    for (enum mt_adam_isa i = MT_ADAM_SCALAR; isa && i <= MT_ADAM_AVX512; i++)
        if (!strcmp(isa, mt_adam_isa_name(i)) && mt_adam_isa_available(i))
            s->engine_params.isa = i;
    rc = mt_engine_plan(&s->plan, &s->engine_params, err);
    if (rc != -ENOSPC || !s->halves || s->has_choice || mt_engine_fits(&s->engine_params))
        return rc;
    cut_layers(s);
    s->engine_params.layout = s->layout;
    s->engine_params.drive_bytes = mt_plan_drive_bytes(s->layout);
    return mt_engine_plan(&s->plan, &s->engine_params, err);
}

static const char *const act_names[] = {"auto", "keep", "offload", "disk", "recompute"};

/* What `auto` became is written down: what changes bits, so that a resume elsewhere does the same; of placement,
 * what was searched for. */
static int record_choices(struct mt_session *s, struct mt_err *err)
{
    char v[32];
    snprintf(v, sizeof(v), "%lld", (long long)s->numerics.micro_batch);
    int rc = mt_config_override(s->cfg, "train.micro_batch", v, "chosen", err);
    snprintf(v, sizeof(v), "%lld", (long long)s->numerics.logits_chunk);
    if (!rc)
        rc = mt_config_override(s->cfg, "memory.logits_chunk", v, "chosen", err);
    if (!rc)
        rc = mt_config_override(s->cfg, "optimizer.grad_dtype", mt_dtype_name(s->numerics.grad_dtype),
                                "chosen", err);
    bool cut = s->layout->cut.n_units > 1;
    if (!rc && s->cfg->placement.unit == MT_CUT_AUTO && (s->has_choice || cut))
        rc = mt_config_override(s->cfg, "memory.unit", cut ? "half" : "layer", "chosen", err);
    snprintf(v, sizeof(v), "%lld", (long long)s->placement.slots);
    if (!rc && s->has_choice && s->cfg->placement.slots == MT_AUTO)
        rc = mt_config_override(s->cfg, "memory.slots", v, "chosen", err);
    snprintf(v, sizeof(v), "%lld", (long long)s->placement.keep_layers);
    if (!rc && s->has_choice && s->cfg->placement.keep_layers == MT_AUTO)
        rc = mt_config_override(s->cfg, "memory.keep_layers", v, "chosen", err);
    if (!rc && s->has_choice && s->cfg->placement.activations == MT_ACT_AUTO)
        rc = mt_config_override(s->cfg, "memory.activations", act_names[s->plan.activations], "chosen",
                                err);
    return rc;
}

int mt_session_prepare_data(struct mt_session *s, struct mt_config *cfg, struct mt_err *err)
{
    int rc = mt_session_open_inputs(s, cfg, err);
    if (!rc)
        rc = mt_session_lay_out_steps(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare(struct mt_session *s, struct mt_config *cfg, bool train, struct mt_err *err)
{
    int rc = mt_session_open_inputs(s, cfg, err);
    s->train = train;
    if (!rc)
        rc = open_device(s, err);
    if (!rc && train)
        rc = search_plan(s, err);
    if (!rc)
        rc = mt_session_lay_out_steps(s, err);
    if (!rc)
        rc = make_plan(s, err);
    forget_halves(s);
    if (!rc)
        rc = record_choices(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare_model(struct mt_session *s, struct mt_config *cfg, size_t max_len,
                             struct mt_err *err)
{
    *s = (struct mt_session){.cfg = cfg, .n_micro = 1};
    cfg->numerics.seq_len = (int64_t)max_len;
    int rc = mt_session_open_model(s, err);
    s->numerics.rows_per_step = s->numerics.micro_batch = 1;
    if (!rc)
        rc = open_device(s, err);
    if (!rc)
        rc = make_plan(s, err);
    forget_halves(s);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_plane_params(const struct mt_session *s, struct mt_plane_set_params *p, struct mt_err *err)
{
    int rc = mt_layout_plane_params(p, s->layout, s->train ? s->numerics.optimizer : NULL, s->numerics.grad_dtype, err);
    p->on_disk = s->plan.on_disk;
    p->disk = s->disk;
    return rc;
}

/* Scratch for planes and what is spilled, in that order. */
static int open_disk(struct mt_session *s, const struct mt_plane_set_params *p, struct mt_err *err)
{
    const struct mt_cfg_list *dirs = &s->cfg->memory.nvme_paths;
    const char *fault = getenv("MEGATRAIN_IO_FAULT"), *io = getenv("MEGATRAIN_IO");
    struct mt_io_fault f;
    uint64_t planes = mt_plane_set_disk_bytes(p);
    struct mt_disk_params d = {.dirs = (const char *const *)dirs->items, .n_dirs = (size_t)dirs->n,
                               .bytes = planes + s->plan.disk_spill_bytes};
    int rc = 0;
    if (!s->plan.uses_disk)
        return 0;
    if (io && !strcmp(io, "threads"))
        d.io = MT_IO_THREADS;
    if (fault) {
        rc = mt_io_fault_parse(&f, fault, err);
        d.fault = &f;
    }
    if (!rc)
        rc = mt_disk_open(&s->disk, &d, err);
    s->engine_params.disk = s->disk;
    s->engine_params.disk_spill_at = planes;
    return rc;
}

int mt_session_start(struct mt_session *s, struct mt_err *err)
{
    struct mt_plane_set_params p = {.elems = NULL};
    int rc = mt_session_plane_params(s, &p, err);
    if (!rc)
        rc = open_disk(s, &p, err);
    p.disk = s->disk;
    if (!rc)
        rc = mt_plane_set_create(&s->planes, &p, err);
    free(p.elems);
    s->engine_params.planes = s->planes;
    return rc ? rc : mt_engine_create(&s->engine, &s->engine_params, err);
}

void mt_session_finish(struct mt_session *s)
{
    mt_engine_destroy(&s->engine);
    mt_plane_set_destroy(&s->planes);
    mt_disk_close(&s->disk);
    mt_engine_plan_finish(&s->plan);
    mt_plan_choice_finish(&s->choice);
    mt_machine_finish(&s->machine);
    mt_device_destroy(&s->dev);
    mt_sampler_destroy(&s->sampler);
    mt_sampler_destroy(&s->eval_sampler);
    mt_split_finish(&s->split);
    mt_split_finish(&s->held_out);
    mt_dataset_destroy(&s->data);
    mt_dataset_destroy(&s->eval_data);
    mt_layout_destroy(&s->layout);
    mt_layout_destroy(&s->halves);
    free(s->cpus);
    free(s->model_dir);
    *s = (struct mt_session){0};
}
