/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of help that are about no command, of the folder help: paragraphs, folded for a terminal; roff folds its own.
 * One that begins with spaces is a command or a line of a file, and stays as it is. */
#include "help_topics.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/strbuf.h"
#include "hf/family.h"
#include "hf/refused.h"
#include "help_text.inc"

enum { WIDTH = 78 };

static void print_folded(const char *text)
{
    MT_STR_FREED struct mt_str s = {0};
    mt_str_fold(&s, "", text, WIDTH);
    fputs(s.p ? s.p : "", stdout);
}

/* Of roff, a line that begins with a dot or an apostrophe is a request, and a backslash an escape. */
static void print_roff(const char *text)
{
    for (const char *p = text; *p; p++)
        fputs(*p == '\\' ? "\\e" : (char[]){*p, 0}, stdout);
    printf("\n");
}

static bool is_example(const char *text)
{
    return text && *text == ' ';
}

static void print_example(const char *text, bool opens, bool closes, int roff)
{
    if (opens)
        fputs(roff ? ".PP\n.nf\n" : "\n", stdout);
    if (roff)
        print_roff(text);
    else
        puts(text);
    if (closes && roff)
        fputs(".fi\n", stdout);
}

static void print_families(void)
{
    for (size_t i = 0; mt_family_at(i); i++)
        printf("  %-30s%s\n", mt_family_at(i)->architecture, mt_family_at(i)->moe ? " mixture of experts" : "");
}

static void print_refused(void)
{
    const char *name, *reason;
    for (size_t i = 0; (name = mt_refused_at(i, &reason)); i++)
        printf("  %s: %s\n", name, reason);
}

/* What a paragraph stands for that the program knows itself. */
static void print_list(const char *text, int roff)
{
    fputs(roff ? ".nf\n" : "\n", stdout);
    if (!strcmp(text, "{families}"))
        print_families();
    else
        print_refused();
    fputs(roff ? ".fi\n" : "", stdout);
}

void cli_topic_print(const struct cli_topic *t, bool roff)
{
    const char *const *text = t->text;
    for (int i = 0; text[i]; i++) {
        if (is_example(text[i])) {
            print_example(text[i], !i || !is_example(text[i - 1]), !is_example(text[i + 1]), roff);
        } else if (text[i][0] == '{') {
            print_list(text[i], roff);
        } else {
            fputs(roff ? ".PP\n" : i ? "\n" : "", stdout);
            if (roff)
                print_roff(text[i]);
            else
                print_folded(text[i]);
        }
    }
}

void cli_print_policy_manual(void)
{
    printf(".TH MEGATRAIN-POLICY 7 \"\" \"megatrain %s\" \"Miscellaneous\"\n.SH NAME\nmegatrain-policy \\- reinforcement "
           "learning: rollouts, losses, rounds\n.SH DESCRIPTION\n", MT_VERSION);
    for (size_t i = 0; i < cli_n_topics; i++)
        if (!strcmp(cli_topics[i].name, "policy"))
            cli_topic_print(&cli_topics[i], true);
    printf(".SH SEE ALSO\nmegatrain(1), megatrain.ini(5)\n");
}

void cli_print_cluster_manual(void)
{
    printf(".TH MEGATRAIN-CLUSTER 7 \"\" \"megatrain %s\" \"Miscellaneous\"\n%s", MT_VERSION, megatrain_cluster_text);
}
const struct cli_topic cli_topics[] = {
    {"models", "supported models and formats of weights", models_text},
    {"adapters", "LoRA and DoRA: what can have adapters, and how they are named", adapters_text},
    {"base", "frozen weights: packed, on drives, or read in place from the model's files", base_text},
    {"formats", "formats of training data, and what is trained of them", formats_text},
    {"updates", "optimizers and the order of updates: memory, time, and what a failure costs", updates_text},
    {"hosts", "several machines by MPI: what they need, what is sent, and what ends them", hosts_text},
    {"sampling", "what megatrain generate and sample keep, and what serves a model", sampling_text},
    {"preferences", "pairs and rated answers, references, rounds with a server", preferences_text},
    {"policy", "reinforcement learning: rollouts, losses, what to watch", policy_text},
};
const size_t cli_n_topics = MT_ARRAY_LEN(cli_topics);
