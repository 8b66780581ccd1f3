/* SPDX-License-Identifier: Apache-2.0 */
#include "train/saves.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"

static const int64_t SECOND_NS = 1000000000;
enum { FIRST_WAIT_S = 10, LONGEST_WAIT_S = 600, FINAL_WAIT_S = 15 };
static const double GUESSED_RATE = 1e9; /* bytes a second: assumed until a first save was timed */

void mt_saves_init(struct mt_saves *s, const struct mt_train_params *p)
{
    *s = (struct mt_saves){.p = p, .saved_ns = mt_now_ns()};
}

static const struct mt_config *config(const struct mt_saves *s)
{
    return s->p->session->setup->in->cfg;
}

double mt_saves_expect(const struct mt_saves *s)
{
    const struct mt_session *se = s->p->session;
    bool full = config(s)->checkpoint.save == MT_SAVE_FULL;
    if (s->seconds > 0)
        return s->seconds;
    return (double)mt_checkpoint_bytes(se->setup->layout, mt_plane_desc_of(se->planes, MT_PLANE_HI), full,
                                       mt_setup_names_base(se->setup)) /
           GUESSED_RATE;
}

bool mt_saves_due(const struct mt_saves *s)
{
    const struct mt_cfg_interval *every = &config(s)->checkpoint.every;
    int64_t now = mt_now_ns();
    if (s->wait_ns)
        return now >= s->retry_ns;
    if (every->is_time)
        return every->seconds > 0 && (double)(now - s->saved_ns) >= every->seconds * 1e9;
    return every->steps && s->p->state->step % (uint64_t)every->steps == 0;
}

/* Which checkpoints are kept: as configured; the newest, the best and those of keep_every; only the newest. */
enum pruning { AS_CONFIGURED, NEWEST_AND_CHOSEN, NEWEST_ALONE };

static void prune(const struct mt_saves *s, enum pruning how)
{
    const struct mt_config *c = config(s);
    const struct mt_train_state *st = s->p->state;
    struct mt_prune_policy p = {.keep = 1, .lineage = &st->lineage};
    struct mt_err why;
    if (how == AS_CONFIGURED)
        p.keep = (uint64_t)c->checkpoint.keep;
    if (how != NEWEST_ALONE) {
        p.keep_every = (uint64_t)c->checkpoint.keep_every;
        p.keep_best = c->checkpoint.keep_best && isfinite(st->best_loss);
        p.best_step = st->best_step;
    }
    if (mt_checkpoint_prune(NULL, s->p->dir, &p, &why))
        mt_warn("old checkpoints stay: %s", why.msg);
}

/* Records what was found wrong with a library, so that a resumed run avoids it too and has the same bits. */
static int note_findings(struct mt_train_state *st, mt_device *dev, struct mt_err *err)
{
    struct mt_str s = {0};
    mt_device_findings(dev, &s);
    if (s.failed) {
        mt_str_finish(&s);
        return mt_fail_nomem(err, "the device's findings", 1);
    }
    free(st->findings);
    st->findings = s.p; /* NULL: none */
    return 0;
}

/* *lost: the training state itself could not be read. */
static int save(struct mt_saves *s, bool full, bool *lost, struct mt_err *err)
{
    const struct mt_train_params *p = s->p;
    const struct mt_inputs *in = p->session->setup->in;
    struct mt_train_state *st = p->state;
    int64_t t0 = mt_now_ns();
    *lost = false;
    if (!s->unsettled && mt_history_holds(p->history, p->dir, st->step, full))
        return 0;
    s->unsettled = true;
    mt_train_phase(p->control, "saving a checkpoint");
    int rc = mt_engine_flush(p->session->engine, err);
    *lost = !mt_engine_whole(p->session->engine);
    if (!rc && p->session->disk && !config(s)->placement.nvme_checksums) {
        rc = mt_disk_sync(p->session->disk, err);
        *lost = rc;
    }
    st->updates = mt_engine_updates(p->session->engine, 0);
    bool named = full && mt_setup_names_base(p->session->setup);
    if (!rc && named) {
        rc = mt_session_sum_base(p->session, err);
        *lost = rc && rc != -ENOMEM;
    }
    if (!rc)
        rc = note_findings(st, p->session->setup->dev, err);
    if (!rc)
        rc = mt_checkpoint_save(&(struct mt_checkpoint_save){.dir = p->dir,
                                                             .model_dir = in->model_dir,
                                                             .base_model = config(s)->model.path,
                                                             .files = p->files,
                                                             .layout = p->session->setup->layout,
                                                             .planes = p->session->planes,
                                                             .state = st,
                                                             .history = p->history,
                                                             .full = full,
                                                             .named = named ? p->session->base_sum : NULL,
                                                             .base_dir = in->model_dir,
                                                             .lost = lost,
                                                             .shard_bytes = config(s)->checkpoint.shard_size},
                                err);
    if (rc)
        return rc;
    s->unsettled = false;
    s->saved_ns = mt_now_ns();
    s->seconds = (double)(s->saved_ns - t0) * 1e-9;
    s->wait_ns = 0;
    if (p->events.saved)
        p->events.saved(p->events.ctx, st->step, s->seconds);
    prune(s, AS_CONFIGURED);
    return 0;
}

