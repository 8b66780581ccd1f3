/* SPDX-License-Identifier: Apache-2.0 */
#include "train/saves.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "hw/ecc.h"
#include "train/best.h"
#include "train/cluster.h"
#include "train/watch.h"

static const int64_t SECOND_NS = 1000000000;
enum { FIRST_WAIT_S = 10, LONGEST_WAIT_S = 600 };
/* Pauses between tries of the last save: most failures pass soon, some when a person has mended their cause. */
static const double FINAL_WAIT_S[] = {0, 0.5, 0.5, 1, 2, 4, 8, 15};
static const double LEAST_FINAL_S = 1; /* it is tried for so long in any case: for four tries, if they fail at once */
static const double GUESSED_RATE = 1e9; /* bytes a second: assumed until a first save was timed */

void mt_saves_init(struct mt_saves *s, const struct mt_train_params *p)
{
    struct mt_ecc ecc;
    *s = (struct mt_saves){.p = p, .clock = p->clock};
    if (!s->clock->saved_ns)
        s->clock->saved_ns = mt_now_ns();
    mt_hw_ecc(&ecc, "");
    s->n_corrected = ecc.corrected;
    s->n_uncorrected = ecc.uncorrected;
}

/* Warns of errors of the machine's memory since the last look. */
static void look_at_memory(struct mt_saves *s)
{
    struct mt_ecc ecc;
    mt_hw_ecc(&ecc, "");
    if (ecc.uncorrected > s->n_uncorrected || ecc.corrected > s->n_corrected)
        mt_warn("the machine's memory had %llu errors that ECC corrected and %llu that it did not, since the last look: "
                "see megatrain doctor", (unsigned long long)(ecc.corrected - MT_MIN(ecc.corrected, s->n_corrected)),
                (unsigned long long)(ecc.uncorrected - MT_MIN(ecc.uncorrected, s->n_uncorrected)));
    s->n_corrected = ecc.corrected;
    s->n_uncorrected = ecc.uncorrected;
}

static const struct mt_config *config(const struct mt_saves *s)
{
    return s->p->session->setup->in[s->p->learner].cfg;
}

double mt_saves_expect(const struct mt_saves *s)
{
    const struct mt_session *se = s->p->session;
    const struct mt_layout *own = mt_setup_layout_of(se->setup, s->p->learner);
    bool full = config(s)->checkpoint.save == MT_SAVE_FULL;
    if (s->clock->seconds > 0)
        return s->clock->seconds;
    return (double)mt_checkpoint_bytes(own, mt_plane_desc_of(se->planes, MT_PLANE_HI), full,
                                       mt_setup_names_base(se->setup, s->p->learner)) /
           GUESSED_RATE;
}

void mt_saves_evaluated(struct mt_saves *s, double value, bool is_best)
{
    s->eval_step = s->p->state->step;
    s->news = true;
    s->eval_value = value;
    s->is_best = is_best && s->eval_step && config(s)->checkpoint.keep_best && !s->p->no_save;
}

static void settle(struct mt_saves *s);

bool mt_saves_due(struct mt_saves *s)
{
    settle(s);
    const struct mt_cfg_interval *every = &config(s)->checkpoint.every;
    int64_t now = mt_now_ns();
    if (s->is_best && s->eval_step == s->p->state->step)
        return true;
    if (s->clock->wait_ns)
        return now >= s->clock->retry_ns;
    if (every->is_time)
        return every->seconds > 0 && (double)(now - s->clock->saved_ns) >= every->seconds * 1e9;
    return every->steps && s->p->state->step % (uint64_t)every->steps == 0;
}

/* Which checkpoints are kept: as configured; the newest, the best and those of keep_every; only the newest. */
enum pruning { AS_CONFIGURED, NEWEST_AND_CHOSEN, NEWEST_ALONE };

static void prune(const struct mt_saves *s, enum pruning how)
{
    const struct mt_config *c = config(s);
    struct mt_train_state *st = s->p->state;
    struct mt_prune_policy p = {.keep = 1, .lineage = &st->lineage};
    struct mt_err why;
    if (how == AS_CONFIGURED)
        p.keep = (uint64_t)c->checkpoint.keep;
    if (how != NEWEST_ALONE) {
        p.keep_every = (uint64_t)c->checkpoint.keep_every;
        p.keep_best = st->best_saved_step > 0;
        p.best_step = st->best_saved_step;
    }
    if (mt_checkpoint_prune(NULL, s->p->dir, &p, &why))
        mt_warn("old checkpoints stay: %s", why.msg);
    mt_checkpoint_link_best(NULL, s->p->dir, &st->best_saved_step);
}

