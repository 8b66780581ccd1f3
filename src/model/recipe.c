/* SPDX-License-Identifier: Apache-2.0 */
#include "model/recipe.h"

#include <assert.h>

#include "base/mem.h"
#include "model/rule.h"

/* --- the list ----------------------------------------------------------------------------------- */

struct mt_view mt_recipe_value(struct mt_recipe *r, const char *name, size_t width, bool f32, int segment)
{
    assert(r->n_values < MT_RECIPE_VALUES);
    r->value[r->n_values] = (struct mt_recipe_value){.name = name, .width = width, .f32 = f32, .segment = segment};
    return (struct mt_view){r->n_values++, 0, 1, width, width};
}

struct mt_view mt_recipe_rows(struct mt_recipe *r, const char *name, size_t width, int role, int grad_role)
{
    struct mt_view v = mt_recipe_value(r, name, width, false, MT_UNKEPT);
    r->value[v.value].role = role;
    r->value[v.value].grad_role = grad_role;
    return v;
}

struct mt_view mt_view_of(struct mt_view v, size_t first, size_t heads, size_t dim, size_t stride)
{
    return (struct mt_view){v.value, v.first + first, heads, dim, stride};
}

struct mt_view mt_recipe_x(const struct mt_recipe *r)
{
    return (struct mt_view){0, 0, 1, r->value[0].width, r->value[0].width};
}

struct mt_node *mt_node_of(struct mt_recipe *r, const struct mt_rule *rule)
{
    assert(r->n_nodes < MT_RECIPE_NODES);
    struct mt_node *n = &r->node[r->n_nodes++];
    *n = (struct mt_node){.rule = rule, .number = 1};
    for (int i = 0; i < MT_NODE_INS; i++)
        n->in[i] = mt_no_view();
    for (int i = 0; i < MT_NODE_OUTS; i++)
        n->out[i] = mt_no_view();
    for (int i = 0; i < MT_NODE_PARAMS; i++)
        n->param[i] = -1;
    return n;
}

struct mt_view mt_norm_of(struct mt_recipe *r, const char *name, struct mt_view x, int role, double eps, int stats)
{
    struct mt_node *n = mt_node_of(r, &mt_rule_norm);
    n->in[0] = x;
    n->out[0] = mt_recipe_value(r, name, x.dim, false, MT_UNKEPT);
    n->out[1] = mt_recipe_value(r, "statistics", 1, true, stats);
    n->param[0] = role;
    n->number = eps;
    return n->out[0];
}

struct mt_view mt_linear_of(struct mt_recipe *r, const char *name, struct mt_view x, int role, int bias, size_t width,
                            int segment)
{
    struct mt_node *n = mt_node_of(r, &mt_rule_linear);
    n->in[0] = x;
    n->out[0] = mt_recipe_value(r, name, width, false, segment);
    n->param[0] = role;
    n->param[1] = bias;
    r->linears |= 1u << role;
    return n->out[0];
}

struct mt_view mt_linear_add_of(struct mt_recipe *r, struct mt_view x, int role, int bias, struct mt_view residual)
{
    struct mt_view y = mt_linear_of(r, "y", x, role, bias, residual.dim, MT_UNKEPT);
    r->node[r->n_nodes - 1].in[1] = residual;
    return y;
}

struct mt_view mt_activation_of(struct mt_recipe *r, struct mt_view gate_up, int curve)
{
    const struct mt_layer_spec *s = r->spec;
    bool bent = s->activation == MT_ACTIVATION_XIELU;
    struct mt_node *n = mt_node_of(r, bent ? &mt_rule_xielu : s->ungated ? &mt_rule_activate : &mt_rule_glu);
    n->kind = !s->ungated                            ? (int)mt_activation(s)
              : s->activation == MT_ACTIVATION_RELU2 ? (int)MT_ACTIVATE_RELU2
                                                     : (int)MT_ACTIVATE_GELU_TANH;
    n->in[0] = gate_up;
    n->out[0] = mt_recipe_value(r, "act", (size_t)s->ffn, false, MT_UNKEPT);
    n->param[0] = curve;
    return n->out[0];
}

struct mt_view mt_sum_of(struct mt_recipe *r, struct mt_view a, struct mt_view b, double factor)
{
    struct mt_node *n = mt_node_of(r, &mt_rule_sum);
    n->in[0] = a;
    n->in[1] = b;
    n->out[0] = mt_recipe_value(r, "y", a.dim, false, MT_UNKEPT);
    n->number = factor;
    return n->out[0];
}

