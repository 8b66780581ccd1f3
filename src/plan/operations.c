/* SPDX-License-Identifier: Apache-2.0 */
/* Open choices of a request that change a step's work, and the device operations for all of them. */
#include <stdlib.h>

#include "base/mem.h"
#include "model/model.h"
#include "plan/evaluate.h"

/* The matrix gradient's product reads and writes FP32; with 2048 rows its compute hides most of that traffic. */
static const int64_t longer[] = {512, 2048};
enum { PIECE = 512 };

size_t mt_plan_chunks(const struct mt_plan_request *r, int64_t chunk[MT_PLAN_MAX_CHUNKS])
{
    size_t n = 1;
    chunk[0] = r->numerics.logits_chunk;
    if (chunk[0] != MT_AUTO)
        return n;
    chunk[0] = (int64_t)mt_model_auto_logits_chunk(r->layout);
    for (size_t i = 0; i < MT_ARRAY_LEN(longer); i++)
        if (longer[i] > chunk[0])
            chunk[n++] = longer[i];
    return n;
}

void mt_plan_take_chunk(struct mt_plan_request *r, int64_t chunk)
{
    struct mt_numerics *n = &r->numerics;
    bool open = n->logits_chunk == MT_AUTO && n->logits_piece == MT_AUTO;
    n->logits_chunk = chunk;
    if (open && n->dtype == MT_BF16 && chunk > PIECE && chunk > (int64_t)mt_model_auto_logits_chunk(r->layout))
        n->logits_piece = PIECE;
}

size_t mt_plan_micro_batches(const struct mt_plan_request *r, int64_t list[MT_PLAN_MAX_MICRO_BATCHES])
{
    struct mt_plan_request t = *r;
    int64_t rows = r->numerics.rows_per_step;
    size_t n = 0;
    if (r->numerics.micro_batch != MT_AUTO || mt_row_chunks(&r->numerics) > 1) {
        list[0] = MT_MAX(r->numerics.micro_batch, (int64_t)1);
        return 1;
    }
    for (int64_t mb = 1; mb < rows * 2 && n < MT_PLAN_MAX_MICRO_BATCHES; mb *= 2) {
        t.numerics.micro_batch = MT_MIN(mb, rows);
        if (n && !mt_plan_fits_device(&t))
            break;
        list[n++] = t.numerics.micro_batch;
    }
    return n;
}

static bool is_listed(const struct mt_metered *ops, size_t n, const struct mt_metered *op)
{
    size_t i = 0;
    while (i < n && !mt_same_operation(&ops[i], op))
        i++;
    return i < n;
}

static int add_operations(struct mt_metered **ops, size_t *n, size_t *cap, const struct mt_plan_request *r,
                          struct mt_err *err)
{
    MT_CLOSED_BY(mt_cost_table_destroy) mt_cost_table *costs = NULL;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    mt_cost_table *used = NULL; /* costs' own */
    int rc = mt_plan_costs(&costs, r, err)
          ?: mt_plan_with_costs(&c, r, costs, NULL, err)
          ?: mt_cost_table_as(&used, costs, &c.placement, err);
    if (!rc) {
        size_t k;
        const struct mt_metered *more = mt_cost_operations(used, &k);
        if (!mt_grow(ops, cap, *n + k, sizeof(**ops)))
            rc = mt_fail_nomem(err, "operations", k * sizeof(**ops));
        for (size_t i = 0; i < k && !rc; i++)
            if (!is_listed(*ops, *n, &more[i]))
                (*ops)[(*n)++] = more[i];
    }
    return rc == -ENOSPC ? 0 : rc;
}

static int compare_operations(const void *a, const void *b)
{
    const struct mt_metered *x = a, *y = b;
    const int64_t of_x[] = {x->op, x->variant, x->dtype, x->flags}, of_y[] = {y->op, y->variant, y->dtype, y->flags};
    for (size_t i = 0; i < MT_ARRAY_LEN(of_x); i++)
        if (of_x[i] != of_y[i])
            return of_x[i] < of_y[i] ? -1 : 1;
    for (size_t i = 0; i < MT_METER_DIMS; i++)
        if (x->dim[i] != y->dim[i])
            return x->dim[i] < y->dim[i] ? -1 : 1;
    return 0;
}

static int add_layout(struct mt_metered **ops, size_t *n, size_t *cap, const struct mt_plan_request *r,
                      struct mt_err *err)
{
    int64_t list[MT_PLAN_MAX_MICRO_BATCHES], chunk[MT_PLAN_MAX_CHUNKS];
    size_t n_mb = mt_plan_micro_batches(r, list), n_chunks = mt_plan_chunks(r, chunk);
    int rc = 0;
    for (size_t i = 0; i < n_mb * n_chunks && !rc; i++) {
        struct mt_plan_request t = *r;
        t.numerics.micro_batch = list[i / n_chunks];
        mt_plan_take_chunk(&t, chunk[i % n_chunks]);
        rc = add_operations(ops, n, cap, &t, err);
    }
    return rc;
}

int mt_plan_operations(struct mt_metered **ops, size_t *n, const struct mt_plan_request *r,
                       struct mt_err *err)
{
    MT_FREED struct mt_metered *all = NULL;
    size_t cap = 0;
    *n = 0;
    int rc = add_layout(&all, n, &cap, r, err);
    if (!rc && r->halves) {
        struct mt_plan_request halves = mt_plan_request_in_halves(r);
        rc = add_layout(&all, n, &cap, &halves, err);
    }
    if (*n) /* sorted, so that operations that are compared are timed one after the other */
        qsort(all, *n, sizeof(*all), compare_operations);
    *ops = rc ? NULL : MT_GIVE(all);
    return rc;
}
