/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of generation: passes of one new token of each text, by how many texts there are at once. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cli.h"
#include "plan_print.h"
#include "report.h"
#include "train/texts.h"

/* A policy's round: its texts, as many at once as are best or as there are, and the steps on them. */
struct round {
    double texts, generate, train; /* texts 0: the configuration has none */
};

static int plan_round(struct round *out, const struct mt_texts_pass *row, size_t best, const struct plan_view *g,
                      const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(plan_view_close) struct plan_view v = {.cfg = NULL};
    const struct mt_config *c = g->cfg;
    *out = (struct round){0};
    if (!strcmp(c->policy.loss, "off") || !*c->policy.prompts)
        return 0;
    double texts = (double)mt_plan_rollouts(c);
    int64_t together = c->policy.prompts_per_round * c->policy.samples; /* of the same weights */
    while (best && (int64_t)row[best].texts > together)
        best--;
    double most = (double)c->numerics.objective_keys.policy.max_tokens;
    *out = (struct round){.texts = texts, .generate = texts * most / row[best].per_second};
    int rc = plan_view_open(&v, args->n_operands ? args->operands[0] : NULL, args, err);
    rc = rc ?: plan_view_resolve(&v, err);
    if (!rc)
        out->train = v.choice.sim.seconds * (double)c->policy.steps_per_round;
    return rc;
}

/* Of all layers, without states of recurrences. */
static size_t cache_bytes(const struct plan_view *v)
{
    size_t bytes = 0;
    for (size_t u = 0; u < v->layout->n_units; u++) {
        struct mt_unit_cache c = mt_unit_cache(v->layout, u, v->cfg->numerics.dtype, 1);
        bytes += c.kind == MT_CACHE_STATES ? 0 : c.bytes;
    }
    return bytes;
}

static bool keeps_latents(const struct plan_view *v)
{
    return v->cfg->memory.latent_cache && v->hf.spec[0].kv_latent;
}

static void print_json(const struct plan_view *v, const struct mt_texts_pass *row, size_t n, size_t best, size_t len,
                       const struct round *of)
{
    mt_json_begin();
    cJSON *o = mt_json_put(NULL, "tokens_of_a_text=%f, best_texts=%f, tokens_per_second=%f, cache_bytes_of_a_token=%f, cache_of=%s",
                           (double)len, (double)row[best].texts, row[best].per_second, (double)cache_bytes(v),
                           keeps_latents(v) ? "latents" : "keys and values");
    cJSON *list = cJSON_AddArrayToObject(o, "by_texts");
    for (size_t i = 0; i < n; i++) {
        const double units = (double)row[i].units;
        mt_json_append(list, mt_json_put(NULL, "texts=%f, tokens_per_second=%f, pass_seconds=%f, drawing_seconds=%f, "
                                         "bound_by=%s, caches_on_device=%f, weights_on_device=%f", (double)row[i].texts,
                                         row[i].per_second, row[i].seconds, row[i].drawing, row[i].bound,
                                         (double)row[i].caches / units, (double)row[i].weights / units));
    }
    if (of->texts > 0)
        mt_json_put(cJSON_AddObjectToObject(o, "round"), "texts=%f, generate_seconds=%f, train_seconds=%f", of->texts,
                    of->generate, of->train);
    cli_print_object(o, true);
}

static void print_table(const struct plan_view *v, const struct mt_texts_pass *row, size_t n, size_t best, size_t len,
                        const struct round *of)
{
    char bytes[32];
    printf("Generation of texts of %zu tokens, each pass a new token of every text. The cache has %s of a token: %s\n\n", len,
           mt_format_bytes(bytes, sizeof(bytes), cache_bytes(v)), keeps_latents(v) ? "latents" : "keys and values");
    printf("  texts   tokens/s    s a pass   of it drawing   on the device: caches, weights   bound by\n");
    for (size_t i = 0; i < n; i++)
        printf("  %5zu %10.4g  %10.4g      %10.4g             %5.0f%%   %5.0f%%           %s\n", row[i].texts, row[i].per_second,
               row[i].seconds, row[i].drawing, 100.0 * (double)row[i].caches / (double)row[i].units,
               100.0 * (double)row[i].weights / (double)row[i].units, row[i].bound);
    printf("\nBest: %zu texts at once (--batch %zu), %.4g tokens/s%s\n", row[best].texts, row[best].texts, row[best].per_second,
           row[n - 1].texts < MT_TEXTS_MOST ? "; twice as many as the last do not fit" : "");
    if (of->texts > 0)
        printf("Round: %.0f texts of policy.max_tokens generated in %.4g s, trained in %.4g s; rewards are not known\n", of->texts,
               of->generate, of->train);
}

int plan_print_generation(const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(plan_view_close) struct plan_view v = {.cfg = NULL};
    struct mt_texts_pass row[MT_TEXTS_PASSES];
    struct round of = {0};
    size_t len = (size_t)cli_whole(args, "generate", 0), n = 0, best = 0;
    const struct plan_settings as = {.generates = true};
    int rc = plan_view_open_as(&v, args->n_operands ? args->operands[0] : NULL, args, &as, err);
    rc = rc ?: plan_view_needs_rates(&v, err)
            ?: mt_texts_plan(row, &n, &best, &v.request, &(struct mt_texts){.n = MT_TEXTS_MOST, .len = len}, 1, err)
            ?: plan_round(&of, row, best, &v, args, err);
    if (!rc)
        (cli_arg(args, "json") ? print_json : print_table)(&v, row, n, best, len, &of);
    return rc;
}
