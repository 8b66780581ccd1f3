/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/card.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"

enum { VALUE = 1024, EVALUATIONS = 10 };

static const char *value_of(const struct mt_train_state *s, const char *section, const char *key, char buf[VALUE])
{
    return mt_train_state_value(s, section, key, buf, VALUE);
}

static bool is(const struct mt_train_state *s, const char *section, const char *key, const char *value)
{
    char buf[VALUE];
    return !strcmp(value_of(s, section, key, buf), value);
}

/* The characters that names on the Hub have, which need no quotes in YAML either. */
static bool is_plain(const char *name)
{
    return !name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/")];
}

/* "Qwen/Qwen3-8B", as it is, or of a folder in the Hub's cache (models--Qwen--Qwen3-8B/snapshots/...). Folders are
 * absolute in a run's configuration. */
static bool hub_name(const char *path, char buf[VALUE])
{
    const char *owned = strchr(path, '/');
    if (owned && owned > path && owned[1] && *path != '.' && !strchr(owned + 1, '/')) {
        snprintf(buf, VALUE, "%s", path);
        return is_plain(buf);
    }
    const char *at = strstr(path, "models--"), *slash = at ? strstr(at, "--") : NULL;
    const char *name = slash ? slash + 2 : NULL, *rest = name ? strstr(name, "--") : NULL;
    size_t n = name ? strcspn(name, "/") : 0;
    if (!rest || rest >= name + n)
        return false;
    snprintf(buf, VALUE, "%.*s/%.*s", (int)(rest - name), name, (int)(name + n - rest - 2), rest + 2);
    return is_plain(buf);
}

/* Text that is no markup, whatever characters a name has: not of Markdown, of its tables, or of HTML. */
static void add_cell(struct mt_str *out, const char *text, size_t n)
{
    static const char marks[] = "\\`*[]|~$#!";
    for (size_t i = 0; i < n; i++) {
        char c = text[i];
        bool within = i && i + 1 < n && isalnum((unsigned char)text[i - 1]) && isalnum((unsigned char)text[i + 1]);
        const char *entity = c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : c == '"' ? "&quot;" : NULL;
        if (entity)
            mt_str_printf(out, "%s", entity);
        else if (strchr(marks, c) || (c == '_' && !within))
            mt_str_printf(out, "\\%c", c);
        else
            mt_str_printf(out, "%c", (unsigned char)c < ' ' || c == 0x7f ? ' ' : c);
    }
}

static void add_name(struct mt_str *out, const char *name)
{
    add_cell(out, name, strlen(name));
}

/* The last parts of paths that commas separate. */
static void add_names(struct mt_str *out, const char *paths)
{
    for (const char *at = paths; *at;) {
        size_t n = strcspn(at, ","), last = n;
        while (last && at[last - 1] != '/')
            last--;
        add_cell(out, at + last, n - last);
        at += n + (at[n] == ',');
        at += strspn(at, " ");
        if (*at)
            mt_str_printf(out, ", ");
    }
}

static void add_base(struct mt_str *out, const struct mt_train_state *s)
{
    char path[VALUE], name[VALUE];
    value_of(s, "model", "path", path);
    if (hub_name(path, name))
        add_name(out, name);
    else
        add_names(out, path);
}

/* "| Name | a, b 1, c 2 |": values of the keys of a section that have one, each after its label. */
struct labelled {
    const char *label, *key;
};

static void add_values(struct mt_str *out, const struct mt_train_state *s, const char *section,
                       const struct labelled *of, size_t n)
{
    char buf[VALUE];
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        value_of(s, section, of[i].key, buf);
        if (!*buf || !strcmp(buf, "auto") || !strcmp(buf, "off") || !strcmp(buf, "0"))
            continue;
        mt_str_printf(out, "%s%s", any ? ", " : "", of[i].label);
        add_name(out, buf);
        any = true;
    }
}

static void add_method(struct mt_str *out, const struct mt_card *c, const struct mt_train_state *s)
{
    static const struct labelled adapters[] = {{"", "kind"}, {"rank ", "rank"}, {"alpha ", "alpha"}, {"rsLoRA ", "rslora"},
                                               {"targets ", "targets"}, {"dropout ", "dropout"}, {"and whole ", "train_also"}};
    static const struct labelled base[] = {{"base in ", "base_dtype"}}, frozen[] = {{"without ", "freeze"}};
    mt_str_printf(out, "| Method | ");
    if (!is(s, "adapter", "kind", "none") && !is(s, "adapter", "kind", "")) {
        add_values(out, s, "adapter", adapters, MT_ARRAY_LEN(adapters));
        mt_str_printf(out, "%s", is(s, "model", "base_dtype", "auto") ? "" : ", ");
        add_values(out, s, "model", base, MT_ARRAY_LEN(base));
    } else {
        mt_str_printf(out, "all parameters%s", is(s, "model", "freeze", "") ? "" : ", ");
        add_values(out, s, "model", frozen, MT_ARRAY_LEN(frozen));
    }
    mt_str_printf(out, "%s |\n", c->merged ? "; merged into the model's weights" : "");
    if (c->packed)
        mt_str_printf(out, "| Weights | matrices of layers in %s |\n", c->packed);
    if (is(s, "train", "objective", "distill")) {
        char buf[VALUE];
        static const struct labelled distill[] = {{"top ", "top"}, {"share of the data's own tokens ", "sft"}};
        mt_str_printf(out, "| Distilled from | ");
        add_names(out, value_of(s, "distill", "teacher", buf));
        mt_str_printf(out, ", ");
        add_values(out, s, "distill", distill, MT_ARRAY_LEN(distill));
        mt_str_printf(out, " |\n");
    }
    if (!is(s, "preference", "loss", "off") && !is(s, "preference", "loss", "")) {
        static const struct labelled loss[] = {{"", "loss"}, {"beta ", "beta"}};
        mt_str_printf(out, "| Preference loss | ");
        add_values(out, s, "preference", loss, MT_ARRAY_LEN(loss));
        mt_str_printf(out, " |\n");
    }
}

