/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_embedding(const struct mt_embedding *a)
{
    MT_OP_NEED(a->c && a->vocab);
    MT_OP_NEED(a->ids && aligned(a->table) && aligned(a->out));
    MT_OP_NEED(a->table != a->out);
    return NULL;
}

static void cost_embedding(const struct mt_embedding *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, 2, out);
}

static void fill_embedding(mt_example *x, const struct mt_metered *shape, struct mt_embedding *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_embedding){
        .n = n, .vocab = n, .c = c, .dtype = shape->dtype, .scale = 1, .ids = mt_example_ints(x, n, MT_OP_SCATTER, n),
        .table = mt_example_read(x, shape->dtype, n * c), .out = mt_example_write(x, shape->dtype, n * c)};
}

MT_OP_ROW(embedding, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

static const char *check_embedding_bwd(const struct mt_embedding_bwd *a)
{
    MT_OP_NEED(a->c && a->vocab);
    MT_OP_NEED(a->run_ids && a->starts && a->order);
    MT_OP_NEED(aligned(a->dout) && aligned(a->dtable));
    return NULL;
}

static void cost_embedding_bwd(const struct mt_embedding_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c, a->n_runs));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n_runs, a->c, MT_F32);
}

/* The lengths of runs differ by at most one. */
static void fill_embedding_bwd(mt_example *x, const struct mt_metered *shape, struct mt_embedding_bwd *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], runs = (size_t)shape->dim[2];
    int32_t *starts = mt_example_host_ints(x, runs + 1, n, 0);
    for (size_t i = 0; starts && i <= runs; i++)
        starts[i] = (int32_t)(i * n / runs);
    *a = (struct mt_embedding_bwd){
        .n = n, .vocab = runs, .c = c, .n_runs = runs, .dtype = shape->dtype, .scale = 1,
        .run_ids = mt_example_ints(x, runs, 1, 0), .starts = mt_example_upload(x, starts, runs + 1),
        .order = mt_example_ints(x, n, MT_OP_SCATTER, n), .dout = mt_example_fresh(x, shape->dtype, n * c),
        .dtable = mt_example_update(x, MT_F32, runs * c)};
}

MT_OP_ROW(embedding_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_RUNS});