/* The state that is saved names the best of this run's checkpoints: this one, if it was evaluated and is better. */
static void choose_best(struct mt_saves *s)
{
    struct mt_train_state *st = s->p->state;
    if (!config(s)->checkpoint.keep_best)
        st->best_saved_step = 0;
    else if (st->step && s->eval_step == st->step && isfinite(s->eval_value) &&
             (!st->best_saved_step ||
              mt_best_is_better(config(s)->eval.best_by, s->eval_value, st->best_saved_loss))) {
        st->best_saved_step = st->step;
        st->best_saved_loss = s->eval_value;
    }
}

/* The newest checkpoint is not what was written: it does not count, and the state is saved once more. */
static void set_damaged_aside(struct mt_saves *s, uint64_t step, const struct mt_err *why)
{
    char aside[4096];
    struct mt_err err;
    mt_warn("checkpoint of step %llu was saved, but reads back wrong: %s; it is saved again", (unsigned long long)step,
            why->msg);
    if (mt_history_set_aside(s->p->history, &mt_vfs_posix, s->p->dir, step, aside, &err))
        mt_warn("%s", err.msg);
    if (s->p->state->best_saved_step == step)
        s->p->state->best_saved_step = 0; /* an evaluation to come is the best that is saved */
    s->p->history->has = false;
    s->clock->wait_ns = 1;
    s->clock->retry_ns = 0;
}

/* The checkpoint of `step` has been read back: others are pruned if it is good. What cannot be read is not wrong. */
static void conclude(struct mt_saves *s, uint64_t step, enum mt_readback_state state, const struct mt_err *why)
{
    if (state == MT_READBACK_GOOD)
        prune(s, AS_CONFIGURED);
    else if (state == MT_READBACK_BAD)
        set_damaged_aside(s, step, why);
    else
        mt_warn("checkpoint of step %llu was saved, but cannot be read back: %s; it may be good and is kept, and so are older ones",
                (unsigned long long)step, why->msg);
}

static void settle(struct mt_saves *s)
{
    struct mt_err why = {0};
    enum mt_readback_state state = s->readback ? mt_readback_poll(s->readback, &why) : MT_READBACK_RUNS;
    if (state == MT_READBACK_RUNS)
        return;
    mt_readback_drop(&s->readback);
    conclude(s, s->read_step, state, &why);
}

/* What follows a save: older checkpoints go, but not the last one before the new one was read back. */
static int after_save(struct mt_saves *s, struct mt_err *err)
{
    const struct mt_config *c = config(s);
    const char *path = MT_PATH("%s/checkpoint-%llu", s->p->dir, (unsigned long long)s->p->state->step);
    struct mt_err why = {0};
    if (!s->final && !mt_readback_start(&s->readback, path, NULL, &why)) {
        s->read_step = s->p->state->step;
        return 0;
    }
    if (c->checkpoint.keep > 1 || !s->final) {
        prune(s, AS_CONFIGURED);
        return 0;
    }
    if (c->checkpoint.time_limit > 0) /* there is no time to read it: the next run will prune */
        return 0;
    enum mt_readback_state state = mt_readback_of(mt_checkpoint_verify(path, &why));
    conclude(s, s->p->state->step, state, &why);
    return state == MT_READBACK_BAD ? mt_fail(err, MT_ERR_RUNTIME, -EIO, "%s", why.msg) : 0;
}

/* Warns of a save that takes much longer than others did. */
static void note_time(struct mt_saves *s, bool full)
{
    enum { TIMES = 4, LEAST_S = 10 };
    if (full && s->clock->fastest > 0 && s->clock->seconds > TIMES * s->clock->fastest && s->clock->seconds > LEAST_S)
        mt_warn("the save of step %llu took %.0f s, the fastest so far %.0f s: the drive of %s has become slow",
                (unsigned long long)s->p->state->step, s->clock->seconds, s->clock->fastest, s->p->dir);
    if (full && (s->clock->fastest <= 0 || s->clock->seconds < s->clock->fastest))
        s->clock->fastest = s->clock->seconds;
}

static bool is_stopped(const struct mt_train_params *p)
{
    return mt_train_is_stopped(p->control, p->learner) != 0;
}

/* Before the next save begins, and before the run ends, the last one has been read; unless nothing hangs on it, or
 * there is no time, or somebody waits for this save. */
