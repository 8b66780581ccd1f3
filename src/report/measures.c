/* SPDX-License-Identifier: Apache-2.0 */
/* Charts of what objectives measure beside the loss: each key of metrics.jsonl is a line, each evaluation a point. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "report/chart.h"
#include "report/report_priv.h"

static const struct {
    const char *key, *name;
    int panel;
} lines[MT_N_LINES] = {
    {"rewards/chosen", "chosen", 0},     {"rewards/rejected", "rejected", 0},   {"rewards/margins", "margin", 0},
    {"rewards/accuracies", "pairs", 1},  {"mean_token_accuracy", "tokens", 1},  {"logps/chosen", "chosen", 2},
    {"logps/rejected", "rejected", 2},   {"kl", "distance to the reference", 3}, {"reward", "mean", 4},
    {"reward_std", "deviation in a group", 4}, {"clip_ratio/region_mean", "tokens clipped", 5},
    {"frac_reward_zero_std", "rollouts of groups of equal rewards", 5}, {"completions/clipped_ratio", "rollouts cut off", 5},
    {"entropy", "entropy", 6},           {"completions/mean_length", "tokens", 7},
};

static const struct {
    const char *name, *title, *label;
    bool zero;
} panels[] = {
    {"rewards", "Rewards of answers", "beta times log-ratio to the reference", false},
    {"preferred", "Share of pairs preferred, of tokens foreseen", "1: all", true},
    {"log-probabilities", "Log-probabilities of answers", "nats", false},
    {"distance", "Distance to the reference", "nats", true},
    {"reward", "Rewards of rollouts", "reward", false},
    {"signal", "Shares without a gradient, or cut off", "1: all", true},
    {"entropy", "Entropy of the policy", "nats", true},
    {"length", "Length of completions", "tokens", true},
};

int mt_lines_alloc(struct mt_lines *l, size_t n, struct mt_err *err)
{
    bool ok = (l->step = mt_calloc(n, sizeof(double))) && (l->eval_step = mt_calloc(n, sizeof(double)));
    for (int k = 0; k < MT_N_LINES; k++) {
        l->value[k] = mt_calloc(n, sizeof(double));
        l->eval[k] = mt_calloc(n, sizeof(double));
        ok = ok && l->value[k] && l->eval[k];
    }
    return ok ? 0 : mt_fail_nomem(err, "a report", n * sizeof(double));
}

void mt_lines_finish(struct mt_lines *l)
{
    free(l->step);
    free(l->eval_step);
    for (int k = 0; k < MT_N_LINES; k++) {
        free(l->value[k]);
        free(l->eval[k]);
    }
}

/* Returns whether the record has any of them. */
static bool read(const cJSON *o, const char *prefix, double *const value[], size_t at)
{
    char key[64];
    bool any = false;
    for (int k = 0; k < MT_N_LINES; k++) {
        snprintf(key, sizeof(key), "%s%s", prefix, lines[k].key);
        const cJSON *v = mt_json_get(o, key);
        value[k][at] = cJSON_IsNumber(v) ? v->valuedouble : NAN;
        any |= cJSON_IsNumber(v);
    }
    return any;
}

void mt_lines_read(struct mt_lines *l, double step, const cJSON *o)
{
    l->step[l->n] = l->eval_step[l->n_eval] = step;
    if (read(o, "", l->value, l->n))
        l->n++;
    if (read(o, "eval_", l->eval, l->n_eval))
        l->n_eval++;
}

static bool has_value(const double *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (isfinite(v[i]))
            return true;
    return false;
}

static int add_panel(struct mt_report *r, const char *section, const struct mt_lines *l, int panel, struct mt_err *err)
{
    struct mt_series s[2 * MT_N_LINES] = {{0}};
    size_t n = 0;
    for (int k = 0, colour = 0; k < MT_N_LINES; k++) {
        bool steps = lines[k].panel == panel && has_value(l->value[k], l->n);
        bool evals = lines[k].panel == panel && has_value(l->eval[k], l->n_eval);
        if (steps)
            s[n++] = (struct mt_series){.name = lines[k].name, .x = l->step, .y = l->value[k], .n = l->n,
                                        .colour = colour};
        if (evals)
            s[n++] = (struct mt_series){.name = steps ? NULL : lines[k].name, .x = l->eval_step, .y = l->eval[k],
                                        .n = l->n_eval, .colour = colour, .points = true};
        colour += steps || evals;
    }
    if (!n)
        return 0;
    struct mt_chart c = {.title = panels[panel].title, .x_label = "step (points: evaluations)",
                         .y_label = panels[panel].label, .zero = panels[panel].zero, .series = s, .n_series = n};
    struct mt_str text = {0};
    mt_chart_lines(&text, &c);
    return mt_report_add(r, section, panels[panel].name, &text, err);
}

int mt_report_lines(struct mt_report *r, const char *section, const struct mt_lines *l, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(panels) && !rc; i++)
        rc = add_panel(r, section, l, (int)i, err);
    return rc;
}
