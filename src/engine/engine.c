/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/state.h"

/* A save makes the pending update: it must not need memory at that time. */
static int prepare_update(mt_engine *e, struct mt_err *err)
{
    struct mt_runnable *r;
    return e->p.train ? mt_runnable_get(&r, e, MT_MODE_UPDATE, 1, err) : 0;
}

static int create_lanes(mt_engine *e, struct mt_err *err)
{
    int rc = mt_host_memory_alloc(e, err);
    for (size_t i = 0; i < e->n_lanes && !rc; i++)
        rc = mt_lane_init(&e->lane[i], &e->b, i ? e->p.other_dev[i - 1] : e->p.dev,
                          (int)(mt_engine_first_lane(&e->p) + i), &e->p, &e->plan, err);
    return rc ?: mt_host_memory_lock(e, err);
}

static int create_parts(mt_engine *e, struct mt_err *err)
{
    const struct mt_engine_params *p = &e->p;
    struct mt_pool_params update = {"update", p->train ? (int)p->placement.threads : 1, p->update_cpus, NULL};
    if (!mt_device_limits(p->dev)->shares_host_memory) /* the threads that submit need little time, but at once */
        update.thread_init = mt_thread_gives_way;
    int rc = create_lanes(e, err) ?: mt_pool_create(&e->update_pool, &update, err);
    if (!rc && e->p.planes)
        mt_numa_lanes(mt_plane_set_numa(e->p.planes), e->update_pool, p->update_cpus);
    return rc ?: mt_row_gradient_init(e, err) ?: prepare_update(e, err);
}

/* The lists that the number of devices and of results decides. */
static int create_lists(mt_engine *e, struct mt_err *err)
{
    const struct mt_engine_params *p = &e->p;
    e->n_learners = MT_MAX(p->n_learners, (size_t)1);
    e->lane = mt_arrays_add(&e->arrays, e->n_lanes, sizeof(*e->lane));
    e->learner = mt_arrays_add(&e->arrays, e->n_learners, sizeof(*e->learner));
    e->step_learner = mt_arrays_add(&e->arrays, e->n_learners, sizeof(*e->step_learner));
    e->micro = mt_arrays_add(&e->arrays, p->max_micro, sizeof(*e->micro));
    for (size_t i = 0; i < e->n_learners && !e->arrays.failed; i++) {
        struct mt_learner *l = &e->learner[i];
        l->numerics = p->n_learners ? p->learner[i] : p->numerics;
        if (l->numerics.optimizer)
            mt_optimizer_own_keys(l->numerics.optimizer, l->numerics.optimizer_keys, l->keys);
        l->clip = mt_arrays_add(&e->arrays, p->layout->n_units, sizeof(*l->clip));
    }
    return e->arrays.failed ? mt_fail_nomem(err, "the engine", p->max_micro * sizeof(*e->micro)) : 0;
}

/* Tensors before the first whose update follows under backward. */
static size_t count_late(const mt_engine *e)
{
    const struct mt_layout *l = e->p.layout;
    size_t u = 0;
    while (u < l->n_units && !e->plan.units[u].grad_in_ring)
        u++;
    return u < l->n_units ? l->units[u].first_tensor : l->n_tensors;
}

int mt_engine_create(mt_engine **out, const struct mt_engine_params *p, struct mt_err *err)
{
    mt_engine *e = mt_calloc(1, sizeof(*e));
    if (!e)
        return mt_fail_nomem(err, "the engine", sizeof(*e));
    e->p = *p;
    e->b = (struct mt_binding){
        .layout = p->layout,
        .planes = p->planes,
        .dtype = p->numerics.dtype,
        .grad_dtype = p->numerics.grad_dtype,
        .adapters_stay = p->placement.adapters == MT_ADAPTERS_RESIDENT,
        .disk_spill_at = p->disk_spill_at,
        .perturbing = &e->perturbing,
        .noisy_loads = p->numerics.mezo.on_load,
    };
    e->n_lanes = mt_engine_n_lanes(p);
    int rc = mt_exec_start(e, err);
    if (!rc && p->net)
        rc = mt_hosts_create(e, err);
    rc = rc ?: create_lists(e, err) ?: mt_engine_plan(&e->plan, p, err);
    e->b.piece_elems = e->plan.program.piece_elems;
    e->b.piece_align = e->plan.program.piece_align;
    e->b.n_late = rc ? 0 : count_late(e);
    rc = rc ?: create_parts(e, err);
    if (rc)
        mt_engine_destroy(&e);
    else
        *out = e;
    return rc;
}

