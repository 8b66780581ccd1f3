/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void embedding(struct mt_op_walk *w, struct mt_embedding *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->vocab = n; a->scale = 1; a->ids = mt_example_ints(w->x, n, MT_OP_SCATTER, n));
    MT_ARRAY(w, a->table, READ, t, n * c, 1);
    MT_ARRAY(w, a->out, WRITE, t, n * c, 1);
    MT_NEED(w, a->c && a->vocab && a->ids && a->table != a->out);
}

MT_OP_WALK(embedding, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* n tokens in runs whose lengths differ by at most one. */
static void take_runs(mt_example *x, struct mt_embedding_bwd *a)
{
    int32_t *starts = mt_example_host_ints(x, a->n_runs + 1, a->n, 0);
    for (size_t i = 0; starts && i <= a->n_runs; i++)
        starts[i] = (int32_t)(i * a->n / a->n_runs);
    a->run_ids = mt_example_ints(x, a->n_runs, 1, 0);
    a->starts = mt_example_upload(x, starts, a->n_runs + 1);
    a->order = mt_example_ints(x, a->n, MT_OP_SCATTER, a->n);
}

static void embedding_bwd(struct mt_op_walk *w, struct mt_embedding_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c), runs = mt_op_dim(w, &a->n_runs);
    MT_FILL(w, a->vocab = runs; a->scale = 1; take_runs(w->x, a));
    MT_ARRAY(w, a->dout, FRESH, mt_op_dtype(w, &a->dtype), n * c, 1);
    MT_ARRAY(w, a->dtable, UPDATE, MT_F32, runs * c, 2);
    MT_NEED(w, a->c && a->vocab && a->run_ids && a->starts && a->order);
}

MT_OP_WALK(embedding_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_RUNS});