struct mt_view mt_scaled_of(struct mt_recipe *r, struct mt_view y)
{
    struct mt_node *n = mt_node_of(r, &mt_rule_scaled);
    n->in[0] = n->out[0] = y;
    return y;
}

static struct mt_node *pair_node(struct mt_recipe *r, const struct mt_rule *rule, struct mt_pair x, struct mt_pair y)
{
    struct mt_node *n = mt_node_of(r, rule);
    n->in[0] = x.q;
    n->in[1] = x.k;
    n->out[0] = y.q;
    n->out[1] = y.k;
    return n;
}

struct mt_node *mt_head_norm_of(struct mt_recipe *r, struct mt_pair x, struct mt_pair y, double eps, int flags,
                                int stats)
{
    struct mt_node *n = pair_node(r, &mt_rule_head_norm, x, y);
    n->out[2] = mt_recipe_value(r, "statistics of heads", x.q.heads, true, stats);
    if (x.k.value >= 0)
        n->out[3] = mt_recipe_value(r, "statistics of keys", x.k.heads, true, stats);
    n->number = eps;
    n->kind = flags;
    return n;
}

struct mt_node *mt_rope_of(struct mt_recipe *r, struct mt_pair x, struct mt_pair y, int rope, int q_rope)
{
    struct mt_node *n = pair_node(r, &mt_rule_rope, x, y);
    n->number = 0;
    n->kind = rope;
    n->q_rope = q_rope;
    return n;
}

struct mt_view mt_attend_of(struct mt_recipe *r, struct mt_view q, struct mt_view k, struct mt_view v, int segment)
{
    struct mt_view o = mt_recipe_value(r, "o", q.heads * v.dim, false, segment);
    struct mt_node *n = mt_node_of(r, &mt_rule_attend);
    n->in[0] = q;
    n->in[1] = k;
    n->in[2] = v;
    n->out[0] = mt_view_of(o, 0, q.heads, v.dim, v.dim);
    n->out[1] = mt_recipe_value(r, "log-sum-exp", q.heads, true, segment);
    return n->out[0];
}

struct mt_view mt_other_of(struct mt_recipe *r, const struct mt_rule *rule, const char *name, struct mt_view x,
                           struct mt_view with)
{
    struct mt_node *n = mt_node_of(r, rule);
    n->in[0] = x;
    n->in[1] = with;
    n->out[0] = mt_view_of(mt_recipe_value(r, name, x.heads * x.dim, false, MT_UNKEPT), 0, x.heads, x.dim, x.dim);
    return n->out[0];
}

struct mt_view mt_leave(struct mt_recipe *r, struct mt_view x, struct mt_view in, int role, int bias, int after,
                        int segment)
{
    double factor = r->spec->residual;
    if (after < 0 && factor == 1)
        return mt_linear_add_of(r, in, role, bias, x);
    struct mt_view out = mt_linear_of(r, "out", in, role, bias, x.dim, after < 0 ? MT_UNKEPT : segment);
    if (after >= 0)
        out = mt_norm_of(r, "normed", out, after, r->spec->after_eps, MT_UNKEPT);
    return mt_sum_of(r, x, out, factor);
}

/* --- what follows from it ----------------------------------------------------------------------- */

void mt_recipe_lay_out_record(const struct mt_recipe *r, const struct mt_part_shape *s, struct mt_part_record *at,
                              void *of[MT_RECIPE_VALUES])
{
    for (int v = 0; v < r->n_values; v++)
        if (r->value[v].segment >= 0)
            of[v] = mt_record_take(at, r->value[v].segment,
                                   s->max_tokens * r->value[v].width * mt_recipe_elem(&r->value[v], s->dtype));
}

double mt_recipe_macs(const struct mt_recipe *r, size_t seq_len)
{
    double macs = 0;
    for (int i = 0; i < r->n_nodes; i++)
        if (r->node[i].rule->macs)
            macs += r->node[i].rule->macs(r, &r->node[i], seq_len);
    return macs;
}

/* --- tapes -------------------------------------------------------------------------------------- */

enum { NO_BUFFER = -1, NO_NODE = -1, MAX_WRITTEN = 24 };

