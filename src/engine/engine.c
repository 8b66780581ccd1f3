/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_priv.h"
#include "optim/lr.h"

static int alloc_pools(mt_engine *e, struct mt_err *err)
{
    int rc = 0;
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(&e->plan.program, bytes);
    for (int i = 0; i < MT_N_POOLS && !rc; i++) {
        int n = bytes[i] ? e->plan.program.n_buffers[i] : 0;
        e->b.buffers[i] = mt_calloc((size_t)n + 1, sizeof(void *)); /* NULL at the end */
        if (!e->b.buffers[i])
            return mt_fail_nomem(err, "device pools", (size_t)n * sizeof(void *));
        for (int k = 0; k < n && mt_pools[i].device && !rc; k++)
            rc = mt_device_alloc(e->b.dev, bytes[i], mt_pools[i].name, &e->b.buffers[i][k], err);
    }
    return rc;
}

/* Buffers of the host pools, in one mapping that is registered with the device and the kernel. */
static int alloc_staging(mt_engine *e, struct mt_err *err)
{
    size_t bytes[MT_N_POOLS], at = 0;
    void *base = NULL;
    mt_program_buffer_bytes(&e->plan.program, bytes);
    for (int i = 0; i < MT_N_POOLS; i++)
        e->staging_bytes += mt_pools[i].device ? 0 : e->plan.pool_bytes[i];
    if (!e->staging_bytes)
        return 0;
    int rc = mt_host_alloc(&base, e->staging_bytes, "staging between device and disk", err);
    if (rc)
        return rc;
    e->staging = base;
    for (int i = 0; i < MT_N_POOLS; i++) {
        if (mt_pools[i].device)
            continue;
        int n = bytes[i] ? e->plan.program.n_buffers[i] : 0;
        e->x.disk_ops[i] = mt_calloc((size_t)n, sizeof(struct mt_disk_op));
        if (!e->x.disk_ops[i])
            return mt_fail_nomem(err, "disk transfers", (size_t)n * sizeof(struct mt_disk_op));
        for (int k = 0; k < n; k++, at += bytes[i])
            e->b.buffers[i][k] = e->staging + at;
    }
    if (e->p.disk)
        mt_disk_set_buffers(e->p.disk, &(struct iovec){e->staging, e->staging_bytes}, 1);
    return mt_device_register_host(e->b.dev, e->staging, e->staging_bytes, err);
}

/* Whether planes and spill memory are page-locked; else they are copied through the device's staging ring. */
static bool locks_all(const mt_engine *e)
{
    return e->p.placement.pin != MT_PIN_STAGING;
}

/* Locks planes that are copied to or from the device: not states. */
static int lock_planes(mt_engine *e, struct mt_err *err)
{
    int rc = 0;
    mt_plane_bits loaded = mt_layout_loaded_planes(e->p.layout, e->p.numerics.dtype);
    for (int k = 0; k < MT_N_PLANES && !rc && locks_all(e); k++) {
        size_t bytes;
        void *p = mt_plane_set_range(e->p.planes, (enum mt_plane_kind)k, &bytes);
        bool gradient = mt_plane_desc_of(e->p.planes, (enum mt_plane_kind)k)->role == MT_ROLE_GRADIENT;
        if (!p || !(gradient || loaded >> k & 1))
            continue;
        rc = mt_device_register_host(e->b.dev, p, bytes, err);
        if (!rc)
            e->locked_planes[k] = p;
    }
    return rc;
}

static int alloc_host(mt_engine *e, struct mt_err *err)
{
    void *spill = NULL;
    int rc = 0;
    if (e->plan.uses_disk && !e->p.disk)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "the plan uses a disk, but none is open");
    if (e->plan.uses_files && !e->p.files)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "the plan reads the model's files, but none are open");
    if (e->plan.spill_bytes) {
        rc = mt_host_alloc(&spill, e->plan.spill_bytes, "boundaries and activations", err);
        e->b.spill = spill;
        if (!rc && locks_all(e))
            rc = mt_device_register_host(e->b.dev, spill, e->plan.spill_bytes, err);
    }
    if (!rc)
        rc = alloc_staging(e, err);
    return rc ? rc : lock_planes(e, err);
}

