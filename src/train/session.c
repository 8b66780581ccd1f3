/* SPDX-License-Identifier: Apache-2.0 */
#include "train/session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "hw/hw.h"

enum { AUTO_MICRO_TOKENS = 8192 };

static int open_model(struct mt_session *s, struct mt_err *err)
{
    int rc = mt_hf_find_model(&s->model_dir, s->cfg->model.path, err);
    if (!rc)
        rc = mt_hf_config_read(&s->hf, s->model_dir, err);
    if (!rc)
        rc = mt_layout_create(&s->layout, &s->hf, &s->cfg->model.freeze,
                              s->cfg->optimizer.decay_embeddings, err);
    if (rc)
        return rc;
    s->dtype = s->cfg->model.dtype == MT_CFG_F32 ? MT_F32 : MT_BF16;
    s->grad_dtype = s->cfg->optimizer.grad_dtype == MT_CFG_DTYPE_AUTO  ? s->dtype
                    : s->cfg->optimizer.grad_dtype == MT_CFG_DTYPE_F32 ? MT_F32
                                                                       : MT_BF16;
    if (s->cfg->data.seq_len > s->hf.max_pos)
        mt_warn("data.seq_len = %lld is beyond the model's max_position_embeddings = %lld",
                (long long)s->cfg->data.seq_len, (long long)s->hf.max_pos);
    return 0;
}

static int cache_dir(const struct mt_config *cfg, char *buf, size_t len)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (strcmp(cfg->data.cache_dir, "auto"))
        return snprintf(buf, len, "%s", cfg->data.cache_dir);
    if (xdg && *xdg)
        return snprintf(buf, len, "%s/megatrain", xdg);
    return snprintf(buf, len, "%s/.cache/megatrain", home ? home : ".");
}

static int open_set(struct mt_session *s, mt_dataset **out, const struct mt_cfg_list *files,
                    struct mt_err *err)
{
    char cache[4096];
    int n = 1, *cpus = NULL, rc = mt_hw_cores(&cpus, &n, err);
    free(cpus);
    if (rc)
        return rc;
    if (s->cfg->device.cpu_threads != MT_CFG_AUTO)
        n = (int)s->cfg->device.cpu_threads;
    cache_dir(s->cfg, cache, sizeof(cache));
    return mt_dataset_open(out,
                           &(struct mt_dataset_params){
                               .files = files,
                               .format = s->cfg->data.format,
                               .tokenizer = s->cfg->data.tokenizer,
                               .overlong = s->cfg->data.overlong,
                               .seq_len = (size_t)s->cfg->data.seq_len,
                               .vocab = (size_t)s->hf.vocab,
                               .cache_dir = cache,
                               .model_dir = s->model_dir,
                               .template_ = s->cfg->data.template_,
                               .train_on = s->cfg->data.train_on,
                               .n_processes = n,
                           },
                           err);
}

static int open_data(struct mt_session *s, struct mt_err *err)
{
    const char *eval = s->cfg->data.eval;
    bool eval_file = eval[0] && mt_path_exists(eval);
    char *item = s->cfg->data.eval;
    struct mt_cfg_list list = {&item, 1};
    int rc = open_set(s, &s->data, &s->cfg->data.train, err);
    if (!rc && eval_file)
        rc = open_set(s, &s->eval_data, &list, err);
    if (!rc)
        rc = mt_dataset_split(s->data, eval_file ? "" : eval, &s->split, &s->held_out, err);
    return rc;
}

static void choose_batch(struct mt_session *s)
{
    struct mt_config *c = s->cfg;
    int64_t len = c->data.seq_len;
    s->rows_per_step = (size_t)(c->train.batch_size ? c->train.batch_size
                                                    : c->train.tokens_per_step / len);
    /* numerics: of the configuration alone; or the plan's, once, and kept on resume */
    int64_t micro = c->train.micro_batch != MT_CFG_AUTO ? c->train.micro_batch
                    : s->has_choice                     ? (int64_t)s->choice.micro_batch
                                                        : MT_MAX(AUTO_MICRO_TOKENS / len, (int64_t)1);
    s->micro_batch = MT_MIN((size_t)micro, s->rows_per_step);
    s->n_micro = mt_div_up(s->rows_per_step, s->micro_batch);
}

