/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/cost.h"

#include <stdlib.h>

#include "base/mem.h"
#include "engine/dry.h"
#include "engine/share.h"
#include "kinds/kinds.h"

struct entry {
    uint8_t op;
    uint64_t roles; /* roles of its operands: a bit each, and another for each that it does not read */
    bool last; /* of the smaller last micro-batch */
    int unit_class;
    struct mt_cost cost;
};

struct mt_cost_table {
    const struct mt_machine *machine;
    void (*on_call)(void *ctx, enum mt_dev_op op, const void *args);
    void *ctx;
    struct mt_engine_params engine_params; /* of the dry engine */
    mt_device *meter;
    mt_dry_engine *engine;
    struct mt_batch batch[2]; /* a full micro-batch; the last one if it is smaller */
    size_t n_batches, n_micro;
    int *unit_class; /* [n_units] the first unit with the same instructions */
    struct entry *entries;
    size_t n_entries, cap_entries;
    struct mt_metered *ops;
    size_t n_ops, cap_ops;
    struct mt_cost sum; /* of the instruction being priced */
    bool failed;
    struct mt_engine_params given; /* as it was created with */
    mt_cost_table *next;           /* for experts that run in another way */
};

static void on_operation(void *ctx, const struct mt_metered *op, const void *args)
{
    mt_cost_table *t = ctx;
    if (t->on_call)
        t->on_call(t->ctx, op->op, args);
    t->sum.seconds += t->machine ? mt_machine_op_seconds(t->machine, op) : 0;
    t->sum.flops += op->flops;
    t->sum.bytes += op->bytes;
    for (size_t i = 0; i < t->n_ops; i++)
        if (mt_same_operation(&t->ops[i], op))
            return;
    if (mt_grow(&t->ops, &t->cap_ops, t->n_ops + 1, sizeof(*t->ops)))
        t->ops[t->n_ops++] = *op;
    else
        t->failed = true;
}

static int classify_units(mt_cost_table *t, struct mt_err *err)
{
    const struct mt_layout *l = t->engine_params.layout;
    int rc = MT_NEW(&t->unit_class, l->n_units, "a cost table", err);
    for (size_t u = 0; u < l->n_units && !rc; u++)
        while (!mt_layout_alike(l, (size_t)t->unit_class[u], u))
            t->unit_class[u]++;
    return rc;
}

/* Rows of one document each, with a loss on every token and ids spread over the vocabulary; of one in chunks a chunk
 * that sees as many tokens as they do on average. */
static int make_batch(mt_cost_table *t, size_t rows, struct mt_err *err)
{
    struct mt_batch *b = &t->batch[t->n_batches];
    size_t chunks = mt_row_chunks(&t->engine_params.numerics), len = t->engine_params.max_len / chunks;
    size_t vocab = (size_t)t->engine_params.layout->cfg.vocab;
    const struct mt_cache_shape *cache = &t->engine_params.cache;
    size_t past = 0;
    if (cache->slots) { /* generation: a new token of each text at the end of its length */
        rows = cache->slots;
        past = len - 1;
        len = 1;
    }
    int rc = mt_batch_init(b, rows * len, rows, err);
    if (!rc && cache->slots)
        rc = mt_batch_init_cache(b, cache, err);
    if (rc)
        return rc;
    t->n_batches++;
    MT_FREED uint32_t *ids = NULL;
    rc = MT_NEW(&ids, len, "a cost table", err);
    for (size_t r = 0; r < rows && !rc; r++) {
        for (size_t i = 0; i < len; i++)
            ids[i] = (uint32_t)(((uint64_t)r * len + i) * 2654435761u % vocab);
        rc = cache->slots ? mt_batch_go_on(b, past, ids, len, 1, err) : mt_batch_add(b, ids, NULL, len, 0, err);
    }
    b->row_before = b->doc_before = b->doc_after = (chunks - 1) * len / 2;
    b->max_doc_len += b->doc_before;
    mt_batch_seal(b);
    return rc;
}

static int make_engine(mt_cost_table *t, struct mt_err *err)
{
    const char *kind = t->machine ? mt_machine_device_kind(t->machine) : mt_device_limits(t->engine_params.dev)->kind;
    struct mt_meter_params mp = {
        .kind = mt_device_kind(kind),
        .budget_bytes = SIZE_MAX / 2,
        .n_threads = t->machine ? (int)t->machine->rate[MT_RATE_CORES].value : (int)t->engine_params.placement.threads,
        .capability = t->machine ? (int)t->machine->rate[MT_RATE_CAPABILITY].value
                                 : mt_device_limits(t->engine_params.dev)->capability,
        .fn = on_operation,
        .ctx = t,
    };
    int rc = mt_device_create_meter(&t->meter, &mp, err);
    if (rc)
        return rc;
    t->engine_params.dev = t->meter;
    t->engine_params.planes = NULL;
    const struct mt_groups groups = mt_engine_groups(&t->engine_params);
    size_t tokens = t->engine_params.cache.slots ? t->batch[0].n_tokens : t->engine_params.max_tokens;
    t->engine_params.assumed_rows = mt_group_most(groups, t->n_micro) * tokens;
    if (mt_groups_n(groups) > 1)
        t->engine_params.placement.expert_sums = 0;
    t->engine_params.numerics.groups = 1; /* whose rows these are */
    t->engine_params.max_micro = t->n_batches;
    if (!t->engine_params.cache.slots)
        t->engine_params.max_docs = (size_t)t->engine_params.numerics.micro_batch;
    rc = mt_dry_engine_create(&t->engine, &t->engine_params, err);
    return rc ? rc : mt_dry_engine_upload(t->engine, t->batch, t->n_batches, err);
}

