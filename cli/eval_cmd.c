/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "cli.h"
#include "train/evaluate.h"

static int print_samples(struct mt_session *s, bool json, struct mt_err *err)
{
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data data = {.n = 0};
    mt_sampler *sampler = s->setup->in->eval_sampler;
    int rc = mt_step_data_init(&data, sampler, err);
    MT_FREED double *loss = NULL;
    size_t cap = 0;
    for (uint64_t i = 0; !rc && i < mt_sampler_stats(sampler)->steps_per_epoch; i++) {
        size_t docs = 0, at = 0, n;
        rc = mt_sampler_fill(sampler, i, &data, err);
        const struct mt_batch *b = mt_step_whole(&data, &n);
        for (size_t m = 0; m < n; m++)
            docs += b[m].n_docs;
        if (!rc && !mt_grow(&loss, &cap, docs, sizeof(*loss)))
            rc = mt_fail_nomem(err, "losses", docs * sizeof(*loss));
        struct mt_eval_result sum = {.doc_loss = loss};
        rc = rc ?: mt_engine_eval(s->engine, 0, &data, &sum, err);
        for (size_t m = 0; m < n && !rc; m++)
            for (size_t d = 0; d < b[m].n_docs; d++, at++)
                printf(json ? isfinite(loss[at]) ? "{\"sample\": %d, \"loss_sum\": %.17g}\n" : "{\"sample\": %d, \"loss_sum\": null}\n"
                            : "sample %d loss_sum %.17g\n",
                       b[m].sample[d], loss[at]);
    }
    return rc;
}

/* Such a loss is no result. */
static int check_loss(double loss, const char *of, struct mt_err *err)
{
    return isfinite(loss) ? 0 : mt_fail(err, MT_ERR_TRAINING, -EDOM, "the loss on %s is not finite: the model's weights, or values "
                                        "that it computes of these samples, are too large (--per-sample says of which; megatrain "
                                        "verify, whether its files are whole)", of);
}

/* What an objective weighs is no mean of the tokens' losses, of which there is a perplexity. */
static void print_loss(const struct mt_eval_report *r, bool json)
{
    bool weighed = r->objective->weights && r->measures[0].n > 0;
    printf(json ? "{\"loss\": %.17g" : "loss %.6f", r->loss);
    if (!weighed)
        printf(json ? ", \"perplexity\": %.17g" : "  perplexity %.4f", exp(r->loss));
    printf(json ? ", \"accuracy\": %.17g, \"tokens\": %llu}\n" : "  accuracy %.4f  tokens %llu\n", r->accuracy,
           (unsigned long long)r->n_loss);
    for (size_t i = 0; i < r->n_sets; i++) {
        const struct mt_eval_of_set *e = &r->sets[i];
        printf(json ? "{\"set\": \"%s\", \"loss\": %.17g, \"perplexity\": %.17g, \"accuracy\": %.17g, \"tokens\": %llu}\n"
                    : "%s: loss %.6f  perplexity %.4f  accuracy %.4f  tokens %llu\n",
               e->name, e->loss, exp(e->loss), e->accuracy, (unsigned long long)e->n_loss);
    }
}

static int run_eval(struct mt_setup *setup, const struct cli_args *args, double *loss, struct mt_err *err)
{
    struct mt_session s;
    struct mt_eval_report r = {0};
    bool json = args && cli_arg(args, "json"), unread;
    mt_setup_adopt_checkpoint(setup);
    int rc = mt_session_start(&s, setup, err);
    rc = rc ?: mt_session_fill_weights(&s, NULL, err);
    if (!rc && args && cli_arg(args, "per-sample"))
        rc = print_samples(&s, json, err);
    rc = rc ?: mt_evaluate(&s, 0, NULL, NULL, &r, &unread, err);
    mt_session_finish(&s);
    rc = rc ?: check_loss(r.loss, "data.eval", err);
    for (size_t i = 0; i < r.n_sets && !rc; i++)
        rc = check_loss(r.sets[i].loss, r.sets[i].name, err);
    if (!rc && args)
        print_loss(&r, json);
    *loss = r.loss;
    return rc;
}

int cli_eval(struct mt_config *cfg, const struct cli_args *args, double *loss, struct mt_err *err)
{
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {0};
    MT_CLOSED_BY(mt_setup_finish) struct mt_setup setup = {0};
    int rc = mt_inputs_open(&in, cfg, MT_RUN_EVAL, NULL, err) ?: mt_setup_open(&setup, &in, MT_RUN_EVAL, err);
    if (!rc && !in.eval_sampler)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.eval is not set: give a file, a number of samples, or a share such as 2%%");
    return rc ?: run_eval(&setup, args, loss, err);
}

int cli_cmd_eval(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    double loss;
    return cli_load_config(&cfg, MT_TO_EVALUATE, args, err)
        ?: cli_choose_model(cfg, cli_arg(args, "model"), cli_arg(args, "adapter"), err)
        ?: cli_eval(cfg, args, &loss, err);
}
