/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of recipes, and running their tapes. */

#include "base/mem.h"
#include "model/rule.h"

/* --- memory ------------------------------------------------------------------------------------- */

static size_t buffer_bytes(const struct mt_recipe *r, const struct mt_buffer *b, const struct mt_model_params *p,
                           mt_device *dev)
{
    const struct mt_node *n = &r->node[b->of];
    size_t bytes = 0;
    if (b->kind == MT_BUFFER_WORK)
        bytes = n->rule->scratch(r, n, p, dev);
    else if (b->kind == MT_BUFFER_SCRATCH)
        bytes = p->max_tokens * b->width * (b->f32 ? sizeof(float) : mt_dtype_size(p->dtype));
    return mt_align_up(bytes, MT_RECORD_ALIGN);
}

static bool at_once(const struct mt_buffer *a, const struct mt_buffer *b)
{
    return a->from <= b->to && b->from <= a->to;
}

/* Is the shared buffer free while b is used? */
static bool is_free(const struct mt_tape *t, const struct mt_places *places, int b, ptrdiff_t shared)
{
    for (int i = 0; i < b; i++)
        if (places->at[i] == shared && at_once(&t->buffer[i], &t->buffer[b]))
            return false;
    return true;
}

/* First fit, among the buffers that are used at the same time; hidden states go to the model's own where these are
 * free. */
static size_t place(const struct mt_recipe *r, const struct mt_tape *t, const struct mt_model_params *p, mt_device *dev,
                    struct mt_places *places)
{
    size_t bytes[MT_TAPE_BUFFERS], most = 0;
    for (int b = 0; b < t->n_buffers; b++) {
        const struct mt_buffer *buffer = &t->buffer[b];
        bool hidden = buffer->kind == MT_BUFFER_SCRATCH && buffer->width == r->value[0].width && !buffer->f32;
        size_t at = 0;
        bytes[b] = buffer_bytes(r, buffer, p, dev);
        places->at[b] = MT_PLACE_H;
        if (!bytes[b])
            continue;
        if (hidden && is_free(t, places, b, MT_PLACE_H))
            continue;
        places->at[b] = MT_PLACE_DH;
        if (hidden && is_free(t, places, b, MT_PLACE_DH))
            continue;
        for (int i = 0; i < b; i++)
            if (places->at[i] >= 0 && bytes[i] && at_once(&t->buffer[i], buffer) &&
                at < (size_t)places->at[i] + bytes[i] && (size_t)places->at[i] < at + bytes[b]) {
                at = (size_t)places->at[i] + bytes[i];
                i = -1; /* others may be there */
            }
        places->at[b] = (ptrdiff_t)at;
        most = MT_MAX(most, at + bytes[b]);
    }
    return places->bytes = most;
}

size_t mt_recipe_place(const struct mt_recipe *r, const struct mt_model_params *p, mt_device *dev,
                       struct mt_recipe_places *places)
{
    struct mt_recipe_places own, *to = places ? places : &own;
    size_t most = place(r, &r->finish, p, dev, &to->finish);
    for (unsigned kept = 0; kept < 1u << r->n_segments; kept++)
        most = MT_MAX(most, place(r, &r->prepare[kept], p, dev, &to->prepare[kept]));
    return p->backward ? MT_MAX(most, place(r, &r->backward, p, dev, &to->backward)) : most;
}

size_t mt_recipe_workspace(const struct mt_recipe *r, const struct mt_model_params *p, mt_device *dev)
{
    size_t most = 0;
    for (int i = 0; i < r->n_nodes; i++)
        if (r->node[i].rule->workspace)
            most = MT_MAX(most, r->node[i].rule->workspace(r, &r->node[i], p, dev));
    return most;
}

/* --- running ------------------------------------------------------------------------------------ */

/* A tape that runs: the addresses of its buffers. */
struct player {
    const struct mt_part_run *run;
    const struct mt_recipe *r;
    const struct mt_tape *t;
    void *at[MT_TAPE_BUFFERS];
    bool f32[MT_TAPE_BUFFERS];
};

/* The micro-batch's rows of a value of the unit, or of its gradient; NULL: this run does not use it. */
static void *rows_of(const struct mt_part_run *run, const struct mt_recipe_value *v, bool gradient)
{
    enum mt_role role = (enum mt_role)(gradient ? v->grad_role : v->role);
    char *rows = mt_value(run, role);
    size_t first = mt_roles[role].life == MT_LIFE_GROUP ? mt_model_first_row(run->m, run->of->mb) : 0;
    return rows ? rows + first * v->width * mt_recipe_elem(v, run->m->dt) : NULL;
}

