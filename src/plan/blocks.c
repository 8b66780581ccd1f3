/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of a run's schedule that are tried before the first is trained. */
#include "base/mem.h"
#include "config/blocks.h"
#include "plan/resolve.h"

struct schedule {
    const struct mt_plan_blocks *p;
    struct mt_blocks b;
    uint64_t *elems; /* [n_layers] that each trains once its block is */
    uint64_t *phase; /* [b.n] that trains the block, the first of those that are left; NONE */
};
#define NONE UINT64_MAX

/* Whether it is trained with its layer's block. */
static bool takes_turns(const struct mt_layout *l, const struct mt_tensor *t)
{
    return l->units[t->unit].layer >= 0 && (t->trainable || t->waits);
}

static int read_schedule(struct schedule *s, struct mt_err *err)
{
    const struct mt_layout *l = s->p->layout;
    uint64_t end = s->p->steps ? mt_div_up(s->p->steps, s->b.steps) : UINT64_MAX;
    uint64_t first = s->p->of.resumed ? s->p->of.resumed->phase : 0;
    int rc = MT_NEW(&s->elems, s->b.n_layers, "the blocks", err) ?: MT_NEW(&s->phase, s->b.n, "the blocks", err);
    if (rc)
        return rc;
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors; t++)
        if (takes_turns(l, t))
            s->elems[l->units[t->unit].layer] += t->n;
    for (uint64_t k = 0; k < s->b.n; k++)
        s->phase[k] = NONE;
    for (uint64_t p = first; p < end && p < first + 2 * s->b.n; p++) { /* two rounds have all */
        uint64_t *of = &s->phase[mt_blocks_at(&s->b, p)];
        *of = MT_MIN(*of, p);
    }
    return 0;
}

static bool are_alike(const struct schedule *s, uint64_t x, uint64_t y)
{
    const struct mt_hf_config *hf = s->p->of.hf;
    int a, a_end, b, b_end;
    mt_blocks_layers(&s->b, x, &a, &a_end);
    mt_blocks_layers(&s->b, y, &b, &b_end);
    bool alike = a_end - a == b_end - b;
    for (; alike && a < a_end; a++, b++)
        alike = s->elems[a] == s->elems[b] && mt_layer_of(hf, a) == mt_layer_of(hf, b);
    return alike;
}

/* Of blocks with equal layers the lowest takes the most: its backward passes through all layers above it. */
static bool takes_most(const struct schedule *s, uint64_t block)
{
    bool most = s->phase[block] != NONE;
    for (uint64_t k = 0; k < block && most; k++)
        most = s->phase[k] == NONE || !are_alike(s, k, block);
    return most;
}

static int try_block(const struct schedule *s, uint64_t block, struct mt_err *err)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL, *halves = NULL;
    const struct mt_lay_out *o = &s->p->of;
    struct mt_resumed resumed = o->resumed ? *o->resumed : (struct mt_resumed){.dir = NULL};
    int first, end;
    resumed.phase = s->phase[block];
    mt_blocks_layers(&s->b, block, &first, &end);
    int rc = mt_plan_lay_out(&layout, &halves, o->cfg, o->hf, o->dir, &resumed, err)
          ?: s->p->fits(s->p->ctx, &layout, &halves, err);
    return rc ? mt_fail_prefix(err, rc, "layers %d to %d, which train.blocks trains from step %llu on", first, end - 1,
                               (unsigned long long)(resumed.phase * s->b.steps)) : 0;
}

int mt_plan_check_blocks(const struct mt_plan_blocks *p, struct mt_err *err)
{
    struct schedule s = {.p = p};
    int rc = mt_blocks_init(&s.b, p->of.cfg, p->of.hf->n_layers, err);
    if (rc || !s.b.n)
        return rc;
    uint64_t now = p->of.resumed ? mt_blocks_at(&s.b, p->of.resumed->phase) : 0;
    rc = read_schedule(&s, err);
    for (uint64_t k = 0; k < s.b.n && !rc; k++)
        if (k != now && takes_most(&s, k))
            rc = try_block(&s, k, err);
    free(s.elems);
    free(s.phase);
    return rc;
}

uint64_t mt_plan_merged_bytes(const struct mt_layout *l)
{
    uint64_t n = 0;
    for (size_t i = 0; i < l->n_adapters; i++)
        for (size_t k = 0; k < l->adapters[i].n_targets; k++)
            n += (uint64_t)l->adapters[i].in * l->adapters[i].target[k].out;
    for (size_t i = 0; i < l->n_tensors; i++)
        n += l->tensors[i].trainable && !l->tensors[i].adapter ? l->tensors[i].n : 0;
    return n * mt_dtype_size(MT_BF16);
}

uint64_t mt_plan_overlay_bytes(const struct mt_plan_blocks *p)
{
    struct mt_blocks b;
    const struct mt_config *c = p->of.cfg;
    uint64_t phase = p->of.resumed->phase, every = (uint64_t)c->adapter.merge_every, n = 0;
    if (!p->steps || mt_blocks_init(&b, c, p->of.hf->n_layers, NULL) || (!every && !b.n))
        return 0;
    uint64_t switches = (p->steps - 1) / (every ? every : b.steps);
    if (every) /* each is whole, and the one before it stays until the next checkpoint */
        return mt_plan_merged_bytes(p->layout) * MT_MIN(switches - MT_MIN(phase, switches), (uint64_t)(phase ? 1 : 2));
    for (const struct mt_tensor *t = p->layout->tensors; t < p->layout->tensors + p->layout->n_tensors; t++)
        n += takes_turns(p->layout, t) ? t->n : 0;
    return n / b.n * (MT_MIN(switches, b.n) - MT_MIN(phase, b.n)) * mt_dtype_size(MT_BF16);
}
