/* SPDX-License-Identifier: Apache-2.0 */
#include "train/session_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "machine/stored.h"
#include "model/peft.h"
#include "model/ranges.h"
#include "model/weights.h"
#include "plan/evaluate.h"

/* Products end the program where they are refused memory: none before it is known that there is enough. */
static const uint64_t WARM_NEEDS = (uint64_t)256 << 20;

/* Before planes are taken, and threads started that take memory. */
static void spread_memory(const struct mt_session *s)
{
    int nodes = strcmp(s->cfg->device.numa, "auto") ? 0 : mt_hw_interleave(2);
    if (nodes)
        mt_info("host memory is spread over %d NUMA nodes (device.numa = auto)", nodes);
}

static int open_device(struct mt_session *s, const char *kind, struct mt_err *err)
{
    struct mt_hw_memory hw;
    const struct mt_config *c = s->cfg;
    uint64_t budget = s->placement.device_budget.bytes;
    int n = 0, rc = mt_hw_memory(&hw, "", err);
    if (!rc)
        rc = mt_hw_cores(&s->cpus, &n, err);
    if (rc)
        return rc;
    if (s->placement.threads > n) { /* more threads than cores are not bound */
        free(s->cpus);
        s->cpus = NULL;
    }
    uint64_t most = MT_MIN(hw.address_space, hw.cgroup_free);
    bool warm = most > budget && most - budget > WARM_NEEDS;
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
    return rc || !warm ? rc : mt_hw_resident(&s->request.resident, err);
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

/* Where something is known of this machine, `auto` is what the search says. *found: it said something. */
static int search(struct mt_session *s, bool *found, struct mt_err *err)
{
    const struct mt_device_limits *lim = mt_device_limits(s->dev);
    struct mt_err why = {0};
    *found = false;
    int rc = mt_machine_load(&s->machine, lim, (int)s->placement.threads, &why);
    if (!rc) {
        s->request.machine = &s->machine;
        rc = mt_resolve(&s->choice, &s->request, &why);
        *found = !rc;
        if (rc == -ENOSPC)
            return 0; /* what the rules would take says what is short */
        if (rc == -ENOENT)
            mt_warn("no prediction: %s", why.msg);
    } else if (rc != -ENOENT) {
        mt_warn("no prediction: %s", why.msg);
        rc = 0;
    }
    if (rc && rc != -ENOENT && err)
        *err = why;
    return rc == -ENOENT ? 0 : rc;
}

/* The settings, whole, and the layout that they are of. */
static void take_choice(struct mt_session *s)
{
    if (s->choice.layout == s->halves)
        cut_layers(s);
    mt_layout_destroy(&s->halves);
    s->request.halves = NULL;
    s->numerics = s->choice.numerics;
    s->placement = s->choice.placement;
}

/* The engine's parameters are those of the placement that was chosen, which is how it was planned. */
static void take_engine_params(struct mt_session *s)
{
    struct mt_plan_request r = mt_plan_request_as(&s->request, &s->choice);
    s->engine_params = mt_plan_engine_params(&r, s->dev);
    s->engine_params.adam_cpus = s->cpus;
    const char *isa = getenv("MEGATRAIN_ADAM_ISA");
    for (enum mt_adam_isa i = MT_ADAM_SCALAR; isa && i <= MT_ADAM_AVX512; i++)
        if (!strcmp(isa, mt_adam_isa_name(i)) && mt_adam_isa_available(i))
            s->engine_params.isa = i;
}

/* From the request to the choice. */
static int resolve(struct mt_session *s, const char *kind, struct mt_err *err)
{
    spread_memory(s);
    s->placement = s->request.placement;
    s->request.layout = s->layout;
    s->request.halves = s->halves;
    int rc = open_device(s, kind, err);
    if (!rc && s->request.train)
        rc = search(s, &s->predicted, err);
    if (!rc && !s->predicted)
        rc = mt_resolve_by_rules(&s->choice, &s->request, s->dev, err);
    if (rc)
        return rc;
    take_choice(s);
    take_engine_params(s);
    return 0;
}

/* The placement as it is run, all of it fixed. */
static int request_as_run(const struct mt_session *s, struct mt_plan_request *r, struct mt_err *err)
{
    if (!s->predicted)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       s->request.machine ? "the search found no placement"
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

int mt_session_prepare_data(struct mt_session *s, struct mt_config *cfg, struct mt_err *err)
{
    int rc = mt_session_open_inputs(s, cfg, NULL, err);
    if (!rc)
        rc = mt_session_lay_out_steps(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare(struct mt_session *s, struct mt_config *cfg, enum mt_session_use use, const cJSON *from_files,
                       struct mt_err *err)
{
    struct mt_plan_limits limits;
    bool train = use != MT_USE_EVAL;
    int rc = mt_session_open_inputs(s, cfg, from_files, err);
    if (!rc)
        rc = mt_plan_limits_here(&limits, cfg, err);
    if (!rc)
        rc = mt_resolve_request(&s->request, cfg, &limits, err);
    s->request.train = train;
    if (!rc)
        rc = resolve(s, limits.kind, err);
    if (!rc)
        rc = mt_session_lay_out_steps(s, err);
    bool full = cfg->checkpoint.save == MT_SAVE_FULL;
    if (!rc && train && s->choice.engine.in_files && full && !s->layout->n_adapters &&
        cfg->checkpoint.frozen == MT_FROZEN_COPY)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.base = files with checkpoint.frozen = copy: a run that goes on from "
                     "a copy cannot read it in place; set checkpoint.frozen = name, or memory.base = host");
    if (!rc)
        rc = mt_config_adopt(cfg, &s->numerics, &s->placement, "chosen", err);
    if (!rc && train && s->lr.warmup >= s->total_steps)
        mt_warn("train.warmup is %llu steps of a run of %llu: the learning rate never reaches its peak",
                (unsigned long long)s->lr.warmup, (unsigned long long)s->total_steps);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare_model(struct mt_session *s, struct mt_config *cfg, size_t max_len,
                             struct mt_err *err)
{
    struct mt_plan_limits limits;
    *s = (struct mt_session){.cfg = cfg};
    cfg->numerics.seq_len = (int64_t)max_len;
    cfg->numerics.micro_batch = cfg->train.batch_size = 1;
    int rc = mt_session_open_model(s, err);
    if (!rc)
        rc = mt_plan_limits_here(&limits, cfg, err);
    if (!rc)
        rc = mt_resolve_request(&s->request, cfg, &limits, err);
    s->request.train = false;
    if (!rc)
        rc = resolve(s, limits.kind, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_plane_params(const struct mt_session *s, struct mt_plane_set_params *p, struct mt_err *err)
{
    const struct mt_numerics *n = &s->numerics;
    int rc = mt_layout_plane_params(p, s->layout, s->request.train ? n->optimizer : NULL, n->grad_dtype, err);
    p->on_disk = s->choice.engine.on_disk;
    p->in_files = s->choice.engine.in_files;
    p->disk = s->disk;
    p->files = s->files;
    p->sums = s->placement.nvme_checksums;
    p->piece_elems = s->choice.engine.program.piece_elems;
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
                               .bytes = planes + s->choice.engine.disk_spill_bytes};
    int rc = 0;
    if (!s->choice.engine.uses_disk)
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
    if (!rc && p.in_files)
        rc = mt_weights_open_files(&s->files, s->layout, s->model_dir, err);
    p.files = s->engine_params.files = s->files;
    s->base_sum = mt_calloc(s->layout->n_tensors, sizeof(*s->base_sum));
    if (!rc && !s->base_sum)
        rc = mt_fail_nomem(err, "sums of the base", s->layout->n_tensors * sizeof(*s->base_sum));
    if (!rc)
        rc = mt_plane_set_create(&s->planes, &p, err);
    free(p.elems);
    s->engine_params.planes = s->planes;
    return rc ? rc : mt_engine_create(&s->engine, &s->engine_params, err);
}

int mt_session_sum_base(struct mt_session *s, struct mt_err *err)
{
    size_t n = s->files ? mt_file_weights_n_parts(s->files) : 0, t = 0;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        const char *name = mt_file_weights_part(s->files, i, NULL)->name;
        while (s->layout->tensors[t].name != name) /* parts are in the layout's order, under its names */
            t++;
        rc = mt_file_weights_sum(s->files, i, &s->base_sum[t], err);
    }
    return rc;
}

static int fill_model(struct mt_session *s, struct mt_err *err)
{
    if (s->request.train && s->cfg->model.init == MT_INIT_RANDOM)
        return mt_weights_init_random(s->layout, s->planes, (uint64_t)s->cfg->train.seed, (int)s->placement.threads,
                                      err);
    int rc = mt_checkpoint_verify_model(s->model_dir, false, false, err);
    return rc ? rc : mt_weights_load(s->layout, s->planes, s->model_dir, s->request.train ? s->base_sum : NULL, err);
}

static int fill_adapters(struct mt_session *s, struct mt_err *err)
{
    const char *path = s->cfg->adapter.path;
    if (!*path)
        return mt_adapter_init(s->layout, s->planes, (uint64_t)s->cfg->train.seed, err);
    int rc = mt_checkpoint_verify_model(path, false, false, err);
    return rc ? rc : mt_peft_load(s->layout, s->planes, path, err);
}

int mt_session_fill_weights(struct mt_session *s, const char *resume, struct mt_err *err)
{
    bool adapters = s->layout->n_adapters || s->cfg->adapter.kind != MT_ADAPTER_NONE;
    int rc = resume && !adapters ? 0 : fill_model(s, err);
    if (!rc && resume)
        rc = mt_checkpoint_load(resume, s->layout, s->planes, err);
    else if (!rc && adapters)
        rc = fill_adapters(s, err);
    if (!rc && resume && !adapters)
        rc = mt_weights_load_base(s->layout, s->planes, s->files, s->model_dir, s->from_files, s->base_sum, err);
    return rc;
}

void mt_session_finish(struct mt_session *s)
{
    mt_engine_destroy(&s->engine);
    mt_plane_set_destroy(&s->planes);
    mt_disk_close(&s->disk);
    mt_file_weights_close(&s->files);
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
    free(s->base_sum);
    *s = (struct mt_session){0};
}
