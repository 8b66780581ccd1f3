/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "train/best.h"
#include "train/blocks.h"
#include "train/cluster.h"
#include "train/loop.h"
#include "train/reference.h"
#include "train/watch.h"

/* The learners of a run, which take their steps together. */
struct run {
    struct mt_loop *loop;
    size_t n;
    struct mt_learner_step *of;
    struct mt_step_result *result;
    bool again; /* the step was computed in another way */
};

static double time_left(const struct mt_loop *l)
{
    return l->in->cfg->checkpoint.time_limit - (double)(mt_boot_ns() - l->p->start_ns) * 1e-9;
}

/* Time of the limit to reserve for the last save: twice what it is likely to take, so that it can be tried again; at
 * most a quarter. */
static double time_for_save(const struct mt_loop *l)
{
    return l->p->no_save ? 0 : MT_MIN(2 * mt_saves_expect(&l->saves), 0.25 * l->in->cfg->checkpoint.time_limit);
}

static bool stops_early(const struct mt_loop *l)
{
    uint64_t patience = (uint64_t)l->in->cfg->eval.early_stop_patience;
    return patience && l->st->bad_evals >= patience;
}

/* What somebody has asked for. */
static int save_asked(struct mt_loop *l, struct mt_err *err)
{
    return atomic_exchange(&mt_loop_asked(l)->save, false) ? mt_saves_periodic(&l->saves, true, err) : 0;
}

/* What is due between two steps. *over: the run is to end, for the reason *end. */
static int between_steps(struct mt_loop *l, enum mt_train_end *end, bool *over, struct mt_err *err)
{
    const struct mt_config *c = l->in->cfg;
    int rc = save_asked(l, err);
    if (!rc && c->eval.every && l->st->step % (uint64_t)c->eval.every == 0)
        rc = mt_loop_evaluate(l, err);
    if (!rc && mt_saves_due(&l->saves))
        rc = mt_saves_periodic(&l->saves, false, err);
    if (rc)
        return rc;
    double reserve = time_for_save(l);
    atomic_store(&mt_loop_asked(l)->reserve_ns, (int64_t)(reserve * 1e9));
    if (stops_early(l)) {
        *end = MT_END_EARLY;
        *over = true;
    } else if (c->checkpoint.time_limit > 0 && time_left(l) <= l->step_seconds + reserve) {
        *end = MT_END_TIME;
        *over = true;
    }
    return 0;
}

static bool more_steps(const struct mt_loop *l)
{
    uint64_t done = l->st->step - l->first_step;
    return l->st->step < l->in->total_steps && (!l->p->max_steps || done < l->p->max_steps);
}

static bool ends_block(const struct mt_loop *l)
{
    return l->p->block_end && l->st->step >= l->p->block_end;
}

/* Whether the learner is asked to end, and why; the engine is then made usable again. */
static bool is_stopped(const struct mt_loop *l, enum mt_train_end *why)
{
    int stop = mt_train_is_stopped(l->p->control, l->p->learner);
    if (!stop)
        return false;
    *why = stop == MT_STOP_TIME ? MT_END_TIME : MT_END_SIGNAL;
    mt_engine_clear_interrupt(l->s->engine);
    return true;
}

/* Layers that have shared their weights go on from a checkpoint, each with its own. */
static int finish_block(struct mt_loop *l, struct mt_err *err)
{
    bool shared = l->setup->choice.layout->share > 1;
    if (shared && mt_train_is_stopped(l->p->control, l->p->learner))
        return -ECANCELED;
    int rc = shared ? mt_saves_final(&l->saves, true, l->in->cfg->checkpoint.save_deadline, err) : 0;
    rc = rc ?: mt_saves_end_block(&l->saves, err);
    l->sound = !rc;
    return rc || shared ? rc : mt_blocks_finish(l->p, err);
}