void mt_engine_destroy(mt_engine **engine)
{
    mt_engine *e = *engine;
    if (!e)
        return;
    mt_exec_stop(&e->x);
    for (size_t i = 0; e->lane && i < e->n_lanes; i++)
        if (e->lane[i].b.dev)
            mt_device_sync(e->lane[i].b.dev, NULL);
    mt_runnable_destroy_all(e);
    mt_host_memory_unlock(e);
    for (size_t i = 0; e->lane && i < e->n_lanes; i++)
        mt_lane_finish(&e->lane[i]);
    mt_host_memory_free(e);
    free(e->hosts.buf);
    mt_pool_destroy(&e->update_pool);
    mt_arrays_finish(&e->arrays);
    mt_engine_plan_finish(&e->plan);
    free(e);
    *engine = NULL;
}

/* The model of the lane that computes losses of the micro-batch. */
static mt_model *head_of(const mt_engine *e, size_t mb)
{
    return mt_engine_model_for(e, e->b.layout->n_units - 1, mb);
}

static double seconds(int64_t from_ns, int64_t to_ns)
{
    return (double)(to_ns - from_ns) * 1e-9;
}

static void read_times(const mt_engine *e, struct mt_runnable *r, struct mt_step_result *res)
{
    int n_lanes = 0;
    int64_t t0 = INT64_MAX, end = 0, wait = 0;
    for (int lane = 0; lane < r->prog.n_lanes; lane++)
        if (r->start[lane]) {
            n_lanes++;
            t0 = MT_MIN(t0, mt_event_time_ns(r->start[lane]));
            end = MT_MAX(end, mt_event_time_ns(r->end[lane]));
        }
    for (size_t i = 0; i < r->prog.n_instrs; i++)
        if (r->before[i])
            wait += mt_event_time_ns(r->after[i]) - mt_event_time_ns(r->before[i]);
    t0 = n_lanes ? t0 : end; /* of a short step there may be nothing here */
    int64_t turn = r->turn ? mt_event_time_ns(r->turn) : t0;
    res->t_forward = seconds(t0, turn);
    res->t_backward = seconds(turn, end);
    res->t_step = seconds(t0, end);
    res->t_wait_h2d = seconds(0, wait) / MT_MAX(n_lanes, 1);
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

/* The pending updates have been made in every unit. */
static void retire_pending(mt_engine *e)
{
    for (struct mt_learner *l = e->learner; l < e->learner + e->n_learners; l++) {
        l->updates += l->pending.any;
        l->pending.any = false;
    }
}

static int run_program(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < e->n_lanes && !rc; i++)
        rc = mt_model_load_constants(e->lane[i].b.model, e->p.planes, err);
    if (rc)
        return rc;
    e->x.pending = mt_engine_is_pending(e);
    rc = mt_exec_run(&e->x, r, err);
    e->torn |= rc && (e->x.broken || e->x.committed);
    if (!rc && e->p.net && r->mode != MT_MODE_UPDATE)
        rc = mt_hosts_share_stats(e, r, err);
    e->torn |= rc && e->plan.program.owned; /* what other hosts own is lost with them */
    return rc;
}

/* Lists the micro-batches of all learners, of one after the other; *n: how many. */
static int list_micro(mt_engine *e, const struct mt_learner_step *of, struct mt_model_learner *what, size_t *n,
                      struct mt_err *err)
{
    size_t times = mt_engine_times(&e->p);
    *n = 0;
    for (size_t k = 0; k < e->n_learners; k++) {
        struct mt_learner *l = &e->learner[k];
        const struct mt_step_data *data = of[k].data;
        l->first_micro = *n;
        what[k] = mt_learner_of_model(l, data, of[k].reference);
        l->objective.logit_cap = e->b.layout->cfg.logit_cap;
        l->objective.vocab = (size_t)e->b.layout->cfg.vocab;
        l->micro = e->micro;
        if (data && !data->n_loss)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "no token of the step has a loss");
        size_t n_micro = data ? data->n * times : 0;
        if (n_micro > e->p.max_micro - *n)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "a step of more than the %zu micro-batches that were planned",
                           e->p.max_micro);
        for (size_t i = 0; i < n_micro; i++, ++*n) {
            e->micro[*n] = data->micro[i % data->n];
            e->micro[*n].learner = (int)k;
        }
    }
    return 0;
}

