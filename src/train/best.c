/* SPDX-License-Identifier: Apache-2.0 */
#include "train/best.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"

double mt_best_value(const char *by, const struct mt_eval_report *r)
{
    for (size_t k = 0; k < r->n_sets; k++) {
        const char *what = mt_measure_of_set(by, r->sets[k].name, strlen(r->sets[k].name));
        if (what)
            return strcmp(what, MT_EVAL_ACCURACY) ? r->sets[k].loss : r->sets[k].accuracy;
    }
    if (!strcmp(by, "reward") && !isnan(r->reward))
        return r->reward;
    int i = r->objective && strcmp(by, "loss") ? mt_objective_measure(r->objective, by) : -1;
    if (!strcmp(by, "loss"))
        return r->loss;
    if (!strcmp(by, MT_EVAL_ACCURACY))
        return r->accuracy;
    return i < 0 ? NAN : mt_measure_mean(&r->measures[i]);
}

bool mt_best_is_better(const char *by, double value, double best)
{
    if (!isfinite(value))
        return false;
    return !(mt_measure_more_is_better(by) ? best >= value : best <= value);
}

void mt_best_begin(struct mt_train_state *st, const char *by, uint64_t data)
{
    const char *before = st->best_by[0] ? st->best_by : "loss";
    bool other = st->eval_hash && data && st->eval_hash != data;
    st->eval_hash = data;
    if (!strcmp(before, by) && !other)
        return;
    if (isfinite(st->best_loss) && other)
        mt_info("the best evaluation so far was on other data than data.eval and eval.sets now name: it counts no more");
    else if (isfinite(st->best_loss))
        mt_info("the best evaluation so far was by %s: from here on it is by eval.best_by = %s", before, by);
    snprintf(st->best_by, sizeof(st->best_by), "%s", strcmp(by, "loss") ? by : "");
    st->best_loss = NAN;
    st->best_step = st->best_saved_step = st->bad_evals = 0;
    st->eval_step = MT_EVAL_UNKNOWN;
}