/* A tape that is being made. */
struct maker {
    const struct mt_recipe *r;
    struct mt_tape *t;
    int held[MT_RECIPE_VALUES];        /* the buffer that holds a value now */
    int grad[MT_RECIPE_VALUES];        /* that of its gradient */
    bool gives_y;                      /* the output goes to its place, not to scratch */
    struct mt_at written[MAX_WRITTEN]; /* gradients that there are */
    int n_written;
};

static struct mt_at at_view(const struct maker *m, int buffer, struct mt_view v)
{
    return (struct mt_at){buffer, v.first, m->r->value[v.value].width, v.stride};
}

static int add_buffer(struct maker *m, enum mt_buffer_kind kind, int of, size_t width, bool f32)
{
    assert(m->t->n_buffers < MT_TAPE_BUFFERS);
    m->t->buffer[m->t->n_buffers] = (struct mt_buffer){kind, of, width, f32, -1, -1};
    return m->t->n_buffers++;
}

/* The one buffer of a kind that is given. */
static int given(struct maker *m, enum mt_buffer_kind kind, int of)
{
    for (int i = 0; i < m->t->n_buffers; i++)
        if (m->t->buffer[i].kind == kind && m->t->buffer[i].of == of)
            return i;
    return add_buffer(m, kind, of, 0, false);
}

static int scratch_for(struct maker *m, int value)
{
    return add_buffer(m, MT_BUFFER_SCRATCH, value, m->r->value[value].width, m->r->value[value].f32);
}

static void use(struct maker *m, struct mt_at at)
{
    if (at.buffer < 0)
        return;
    struct mt_buffer *b = &m->t->buffer[at.buffer];
    b->to = m->t->n_actions - 1;
    b->from = b->from < 0 ? b->to : b->from;
}

static bool is_made(const struct mt_recipe *r, int value)
{
    for (int i = 0; i < r->n_nodes; i++)
        for (int k = 0; k < MT_NODE_OUTS; k++)
            if (r->node[i].out[k].value == value)
                return true;
    return false;
}

/* Of the unit's values forward has those that the part does not make, and backward those that get a gradient. */
static void begin(struct maker *m, const struct mt_recipe *r, struct mt_tape *t, unsigned kept, bool backward)
{
    *m = (struct maker){.r = r, .t = t};
    for (int v = 0; v < r->n_values; v++) {
        int s = r->value[v].segment;
        bool there = r->value[v].role && (backward ? r->value[v].grad_role != 0 : !is_made(r, v));
        m->held[v] = s >= 0 && kept >> s & 1 ? given(m, MT_BUFFER_RECORD, v)
                     : there                 ? given(m, MT_BUFFER_ROLE, v)
                                             : NO_BUFFER;
        m->grad[v] = NO_BUFFER;
    }
    m->held[0] = given(m, r->value[0].role ? MT_BUFFER_ROLE : MT_BUFFER_X, 0);
}

static struct mt_action *add_action(struct maker *m, enum mt_act act, int node)
{
    static const struct mt_at none = {.buffer = NO_BUFFER};
    assert(m->t->n_actions < MT_TAPE_ACTIONS);
    struct mt_action *a = &m->t->action[m->t->n_actions++];
    *a = (struct mt_action){.act = act, .node = node, .add = none, .workspace = NO_BUFFER};
    for (int i = 0; i < MT_NODE_INS; i++)
        a->in[i] = a->d_in[i] = none;
    for (int i = 0; i < MT_NODE_OUTS; i++)
        a->out[i] = a->d_out[i] = none;
    return a;
}

/* Names the memory of the forward pass that an action uses, as far as it is there. */
static void take_values(struct maker *m, struct mt_action *a)
{
    const struct mt_node *n = &m->r->node[a->node];
    for (int i = 0; i < MT_NODE_INS; i++)
        if (n->in[i].value >= 0 && m->held[n->in[i].value] >= 0) {
            a->in[i] = at_view(m, m->held[n->in[i].value], n->in[i]);
            use(m, a->in[i]);
        }
    for (int i = 0; i < MT_NODE_OUTS; i++)
        if (n->out[i].value >= 0 && m->held[n->out[i].value] >= 0) {
            a->out[i] = at_view(m, m->held[n->out[i].value], n->out[i]);
            use(m, a->out[i]);
        }
    if (n->rule->scratch) {
        a->workspace = add_buffer(m, MT_BUFFER_WORK, a->node, 0, false);
        use(m, (struct mt_at){.buffer = a->workspace});
    }
}