/* After the last save. What it finds is added to that; cut short, it leaves it to a run that resumes there. */
static int evaluate_last(struct mt_loop *l, bool full, double seconds, enum mt_train_end *why, struct mt_err *err)
{
    int rc = mt_loop_evaluate(l, err);
    if (rc == -ECANCELED && is_stopped(l, why))
        return 0;
    return rc ?: mt_saves_last_evaluation(&l->saves, full, seconds, err);
}

/* Rounding may swallow all that was learned. */
static int tell_merged(const struct mt_loop *l, struct mt_err *err)
{
    double share;
    int rc = mt_loop_merged_share(l, &share, err);
    if (!rc && share == 0)
        mt_warn("nothing was learned: each weight with an adapter is what it was after it was merged, since no change reaches the next "
                "value of its format; raise train.learning_rate or train longer, or set adapter.merge_scale = recomputed");
    else if (!rc && !isnan(share))
        mt_info("%.2f%% of the weights with adapters differ from the base", 100 * share);
    return rc;
}

/* The next block, or the last save and the last evaluation. A request to stop during either changes *why. */
static int finish_run(struct mt_loop *l, enum mt_train_end *why, struct mt_err *err)
{
    if (*why == MT_END_BLOCK) {
        int rc = finish_block(l, err);
        if (rc != -ECANCELED || !is_stopped(l, why))
            return rc;
    }
    enum mt_train_end end = *why;
    const struct mt_config *c = l->in->cfg;
    bool full = c->checkpoint.save == MT_SAVE_FULL;
    bool trained = l->st->step != l->first_step;
    bool stopped = end == MT_END_SIGNAL || end == MT_END_TIME || (end == MT_END_EARLY && !trained);
    double seconds = c->checkpoint.save_deadline;
    if (l->p->no_save || (stopped && !trained) ||
        (end == MT_END_SIGNAL && c->checkpoint.on_signal == MT_ON_SIGNAL_NONE))
        return mt_train_flush(l->p, err);
    if (c->checkpoint.time_limit > 0)
        seconds = MT_MAX(0.0, MT_MIN(seconds, time_left(l)));
    if (end == MT_END_SIGNAL)
        full = full && c->checkpoint.on_signal == MT_ON_SIGNAL_FULL;
    int rc = mt_saves_final(&l->saves, full, seconds, err);
    if (!rc && trained)
        rc = tell_merged(l, err);
    return rc || stopped ? rc : evaluate_last(l, full, seconds, why, err);
}

/* Something beside training failed: the state is sound, and is saved before the run ends with that error. */
static void save_before_failing(struct mt_loop *l)
{
    const struct mt_config *c = l->in->cfg;
    struct mt_err err = {0};
    if (l->p->no_save || l->st->step == l->first_step)
        return;
    if (mt_saves_final(&l->saves, c->checkpoint.save == MT_SAVE_FULL, c->checkpoint.save_deadline, &err))
        mt_warn("%s", err.msg);
}

/* --- the run: all learners ---------------------------------------------------------------------------------- */

/* The first learner that goes on; NULL: none does. */
static struct mt_loop *first_live(const struct run *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->loop[i].live)
            return &r->loop[i];
    return NULL;
}

/* The learner has failed. The others go on, if the engine can. */
static void fail(struct run *r, struct mt_loop *l, int rc, const struct mt_err *err)
{
    l->live = false;
    l->rc = rc;
    l->err = *err;
    if (r->n > 1)
        mt_fail_prefix(&l->err, rc, "%s", l->p->dir);
    if (l->sound)
        save_before_failing(l);
    if (first_live(r))
        mt_warn("%s; the other runs go on", l->err.msg);
}

/* sound: the state is as it was. */
static void fail_all(struct run *r, bool sound, int rc, const struct mt_err *err)
{
    for (size_t i = 0; i < r->n; i++) {
        if (!r->loop[i].live)
            continue;
        r->loop[i].sound = sound;
        fail(r, &r->loop[i], rc, err);
    }
}

