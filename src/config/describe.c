/* SPDX-License-Identifier: Apache-2.0 */
/* What the table of keys says to users: lists, tables, one key, a file with all of them. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/strbuf.h"
#include "config/config.h"
#include "config/schema.h"
#include "config/synonyms.h"
#include "optim/optimizer.h"

enum { WIDTH = 78 };

/* "a|b" as a sentence, for a cell of a table, which a bar would end. */
static void list_values(struct mt_str *out, const char *what, const char *values)
{
    const char *sep = " `";
    if (!values)
        return;
    mt_str_printf(out, "%s", what);
    while (*values) {
        int n = (int)strcspn(values, "|");
        mt_str_printf(out, "%s%.*s`", sep, n, values);
        values += n + (values[n] == '|');
        sep = ", `";
    }
    mt_str_printf(out, ".");
}

/* The key's sentences; of an optimizer's own key also what auto is. */
static void add_meaning(struct mt_str *out, const struct mt_key *key)
{
    mt_str_printf(out, "%s", key->help);
    if (key->offset != MT_KEY_NO_OFFSET)
        return;
    mt_str_printf(out, " auto: ");
    mt_optimizer_defaults(mt_optimizer_slot_of(key->name), out);
    mt_str_printf(out, ".");
}

/* The same, folded. */
static void fold_meaning(struct mt_str *out, const char *indent, const struct mt_key *key)
{
    MT_STR_FREED struct mt_str text = {0};
    add_meaning(&text, key);
    out->failed |= text.failed;
    mt_str_fold(out, indent, text.p ? text.p : "", WIDTH);
}

void mt_config_describe(struct mt_str *out, bool markdown)
{
    const char *section = "";
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        bool first = strcmp(section, k->section) != 0;
        section = k->section;
        if (markdown) {
            if (first)
                mt_str_printf(out, "%s### [%s]\n\n| key | default | meaning |\n|---|---|---|\n",
                              i ? "\n" : "", section);
            mt_str_printf(out, "| `%s` | `%s` | ", k->name, k->def);
            add_meaning(out, k);
            list_values(out, " One of", k->choices);
            list_values(out, " Not supported:", k->unsupported);
            mt_str_printf(out, " |\n");
        } else {
            mt_str_printf(out, "%s%s.%s = %s\n", first && i ? "\n" : "", k->section, k->name, k->def);
            fold_meaning(out, "    ", k);
            if (k->choices)
                mt_str_printf(out, "    One of: %s\n", k->choices);
            if (k->unsupported)
                mt_str_printf(out, "    Not supported: %s\n", k->unsupported);
        }
    }
}

void mt_config_write_template(struct mt_str *out, const char *model_path)
{
    const char *section = "";
    mt_str_fold(out, "# ", "Lines that begin with # or ; are comments, and so is the rest of a line after \" ;\". A value that "
                "holds \" ;\" or \" #\" is written in quotes: \"a # b\". ${HOME} is a variable of the environment.", WIDTH);
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        const char *value = k->def;
        if (strcmp(section, k->section))
            mt_str_printf(out, "\n[%s]\n", section = k->section);
        if (!strcmp(section, "model") && !strcmp(k->name, "path"))
            value = model_path;
        else if (!strcmp(section, "train") && !strcmp(k->name, "epochs"))
            value = "1";
        else if (!strcmp(section, "train") && !strcmp(k->name, "tokens_per_step"))
            value = "64Ki";
        else if (!strcmp(section, "data") && !strcmp(k->name, "train"))
            value = "data/train.jsonl";
        fold_meaning(out, "# ", k);
        mt_str_printf(out, "%s = %s\n", k->name, value);
    }
}

/* --- one key ----------------------------------------------------------------------------------------- */

static const char *const roles[] = {
    [MT_NUMERICS] = "numerics: it may change results, so a resumed run refuses another value, and keeps what auto became",
    [MT_RELEASED] = "numerics: it may change results, so a resumed run refuses another value, but for the default",
    [MT_LENGTH] = "length: a resumed run may have a larger value",
    [MT_PLACEMENT] = "placement: it never changes a bit of the result; a resumed run may have another value",
    [MT_MACHINE] = "this machine: what placement may use of it; it never changes a bit of the result",
    [MT_OUTPUT] = "output: what is written, and when; a resumed run may have another value",
};

static void add_values(struct mt_str *out, const struct mt_key *k)
{
    if (k->choices && k->type != MT_KEY_NAME_OR_FILE) {
        for (const char *c = k->choices; *c; c++)
            mt_str_printf(out, *c == '|' ? ", " : "%c", *c);
    } else {
        mt_key_values(k, out);
    }
    if (k->min < k->max) {
        mt_str_printf(out, "; at least ");
        mt_str_number(out, k->min);
        if (k->max < 1e12) {
            mt_str_printf(out, ", at most ");
            mt_str_number(out, k->max);
        }
    }
}

