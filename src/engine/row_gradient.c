/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gradient of an untied embedding is zero but in the rows of the step's tokens. Only these leave the device, to the
 * beginning of the plane, in ascending order. UNPACK moves them to their places there, so that updates read the whole
 * gradient: moments and decay of all rows change, and all bits are as if it had left the device as a whole.
 */
#include <string.h>

#include "base/mem.h"
#include "engine/state.h"
#include "schedule/build.h"

enum { STRIP = 512 }; /* bytes of each row that a thread moves at once */

int mt_row_gradient_init(mt_engine *e, struct mt_err *err)
{
    struct mt_model_params mp = mt_engine_model_params(&e->p);
    size_t most = mt_model_max_used_rows(&mp);
    if (!e->p.train || !mt_program_compacts(&e->plan.program, 0))
        return 0;
    e->rows.ids = mt_arrays_add(&e->arrays, most, sizeof(*e->rows.ids));
    if (!e->rows.ids)
        return mt_fail_nomem(err, "rows of the embedding", most * sizeof(*e->rows.ids));
    e->rows.row_bytes = e->plan.units[0].grad_row_bytes;
    e->rows.table = mt_plane(e->p.planes, 0, MT_PLANE_GRAD);
    memset(e->rows.table, 0, e->plan.units[0].grad_out_bytes);
    return 0;
}

void mt_row_gradient_note(mt_engine *e)
{
    if (!e->rows.table)
        return;
    struct mt_used_rows used = mt_model_used_rows(mt_engine_inputs(e));
    memcpy(e->rows.ids, used.ids, used.n * sizeof(*used.ids));
    e->rows.n = used.n;
}

/*
 * A strip of all rows, from the last to the first: row k goes to place ids[k] >= k, where nothing is that has yet to be
 * moved. Places among the first n that get no row become zero.
 */
static void scatter_strip(void *ctx, size_t strip, int)
{
    const struct mt_row_gradient *r = ctx;
    size_t from = strip * STRIP, bytes = MT_MIN((size_t)STRIP, r->row_bytes - from), k = r->n;
    char *at = r->table + from;
    for (; k && (size_t)r->ids[k - 1] >= r->n; k--)
        memcpy(at + (size_t)r->ids[k - 1] * r->row_bytes, at + (k - 1) * r->row_bytes, bytes);
    for (size_t place = r->n; place-- > 0;) {
        if (!k || (size_t)r->ids[k - 1] != place)
            memset(at + place * r->row_bytes, 0, bytes);
        else if (--k != place)
            memcpy(at + place * r->row_bytes, at + k * r->row_bytes, bytes);
    }
}

int mt_row_gradient_scatter(mt_engine *e)
{
    if (mt_engine_is_pending(e))
        mt_pool_run(e->update_pool, scatter_strip, &e->rows, mt_div_up(e->rows.row_bytes, (size_t)STRIP));
    else
        memset(e->rows.table, 0, e->rows.n * e->rows.row_bytes);
    e->rows.n = mt_engine_is_pending(e) ? e->rows.n : 0;
    return 0;
}

/* Position in the list of the first row that is not before `row`. */
static size_t find_row(const struct mt_row_gradient *r, size_t row)
{
    size_t lo = 0, hi = r->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if ((size_t)r->ids[mid] < row)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool mt_row_gradient_read(const mt_engine *e, char *out, size_t first, size_t n)
{
    const struct mt_row_gradient *r = &e->rows;
    size_t size = mt_dtype_size(e->b.grad_dtype), from = first * size, end = from + n * size;
    if (!r->table)
        return false;
    memset(out, 0, n * size);
    for (size_t k = find_row(r, from / r->row_bytes); k < r->n; k++) {
        size_t row = (size_t)r->ids[k] * r->row_bytes, lo = MT_MAX(row, from), hi = MT_MIN(row + r->row_bytes, end);
        if (lo >= hi)
            break;
        memcpy(out + (lo - from), r->table + k * r->row_bytes + (lo - row), hi - lo);
    }
    return true;
}

static void clear_row(void *ctx, size_t k, int)
{
    const struct mt_row_gradient *r = ctx;
    memset(r->table + (size_t)r->ids[k] * r->row_bytes, 0, r->row_bytes);
}

void mt_row_gradient_clear(mt_engine *e)
{
    mt_pool_run(e->update_pool, clear_row, &e->rows, e->rows.n);
    e->rows.n = 0;
}