/* A save makes the pending update: it must not need memory at that time. */
static int prepare_update(mt_engine *e, struct mt_err *err)
{
    struct mt_runnable *r;
    return e->p.train ? mt_runnable_get(&r, e, MT_MODE_UPDATE, 1, err) : 0;
}

static int create_parts(mt_engine *e, struct mt_err *err)
{
    const struct mt_engine_params *p = &e->p;
    struct mt_model_params mp = mt_engine_model_params(p);
    struct mt_pool_params update = {"update", p->train ? (int)p->placement.threads : 1, p->update_cpus, NULL};
    if (!mt_device_limits(e->b.dev)->shares_host_memory) /* the threads that submit need little time, but at once */
        update.thread_init = mt_thread_gives_way;
    int rc = mt_model_create(&e->b.model, e->b.dev, &mp, err);
    if (!rc)
        rc = alloc_pools(e, err);
    if (!rc)
        rc = alloc_host(e, err);
    if (!rc)
        rc = mt_pool_create(&e->update_pool, &update, err);
    if (!rc && e->p.planes)
        mt_numa_lanes(mt_plane_set_numa(e->p.planes), e->update_pool, p->update_cpus);
    if (!rc)
        rc = mt_row_gradient_init(e, err);
    return rc ? rc : prepare_update(e, err);
}

int mt_engine_create(mt_engine **out, const struct mt_engine_params *p, struct mt_err *err)
{
    mt_engine *e = mt_calloc(1, sizeof(*e));
    if (!e)
        return mt_fail_nomem(err, "the engine", sizeof(*e));
    e->p = *p;
    e->b = (struct mt_binding){
        .dev = p->dev,
        .layout = p->layout,
        .planes = p->planes,
        .dtype = p->numerics.dtype,
        .grad_dtype = p->numerics.grad_dtype,
        .adapters_stay = p->placement.adapters == MT_ADAPTERS_RESIDENT,
        .disk_spill_at = p->disk_spill_at,
    };
    e->x.b = &e->b;
    e->x.disk = p->disk;
    e->x.files = p->files;
    e->x.update = mt_optimizer_update;
    e->x.ctx = e;
    int rc = mt_exec_start(&e->x, err);
    e->x.resident = mt_calloc(e->b.layout->n_units, sizeof(*e->x.resident));
    if (!rc && !e->x.resident)
        rc = mt_fail_nomem(err, "the engine", e->b.layout->n_units);
    if (!rc)
        rc = mt_engine_plan(&e->plan, p, err);
    if (!rc)
        e->b.piece_elems = e->plan.program.piece_elems;
    if (!rc)
        rc = create_parts(e, err);
    if (rc) {
        mt_engine_destroy(&e);
        return rc;
    }
    *out = e;
    return 0;
}

void mt_engine_destroy(mt_engine **engine)
{
    mt_engine *e = *engine;
    if (!e)
        return;
    mt_exec_stop(&e->x);
    mt_device_sync(e->b.dev, NULL);
    mt_runnable_destroy_all(e);
    mt_model_destroy(&e->b.model);
    for (int i = 0; i < MT_N_POOLS; i++) {
        for (void **b = e->b.buffers[i]; b && *b && mt_pools[i].device; b++)
            mt_device_free(e->b.dev, *b);
        free(e->b.buffers[i]);
    }
    for (int k = 0; k < MT_N_PLANES; k++)
        if (e->locked_planes[k])
            mt_device_unregister_host(e->b.dev, e->locked_planes[k]);
    if (e->b.spill) {
        mt_device_unregister_host(e->b.dev, e->b.spill);
        mt_host_free(e->b.spill, e->plan.spill_bytes);
    }
    if (e->staging) {
        if (e->p.disk)
            mt_disk_set_buffers(e->p.disk, NULL, 0);
        mt_device_unregister_host(e->b.dev, e->staging);
        mt_host_free(e->staging, e->staging_bytes);
    }
    for (int i = 0; i < MT_N_POOLS; i++)
        free(e->x.disk_ops[i]);
    free(e->x.resident);
    free(e->rows.ids);
    mt_pool_destroy(&e->update_pool);
    mt_engine_plan_finish(&e->plan);
    free(e);
    *engine = NULL;
}