/* The learner ends, for a reason that its last evaluation may change. */
static void end(struct run *r, struct mt_loop *l, enum mt_train_end why)
{
    struct mt_err err = {0};
    l->end = why;
    int rc = why == MT_END_DONE || why == MT_END_EARLY ? mt_loop_check_trained(l, &err) : 0;
    rc = rc ?: finish_run(l, &l->end, &err);
    l->live = false;
    if (rc)
        fail(r, l, rc, &err);
}

/* The data of all learners for their next step. */
static void collect(struct run *r)
{
    for (size_t i = 0; i < r->n; i++) {
        struct mt_err err = {0};
        r->of[i] = (struct mt_learner_step){.data = NULL};
        int rc = r->loop[i].live ? mt_loop_next_data(&r->loop[i], &r->of[i], &err) : 0;
        if (!rc)
            continue;
        r->of[i].data = NULL;
        r->loop[i].sound = true;
        fail(r, &r->loop[i], rc, &err);
    }
}

static const struct mt_step_result *first_skipped(const struct run *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->of[i].data && r->result[i].n_skipped)
            return &r->result[i];
    return NULL;
}

static bool updates_any(const struct run *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->of[i].data && !r->result[i].skipped)
            return true;
    return false;
}

/* A gradient that is not finite may be the fault of a library: it is computed in another way before the step is given
 * up. If that is finite, the other way stays, and findings keep it; else what is finite, of other learners or blocks,
 * is computed as it was. Not where a step has changed weights or states when it ends: updates under backward, and
 * states by which the device makes directions; nor with several hosts, which would have to agree. */
static int second_opinion(struct run *r, struct mt_err *err)
{
    const struct mt_setup *s = r->loop->setup;
    const struct mt_step_result *bad = first_skipped(r);
    if (!bad || s->cluster || s->choice.placement.update == MT_UPDATE_BACKWARD || s->choice.numerics.optimizer->direct)
        return 0;
    if (!mt_setup_distrust(s))
        return 0;
    char name[sizeof(bad->bad_tensor)];
    snprintf(name, sizeof(name), "%s", bad->bad_tensor);
    bool updates = updates_any(r);
    int rc = mt_engine_step_again(r->loop->s->engine, r->of, r->result, err);
    r->again = !rc && !first_skipped(r);
    if (!r->again)
        mt_setup_trust(s);
    if (!rc && !r->again && (updates || updates_any(r)))
        return mt_engine_step_again(r->loop->s->engine, r->of, r->result, err);
    if (r->again)
        mt_warn("step %llu: the gradient of %s was not finite; with attention computed in another way it is, which is used from now "
                "on. A library or kernel is wrong on this GPU: please report it",
                (unsigned long long)r->loop->st->step + 1, name);
    return rc;
}

/* On all hosts. One that was asked to stop has told the others in this step. */
static int make_step(struct run *r, struct mt_err *err)
{
    const struct mt_loop *l = r->loop;
    mt_engine *e = l->s->engine;
    const struct mt_cluster_do step = {.act = MT_CLUSTER_STEP, .at = l->st->step, .lr = r->of[0].lr};
    int rc = mt_cluster_begin(l->setup->cluster, &step, err);
    if (rc)
        return rc;
    rc = mt_engine_step(e, r->of, r->result, err);
    mt_cluster_end(l->setup->cluster, rc, err);
    int none = 0;
    if (!rc && mt_engine_is_asked(e))
        atomic_compare_exchange_strong(&l->p->control->stop, &none, SIGTERM);
    return rc;
}

/* Answers what was asked of the learners, but does not end the one that is under way (SIZE_MAX: none is). */
static void answer(struct run *r, size_t under_way)
{
    for (size_t i = 0; i < r->n; i++) {
        struct mt_loop *l = &r->loop[i];
        struct mt_err err = {0};
        enum mt_train_end why;
        int rc = l->live ? save_asked(l, &err) : 0;
        if (rc)
            fail(r, l, rc, &err);
        else if (l->live && i != under_way && is_stopped(l, &why))
            end(r, l, why);
        if (!l->live)
            r->of[i].data = NULL;
    }
}

static void answer_in_phase(void *run, size_t learner)
{
    answer(run, learner);
}

