/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_embedding *a = args;
    MT_OP_NEED(a->c && a->vocab);
    MT_OP_NEED(a->ids && aligned(a->table) && aligned(a->out));
    MT_OP_NEED(a->table != a->out);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_embedding *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = 2 * mt_op_bytes(a->n, a->c, a->dtype);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_embedding *)args = (struct mt_embedding){
        .n = n, .vocab = n, .c = c, .dtype = shape->dtype, .scale = 1, .ids = mt_example_ints(x, n, MT_OP_SCATTER, n),
        .table = mt_example_read(x, shape->dtype, n * c), .out = mt_example_write(x, shape->dtype, n * c)};
}

const struct mt_op mt_op_row_embedding = {
    .name = {"embedding"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_embedding),
    .count = offsetof(struct mt_embedding, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_embedding_bwd *a = args;
    MT_OP_NEED(a->c && a->vocab);
    MT_OP_NEED(a->run_ids && a->starts && a->order);
    MT_OP_NEED(aligned(a->dout) && aligned(a->dtable));
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_embedding_bwd *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->dim[2] = a->n_runs;
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n_runs, a->c, MT_F32);
}

/* The lengths of runs differ by at most one. */
static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], runs = (size_t)shape->dim[2];
    int32_t *starts = mt_example_host_ints(x, runs + 1, n, 0);
    for (size_t i = 0; starts && i <= runs; i++)
        starts[i] = (int32_t)(i * n / runs);
    *(struct mt_embedding_bwd *)args = (struct mt_embedding_bwd){
        .n = n, .vocab = runs, .c = c, .n_runs = runs, .dtype = shape->dtype, .scale = 1,
        .run_ids = mt_example_ints(x, runs, 1, 0), .starts = mt_example_upload(x, starts, runs + 1),
        .order = mt_example_ints(x, n, MT_OP_SCATTER, n), .dout = mt_example_fresh(x, shape->dtype, n * c),
        .dtable = mt_example_update(x, MT_F32, runs * c)};
}

const struct mt_op mt_op_row_embedding_bwd = {
    .name = {"embedding_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_RUNS},
    .args_bytes = sizeof(struct mt_embedding_bwd),
    .count = offsetof(struct mt_embedding_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};