static void find_buffers(struct player *p, const struct mt_places *places, void *y)
{
    const struct mt_part_run *run = p->run;
    struct mt_part_record at = run->record;
    void *record[MT_RECIPE_VALUES];
    mt_recipe_lay_out_record(p->r, &run->shape, &at, record);
    for (int b = 0; b < p->t->n_buffers; b++) {
        const struct mt_buffer *buffer = &p->t->buffer[b];
        ptrdiff_t place = places->at[b];
        void *scratch = place == MT_PLACE_H    ? run->m->h
                        : place == MT_PLACE_DH ? run->m->dh
                                               : (char *)run->scratch + place;
        bool valued = buffer->kind == MT_BUFFER_RECORD || buffer->kind == MT_BUFFER_ROLE;
        p->f32[b] = valued ? p->r->value[buffer->of].f32 : buffer->f32;
        p->at[b] = buffer->kind == MT_BUFFER_X        ? (void *)(uintptr_t)run->x
                   : buffer->kind == MT_BUFFER_ROLE   ? rows_of(run, &p->r->value[buffer->of], false)
                   : buffer->kind == MT_BUFFER_GRAD   ? rows_of(run, &p->r->value[buffer->of], true)
                   : buffer->kind == MT_BUFFER_Y      ? y
                   : buffer->kind == MT_BUFFER_DX     ? run->dx
                   : buffer->kind == MT_BUFFER_RECORD ? record[buffer->of]
                                                      : scratch;
    }
}

static void *address(const struct player *p, struct mt_at at)
{
    if (at.buffer < 0)
        return NULL;
    size_t size = p->f32[at.buffer] ? sizeof(float) : mt_dtype_size(p->run->m->dt);
    return (char *)p->at[at.buffer] + at.first * size;
}

/* A view of the node, in the memory of an action. */
static struct mt_heads heads(const struct player *p, struct mt_at at, const struct mt_view *v)
{
    return (struct mt_heads){address(p, at), at.ld, at.stride, v->heads, v->dim};
}

static struct mt_rule_run run_of(const struct player *p, const struct mt_action *a)
{
    const struct mt_node *n = &p->r->node[a->node];
    struct mt_rule_run r = {.run = p->run, .m = p->run->m, .n = p->run->in->n_tokens, .recipe = p->r, .node = n,
                            .outs = a->outs, .add = address(p, a->add)};
    for (int i = 0; i < MT_NODE_INS; i++) {
        r.in[i] = heads(p, a->in[i], &n->in[i]);
        r.d_in[i] = heads(p, a->d_in[i], &n->in[i]);
    }
    for (int i = 0; i < MT_NODE_OUTS; i++) {
        r.out[i] = heads(p, a->out[i], &n->out[i]);
        r.d_out[i] = heads(p, a->d_out[i], &n->out[i]);
    }
    r.workspace = a->workspace < 0 ? NULL : p->at[a->workspace];
    if (a->remade) { /* only if that linear layer's backward needs it */
        const struct mt_param w = p->run->part->param[p->r->node[a->remade - 1].param[0]];
        r.remake = mt_grad_of(p->run->g, w) || w.adapter;
    }
    return r;
}

static int sum(const struct player *p, const struct mt_action *a, struct mt_err *err)
{
    const mt_model *m = p->run->m;
    struct mt_add add = {.n = p->run->in->n_tokens * a->in[0].ld,
                         .dtype = m->dt,
                         .a = address(p, a->in[0]),
                         .b = address(p, a->in[1]),
                         .out = address(p, a->out[0])};
    return mt_op_add(m->dev, &add, err);
}

/* Does the action make a value of the unit that this run does not use? */
static bool is_idle(const struct player *p, const struct mt_action *a)
{
    int out = a->out[0].buffer;
    return a->act == MT_ACT_FORWARD && out >= 0 && p->t->buffer[out].kind == MT_BUFFER_ROLE && !p->at[out];
}

static int act(const struct player *p, const struct mt_action *a, struct mt_err *err)
{
    const struct mt_rule *rule = p->r->node[a->node].rule;
    struct mt_rule_run r = run_of(p, a);
    switch (a->act) {
    case MT_ACT_FORWARD:
        return rule->forward(&r, err);
    case MT_ACT_BACKWARD:
        return rule->backward ? rule->backward(&r, err) : 0;
    case MT_ACT_INPUT_GRAD:
        return rule->input_grad(&r, err);
    case MT_ACT_WEIGHT_GRAD:
        return rule->weight_grad(&r, err);
    default:
        return sum(p, a, err);
    }
}

static int play(const struct mt_part_run *run, const struct mt_tape *t, const struct mt_places *places, void *y,
                struct mt_err *err)
{
    struct player p = {.run = run, .r = run->part->recipe, .t = t};
    int rc = 0;
    find_buffers(&p, places, y);
    for (int i = 0; i < t->n_actions && !rc; i++)
        rc = is_idle(&p, &t->action[i]) ? 0 : act(&p, &t->action[i], err);
    return rc;
}

static const struct mt_recipe_places *places_of(const struct mt_part_run *run)
{
    return &run->m->places[run->part->recipe->index];
}

int mt_recipe_prepare(const struct mt_part_run *run, struct mt_err *err)
{
    unsigned kept = run->kept & ((1u << run->part->recipe->n_segments) - 1);
    return play(run, &run->part->recipe->prepare[kept], &places_of(run)->prepare[kept], NULL, err);
}

int mt_recipe_finish(const struct mt_part_run *run, void *y, struct mt_err *err)
{
    return play(run, &run->part->recipe->finish, &places_of(run)->finish, y, err);
}

int mt_recipe_backward(const struct mt_part_run *run, struct mt_err *err)
{
    return play(run, &run->part->recipe->backward, &places_of(run)->backward, NULL, err);
}