const struct mt_engine_plan *mt_engine_plan_of(const mt_engine *e)
{
    return &e->plan;
}

/* FP32 token losses, summed in double in their order. */
static double sum_losses(const mt_engine *e, const struct mt_step_data *data)
{
    double sum = 0;
    for (size_t mb = 0; mb < data->n; mb++) {
        const float *loss = mt_model_losses(e->b.model, mb);
        for (size_t i = 0; i < data->micro[mb].n_loss; i++)
            sum += (double)loss[i];
    }
    return sum;
}

static double seconds(int64_t from_ns, int64_t to_ns)
{
    return (double)(to_ns - from_ns) * 1e-9;
}

static void read_times(const mt_engine *e, struct mt_runnable *r, struct mt_step_result *res)
{
    int64_t t0 = mt_event_time_ns(r->start), turn = mt_event_time_ns(r->turn);
    int64_t end = mt_event_time_ns(r->end), wait = 0;
    for (size_t i = 0; i < r->prog.n_instrs; i++)
        if (r->before[i])
            wait += mt_event_time_ns(r->after[i]) - mt_event_time_ns(r->before[i]);
    res->t_forward = seconds(t0, turn);
    res->t_backward = seconds(turn, end);
    res->t_step = seconds(t0, end);
    res->t_wait_h2d = seconds(0, wait);
    res->t_update = seconds(0, e->x.update_ns);
}

/* Statistics of the drives. Reads of files in place mostly overlap with the disk's, so the longer busy time counts. */
static struct mt_disk_stats drive_stats(const mt_engine *e)
{
    struct mt_disk_stats s = {{0}};
    struct mt_file_weights_stats files = {0};
    if (e->p.disk)
        mt_disk_stats(e->p.disk, &s);
    if (e->p.files)
        mt_file_weights_stats(e->p.files, &files);
    s.busy_ns[0] = MT_MAX(s.busy_ns[0], files.busy_ns);
    return s;
}

/* Disk time and traffic since `before`. */
static void read_disk(const mt_engine *e, const struct mt_disk_stats *before, struct mt_step_result *res)
{
    struct mt_disk_stats now = drive_stats(e);
    res->traffic = e->x.traffic;
    res->t_disk_read = seconds(before->busy_ns[0], now.busy_ns[0]);
    res->t_disk_write = seconds(before->busy_ns[1], now.busy_ns[1]);
    res->t_disk_sums = seconds(before->sum_ns, now.sum_ns);
}

static void decide_update(mt_engine *e, double lr, struct mt_step_result *res)
{
    const struct mt_tensor *bad;
    const char *router = mt_model_bad_router(e->b.model);
    res->grad_norm = mt_optimizer_grad_norm(e, &bad);
    res->skipped = !isfinite(res->grad_norm) || router;
    res->bad_router = router;
    res->clip = 1;
    if (res->skipped) {
        if (router || bad)
            snprintf(res->bad_tensor, sizeof(res->bad_tensor), "%s", router ? router : bad->name);
        return;
    }
    res->clip = mt_clip_factor(res->grad_norm, e->p.numerics.grad_clip);
    e->pending = (struct mt_pending){true, lr, res->clip, e->updates + 1};
}

/* The pending update has been applied to every unit. */
static void retire_pending(mt_engine *e)
{
    e->updates += e->pending.any;
    e->pending.any = false;
}

static int run_program(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    int rc = mt_model_load_constants(e->b.model, e->p.planes, err);
    if (rc)
        return rc;
    e->x.pending = e->pending.any;
    rc = mt_exec_run(&e->x, r, err);
    e->torn |= rc && e->x.broken;
    return rc;
}

