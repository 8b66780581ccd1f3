/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layer_text.h"
#include "base/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/rule.h"

/* Appends; what does not fit is left out. */
__attribute__((format(printf, 3, 4))) static void append(char *buf, size_t len, const char *format, ...)
{
    size_t at = strlen(buf);
    va_list args;
    va_start(args, format);
    vsnprintf(buf + at, len - at, format, args);
    va_end(args);
}

static void add_view(struct mt_layer_line *o, const struct mt_recipe *r, const struct mt_view *v)
{
    const struct mt_recipe_value *value = &r->value[v->value];
    append(o->text, sizeof(o->text), "%s", value->name);
    bool one = v->heads == 1 || !v->stride; /* without a stride all heads share one piece */
    if (one && v->dim == value->width)
        return;
    if (one)
        append(o->text, sizeof(o->text), "[%zu..%zu]", v->first, v->first + v->dim);
    else if (v->heads * v->dim < value->width)
        append(o->text, sizeof(o->text), "[%zu x %zu of %zu at %zu]", v->heads, v->dim, v->stride, v->first);
    else
        append(o->text, sizeof(o->text), "[%zu x %zu]", v->heads, v->dim);
}

/* "{window 1024, cap 50}" */
static void add_settings(struct mt_layer_line *o, const struct mt_recipe *r, const struct mt_node *n)
{
    static const char *const activations[] = {"silu", "gelu_tanh", "relu2", "xielu"};
    const struct mt_layer_spec *s = r->spec;
    char set[120] = "";
    if (n->rule == &mt_rule_norm)
        append(set, sizeof(set), ", %seps %g%s", s->norm.centred ? "mean, " : "", n->number > 0 ? n->number : s->norm.eps,
               s->norm.plus_one ? ", 1 + w" : "");
    if (n->rule == &mt_rule_head_norm)
        append(set, sizeof(set), ", eps %g%s", n->number, n->kind & MT_HEAD_NORM_PLUS_ONE ? ", 1 + w" : "");
    if (n->rule == &mt_rule_rope && n->kind != MT_NO_ROPE)
        append(set, sizeof(set), ", theta %g, %zu of a head%s", r->cfg->rope[n->kind].theta, r->cfg->rope[n->kind].dims,
               n->pairs ? ", pairs" : "");
    if (n->rule == &mt_rule_attend && s->window)
        append(set, sizeof(set), ", window %lld", (long long)s->window);
    if (n->rule == &mt_rule_attend && s->score_cap > 0)
        append(set, sizeof(set), ", cap %g", s->score_cap);
    if ((n->rule == &mt_rule_sum || n->rule == &mt_rule_factor) && n->number != 1)
        append(set, sizeof(set), ", factor %g", n->number);
    if (n->rule == &mt_rule_glu || n->rule == &mt_rule_activate)
        append(set, sizeof(set), ", %s", activations[s->activation]);
    if (*set)
        append(o->text, sizeof(o->text), " {%s}", set + 2);
}

/* "q, k = rope(q, k) {theta 10000}": statistics, which are there for backward alone, are left out. */
static void add_operation(struct mt_layer_line *o, const struct mt_recipe *r, const struct mt_node *n)
{
    for (int i = 0, many = 0; i < MT_NODE_OUTS; i++)
        if (n->out[i].value >= 0 && !(n->rule->statistics >> i & 1)) {
            append(o->text, sizeof(o->text), many++ ? ", " : "");
            add_view(o, r, &n->out[i]);
        }
    append(o->text, sizeof(o->text), " = %s(", n->rule->name);
    for (int i = 0, many = 0; i < MT_NODE_INS; i++)
        if (n->in[i].value >= 0 && !(n->rule == &mt_rule_linear && i == 1)) {
            append(o->text, sizeof(o->text), many++ ? ", " : "");
            add_view(o, r, &n->in[i]);
        }
    append(o->text, sizeof(o->text), ")");
    if (n->rule == &mt_rule_linear && n->in[1].value >= 0) {
        append(o->text, sizeof(o->text), " + ");
        add_view(o, r, &n->in[1]);
    }
    add_settings(o, r, n);
}

/* The tensors of a parameter, without "model.layers.N.". */
static void add_tensors(struct mt_layer_line *o, const struct mt_layout *l, const struct mt_part *p,
                        const struct mt_param *param)
{
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && param->n; t++) {
        const char *layers = strstr(t->name, "layers."), *dot = layers ? strchr(layers + 7, '.') : NULL;
        if (t->param != param)
            continue;
        append(o->tensors, sizeof(o->tensors), "%s%s [%lld", *o->tensors ? ", " : "", dot && p->layer >= 0 ? dot + 1 : t->name,
               (long long)t->shape[0]);
        append(o->tensors, sizeof(o->tensors), t->n_dims == 2 ? ", %lld]" : "]", (long long)t->shape[1]);
        o->params += t->n;
    }
}

static struct mt_layer_line operation(const struct mt_layout *l, const struct mt_part *p, const struct mt_node *n,
                                      enum mt_dtype dtype, size_t seq_len)
{
    const struct mt_recipe *r = p->recipe;
    struct mt_layer_line o = {.part = p->kind};
    add_operation(&o, r, n);
    for (int i = 0; i < MT_NODE_PARAMS; i++)
        if (n->param[i] >= 0)
            add_tensors(&o, l, p, &p->param[n->param[i]]);
    for (int i = 0; i < MT_NODE_OUTS; i++) {
        const struct mt_recipe_value *v = n->out[i].value >= 0 ? &r->value[n->out[i].value] : NULL;
        if (!v || n->rule->statistics >> i & 1)
            continue;
        o.elems += mt_view_width(&n->out[i]);
        o.bytes += mt_view_width(&n->out[i]) * mt_recipe_elem(v, dtype);
        o.kept = v->segment >= 0 ? p->kind->segment[v->segment] : o.kept;
    }
    o.flops = n->rule->macs ? 2 * n->rule->macs(r, n, seq_len) : 0;
    return o;
}

/* A part with code of its own. Of experts the tensors of the first are named. */
static struct mt_layer_line whole_part(const struct mt_layout *l, const struct mt_part *p, size_t seq_len)
{
    struct mt_layer_line o = {.part = p->kind};
    size_t n = p->n_experts ? (size_t)p->n_experts : 1;
    append(o.text, sizeof(o.text), n > 1 ? "%s: %lld of %zu for a token" : "%s", p->kind->name, (long long)l->cfg.moe.top_k, n);
    for (int i = 0; i < MT_PART_MAX_PARAMS; i++)
        add_tensors(&o, l, p, &p->param[i]);
    for (int i = 0; p->n_experts && i < MT_EXPERT_MAX_PARAMS; i++)
        add_tensors(&o, l, p, &p->expert[0][i]);
    o.params *= n;
    o.flops = p->kind->macs_per_token ? 2 * p->kind->macs_per_token(&l->cfg, p, seq_len) : 0;
    return o;
}

void mt_layer_lines(const struct mt_layout *l, int layer, enum mt_dtype dtype, size_t seq_len,
                    void (*line)(void *ctx, const struct mt_layer_line *line), void *ctx)
{
    for (const struct mt_part *p = l->parts; p < l->parts + l->n_parts; p++) {
        struct mt_layer_line o;
        if (p->layer != layer)
            continue;
        if (!p->recipe) {
            o = whole_part(l, p, seq_len);
            line(ctx, &o);
        }
        for (int i = 0; p->recipe && i < p->recipe->n_nodes; i++) {
            o = operation(l, p, &p->recipe->node[i], dtype, seq_len);
            line(ctx, &o);
        }
    }
}