static void wait_for_readback(struct mt_saves *s)
{
    const struct mt_config *c = config(s);
    struct mt_err why;
    int signals = atomic_load(&s->p->control->signals);
    bool waits = s->final ? c->checkpoint.keep == 1 && c->checkpoint.time_limit <= 0 : !s->asked;
    while (waits && s->readback && mt_readback_poll(s->readback, &why) == MT_READBACK_RUNS &&
           (s->final || !is_stopped(s->p)) && atomic_load(&s->p->control->signals) == signals)
        usleep(1000);
    settle(s);
    if (s->readback && c->checkpoint.keep > 1)
        prune(s, AS_CONFIGURED);
    mt_readback_drop(&s->readback);
}

int mt_saves_note_findings(struct mt_train_state *st, const struct mt_setup *setup, struct mt_err *err)
{
    MT_STR_FREED struct mt_str s = {0};
    if (mt_setup_findings(setup, &s))
        return mt_fail_nomem(err, "the device's findings", 1);
    free(st->findings);
    st->findings = MT_GIVE(s.p); /* NULL: none */
    return 0;
}

/* What is found wrong of the training state. */
static int found(int rc, bool *lost)
{
    *lost |= rc != 0;
    return rc;
}

int mt_saves_settle(const struct mt_train_params *p, enum mt_settle how, bool *lost, struct mt_err *err)
{
    struct mt_session *s = p->session;
    int rc = mt_train_flush(p, err);
    *lost = (rc && s->setup->choice.engine.program.owned) || !mt_engine_whole(s->engine) ||
            mt_engine_check_learner(s->engine, p->learner, NULL);
    while (!rc && how == MT_SETTLE_WAIT && s->second_look && !mt_second_look_over(s->second_look) && !is_stopped(p))
        usleep(1000);
    rc = rc ?: found(mt_session_look_again(s, how == MT_SETTLE_LAST, err), lost)
            ?: found(mt_guard_check_trained(s->guard, err), lost);
    if (!rc && s->disk && !s->setup->in[p->learner].cfg->placement.nvme_checksums)
        rc = found(mt_disk_sync(s->disk, err), lost);
    return rc;
}

/* There may be little time left for the last save. */
static bool hurries(const struct mt_saves *s)
{
    return s->final && (is_stopped(s->p) || config(s)->checkpoint.time_limit > 0);
}

/* The checkpoint of this state is there, but an evaluation since then has said more of it. */
static int add_news(struct mt_saves *s, struct mt_err *err)
{
    int rc = mt_checkpoint_amend(&(struct mt_checkpoint_save){.dir = s->p->dir, .state = s->p->state,
                                                              .history = s->p->history}, err);
    s->news &= rc != 0;
    if (!rc)
        prune(s, AS_CONFIGURED);
    return rc;
}

/* *lost: the training state itself could not be read. */
static int save_state(struct mt_saves *s, bool full, bool *lost, struct mt_err *err)
{
    const struct mt_train_params *p = s->p;
    const struct mt_inputs *in = &p->session->setup->in[p->learner];
    const struct mt_layout *own = mt_setup_layout_of(p->session->setup, p->learner);
    struct mt_train_state *st = p->state;
    int64_t t0 = mt_now_ns();
    int rc = 0;
    if (!s->clock->unsettled && mt_history_holds(p->history, p->dir, st->step, full))
        return s->news ? add_news(s, err) : 0;
    s->clock->unsettled = true;
    mt_train_phase(p->control, "saving a checkpoint");
    look_at_memory(s);
    rc = mt_saves_settle(p, hurries(s) ? MT_SETTLE_LAST : s->asked ? MT_SETTLE_NOW : MT_SETTLE_WAIT, lost, err);
    bool whole = s->final && !hurries(s);
    if (!rc && whole)
        rc = found(mt_session_check_frozen(p->session, err), lost);
    rc = rc ?: found(mt_cluster_compare_weights(p->session->setup->cluster, p->session, whole, err), lost);
    st->updates = mt_engine_updates(p->session->engine, p->learner);
    bool named = full && mt_setup_names_base(p->session->setup, p->learner);
    if (!rc && named) {
        rc = mt_session_sum_base(p->session, err);
        *lost = rc && rc != -ENOMEM;
    }
    rc = rc ?: mt_saves_note_findings(st, p->session->setup, err);
    const struct mt_st_model *files = &p->session->base;
    const uint64_t *sums = named ? mt_session_base_sums(p->session, p->learner) : NULL;
    if (!rc)
        rc = mt_checkpoint_save(&(struct mt_checkpoint_save){.dir = p->dir,
                                                             .model_dir = in->model_dir,
                                                             .base_model = st->blocks.overlay ? in->weights_dir
                                                                                              : config(s)->model.path,
                                                             .files = p->files,
                                                             .layout = own,
                                                             .planes = p->session->planes,
                                                             .state = st,
                                                             .history = p->history,
                                                             .full = full,
                                                             .named = sums,
                                                             .base_dir = in->weights_dir,
                                                             .base = files->n_tensors ? files : NULL,
                                                             .lost = lost,
                                                             .shard_bytes = config(s)->checkpoint.shard_size},
                                err);
    if (rc)
        return rc;
    s->clock->unsettled = s->news = false;
    atomic_store(&p->control->asked[p->learner].unsaved, false);
    s->clock->saved_ns = mt_now_ns();
    s->clock->seconds = (double)(s->clock->saved_ns - t0) * 1e-9;
    s->clock->wait_ns = 0;
    note_time(s, full);
    if (p->events.saved)
        p->events.saved(p->events.ctx, st->step, s->clock->seconds);
    return after_save(s, err);
}