static void add_run(struct mt_str *out, const struct mt_train_state *s)
{
    static const struct labelled batch[] = {{"tokens a step ", "tokens_per_step"}, {"rows a step ", "batch_size"}},
                                 rate[] = {{"", "learning_rate"}, {"", "schedule"}, {"warmup ", "warmup"}},
                                 optimizer[] = {{"", "type"}, {"weight decay ", "weight_decay"}, {"states ", "state_dtype"}, {"masters ", "master"}},
                                 rows[] = {{"rows of ", "seq_len"}}, dtype[] = {{"", "dtype"}, {"products in ", "compute"}};
    char buf[VALUE];
    mt_str_printf(out, "| Data | ");
    add_names(out, value_of(s, "data", "train", buf));
    mt_str_printf(out, " |\n| Steps | %llu of %llu, %llu tokens, ", (unsigned long long)s->step,
                  (unsigned long long)s->total_steps, (unsigned long long)s->tokens);
    add_values(out, s, "data", rows, 1);
    mt_str_printf(out, ", ");
    add_values(out, s, "train", batch, MT_ARRAY_LEN(batch));
    mt_str_printf(out, " |\n| Learning rate | ");
    add_values(out, s, "train", rate, MT_ARRAY_LEN(rate));
    mt_str_printf(out, " |\n| Optimizer | ");
    add_values(out, s, "optimizer", optimizer, MT_ARRAY_LEN(optimizer));
    mt_str_printf(out, " |\n| Compute | ");
    add_values(out, s, "model", dtype, MT_ARRAY_LEN(dtype));
    mt_str_printf(out, " |\n| Trained for | %.3g hours |\n", s->seconds / 3600);
}

/* Rows of the last evaluations: every measure that the first of them has. */
static void add_evaluations(struct mt_str *out, const struct mt_train_state *s)
{
    size_t first = s->log.n, n = 0;
    MT_JSON_FREED cJSON *names = NULL;
    while (first && n < EVALUATIONS)
        n += strstr(s->log.row[--first], "\"eval_loss\"") != NULL;
    for (size_t i = first; n && i < s->log.n; i++) {
        cJSON *row = strstr(s->log.row[i], "\"eval_loss\"") ? cJSON_Parse(s->log.row[i]) : NULL;
        if (row && !names) {
            mt_str_printf(out, "\n## Evaluation\n|");
            for (const cJSON *v = row->child; v; v = v->next) {
                mt_str_printf(out, " ");
                add_name(out, !strncmp(v->string, "eval_", 5) ? v->string + 5 : v->string);
                mt_str_printf(out, " |");
            }
            mt_str_printf(out, "\n|");
            for (const cJSON *v = row->child; v; v = v->next)
                mt_str_printf(out, "--|");
            mt_str_printf(out, "\n");
            names = row;
        }
        for (const cJSON *v = row ? names->child : NULL; v; v = v->next) {
            const cJSON *x = mt_json_get(row, v->string);
            mt_str_printf(out, "%s", v == names->child ? "|" : "");
            if (cJSON_IsNumber(x))
                mt_str_printf(out, " %.6g", x->valuedouble);
            mt_str_printf(out, " |");
        }
        if (row)
            mt_str_printf(out, "\n");
        if (row != names)
            cJSON_Delete(row);
    }
}

char *mt_card_text(const struct mt_card *c, const struct mt_train_state *s)
{
    struct mt_str out = {0};
    char path[VALUE], name[VALUE];
    bool known = hub_name(value_of(s, "model", "path", path), name);
    mt_str_printf(&out, "---\nlibrary_name: %s\n", c->adapters ? "peft" : "transformers");
    if (known)
        mt_str_printf(&out, "base_model: %s\nbase_model_relation: %s\n", name,
                      c->adapters ? "adapter" : c->packed ? "quantized" : "finetune");
    mt_str_printf(&out, "tags:\n- megatrain\n%s---\n# ", c->adapters ? "- lora\n" : "");
    add_name(&out, c->name);
    mt_str_printf(&out, "\n\nTrained with megatrain " MT_VERSION ".\n\n| | |\n|--|--|\n| Base | ");
    add_base(&out, s);
    mt_str_printf(&out, " |\n");
    add_method(&out, c, s);
    add_run(&out, s);
    add_evaluations(&out, s);
    if (out.failed) {
        mt_str_finish(&out);
        return NULL;
    }
    return out.p;
}