static bool is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Whether the text of `k` names `other`: as section.name, or within the section by its name, if that is no word of the
 * language. */
static bool names(const struct mt_key *k, const struct mt_key *other)
{
    char full[128];
    snprintf(full, sizeof(full), "%s.%s", other->section, other->name);
    const char *word = full;
    for (int bare = 0; bare < 2; bare++, word = other->name) {
        if (bare && (strcmp(k->section, other->section) || !strchr(word, '_')))
            continue;
        for (const char *at = k->help; (at = strstr(at, word)); at++)
            if ((at == k->help || (!is_word(at[-1]) && at[-1] != '.')) && !is_word(at[strlen(word)]))
                return true;
    }
    return false;
}

static void add_related(struct mt_str *out, const struct mt_key *k)
{
    const char *sep = "";
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *o = mt_key_at(i);
        if (o == k || (!names(k, o) && !names(o, k)))
            continue;
        mt_str_printf(out, "%s%s.%s", sep, o->section, o->name);
        sep = ", ";
    }
}

/* A heading before a folded text; without a text nothing. */
static void add_field(struct mt_str *out, const char *heading, const struct mt_key *k,
                      void (*add)(struct mt_str *, const struct mt_key *))
{
    const char indent[] = "            ";
    MT_STR_FREED struct mt_str text = {0};
    size_t begin = out->len;
    add(&text, k);
    out->failed |= text.failed;
    if (text.len)
        mt_str_fold(out, indent, text.p, WIDTH);
    if (text.len && !out->failed)
        memcpy(out->p + begin, heading, strlen(heading));
}

static void add_role(struct mt_str *out, const struct mt_key *k)
{
    mt_str_printf(out, "%s", roles[k->role]);
}

static void explain_key(struct mt_str *out, const struct mt_key *k)
{
    mt_str_printf(out, "%s%s.%s = %s\n", out->len ? "\n" : "", k->section, k->name, *k->def ? k->def : "(not set)");
    fold_meaning(out, "  ", k);
    mt_str_append(out, "\n", 1);
    add_field(out, "Values", k, add_values);
    if (k->unsupported)
        mt_str_printf(out, "Refused     %s: %s\n", k->unsupported, k->instead ? k->instead : "not supported yet");
    add_field(out, "Role", k, add_role);
    add_field(out, "Related", k, add_related);
}

/* The keys of a section, or of a name, or the one key; how many there are. */
static size_t explain_all(struct mt_str *out, const char *name)
{
    size_t n = 0;
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        char full[128];
        snprintf(full, sizeof(full), "%s.%s", k->section, k->name);
        if (!strcmp(name, k->section))
            mt_str_printf(out, "%s = %s\n", full, k->def);
        else if (!strcmp(name, k->name) || !strcmp(name, full))
            explain_key(out, k);
        else
            continue;
        n++;
    }
    return n;
}

int mt_config_explain(struct mt_str *out, const char *name, struct mt_err *err)
{
    char section[64] = "", full[128] = "", there[256];
    const char *dot = strchr(name, '.');
    if (explain_all(out, name))
        return 0;
    const char *key = dot ? dot + 1 : name, *here = mt_key_synonym(key, there, sizeof(there));
    if (dot)
        snprintf(section, sizeof(section), "%.*s", (int)(dot - name), name);
    for (size_t i = 0; here && i < mt_n_keys() && !*full; i++) { /* what the other trainer's name is here */
        char at[128];
        size_t n = (size_t)snprintf(at, sizeof(at), ": here it is %s.%s", mt_key_at(i)->section, mt_key_at(i)->name);
        if (!strncmp(here, at, n) && !is_word(here[n]))
            snprintf(full, sizeof(full), "%s.%s", mt_key_at(i)->section, mt_key_at(i)->name);
    }
    if (here)
        mt_str_printf(out, "%s%s\n", key, here);
    if (*full)
        explain_all(out, full);
    if (here)
        return 0;
    bool known = *section && mt_key_suggest(section, key);
    const char *near = mt_key_suggest(known ? section : NULL, known ? key : *section ? section : name);
    for (size_t i = 0; !near && i < mt_n_keys(); i++)
        near = mt_edit_distance(mt_key_at(i)->name, key) < 3 ? mt_key_at(i)->name : NULL;
    return mt_fail(err, MT_ERR_USAGE, -ENOENT, "there is no key or section \"%s\"%s%s%s%s%s: megatrain config keys lists all", name,
                   near ? ": did you mean " : "", near && known ? section : "", near && known ? "." : "", near ? near : "",
                   near ? "?" : "");
}