static struct mt_sampler_params sampler_params(const struct mt_session *s)
{
    return (struct mt_sampler_params){
        .data = s->data,
        .split = &s->split,
        .seq_len = (size_t)s->cfg->data.seq_len,
        .rows_per_step = s->rows_per_step,
        .micro_batch = s->micro_batch,
        .packing = s->cfg->data.packing,
        .shuffle = s->cfg->data.shuffle,
        .seed = (uint64_t)s->cfg->train.seed,
        .weighted = true,
    };
}

static int make_samplers(struct mt_session *s, struct mt_err *err)
{
    struct mt_sampler_params p = sampler_params(s);
    int rc = mt_sampler_create(&s->sampler, &p, err);
    uint64_t most = (uint64_t)s->cfg->eval.max_samples;
    p.shuffle = p.weighted = false;
    if (s->eval_data) {
        struct mt_split unused = {0};
        mt_split_finish(&s->held_out);
        p.data = s->eval_data;
        if (!rc)
            rc = mt_dataset_split(s->eval_data, "", &s->held_out, &unused, err);
        mt_split_finish(&unused);
    }
    s->held_out.n = MT_MIN(s->held_out.n, most);
    p.split = &s->held_out;
    if (!rc && s->held_out.n)
        rc = mt_sampler_create(&s->eval_sampler, &p, err);
    else if (!rc && s->cfg->data.eval[0])
        mt_warn("data.eval = %s holds out no sample: nothing is evaluated", s->cfg->data.eval);
    return rc;
}

static int count_steps(struct mt_session *s, struct mt_err *err)
{
    const struct mt_config *c = s->cfg;
    uint64_t per_epoch = mt_sampler_steps_per_epoch(s->sampler);
    if (c->train.steps)
        s->total_steps = (uint64_t)c->train.steps;
    else if (c->train.epochs > 0)
        s->total_steps = (uint64_t)llround(c->train.epochs * (double)per_epoch);
    else
        s->total_steps = mt_div_up((size_t)c->train.tokens,
                                   s->rows_per_step * (size_t)c->data.seq_len);
    if (!s->total_steps)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.epochs = %g is less than a step",
                       c->train.epochs);
    s->warmup_steps = c->train.warmup.is_ratio
                          ? (uint64_t)llround(c->train.warmup.ratio * (double)s->total_steps)
                          : (uint64_t)c->train.warmup.count;
    return 0;
}

static uint64_t host_budget(const struct mt_config *c, const struct mt_hw_memory *hw)
{
    uint64_t have = MT_MIN(MT_MIN(hw->available, hw->cgroup_free), hw->address_space);
    const struct mt_cfg_size *b = &c->memory.host_budget;
    if (b->is_auto)
        return (uint64_t)((double)have * 0.9);
    return b->is_ratio ? (uint64_t)((double)have * b->ratio) : b->bytes;
}

static uint64_t process_bytes(const struct mt_session *s)
{
    return mt_plan_process_bytes(s->n_threads, (uint64_t)s->micro_batch * (uint64_t)s->cfg->data.seq_len *
                                                   (uint64_t)s->n_micro);
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
    struct mt_device_info gpu = {0};
    if (c->device.kind != MT_DEVICE_CPU)
        mt_device_probe(&gpu, "cuda", (int)c->device.index);
    *memory = gpu.present ? gpu.free_bytes : host;
    return gpu.present || c->device.kind == MT_DEVICE_CUDA ? "cuda" : "cpu";
}