int mt_saves_find_folder(const struct mt_train_params *p, struct mt_err *err)
{
    char before[4096];
    if (!p->output)
        return 0;
    memcpy(before, p->output->dir, sizeof(before));
    int rc = mt_output_find(p->output, p->state->lineage.run, err);
    if (strcmp(before, p->output->dir) != 0 || rc)
        mt_watch_moved(p->watch, p->learner, p->output->dir);
    return rc;
}

/* The last checkpoint is settled before this one is named the best: what prunes must find the best one there. */
static int save(struct mt_saves *s, bool full, bool *lost, struct mt_err *err)
{
    struct mt_train_state *st = s->p->state;
    *lost = false;
    int rc = mt_saves_find_folder(s->p, err);
    if (rc) {
        s->is_best = false;
        return rc;
    }
    wait_for_readback(s);
    const uint64_t best = st->best_saved_step;
    const double best_loss = st->best_saved_loss;
    choose_best(s);
    rc = save_state(s, full, lost, err);
    s->is_best = false;
    if (rc) {
        st->best_saved_step = best;
        st->best_saved_loss = best_loss;
    } else {
        mt_checkpoint_link_best(NULL, s->p->dir, &st->best_saved_step);
    }
    return rc;
}

int mt_saves_periodic(struct mt_saves *s, bool asked, struct mt_err *err)
{
    struct mt_err why = {0};
    bool lost;
    s->asked = asked;
    int rc = save(s, config(s)->checkpoint.save == MT_SAVE_FULL, &lost, &why);
    s->asked = false;
    if (rc && lost && err)
        *err = why;
    if (rc && !lost) {
        s->clock->wait_ns = MT_MIN(MT_MAX(FIRST_WAIT_S * SECOND_NS, 2 * s->clock->wait_ns), LONGEST_WAIT_S * SECOND_NS);
        s->clock->saved_ns = mt_now_ns();
        s->clock->retry_ns = s->clock->saved_ns + s->clock->wait_ns;
        mt_warn("checkpoint of step %llu not saved: %s; the run goes on, the next try is in %d s",
                (unsigned long long)s->p->state->step, why.msg, (int)(s->clock->wait_ns / SECOND_NS));
    }
    return lost ? rc : 0;
}

int mt_saves_end_block(struct mt_saves *s, struct mt_err *err)
{
    mt_train_phase(s->p->control, "reading the last checkpoint back");
    wait_for_readback(s);
    if (!s->clock->wait_ns || mt_now_ns() < s->clock->retry_ns)
        return 0;
    int rc = mt_saves_periodic(s, false, err);
    wait_for_readback(s);
    return rc;
}

/* A last save that is tried until it succeeds. */
struct trial {
    struct mt_saves *s;
    bool full;
    double seconds;
    int64_t until_ns;
    int signals;          /* that had come when it began: another one gives up */
    size_t n_waits;
    enum pruning pruned;
    bool late;            /* the last try was begun at the deadline or later */
};

static bool given_up(const struct trial *t)
{
    return atomic_load(&t->s->p->control->signals) != t->signals;
}