/* Sends the inputs of the listed micro-batches to all lanes. learner: NULL for an evaluation. */
static int upload(mt_engine *e, size_t n, const struct mt_model_learner *learner, const struct mt_draw *draw,
                  struct mt_err *err)
{
    const struct mt_model_step step = {.micro = e->micro, .n = n, .learner = learner, .draw = draw};
    int rc = mt_model_check_text(e->lane[0].b.model, e->micro, n, err);
    e->n_micro = n;
    for (size_t i = 0; i < e->n_lanes && !rc; i++)
        rc = mt_model_upload(e->lane[i].b.model, &step, err);
    return rc;
}

void mt_engine_perturb(mt_engine *e, uint64_t step, size_t variant)
{
    e->perturbing = (struct mt_perturbing){&e->learner[0].numerics, step, variant};
    for (size_t i = 0; i < e->n_lanes && e->b.noisy_loads; i++) /* what stays has the noise before */
        memset(e->lane[i].resident, 0, e->p.layout->n_units * sizeof(*e->lane[i].resident));
}

/* What was sampled has all that the step needs: only the update before is left to be made. */
static int step_by_rewards(mt_engine *e, const struct mt_learner_step *of, struct mt_step_result *res,
                           struct mt_err *err)
{
    struct mt_disk_stats drives = drive_stats(e);
    int64_t began = mt_now_ns();
    size_t n;
    int rc = list_micro(e, of, e->step_learner, &n, err) ?: mt_engine_flush(e, err);
    if (rc)
        return rc;
    e->n_micro = n;
    *res = (struct mt_step_result){.t_step = mt_seconds_since(began)};
    read_disk(e, &drives, res);
    mt_engine_decide_along(e, 0, of, res);
    return 0;
}

int mt_engine_step(mt_engine *e, const struct mt_learner_step *of, struct mt_step_result *res, struct mt_err *err)
{
    struct mt_runnable *r;
    struct mt_step_result out = {0};
    size_t n;
    bool zeroth = mt_engine_variants(&e->p) > 0;
    if (e->p.numerics.mezo.rewards)
        return step_by_rewards(e, of, res, err);
    int rc = mt_engine_find_limits(e, err)
          ?: list_micro(e, of, e->step_learner, &n, err)
          ?: mt_runnable_get(&r, e, mt_engine_mode(&e->p), n, err)
          ?: upload(e, n, zeroth ? NULL : e->step_learner, NULL, err);
    if (rc)
        return rc;
    for (size_t k = 0; k < e->n_learners; k++)
        e->learner[k].own =
            (struct mt_pending){.any = of[k].data, .lr = of[k].lr, .t = mt_engine_next_update(e, k) + 1};
    mt_engine_perturb(e, of[0].data ? of[0].data->step : 0, 0);
    struct mt_disk_stats drives = drive_stats(e);
    rc = run_program(e, r, err);
    if (e->x.updated) {
        retire_pending(e);
        mt_row_gradient_note(e);
    }
    if (rc)
        return rc;
    out.aux_loss = mt_engine_aux_loss(e);
    read_times(e, r, &out);
    read_disk(e, &drives, &out);
    for (size_t k = 0; k < e->n_learners; k++) {
        if (!of[k].data)
            continue;
        res[k] = out;
        if (zeroth) {
            mt_engine_decide_along(e, k, &of[k], &res[k]);
            continue;
        }
        mt_engine_measure(e, &e->learner[k], of[k].data, res[k].measures);
        res[k].loss = mt_measure_mean(&res[k].measures[0]);
        mt_engine_decide(e, k, of[k].lr, &res[k]);
    }
    return 0;
}

int mt_engine_step_again(mt_engine *e, const struct mt_learner_step *of, struct mt_step_result *res, struct mt_err *err)
{
    for (size_t k = 0; k < e->n_learners; k++)
        e->learner[k].pending.any = false;
    return mt_engine_step(e, of, res, err);
}

int mt_engine_flush(mt_engine *e, struct mt_err *err)
{
    struct mt_runnable *r;
    if (!mt_engine_is_pending(e))
        return 0;
    int rc = mt_runnable_get(&r, e, MT_MODE_UPDATE, 1, err) ?: run_program(e, r, err);
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
    size_t first = 0, n, chunks = mt_step_chunks(data);
    const struct mt_batch *whole = mt_step_whole(data, &n);
    for (size_t i = 0, mb = 0; i < n; i++, mb += chunks) {
        const struct mt_batch *b = &whole[i];
        const struct mt_micro_stats s = mt_model_micro_stats(head_of(e, mb), mb);
        for (int32_t d = 0, row = 0; d < (int32_t)b->n_docs; d++) {
            double sum = 0, answer = 0;
            for (; row < b->doc_rows[d + 1]; row++) {
                sum += (double)s.loss[row];
                answer += row < b->answer_rows[d] ? 0 : (double)s.loss[row];
                res->n_correct += (uint64_t)(s.correct[row] != 0);
            }
            res->loss_sum += sum;
            if (doc_loss)
                *doc_loss++ = answer;
        }
        if (res->row_loss) {
            memcpy(res->row_loss + first, s.loss, b->n_loss * sizeof(*s.loss));
            memcpy(res->row_correct + first, s.correct, b->n_loss * sizeof(*s.correct));
        }
        if (res->row_top) {
            memcpy(res->row_top + first * e->p.top, s.top, b->n_loss * e->p.top * sizeof(*s.top));
            memcpy(res->row_rest + first, s.rest, b->n_loss * sizeof(*s.rest));
        }
        first += b->n_loss;
        res->n_loss += b->n_loss;
    }
}