static int place_for(struct maker *m, int value)
{
    const struct mt_recipe_value *v = &m->r->value[value];
    if (v->role)
        return given(m, MT_BUFFER_ROLE, value);
    if (m->gives_y && (value == m->r->y || v->in_y))
        return given(m, MT_BUFFER_Y, 0);
    if (v->ghost)
        return add_buffer(m, MT_BUFFER_SCRATCH, value, 0, false);
    return v->segment >= 0 ? given(m, MT_BUFFER_RECORD, value) : scratch_for(m, value);
}

static void mark(const struct maker *m, int value, bool needed[MT_RECIPE_NODES])
{
    if (m->held[value] >= 0)
        return;
    for (int i = 0; i < m->r->n_nodes; i++) {
        const struct mt_node *n = &m->r->node[i];
        bool makes = false;
        for (int k = 0; k < MT_NODE_OUTS; k++)
            makes |= n->out[k].value == value;
        if (!makes || needed[i])
            continue;
        needed[i] = true;
        for (int k = 0; k < MT_NODE_INS; k++)
            if (n->in[k].value >= 0 && n->in[k].value != value)
                mark(m, n->in[k].value, needed);
    }
}

/* Makes values, of those that are there. */
static void make(struct maker *m, const bool wanted[MT_RECIPE_VALUES])
{
    bool needed[MT_RECIPE_NODES] = {false}, there[MT_RECIPE_VALUES];
    for (int v = 0; v < m->r->n_values; v++) {
        there[v] = m->held[v] >= 0;
        if (wanted[v])
            mark(m, v, needed);
    }
    for (int i = 0; i < m->r->n_nodes; i++) {
        const struct mt_node *n = &m->r->node[i];
        if (!needed[i])
            continue;
        struct mt_action *a = add_action(m, MT_ACT_FORWARD, i);
        for (int k = 0; k < MT_NODE_OUTS; k++)
            if (n->out[k].value >= 0 && !there[n->out[k].value]) {
                a->outs |= 1u << k;
                if (m->held[n->out[k].value] < 0)
                    m->held[n->out[k].value] = place_for(m, n->out[k].value);
            }
        take_values(m, a);
    }
}

static void make_one(struct maker *m, int value)
{
    bool wanted[MT_RECIPE_VALUES] = {false};
    wanted[value] = true;
    make(m, wanted);
}

static bool same_view(struct mt_view a, struct mt_view b)
{
    return a.value == b.value && a.first == b.first && a.heads == b.heads && a.dim == b.dim && a.stride == b.stride;
}

/* The same, or as many columns without gaps. */
static bool same_columns(struct mt_view a, struct mt_view b)
{
    bool dense = a.stride == a.dim && b.stride == b.dim;
    return same_view(a, b) || (dense && a.value == b.value && a.first == b.first && a.heads * a.dim == b.heads * b.dim);
}

/* Where a view's gradient lies: that of the outputs of some operations lies where their inputs' does. */
static struct mt_view home_of(const struct maker *m, struct mt_view v)
{
    for (int i = m->r->n_nodes; i-- > 0;) {
        const struct mt_node *n = &m->r->node[i];
        for (int k = 0; k < MT_NODE_OUTS; k++)
            if (n->rule->through >> k & 1 && !n->apart && n->in[k].value != v.value && same_columns(n->out[k], v)) {
                struct mt_view of = n->in[k];
                return home_of(m, same_view(n->out[k], v) ? of : mt_view_of(of, 0, v.heads, v.dim, v.stride));
            }
    }
    return v;
}

static bool is_consumed(const struct maker *m, int value)
{
    for (int i = 0; i < m->r->n_nodes; i++)
        if (m->r->node[i].rule->consumes && m->r->node[i].in[0].value == value)
            return true;
    return false;
}

static struct mt_at gradient_of(struct maker *m, struct mt_view view)
{
    struct mt_view v = home_of(m, view);
    int *buffer = &m->grad[v.value];
    if (*buffer < 0)
        *buffer = v.value == 0                     ? given(m, MT_BUFFER_DX, 0)
                  : m->r->value[v.value].grad_role ? given(m, MT_BUFFER_GRAD, v.value)
                  : is_consumed(m, v.value)        ? m->held[v.value]
                                                   : scratch_for(m, v.value);
    return at_view(m, *buffer, v);
}

