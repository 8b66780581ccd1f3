/* SPDX-License-Identifier: Apache-2.0 */
#include "train/control.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"

void mt_train_phase(struct mt_train_control *c, const char *phase)
{
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

bool mt_is_doubtful(uint64_t step)
{
    return step == 10 || step == 100 || step == 1000;
}

int mt_train_flush(const struct mt_train_params *p, struct mt_err *err)
{
    int rc = mt_engine_flush(p->session->engine, err);
    return rc ? rc : mt_engine_check_learner(p->session->engine, p->learner, err);
}

bool mt_train_file_request(const struct mt_train_params *p, const char *name)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/%s", p->dir, name);
    return !remove(path);
}
