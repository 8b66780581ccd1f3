/* SPDX-License-Identifier: Apache-2.0 */
/* Merges the placer's queues into one program, in which waits are positions. */
#include <stdlib.h>

#include "base/mem.h"
#include "schedule/placed.h"

static int compare_entries(const void *a, const void *b)
{
    return mt_compare_keys(&((const struct mt_placed *)a)->key, &((const struct mt_placed *)b)->key);
}

static int compare_poisons(const void *a, const void *b)
{
    const struct mt_placed *x = a, *y = b;
    return (x->compute > y->compute) - (x->compute < y->compute);
}

static void sort(struct mt_placed_list *list, int (*compare)(const void *, const void *))
{
    if (list->n)
        qsort(list->e, list->n, sizeof(struct mt_placed), compare);
}

/* Position in the program of the last entry with a key <= k; the list is sorted, pos[] are its positions. */
static int32_t position_of(const struct mt_placed_list *list, const int32_t *pos, struct mt_copy_key k)
{
    size_t lo = 0, hi = list->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (mt_compare_keys(&list->e[mid].key, &k) <= 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? pos[lo - 1] : MT_NO_WAIT;
}

struct merge {
    const struct mt_program *draft;
    struct mt_placed_queues *q;
    struct mt_program *out;
    int32_t *load_pos, *store_pos, *group_end, *host_pos;
    size_t load, store, poison, update; /* next to emit */
};

static void emit(struct merge *m, const struct mt_placed *e)
{
    struct mt_instr *in = &m->out->instrs[m->out->n_instrs++];
    *in = *mt_placed_instr(m->draft, m->q, e);
    if (e->load.id != MT_NO_ENTRY)
        in->wait[mt_queue_number(in->lane, MT_Q_H2D)] = position_of(&m->q->loads, m->load_pos, e->load);
    if (e->store.id != MT_NO_ENTRY && in->queue != MT_Q_D2H)
        in->wait[mt_queue_number(in->lane, MT_Q_D2H)] = position_of(&m->q->stores, m->store_pos, e->store);
    if (e->compute != MT_NO_ENTRY && in->queue != MT_Q_COMPUTE)
        in->wait[mt_queue_number(in->lane, MT_Q_COMPUTE)] = m->group_end[e->compute];
    if (e->host != MT_NO_ENTRY)
        in->wait[MT_Q_HOST] = m->host_pos[e->host];
    for (int k = e->others; k != MT_NO_ENTRY; k = m->q->wait[k].next) {
        const struct mt_placed_wait *w = &m->q->wait[k];
        bool load = mt_queue_kind(w->queue) == MT_Q_H2D;
        int32_t at = load ? position_of(&m->q->loads, m->load_pos, w->key)
                          : position_of(&m->q->stores, m->store_pos, w->key);
        in->wait[w->queue] = MT_MAX(in->wait[w->queue], at);
    }
}

/* Copies that can start once compute entry c (its poisons included) has ended. */
static void emit_copies(struct merge *m, int c)
{
    struct mt_placed_queues *q = m->q;
    for (; m->store < q->stores.n && q->stores.e[m->store].key.release == c; m->store++) {
        m->store_pos[m->store] = (int32_t)m->out->n_instrs;
        emit(m, &q->stores.e[m->store]);
    }
    for (; m->load < q->loads.n && q->loads.e[m->load].key.release == c; m->load++) {
        m->load_pos[m->load] = (int32_t)m->out->n_instrs;
        emit(m, &q->loads.e[m->load]);
    }
    for (; m->update < q->updates.n && q->updates.e[m->update].key.release == c; m->update++)
        emit(m, &q->updates.e[m->update]);
}

static void merge_all(struct merge *m)
{
    struct mt_placed_queues *q = m->q;
    sort(&q->loads, compare_entries);
    sort(&q->stores, compare_entries);
    sort(&q->updates, compare_entries);
    sort(&q->poisons, compare_poisons);
    for (size_t i = 0; i < q->host.n; i++) {
        m->host_pos[i] = (int32_t)m->out->n_instrs;
        emit(m, &q->host.e[i]);
    }
    emit_copies(m, MT_NO_ENTRY);
    for (size_t c = 0; c < q->compute.n; c++) {
        emit(m, &q->compute.e[c]);
        m->group_end[c] = (int32_t)m->out->n_instrs - 1;
        /* a poison waits for the stores of the content it destroys, so these come before it */
        struct mt_program *out = m->out;
        bool poisoned = m->poison < q->poisons.n && q->poisons.e[m->poison].compute == (int)c;
        for (; poisoned && m->store < q->stores.n && q->stores.e[m->store].key.release == (int)c;
             m->store++) {
            m->store_pos[m->store] = (int32_t)out->n_instrs;
            emit(m, &q->stores.e[m->store]);
        }
        for (; m->poison < q->poisons.n && q->poisons.e[m->poison].compute == (int)c; m->poison++) {
            emit(m, &q->poisons.e[m->poison]);
            m->group_end[c] = (int32_t)out->n_instrs - 1;
        }
        emit_copies(m, (int)c);
    }
}

int mt_placed_merge(struct mt_program *out, struct mt_program *draft, struct mt_placed_queues *q,
                    struct mt_err *err)
{
    size_t total = q->compute.n + q->loads.n + q->stores.n + q->poisons.n + q->host.n + q->updates.n;
    *out = *draft;
    draft->objects = NULL; /* `out` owns them now */
    out->instrs = NULL;
    out->n_instrs = out->cap_instrs = 0;
    mt_grow(&out->instrs, &out->cap_instrs, total + 1, sizeof(*out->instrs));
    size_t n_pos = q->loads.n + q->stores.n + q->compute.n + q->host.n;
    MT_FREED int32_t *pos = mt_calloc(n_pos, sizeof(*pos));
    if (!out->instrs || !pos) {
        mt_program_finish(out);
        return mt_fail_nomem(err, "a step program", total * sizeof(*out->instrs));
    }
    struct merge m = {.draft = draft, .q = q, .out = out, .load_pos = pos, .store_pos = pos + q->loads.n};
    m.group_end = m.store_pos + q->stores.n;
    m.host_pos = m.group_end + q->compute.n;
    merge_all(&m);
    return 0;
}