static bool same_place(struct mt_at a, struct mt_at b)
{
    return a.buffer == b.buffer && a.first == b.first;
}

static bool is_written(const struct maker *m, struct mt_at at)
{
    for (int i = 0; i < m->n_written; i++)
        if (same_place(m->written[i], at))
            return true;
    return false;
}

static void write_at(struct maker *m, struct mt_at at)
{
    assert(m->n_written < MAX_WRITTEN);
    m->written[m->n_written++] = at;
}

/* The gradient of in[i] of an action's node: added to what is there, if there is any. `later`: a sum follows. */
static void take_input_gradient(struct maker *m, struct mt_action *a, int i, struct mt_at *later)
{
    const struct mt_node *n = &m->r->node[a->node];
    struct mt_at at = gradient_of(m, n->in[i]);
    bool in_place = false;
    for (int k = 0; k < MT_NODE_OUTS; k++)
        in_place |= n->rule->through >> k & 1 && same_place(a->d_out[k], at);
    a->d_in[i] = at;
    if (!in_place && is_written(m, at)) {
        if (i == 0 && n->rule->adds) {
            a->add = at;
        } else {
            *later = at;
            a->d_in[i] = (struct mt_at){scratch_for(m, n->in[i].value), 0, at.ld, at.stride};
        }
    } else if (!in_place) {
        write_at(m, at);
    }
    use(m, a->d_in[i]);
}

/* in[i]'s gradient is the output's itself. */
static void share_gradient(struct maker *m, const struct mt_node *n, int i, struct mt_at of)
{
    int value = n->in[i].value;
    if (value < 0 || m->grad[value] >= 0)
        return;
    m->grad[value] = of.buffer;
    write_at(m, of);
}

static struct mt_action *add_backward(struct maker *m, enum mt_act act, int node, struct mt_at *later)
{
    const struct mt_node *n = &m->r->node[node];
    struct mt_action *a = add_action(m, act, node);
    take_values(m, a);
    for (int k = 0; k < MT_NODE_OUTS; k++)
        if (n->out[k].value >= 0 && !(n->rule->statistics >> k & 1)) {
            a->d_out[k] = gradient_of(m, n->out[k]);
            use(m, a->d_out[k]);
        }
    for (int i = 0; i < MT_NODE_INS && act != MT_ACT_WEIGHT_GRAD; i++) {
        bool shares = n->rule->residual >> i & 1;
        if (n->in[i].value < 0 || n->rule->blind >> i & 1)
            continue;
        if (shares)
            share_gradient(m, n, i, a->d_out[0]);
        else if (n->rule == &mt_rule_sum && n->number == 1) { /* and so is the other's, which is only read */
            m->grad[n->in[i].value] = a->d_out[0].buffer;
            a->d_in[i] = a->d_out[0];
        } else
            take_input_gradient(m, a, i, later);
    }
    return a;
}

/* Adds what an action has left apart to the gradient that there was. */
static void add_sum(struct maker *m, const struct mt_action *a, struct mt_at at)
{
    const struct mt_node *n = &m->r->node[a->node];
    struct mt_at fresh = a->d_in[0];
    struct mt_action *s = add_action(m, MT_ACT_SUM, a->node);
    bool to_x = n->in[0].value == 0;
    s->in[0] = to_x ? at : fresh;
    s->in[1] = to_x ? fresh : at;
    s->out[0] = s->in[0];
    for (int i = 0; i < 2; i++)
        use(m, s->in[i]);
    if (!to_x)
        m->grad[n->in[0].value] = fresh.buffer;
}

static int consumer_of(const struct mt_recipe *r, int value)
{
    for (int i = 0; i < r->n_nodes; i++)
        for (int k = 0; k < MT_NODE_OUTS; k++)
            if (r->node[i].out[k].value == value && r->node[i].rule->consumes)
                return i;
    return NO_NODE;
}

/* A linear layer: its input's gradient, then its weights', for which the input is made again: by the operation that
 * made it, in that operation's backward, which then comes between. Returns the node whose weights are still to come. */