/* Makes the step; what is asked meanwhile cuts it short, is answered, and the step is made again. -ECANCELED: all have
 * ended. */
static int make_whole_step(struct run *r, struct mt_err *err)
{
    mt_engine *e = r->loop->s->engine;
    for (;;) {
        answer(r, SIZE_MAX);
        if (!first_live(r))
            return -ECANCELED;
        r->again = false;
        int rc = make_step(r, err) ?: second_opinion(r, err);
        if (rc != -ECANCELED || !mt_engine_clear_interrupt(e))
            return rc;
    }
}

static int run_step(struct run *r)
{
    struct mt_train_control *c = r->loop->p->control;
    struct mt_err err = {0};
    int64_t t0 = mt_now_ns();
    mt_train_phase(c, "training");
    collect(r);
    if (!first_live(r))
        return 0;
    if (mt_is_doubtful(r->loop->st->step + 1))
        mt_setup_doubt(r->loop->setup);
    int rc = make_whole_step(r, &err);
    if (rc && first_live(r) && r->loop->setup->choice.engine.program.owned)
        mt_warn("what other hosts own of the state is lost with this step: go on from the last checkpoint with --resume");
    if (rc && first_live(r))
        fail_all(r, mt_engine_whole(r->loop->s->engine), rc, &err);
    if (rc)
        return rc;
    double seconds = mt_seconds_since(t0);
    for (size_t i = 0; i < r->n; i++) {
        struct mt_loop *l = &r->loop[i];
        if (!r->of[i].data)
            continue;
        rc = mt_engine_check_learner(l->s->engine, l->p->learner, &err);
        r->result[i].other_attention = r->again;
        rc = rc ?: mt_loop_end_step(l, &r->of[i], &r->result[i], seconds, &err);
        if (rc)
            fail(r, l, rc, &err);
    }
    atomic_store(&c->step, r->loop->st->step);
    rc = mt_session_guard(r->loop->s, &err);
    if (rc)
        fail_all(r, false, rc, &err);
    return rc;
}

/* An evaluation, or what is due between two steps, of each learner that goes on; those that are asked to end do. */
static void each(struct run *r, int (*what)(struct mt_loop *l, enum mt_train_end *why, bool *over, struct mt_err *err))
{
    for (struct mt_loop *l = r->loop; l < r->loop + r->n; l++) {
        struct mt_err err = {0};
        enum mt_train_end why = MT_END_DONE;
        bool over = false;
        if (!l->live)
            continue;
        int rc = is_stopped(l, &why) ? -ECANCELED : what(l, &why, &over, &err);
        over |= rc == -ECANCELED && is_stopped(l, &why);
        if (over)
            end(r, l, why);
        else if (rc)
            fail(r, l, rc, &err);
    }
}

/* Also what a run that was cut short has not evaluated at the step where this one begins. */
static int evaluate_at_start(struct mt_loop *l, enum mt_train_end *why, bool *over, struct mt_err *err)
{
    const struct mt_train_state *st = l->st;
    uint64_t every = (uint64_t)l->in->cfg->eval.every;
    bool owed = every && st->step && st->step % every == 0 && st->eval_step < st->step;
    int rc = owed || (l->in->cfg->eval.at_start && !st->step) ? mt_loop_evaluate(l, err) : 0;
    *over = stops_early(l); /* resumed where it ended: a step more would not change that */
    *why = *over ? MT_END_EARLY : *why;
    return rc;
}

/* Ends learners that have made all their steps. */
static void end_done(struct run *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->loop[i].live && !more_steps(&r->loop[i]))
            end(r, &r->loop[i], MT_END_DONE);
        else if (r->loop[i].live && ends_block(&r->loop[i]))
            end(r, &r->loop[i], MT_END_BLOCK);
}

static void run_steps(struct run *r)
{
    each(r, evaluate_at_start);
    end_done(r);
    while (first_live(r)) {
        run_step(r);
        each(r, between_steps);
        end_done(r);
    }
}

