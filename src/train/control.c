/* SPDX-License-Identifier: Apache-2.0 */
#include "train/control.h"

#include "base/clock.h"
#include "train/cluster.h"

void mt_train_phase(struct mt_train_control *c, const char *phase)
{
    atomic_store(&c->n_parts, 0);
    atomic_store(&c->phase_ns, mt_now_ns());
    atomic_store(&c->phase, phase);
}

void mt_train_request_stop(struct mt_train_control *c, int signo)
{
    mt_engine *e = atomic_load(&c->engine);
    atomic_store(&c->stop, signo);
    atomic_fetch_add(&c->signals, 1);
    if (e)
        mt_engine_interrupt(e);
}

int mt_train_is_stopped(const struct mt_train_control *c, size_t learner)
{
    int own = learner < c->n ? atomic_load(&c->asked[learner].stop) : 0;
    return own ?: atomic_load(&c->stop);
}

int mt_train_heed(struct mt_train_control *c, size_t learner, uint64_t done, uint64_t all, int rc, struct mt_err *err)
{
    if (!c || (rc && rc != -ECANCELED))
        return rc;
    atomic_store(&c->part, done);
    atomic_store(&c->n_parts, all);
    mt_engine *e = atomic_load(&c->engine);
    if (mt_train_is_stopped(c, learner))
        return mt_fail(err, MT_ERR_RUNTIME, -ECANCELED, "interrupted");
    if (rc && !(e && mt_engine_clear_interrupt(e)))
        return rc;
    if (c->answer)
        c->answer(c->ctx, learner);
    return rc ? MT_AGAIN : 0;
}

bool mt_is_doubtful(uint64_t step)
{
    return step == 10 || step == 100 || step == 1000;
}

int mt_train_flush(const struct mt_train_params *p, struct mt_err *err)
{
    const struct mt_setup *s = p->session->setup;
    struct mt_cluster *others = s->choice.engine.program.owned ? s->cluster : NULL; /* each has its part to do */
    int rc = mt_cluster_begin(others, &(struct mt_cluster_do){.act = MT_CLUSTER_FLUSH}, err);
    if (rc)
        return rc;
    rc = mt_engine_flush(p->session->engine, err);
    mt_cluster_end(others, rc, err);
    return rc ?: mt_engine_check_learner(p->session->engine, p->learner, err);
}