static int open_device(struct mt_session *s, struct mt_err *err)
{
    struct mt_hw_memory hw;
    const struct mt_config *c = s->cfg;
    const struct mt_cfg_size *b = &c->memory.device_budget;
    uint64_t memory = 0;
    int n = 0, rc = mt_hw_memory(&hw, "", err);
    if (!rc)
        rc = mt_hw_cores(&s->cpus, &n, err);
    if (rc)
        return rc;
    s->n_threads = c->device.cpu_threads == MT_CFG_AUTO ? n : (int)c->device.cpu_threads;
    if (s->n_threads > n) { /* more threads than cores are not bound */
        free(s->cpus);
        s->cpus = NULL;
    }
    const char *kind = choose_device(c, host_budget(c, &hw), &memory);
    uint64_t budget = b->is_auto    ? !strcmp(kind, "cuda") ? subtract(memory, GPU_RESERVE) : memory / 4
                      : b->is_ratio ? (uint64_t)((double)memory * b->ratio)
                                    : b->bytes;
    return mt_device_create(&s->dev,
                            &(struct mt_device_params){
                                .kind = kind,
                                .index = (int)c->device.index,
                                .budget_bytes = (size_t)budget,
                                .n_threads = s->n_threads,
                                .cpus = s->cpus,
                                .link_gbps = c->device.link_gbps,
                            },
                            err);
}

/* Where this machine has been measured, `auto` is what the search says; elsewhere the engine's rules. */
static int search_plan(struct mt_session *s, struct mt_err *err)
{
    const struct mt_device_limits *lim = mt_device_limits(s->dev);
    struct mt_hw_memory hw;
    struct mt_err why = {0};
    int rc = mt_machine_load_cached(&s->machine, lim->kind, lim->name, s->n_threads, &why);
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
    s->request.device_budget = lim->budget_bytes;
    s->request.host_budget = host_budget(s->cfg, &hw);
    s->request.docs_per_row = s->request.seq_len; /* at most: how many is not known yet */
    s->request.poison = getenv("MEGATRAIN_POISON") != NULL;
    rc = mt_plan_search(&s->choice, &s->request, &why);
    s->has_choice = !rc;
    return 0; /* what does not fit is told by the engine's plan */
}

int mt_session_predict(const struct mt_session *s, struct mt_sim_graph *graph, struct mt_err *err)
{
    struct mt_plan_choice c;
    struct mt_plan_request r = s->request;
    if (!s->has_choice)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "this machine has not been measured: megatrain probe all");
    r.micro_batch = s->micro_batch;
    r.logits_chunk = s->engine_params.logits_chunk;
    r.slots = s->engine_params.slots;
    r.activations = s->plan.activations;
    r.keep_layers = s->engine_params.keep_layers;
    int rc = mt_plan_evaluate(&c, &r, graph, err);
    if (!rc)
        mt_plan_choice_finish(&c);
    return rc;
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
    s->engine_params = (struct mt_engine_params){
        .dev = s->dev,
        .layout = s->layout,
        .dtype = s->dtype,
        .grad_dtype = s->grad_dtype,
        .max_tokens = s->micro_batch * (size_t)c->data.seq_len,
        .max_docs = s->micro_batch * docs,
        .max_len = (size_t)c->data.seq_len,
        .max_micro = s->n_micro,
        .logits_chunk = c->memory.logits_chunk != MT_CFG_AUTO ? (size_t)c->memory.logits_chunk
                        : s->has_choice                       ? s->choice.logits_chunk
                                                              : mt_model_auto_logits_chunk(s->layout),
        .train = s->train,
        .slots = c->memory.slots == MT_CFG_AUTO && s->has_choice ? s->choice.slots : (int)c->memory.slots,
        .activations = c->memory.activations == MT_ACT_AUTO && s->has_choice ? s->choice.activations
                                                                             : c->memory.activations,
        .keep_layers = c->memory.keep_layers != MT_CFG_AUTO ? (int)c->memory.keep_layers
                       : s->has_choice                      ? s->choice.keep_layers
                                                            : 0,
        .microbatch = c->memory.schedule == MT_SCHEDULE_MICROBATCH,
        .poison = getenv("MEGATRAIN_POISON") != NULL,
        .beta1 = c->optimizer.beta1,
        .beta2 = c->optimizer.beta2,
        .eps = c->optimizer.eps,
        .weight_decay = c->optimizer.weight_decay,
        .grad_clip = c->train.grad_clip,
        .adam_threads = s->n_threads,
        .adam_cpus = s->cpus,
        .states = c->memory.states,
        .may_use_disk = c->memory.nvme_paths.n > 0,
        .host_bytes = subtract(host_budget(c, &hw), process_bytes(s)),
    };
    /* small, so that tests have several pieces of small models */
    const char *piece = getenv("MEGATRAIN_DISK_PIECE");
    if (piece)
        s->engine_params.piece_elems = mt_align_up(strtoull(piece, NULL, 10), MT_PIECE_ALIGN);
    const char *isa = getenv("MEGATRAIN_ADAM_ISA");
    for (enum mt_adam_isa i = MT_ADAM_SCALAR; isa && i <= MT_ADAM_AVX512; i++)
        if (!strcmp(isa, mt_adam_isa_name(i)) && mt_adam_isa_available(i))
            s->engine_params.isa = i;
    return mt_engine_plan(&s->plan, &s->engine_params, err);
}