static int run_forward(mt_engine *e, enum mt_program_mode mode, int learner, const struct mt_batch *micro,
                       size_t n, const struct mt_draw *draw, struct mt_err *err)
{
    struct mt_runnable *r;
    if (mt_engine_is_pending(e))
        return mt_fail(err, MT_ERR_RUNTIME, -EBUSY, "an update is pending: flush the engine first");
    int rc = mt_runnable_get(&r, e, mode, n, err);
    for (size_t i = 0; i < n && i < e->p.max_micro; i++) {
        e->micro[i] = micro[i];
        e->micro[i].learner = learner;
    }
    rc = rc ?: upload(e, n, NULL, draw, err);
    for (size_t i = 0; i < e->n_lanes; i++)
        e->lane[i].b.batch = e->micro;
    return rc ?: run_program(e, r, err);
}

int mt_engine_eval(mt_engine *e, int learner, const struct mt_step_data *data, struct mt_eval_result *res,
                   struct mt_err *err)
{
    int rc = run_forward(e, MT_MODE_EVAL, learner, data->micro, data->n, NULL, err);
    if (!rc)
        add_eval(e, data, res);
    if (!rc)
        mt_engine_measure_eval(e, &e->learner[learner], data, res);
    return rc;
}

int mt_engine_draw(mt_engine *e, const struct mt_batch *micro, size_t n, const struct mt_draw *draw, int32_t *ids,
                   float *losses, struct mt_err *err)
{
    int rc = run_forward(e, MT_MODE_LOGITS, 0, micro, n, draw, err);
    for (size_t mb = 0, at = 0; mb < n && !rc; at += micro[mb++].n_loss) {
        const struct mt_micro_stats s = mt_model_micro_stats(head_of(e, mb), mb);
        memcpy(ids + at, s.drawn, micro[mb].n_loss * sizeof(*ids));
        memcpy(losses + at, s.loss, micro[mb].n_loss * sizeof(*losses));
    }
    return rc;
}

size_t mt_engine_max_micro(const mt_engine *e)
{
    return e->p.max_micro;
}

size_t mt_engine_loaded_bytes(const mt_engine *e)
{
    return e->x.loaded;
}

bool mt_engine_expert_rows(const mt_engine *e, int layer, int32_t *rows)
{
    const struct mt_layout *l = e->b.layout;
    const struct mt_groups groups = e->plan.program.groups;
    size_t u = 0;
    if (!mt_layer_of(&l->cfg, layer)->is_mixture)
        return false;
    while (l->units[u].layer != layer)
        u++;
    memset(rows, 0, (size_t)l->cfg.moe.n_experts * sizeof(*rows));
    for (size_t group = 0; group < mt_groups_in_use(groups, e->n_micro); group++)
        mt_model_add_expert_rows(mt_engine_model_for(e, u, mt_group_first(groups, group)), layer, group, rows);
    return true;
}

void mt_engine_interrupt(mt_engine *e)
{
    atomic_store(e->p.net ? &e->hosts.asked : &e->x.interrupted, true);
}

bool mt_engine_is_asked(const mt_engine *e)
{
    return e->hosts.stop;
}

void mt_engine_set_guard(mt_engine *e, mt_guard *guard)
{
    e->p.guard = guard;
}

bool mt_engine_clear_interrupt(mt_engine *e)
{
    return atomic_exchange(&e->x.interrupted, false);
}

uint64_t mt_engine_next_update(const mt_engine *e, size_t learner)
{
    return e->learner[learner].updates + e->learner[learner].pending.any;
}

uint64_t mt_engine_updates(const mt_engine *e, size_t learner)
{
    return e->learner[learner].updates;
}

void mt_engine_set_updates(mt_engine *e, size_t learner, uint64_t updates, uint64_t t0)
{
    e->learner[learner].updates = updates;
    e->learner[learner].t0 = t0;
}
