/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/warm.h"

#include "base/clock.h"
#include "base/log.h"
#include "machine/measure.h"
#include "plan/cost.h"
#include "plan/warm_attention.h"

/* The distinct operations of the program's compute instructions. */
static int collect(mt_cost_table *t, const struct mt_program_params *program, struct mt_err *err)
{
    MT_CLOSED_BY(mt_program_finish) struct mt_program prog = {0};
    struct mt_cost cost;
    int rc = mt_program_build(&prog, program, err);
    for (size_t i = 0; i < prog.n_instrs && !rc; i++)
        if (prog.instrs[i].queue == MT_Q_COMPUTE)
            rc = mt_cost_of(t, &prog, &prog.instrs[i], &cost, err);
    return rc;
}

/* *n_run of *n_wanted; attention is left to `others`, whose calls are the model's own. */
static int run_once(const struct mt_cost_table *t, mt_device *dev, bool others, size_t *n_run, size_t *n_wanted,
                    struct mt_err *err)
{
    size_t n, one = 0;
    const struct mt_metered *ops = mt_cost_operations(t, &n);
    int rc = 0;
    *n_run = *n_wanted = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        if (others && (ops[i].op == MT_DEV_ATTENTION || ops[i].op == MT_DEV_ATTENTION_BWD))
            continue;
        rc = mt_run_operations_once(dev, &ops[i], 1, &one, err);
        *n_run += one;
        ++*n_wanted;
    }
    return rc;
}

int mt_plan_warm(const struct mt_engine_params *p, const struct mt_program_params *program,
                 const struct mt_step_data *step, struct mt_err *err)
{
    MT_CLOSED_BY(mt_cost_table_destroy) mt_cost_table *t = NULL;
    struct mt_warm_attention attention = {.n = 0};
    int64_t begin = mt_now_ns();
    size_t n = 0, n_run = 0, n_calls = 0;
    if (mt_device_limits(p->dev)->shares_host_memory)
        return 0;
    int rc = mt_cost_table_create(
        &t, &(struct mt_cost_params){.engine = p, .on_call = mt_warm_attention_note, .ctx = &attention}, err)
          ?: collect(t, program, err)
          ?: run_once(t, p->dev, step, &n_run, &n, err);
    if (!rc && step)
        rc = mt_warm_attention_run(&attention, p->dev, step, &n_calls, err);
    if (!rc)
        mt_debug("ran %zu of %zu operations of a step once, and attention over %zu micro-batches, in %.1f s", n_run, n,
                 n_calls, mt_seconds_since(begin));
    return rc;
}