static const char *const act_names[] = {"auto", "keep", "offload", "disk", "recompute"};

/* What `auto` became and changes bits is written down, so that a resume elsewhere does the same. */
static int record_numerics(struct mt_session *s, struct mt_err *err)
{
    char v[32];
    snprintf(v, sizeof(v), "%zu", s->micro_batch);
    int rc = mt_config_override(s->cfg, "train.micro_batch", v, "chosen", err);
    snprintf(v, sizeof(v), "%zu", s->engine_params.logits_chunk);
    if (!rc)
        rc = mt_config_override(s->cfg, "memory.logits_chunk", v, "chosen", err);
    if (!rc)
        rc = mt_config_override(s->cfg, "optimizer.grad_dtype", mt_dtype_name(s->grad_dtype),
                                "chosen", err);
    snprintf(v, sizeof(v), "%d", s->engine_params.slots);
    if (!rc && s->has_choice && s->cfg->memory.slots == MT_CFG_AUTO)
        rc = mt_config_override(s->cfg, "memory.slots", v, "chosen", err);
    snprintf(v, sizeof(v), "%d", s->engine_params.keep_layers);
    if (!rc && s->has_choice && s->cfg->memory.keep_layers == MT_CFG_AUTO)
        rc = mt_config_override(s->cfg, "memory.keep_layers", v, "chosen", err);
    if (!rc && s->has_choice && s->cfg->memory.activations == MT_ACT_AUTO)
        rc = mt_config_override(s->cfg, "memory.activations", act_names[s->plan.activations], "chosen",
                                err);
    return rc;
}

static int open_inputs(struct mt_session *s, struct mt_config *cfg, struct mt_err *err)
{
    *s = (struct mt_session){.cfg = cfg};
    int rc = open_model(s, err);
    return rc ? rc : open_data(s, err);
}

static int lay_out_steps(struct mt_session *s, struct mt_err *err)
{
    choose_batch(s);
    int rc = make_samplers(s, err);
    return rc ? rc : count_steps(s, err);
}