int mt_engine_step(mt_engine *e, const struct mt_step_data *data, double lr,
                   struct mt_step_result *res, struct mt_err *err)
{
    struct mt_runnable *r;
    struct mt_step_result out = {0};
    if (!data->n_loss)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "no token of the step has a loss");
    int rc = mt_runnable_get(&r, e, MT_MODE_TRAIN, data->n, err);
    if (!rc)
        rc = mt_model_upload(e->b.model,
                             &(struct mt_model_step){.micro = data->micro, .n = data->n, .step = data->step,
                                                     .loss_scale = (float)(1.0 / (double)data->n_loss)},
                             err);
    if (rc)
        return rc;
    struct mt_disk_stats drives = drive_stats(e);
    rc = run_program(e, r, err);
    if (e->x.updated) {
        retire_pending(e);
        mt_row_gradient_note(e);
    }
    if (rc)
        return rc;
    out.loss = sum_losses(e, data) / (double)data->n_loss;
    out.aux_loss = mt_model_aux_loss(e->b.model);
    read_times(e, r, &out);
    read_disk(e, &drives, &out);
    decide_update(e, lr, &out);
    *res = out;
    return 0;
}

int mt_engine_flush(mt_engine *e, struct mt_err *err)
{
    struct mt_runnable *r;
    if (!e->pending.any)
        return 0;
    int rc = mt_runnable_get(&r, e, MT_MODE_UPDATE, 1, err);
    if (!rc)
        rc = run_program(e, r, err);
    if (!rc)
        retire_pending(e);
    return rc;
}

bool mt_engine_whole(const mt_engine *e)
{
    return !e->torn;
}

static void add_eval(const mt_engine *e, const struct mt_step_data *data, struct mt_eval_result *res)
{
    double *doc_loss = res->doc_loss;
    for (size_t mb = 0; mb < data->n; mb++) {
        const struct mt_batch *b = &data->micro[mb];
        const float *loss = mt_model_losses(e->b.model, mb);
        const int32_t *correct = mt_model_correct(e->b.model, mb);
        size_t row = 0;
        for (size_t d = 0; d < b->n_docs; d++) {
            double sum = 0;
            for (; row < b->n_loss && b->loss_rows[row] < b->cu_seqlens[d + 1]; row++) {
                sum += (double)loss[row];
                res->n_correct += (uint64_t)(correct[row] != 0);
            }
            res->loss_sum += sum;
            if (doc_loss)
                *doc_loss++ = sum;
        }
        res->n_loss += b->n_loss;
    }
}

static int run_forward(mt_engine *e, enum mt_program_mode mode, const struct mt_batch *micro,
                       size_t n, struct mt_err *err)
{
    struct mt_runnable *r;
    if (e->pending.any)
        return mt_fail(err, MT_ERR_RUNTIME, -EBUSY, "an update is pending: flush the engine first");
    int rc = mt_runnable_get(&r, e, mode, n, err);
    if (!rc)
        rc = mt_model_upload(e->b.model, &(struct mt_model_step){.micro = micro, .n = n}, err);
    return rc ? rc : run_program(e, r, err);
}

int mt_engine_eval(mt_engine *e, const struct mt_step_data *data, struct mt_eval_result *res,
                   struct mt_err *err)
{
    int rc = run_forward(e, MT_MODE_EVAL, data->micro, data->n, err);
    if (!rc)
        add_eval(e, data, res);
    return rc;
}

int mt_engine_logits(mt_engine *e, const struct mt_batch *batch, float *logits, struct mt_err *err)
{
    e->b.host_logits = logits;
    return run_forward(e, MT_MODE_LOGITS, batch, 1, err);
}

size_t mt_engine_loaded_bytes(const mt_engine *e)
{
    return e->x.loaded;
}

const int32_t *mt_engine_expert_rows(const mt_engine *e, int layer)
{
    return mt_model_expert_rows(e->b.model, layer);
}

void mt_engine_interrupt(mt_engine *e)
{
    atomic_store(&e->x.interrupted, true);
}

void mt_engine_clear_interrupt(mt_engine *e)
{
    atomic_store(&e->x.interrupted, false);
}

uint64_t mt_engine_next_update(const mt_engine *e)
{
    return e->updates + e->pending.any;
}

uint64_t mt_engine_updates(const mt_engine *e)
{
    return e->updates;
}

void mt_engine_set_updates(mt_engine *e, uint64_t updates)
{
    e->updates = updates;
}