/* Waits until the next try, the last of which is at the deadline; false: it is time to give up. */
static bool wait_for_next(struct trial *t, const struct mt_err *why)
{
    const struct mt_train_params *p = t->s->p;
    size_t n = MT_MIN(t->n_waits, MT_ARRAY_LEN(FINAL_WAIT_S) - 1);
    int64_t now = mt_now_ns(), next = now + (int64_t)(FINAL_WAIT_S[n] * 1e9);
    if ((t->late && t->n_waits) || given_up(t))
        return false;
    if (t->n_waits++ == 0)
        mt_warn("checkpoint of step %llu not saved: %s; trying again for %.0f s: free space or mend the cause (touch "
                "%s/SAVE tries at once), a signal gives up",
                (unsigned long long)p->state->step, why->msg, t->seconds, p->dir);
    next = MT_MIN(next, MT_MAX(t->until_ns, now));
    atomic_store(&p->control->waiting, true);
    while (!given_up(t) && mt_now_ns() < next && !atomic_exchange(&p->control->asked[p->learner].save, false))
        usleep(50000);
    atomic_store(&p->control->waiting, false);
    t->late = mt_now_ns() >= t->until_ns;
    return !given_up(t);
}

/* Removes older checkpoints that stand in the way of a new one; false: that is not what it needs. */
static bool make_room(struct trial *t, int rc, const struct mt_err *why)
{
    if (t->pruned == NEWEST_ALONE || (rc != -ENOSPC && rc != -EDQUOT))
        return false;
    mt_warn("checkpoint of step %llu not saved: %s; removing older ones of this run%s",
            (unsigned long long)t->s->p->state->step, why->msg,
            t->pruned == AS_CONFIGURED ? " that are not kept for good" : ", but for one");
    prune(t->s, ++t->pruned);
    return true;
}

static int try_until(struct mt_saves *s, bool full, double seconds, bool *lost, struct mt_err *why)
{
    struct trial t = {.s = s, .full = full, .seconds = MT_MAX(seconds, LEAST_FINAL_S),
                      .signals = atomic_load(&s->p->control->signals)};
    t.until_ns = mt_now_ns() + (int64_t)(t.seconds * 1e9);
    int rc = save(s, full, lost, why);
    while (rc && !*lost && (make_room(&t, rc, why) || wait_for_next(&t, why)))
        rc = save(s, full, lost, why);
    return rc;
}

/* Which checkpoint there is to go on from; by its seal alone: reading all of it would take long. */
static void name_newest(const struct mt_saves *s, char *text, size_t len)
{
    const struct mt_history *h = s->p->history;
    MT_FREED char *newest = mt_checkpoint_find_whole(s->p->dir);
    if (newest)
        snprintf(text, len, "the newest checkpoint is %s", newest);
    else if (h->has && h->full)
        snprintf(text, len, "the newest checkpoint is of step %llu, which cannot be read at the moment",
                 (unsigned long long)h->step);
    else
        snprintf(text, len, "there is no other checkpoint to go on from");
}

int mt_saves_final(struct mt_saves *s, bool full, double seconds, struct mt_err *err)
{
    struct mt_err why = {0}, inner = {0};
    bool lost;
    s->final = true;
    int rc = try_until(s, full, seconds, &lost, &why);
    if (!rc && hurries(s) && mt_session_check_frozen(s->p->session, &inner))
        mt_warn("step %llu is saved, but %s", (unsigned long long)s->p->state->step, inner.msg);
    if (!rc)
        return 0;
    const struct mt_history *h = s->p->history;
    bool has = h->has && h->full && h->step == s->p->state->step; /* of which weights alone are no more */
    bool weights = full && !lost && !has &&
                   (!save(s, false, &lost, &inner) || (!lost && !save(s, false, &lost, &inner)));
    char newest[4200];
    name_newest(s, newest, sizeof(newest));
    mt_fail(err, why.kind, rc, "step %llu was not saved: %s; %s%s", (unsigned long long)s->p->state->step, why.msg,
            weights ? "its weights alone are saved; " : "", newest);
    return rc;
}

int mt_saves_last_evaluation(struct mt_saves *s, bool full, double seconds, struct mt_err *err)
{
    struct mt_err why = {0};
    bool lost;
    int rc = s->news ? try_until(s, full, seconds, &lost, &why) : 0;
    if (rc && !lost)
        mt_warn("checkpoint-%llu does not say what the last evaluation found: %s; megatrain run --resume evaluates again",
                (unsigned long long)s->p->state->step, why.msg);
    else if (rc && err)
        *err = why;
    return rc && lost ? rc : 0;
}
