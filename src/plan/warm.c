/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/warm.h"

#include "base/clock.h"
#include "base/log.h"
#include "machine/measure.h"
#include "plan/cost.h"

/* The distinct operations of the program's compute instructions. */
static int collect(mt_cost_table *t, const struct mt_program_params *program, struct mt_err *err)
{
    struct mt_program prog;
    struct mt_cost cost;
    int rc = mt_program_build(&prog, program, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < prog.n_instrs && !rc; i++)
        if (prog.instrs[i].queue == MT_Q_COMPUTE)
            rc = mt_cost_of(t, &prog, &prog.instrs[i], &cost, err);
    mt_program_finish(&prog);
    return rc;
}

int mt_plan_warm(const struct mt_engine_params *p, const struct mt_program_params *program, struct mt_err *err)
{
    mt_cost_table *t = NULL;
    int64_t begin = mt_now_ns();
    size_t n = 0, n_run = 0;
    if (mt_device_limits(p->dev)->shares_host_memory)
        return 0;
    int rc = mt_cost_table_create(&t, &(struct mt_cost_params){.engine = p}, err);
    if (!rc)
        rc = collect(t, program, err);
    const struct mt_metered *ops = rc ? NULL : mt_cost_operations(t, &n);
    if (!rc)
        rc = mt_run_operations_once(p->dev, ops, n, &n_run, err);
    if (!rc)
        mt_debug("ran %zu of %zu operations of a step once, in %.1f s", n_run, n, (double)(mt_now_ns() - begin) * 1e-9);
    mt_cost_table_destroy(&t);
    return rc;
}