int mt_cost_table_create(mt_cost_table **out, const struct mt_cost_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_cost_table_destroy) mt_cost_table *t = NULL;
    int rc = MT_NEW(&t, 1, "a cost table", err);
    if (rc)
        return rc;
    t->machine = p->machine;
    t->on_call = p->on_call;
    t->ctx = p->ctx;
    t->engine_params = t->given = *p->engine;
    if (t->given.train) /* steps that train have no cache */
        t->engine_params.cache.slots = 0;
    size_t micro = (size_t)p->engine->numerics.micro_batch, rows = (size_t)p->engine->numerics.rows_per_step;
    t->n_micro = p->engine->max_micro;
    size_t rest = rows % micro;
    rc = classify_units(t, err) ?: make_batch(t, MT_MIN(micro, rows), err);
    if (!rc && rest && t->n_micro > 1)
        rc = make_batch(t, rest, err);
    rc = rc ?: make_engine(t, err);
    if (!rc)
        *out = MT_GIVE(t);
    return rc;
}

int mt_cost_table_as(mt_cost_table **out, mt_cost_table *t, const struct mt_placement *placement, struct mt_err *err)
{
    for (*out = t;; t = *out = t->next) {
        const struct mt_placement *own = &t->given.placement;
        if (own->expert_sums == placement->expert_sums && own->expert_streams == placement->expert_streams)
            return 0;
        if (!t->next)
            break;
    }
    struct mt_engine_params p = t->given;
    p.placement.expert_sums = placement->expert_sums;
    p.placement.expert_streams = placement->expert_streams;
    const struct mt_cost_params params = {&p, t->machine, t->on_call, t->ctx};
    int rc = mt_cost_table_create(&t->next, &params, err);
    *out = t->next;
    return rc;
}

void mt_cost_table_destroy(mt_cost_table **table)
{
    mt_cost_table *t = *table;
    if (!t)
        return;
    mt_cost_table_destroy(&t->next);
    mt_dry_engine_destroy(&t->engine);
    mt_device_destroy(&t->meter);
    for (size_t i = 0; i < t->n_batches; i++)
        mt_batch_finish(&t->batch[i]);
    free(t->unit_class);
    free(t->entries);
    free(t->ops);
    free(t);
    *table = NULL;
}

static int price(mt_cost_table *t, const struct mt_program *prog, const struct mt_instr *in, bool last,
                 struct mt_err *err)
{
    struct mt_instr one = *in;
    one.mb = last ? 1 : 0;
    t->sum = (struct mt_cost){0};
    int rc = mt_dry_engine_submit(t->engine, prog, &one, err);
    if (!rc && t->failed)
        rc = mt_fail_nomem(err, "a cost table", t->n_ops * sizeof(*t->ops));
    return rc;
}

static uint64_t roles_of(const struct mt_instr *in)
{
    uint64_t roles = 0;
    for (int k = 0; k < in->n_operands; k++)
        roles |= (uint64_t)(in->operand[k].access & MT_READ ? 1 : 1 << MT_N_ROLES | 1) << in->operand[k].role;
    return roles;
}

int mt_cost_of(mt_cost_table *t, const struct mt_program *prog, const struct mt_instr *in,
               struct mt_cost *out, struct mt_err *err)
{
    bool last = t->n_batches > 1 && (size_t)in->mb + 1 == t->n_micro;
    struct entry key = {in->op, roles_of(in), last, t->unit_class[in->unit], {0}};
    for (const struct entry *e = t->entries; e < t->entries + t->n_entries; e++) {
        if (e->op == key.op && e->roles == key.roles && e->last == key.last && e->unit_class == key.unit_class) {
            *out = e->cost;
            return 0;
        }
    }
    int rc = price(t, prog, in, last, err);
    if (rc)
        return rc;
    key.cost = t->sum;
    if (!mt_grow(&t->entries, &t->cap_entries, t->n_entries + 1, sizeof(*t->entries)))
        return mt_fail_nomem(err, "a cost table", t->n_entries * sizeof(*t->entries));
    t->entries[t->n_entries++] = key;
    *out = key.cost;
    return 0;
}

const struct mt_metered *mt_cost_operations(const mt_cost_table *t, size_t *n)
{
    *n = t->n_ops;
    return t->ops;
}