static int open_loop(struct mt_loop *l, const struct mt_train_params *p, struct mt_err *err)
{
    const struct mt_setup *setup = p->session->setup;
    *l = (struct mt_loop){.p = p, .s = p->session, .setup = setup, .in = &setup->in[p->learner], .st = p->state};
    mt_saves_init(&l->saves, p);
    l->first_step = p->first_step;
    p->state->share_layers = (uint64_t)setup->choice.layout->share;
    p->state->blocks.on = p->block_end > 0 && setup->choice.layout->share == 1;
    mt_best_begin(p->state, l->in->cfg->eval.best_by, mt_inputs_eval_hash(l->in));
    l->evaluated = p->state->eval_step == p->state->step && p->state->step;
    p->state->steps_per_epoch = mt_sampler_stats(l->in->sampler)->steps_per_epoch;
    p->state->rows_per_epoch = mt_sampler_stats(l->in->sampler)->rows_per_epoch;
    p->state->rows = mt_sampler_rows_before(l->in->sampler, p->state->step);
    p->state->total_steps = l->in->total_steps;
    mt_engine_set_updates(l->s->engine, p->learner, p->state->updates, p->state->blocks.updates);
    mt_train_phase(p->control, "computing the reference");
    int rc = mt_reference_make(l->s, p->learner, l->st, err); /* takes batches of the sampler, as the loader will */
    rc = rc
      ?: mt_cluster_send_reference(l->setup->cluster, l->st, err)
      ?: mt_loader_create(&l->loader, l->in->sampler, p->state->step, l->in->total_steps, err)
      ?: mt_metrics_open(&l->metrics, l->in->cfg, p->dir, p->state->step,
                         mt_objective_of(mt_setup_numerics_of(l->setup, p->learner)),
                         l->setup->choice.layout->cfg.moe.n_experts > 0, err);
    if (!rc)
        mt_metrics_feed(l->metrics, p->feed);
    l->live = !rc;
    return rc;
}

static int open_run(struct run *r, const struct mt_train_params *p, size_t n, struct mt_err *err)
{
    int rc = MT_NEW(&r->loop, n, "the run", err)
          ?: MT_NEW(&r->of, n, "the run", err)
          ?: MT_NEW(&r->result, n, "the run", err);
    for (; r->n < n && !rc; r->n++)
        rc = open_loop(&r->loop[r->n], &p[r->n], err);
    return rc;
}

/* The first error, and the gravest reason. */
static int result_of(const struct run *r, enum mt_train_end *why, struct mt_err *err)
{
    int rc = 0;
    *why = MT_END_DONE;
    for (const struct mt_loop *l = r->loop; l < r->loop + r->n; l++) {
        *why = MT_MAX(*why, l->end);
        if (l->rc && !rc && err)
            *err = l->err;
        rc = rc ? rc : l->rc;
    }
    return rc;
}

static void close_run(struct run *r)
{
    for (size_t i = 0; i < r->n; i++) {
        mt_readback_drop(&r->loop[i].saves.readback);
        mt_metrics_close(&r->loop[i].metrics);
        mt_loader_destroy(&r->loop[i].loader);
    }
    free(r->loop);
    free(r->of);
    free(r->result);
}

int mt_train_run(const struct mt_train_params *p, size_t n, enum mt_train_end *why, struct mt_err *err)
{
    MT_CLOSED_BY(close_run) struct run r = {.n = 0};
    int rc = open_run(&r, p, n, err);
    if (!rc) {
        mt_engine_trace(p->session->engine, p->trace && p->state->step - p->first_step < MT_TRACED_STEP);
        p->control->answer = answer_in_phase;
        p->control->ctx = &r;
        atomic_store(&p->control->total_steps, p->state->total_steps);
        mt_watch_engine(p->watch, p->control, p->session->engine);
        atomic_store(&p->control->begun, true);
        run_steps(&r);
        rc = result_of(&r, why, err);
        mt_watch_engine(p->watch, p->control, NULL);
        p->control->answer = NULL;
    }
    return rc;
}