int mt_session_prepare_data(struct mt_session *s, struct mt_config *cfg, struct mt_err *err)
{
    int rc = open_inputs(s, cfg, err);
    if (!rc)
        rc = lay_out_steps(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare(struct mt_session *s, struct mt_config *cfg, bool train, struct mt_err *err)
{
    int rc = open_inputs(s, cfg, err);
    s->train = train;
    if (!rc)
        rc = open_device(s, err);
    if (!rc && train)
        rc = search_plan(s, err);
    if (!rc)
        rc = lay_out_steps(s, err);
    if (!rc)
        rc = make_plan(s, err);
    if (!rc)
        rc = record_numerics(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

int mt_session_prepare_model(struct mt_session *s, struct mt_config *cfg, size_t max_len,
                             struct mt_err *err)
{
    *s = (struct mt_session){.cfg = cfg, .rows_per_step = 1, .micro_batch = 1, .n_micro = 1};
    cfg->data.seq_len = (int64_t)max_len;
    int rc = open_model(s, err);
    if (!rc)
        rc = open_device(s, err);
    if (!rc)
        rc = make_plan(s, err);
    if (rc)
        mt_session_finish(s);
    return rc;
}

/* The planes' parameters; n_elems and trainable are the caller's to free. */
static int plane_params(const struct mt_session *s, struct mt_plane_set_params *p, size_t **elems,
                        bool **trainable, struct mt_err *err)
{
    size_t n = s->layout->n_units;
    *elems = mt_calloc(n, sizeof(size_t));
    *trainable = mt_calloc(n, sizeof(bool));
    if (!*elems || !*trainable)
        return mt_fail_nomem(err, "the planes", n * sizeof(size_t));
    for (size_t u = 0; u < n; u++) {
        (*elems)[u] = s->layout->units[u].n_elems;
        (*trainable)[u] = s->train && s->layout->units[u].trainable;
    }
    *p = (struct mt_plane_set_params){.n_units = n, .n_elems = *elems, .trainable = *trainable,
                                      .state_dtype = MT_F32, .grad_dtype = s->grad_dtype,
                                      .on_disk = s->plan.on_disk, .disk = s->disk};
    return 0;
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
    struct mt_plane_set_params p;
    size_t *elems = NULL;
    bool *trainable = NULL;
    int rc = plane_params(s, &p, &elems, &trainable, err);
    if (!rc)
        rc = open_disk(s, &p, err);
    p.disk = s->disk;
    if (!rc)
        rc = mt_plane_set_create(&s->planes, &p, err);
    free(elems);
    free(trainable);
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
    free(s->cpus);
    free(s->model_dir);
    *s = (struct mt_session){0};
}

static void add_row(struct mt_memory *m, const char *tier, const char *tag, uint64_t bytes)
{
    if (bytes && m->n_rows < MT_MEMORY_MAX_ROWS)
        m->rows[m->n_rows++] = (struct mt_memory_row){tier, tag, bytes};
}

static void add_limit(struct mt_memory *m, const char *tier, const char *source, uint64_t wanted,
                      uint64_t available)
{
    if (available != UINT64_MAX && m->n_limits < MT_MEMORY_MAX_LIMITS)
        m->limits[m->n_limits++] = (struct mt_memory_limit){tier, source, wanted, available};
}

static void add_device_rows(const struct mt_session *s, struct mt_memory *m)
{
    const struct mt_engine_plan *p = &s->plan;
    for (int i = 0; i < MT_N_DEVICE_POOLS; i++)
        add_row(m, "device", mt_pool_id_name(i), p->pool_bytes[i]);
    add_row(m, "device", "scratch", p->scratch);
    add_row(m, "device", "logits", p->logits);
    add_row(m, "device", "inputs", p->inputs);
    add_row(m, "device", "rotary tables", p->tables);
    m->device_bytes = p->device_bytes;
}

static const char *const plane_tags[] = {"weights (hi)", "weights (lo)", "first moments",
                                         "second moments", "gradients"};

/* Scratch on the drives. Space for a striped file is looked at by the drives, when it is taken. */
static void add_scratch_rows(const struct mt_session *s, const struct mt_plane_set_params *pp,
                             struct mt_memory *m)
{
    uint64_t sum = s->plan.disk_spill_bytes, least = UINT64_MAX;
    for (int k = 0; k < MT_N_PLANES; k++) {
        add_row(m, "nvme", plane_tags[k], mt_plane_set_plane_disk_bytes(pp, (enum mt_plane_kind)k));
        sum += mt_plane_set_plane_disk_bytes(pp, (enum mt_plane_kind)k);
    }
    add_row(m, "nvme", "boundaries and activations", s->plan.disk_spill_bytes);
    m->disk_bytes += sum;
    for (int i = 0; i < s->cfg->memory.nvme_paths.n; i++) {
        uint64_t have;
        if (!mt_hw_disk_free(s->cfg->memory.nvme_paths.items[i], &have, NULL))
            least = MT_MIN(least, have);
    }
    if (s->cfg->memory.nvme_paths.n == 1)
        add_limit(m, "nvme", "memory.nvme_paths", sum, least);
}

int mt_session_memory(const struct mt_session *s, struct mt_memory *m, struct mt_err *err)
{
    struct mt_plane_set_params pp;
    struct mt_hw_memory hw;
    size_t *elems = NULL;
    bool *trainable = NULL;
    uint64_t disk = 0;
    *m = (struct mt_memory){0};
    int rc = plane_params(s, &pp, &elems, &trainable, err);
    if (!rc)
        rc = mt_hw_memory(&hw, "", err);
    if (!rc) {
        add_device_rows(s, m);
        for (int k = 0; k < MT_N_PLANES; k++)
            add_row(m, "host", plane_tags[k], mt_plane_set_plane_bytes(&pp, k));
        for (int i = MT_N_DEVICE_POOLS; i < MT_N_POOLS; i++)
            add_row(m, "host", mt_pool_id_name(i), s->plan.pool_bytes[i]);
        add_row(m, "host", "windows to the disk", mt_plane_set_window_bytes(&pp));
        add_row(m, "host", "boundaries and activations", s->plan.spill_bytes);
        add_row(m, "host", "staging", s->plan.staging_bytes);
        add_row(m, "host", "process", process_bytes(s));
        for (int i = 0; i < m->n_rows; i++)
            m->host_bytes += strcmp(m->rows[i].tier, "host") ? 0 : m->rows[i].bytes;
        bool cpu = !strcmp(mt_device_limits(s->dev)->kind, "cpu"); /* its arena is host memory too */
        uint64_t all = m->host_bytes + (cpu ? m->device_bytes : 0);
        add_limit(m, "host", "memory.host_budget", all, host_budget(s->cfg, &hw));
        add_limit(m, "host", "MemAvailable", all, hw.available);
        add_limit(m, "host", "cgroup memory limit", all, hw.cgroup_free);
        add_limit(m, "host", "RLIMIT_AS", all, hw.address_space);
    }
    if (!rc && s->plan.uses_disk)
        add_scratch_rows(s, &pp, m);
    if (!rc && s->train && !mt_hw_disk_free(s->cfg->checkpoint.dir, &disk, NULL)) {
        uint64_t checkpoint = mt_checkpoint_bytes(s->layout, s->cfg->checkpoint.save == MT_SAVE_FULL);
        m->disk_bytes += checkpoint;
        add_row(m, "disk", "a checkpoint", checkpoint);
        add_limit(m, "disk", "free space", checkpoint, disk);
    }
    free(elems);
    free(trainable);
    return rc;
}

int mt_memory_check(const struct mt_memory *m, struct mt_err *err)
{
    char want[32], have[32], gap[32];
    for (int i = 0; i < m->n_limits; i++) {
        const struct mt_memory_limit *l = &m->limits[i];
        if (l->wanted <= l->available)
            continue;
        bool nvme = !strcmp(l->tier, "nvme"), disk = nvme || !strcmp(l->tier, "disk");
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                       "it will not fit: %s of %s wanted, %s allows %s: %s short; %s",
                       mt_format_bytes(want, sizeof(want), l->wanted), disk ? "disk" : "host memory",
                       l->source, mt_format_bytes(have, sizeof(have), l->available),
                       mt_format_bytes(gap, sizeof(gap), l->wanted - l->available),
                       nvme   ? "make room there, name more folders, or raise memory.host_budget"
                       : disk ? "make room in checkpoint.dir or set checkpoint.save = weights"
                            : "lower memory.device_budget or train.tokens_per_step, set "
                                "memory.states = disk and memory.nvme_paths, use a smaller model, or "
                                "raise the limit");
    }
    return 0;
}