int mt_saves_periodic(struct mt_saves *s, struct mt_err *err)
{
    struct mt_err why = {0};
    bool lost;
    int rc = save(s, config(s)->checkpoint.save == MT_SAVE_FULL, &lost, &why);
    if (rc && lost) {
        if (err)
            *err = why;
        return rc;
    }
    if (rc) {
        s->wait_ns = MT_MIN(MT_MAX(FIRST_WAIT_S * SECOND_NS, 2 * s->wait_ns), LONGEST_WAIT_S * SECOND_NS);
        s->saved_ns = mt_now_ns();
        s->retry_ns = s->saved_ns + s->wait_ns;
        mt_warn("checkpoint of step %llu not saved: %s; the run goes on, the next try is in %d s",
                (unsigned long long)s->p->state->step, why.msg, (int)(s->wait_ns / SECOND_NS));
    }
    return 0;
}

/* Waits until the next try. Returns false when it is time to give up. */
static bool wait_for_more(const struct mt_saves *s, int64_t until_ns, int signals)
{
    int64_t next = mt_now_ns() + FINAL_WAIT_S * SECOND_NS;
    while (atomic_load(&s->p->control->signals) == signals && mt_now_ns() < MT_MIN(until_ns, next) &&
           !mt_train_file_request(s->p, "SAVE"))
        usleep(100000);
    return atomic_load(&s->p->control->signals) == signals && mt_now_ns() < until_ns;
}

static int try_until(struct mt_saves *s, bool full, double seconds, bool *lost, struct mt_err *why)
{
    struct mt_train_control *c = s->p->control;
    int64_t until = mt_now_ns() + (int64_t)(seconds * 1e9);
    enum pruning pruned = AS_CONFIGURED;
    bool said = false;
    int rc = save(s, full, lost, why), signals = atomic_load(&c->signals);
    while (rc && !*lost) {
        if (pruned != NEWEST_ALONE && (rc == -ENOSPC || rc == -EDQUOT)) {
            mt_warn("checkpoint of step %llu not saved: %s; removing older ones of this run%s",
                    (unsigned long long)s->p->state->step, why->msg,
                    pruned == AS_CONFIGURED ? " that are not kept for good" : ", but for one");
            pruned++;
            prune(s, pruned);
        } else {
            if (!said)
                mt_warn("checkpoint of step %llu not saved: %s; trying again for %.0f s: free space or mend the cause (touch "
                        "%s/SAVE tries at once), a signal gives up",
                        (unsigned long long)s->p->state->step, why->msg, seconds, s->p->dir);
            said = true;
            atomic_store(&c->waiting, true);
            bool more = wait_for_more(s, until, signals);
            atomic_store(&c->waiting, false);
            if (!more)
                break;
        }
        rc = save(s, full, lost, why);
    }
    return rc;
}

int mt_saves_final(struct mt_saves *s, bool full, double seconds, struct mt_err *err)
{
    struct mt_err why = {0}, inner = {0};
    bool lost;
    int rc = try_until(s, full, seconds, &lost, &why);
    if (!rc)
        return 0;
    bool weights = full && !lost && !save(s, false, &lost, &inner);
    char *newest = mt_checkpoint_find_whole(s->p->dir); /* by its seal alone: reading all of it would take long */
    mt_fail(err, why.kind, rc, "step %llu was not saved: %s; %s%s%s", (unsigned long long)s->p->state->step, why.msg,
            weights ? "its weights alone are saved; " : "",
            newest ? "the newest checkpoint is " : "there is no other checkpoint", newest ? newest : "");
    free(newest);
    return rc;
}