static int linear_backward(struct maker *m, int i)
{
    const struct mt_node *n = &m->r->node[i];
    struct mt_at later = {.buffer = NO_BUFFER};
    bool waits = m->held[n->in[0].value] < 0 && consumer_of(m->r, n->in[0].value) != NO_NODE;
    if (!waits)
        make_one(m, n->in[0].value);
    struct mt_action *a = add_backward(m, MT_ACT_INPUT_GRAD, i, &later);
    struct mt_action of = *a;
    if (!waits)
        add_backward(m, MT_ACT_WEIGHT_GRAD, i, &later);
    if (later.buffer >= 0)
        add_sum(m, &of, later);
    return waits ? i : NO_NODE;
}

static void other_backward(struct maker *m, int i, int waiting)
{
    const struct mt_node *n = &m->r->node[i];
    struct mt_at later = {.buffer = NO_BUFFER};
    bool wanted[MT_RECIPE_VALUES] = {false};
    for (int k = 0; k < MT_NODE_INS; k++)
        if (n->rule->reads_in >> k & 1 && n->in[k].value >= 0)
            wanted[n->in[k].value] = true;
    for (int k = 0; k < MT_NODE_OUTS; k++)
        if (n->rule->reads_out >> k & 1 && n->out[k].value >= 0)
            wanted[n->out[k].value] = true;
    make(m, wanted);
    struct mt_action *a = add_backward(m, MT_ACT_BACKWARD, i, &later);
    a->remade = (unsigned)(waiting + 1);
    assert(later.buffer < 0);
    if (waiting == NO_NODE)
        return;
    m->held[n->out[0].value] = a->d_out[0].buffer;
    add_backward(m, MT_ACT_WEIGHT_GRAD, waiting, &later);
    m->held[n->out[0].value] = NO_BUFFER;
}

/* Does anything of a node's results come to the output? */
static bool has_gradient(const struct mt_recipe *r, const struct mt_node *n)
{
    bool any = false;
    for (int k = 0; k < MT_NODE_OUTS && !any; k++) {
        any = n->out[k].value >= 0 && n->out[k].value == r->y;
        for (const struct mt_node *to = r->node; n->out[k].value >= 0 && to < r->node + r->n_nodes; to++)
            for (int i = 0; i < MT_NODE_INS; i++)
                any |= to != n && to->in[i].value == n->out[k].value;
    }
    return any;
}

static void make_backward(struct mt_recipe *r)
{
    struct maker m;
    int waiting = NO_NODE;
    begin(&m, r, &r->backward, ~0u, true);
    m.grad[r->y] = given(&m, MT_BUFFER_DX, 0);
    for (int i = r->n_nodes; i-- > 0;)
        if (!has_gradient(r, &r->node[i])) {
            continue;
        } else if (r->node[i].rule->input_grad) {
            waiting = linear_backward(&m, i);
        } else {
            other_backward(&m, i, waiting);
            waiting = NO_NODE;
        }
    assert(r->backward.buffer[m.grad[0]].kind == MT_BUFFER_DX);
}

static void make_tapes(struct mt_recipe *r)
{
    struct maker m;
    for (unsigned kept = 0; kept < 1u << r->n_segments; kept++) {
        bool wanted[MT_RECIPE_VALUES] = {false};
        for (int v = 0; v < r->n_values; v++)
            wanted[v] = r->value[v].segment >= 0 && !(kept >> r->value[v].segment & 1);
        begin(&m, r, &r->prepare[kept], kept, false);
        make(&m, wanted);
    }
    begin(&m, r, &r->finish, ~0u, false);
    m.gives_y = true;
    bool outputs[MT_RECIPE_VALUES] = {false};
    for (int v = 0; v < r->n_values; v++) /* and what other parts get */
        outputs[v] = v == r->y || (r->value[v].role && is_made(r, v));
    make(&m, outputs);
    make_backward(r);
}

struct mt_recipe *mt_recipe_create(const struct mt_part_kind *kind, const struct mt_hf_config *cfg,
                                   const struct mt_layer_spec *spec)
{
    struct mt_recipe *r = mt_calloc(1, sizeof(*r));
    if (!r)
        return NULL;
    r->cfg = cfg;
    r->spec = spec;
    r->kind = kind;
    r->n_segments = mt_part_n_segments(kind);
    mt_recipe_value(r, "x", (size_t)cfg->hidden, false, MT_UNKEPT);
    r->y = kind->recipe(r).value;
    make_tapes(r);
    return r;
}
