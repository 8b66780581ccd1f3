/* SPDX-License-Identifier: Apache-2.0 */
/* The wear of drives by a plan's writes, and changes that write less. */
#include <stdio.h>

#include "base/mem.h"
#include "plan_print.h"

enum {
    ASSUMED_TB = 2400, /* rated writes of a drive if unknown: 4 TB, a third of it written a day for five years */
    LONG_ENOUGH = 365, /* days of training that drives should last */
    RUNS_ENOUGH = 10,  /* runs as asked for that they should */
};

double plan_run_tokens(const struct plan_view *v)
{
    const struct mt_numerics *n = &v->request.numerics;
    if (!v->request.train)
        return 0;
    double rows = v->cfg->train.steps ? (double)(v->cfg->train.steps * n->rows_per_step)
                                      : v->cfg->train.epochs * (double)v->epoch_rows;
    return v->cfg->train.tokens ? (double)v->cfg->train.tokens : rows * (double)n->seq_len;
}

void plan_wear(struct plan_wear *w, const struct plan_view *v)
{
    const struct mt_rate *rate = v->machine.rate;
    double a_day = v->choice.sim.bytes[MT_Q_DISK_WRITE] / v->choice.sim.seconds * 86400;
    *w = (struct plan_wear){
        .tb_a_day = a_day * 1e-12,
        .rated_tb = rate[MT_RATE_ENDURANCE].value > 0 ? rate[MT_RATE_ENDURANCE].value : ASSUMED_TB,
        .assumed = !(rate[MT_RATE_ENDURANCE].value > 0),
        .drives = MT_MAX(v->request.drives, 1),
    };
    w->days = w->tb_a_day > 0 ? w->rated_tb * w->drives / w->tb_a_day : 0;
    const struct mt_numerics *n = &v->choice.numerics;
    w->tokens = w->days * 86400 / v->choice.sim.seconds * (double)(n->rows_per_step * n->seq_len);
}

/* Bytes of masters, optimizer states and gradients of n parameters. */
static double state_bytes(const struct plan_view *v, uint64_t n)
{
    const struct mt_numerics *num = &v->choice.numerics;
    double master = (double)(mt_dtype_size(MT_BF16) + mt_master_lo_bytes(num->master)),
           gradient = (double)mt_dtype_size(num->grad_dtype);
    return (double)n * (master + gradient + mt_optimizer_state_bytes(num->optimizer));
}

/* What states of 8 bits would take. */
static void print_lean(const struct plan_view *v)
{
    const struct mt_numerics *num = &v->choice.numerics;
    const struct mt_optimizer *lean = mt_optimizer_find(num->optimizer->type, MT_STATE_8BIT, num->optimizer_keys);
    double n = (double)v->layout->n_trained, now = mt_optimizer_state_bytes(num->optimizer);
    if (lean && mt_optimizer_state_bytes(lean) < now)
        printf("          optimizer.state_dtype = 8bit: states of %.4g GB less\n",
               n * (now - mt_optimizer_state_bytes(lean)) * 1e-9);
}

/* What masters of fewer bits would take; adapters have little of them. */
static void print_masters(const struct plan_view *v)
{
    static const struct {
        enum mt_master master;
        const char *name;
    } lean[] = {{MT_MASTER_24BIT, "24bit"}, {MT_MASTER_BF16, "bf16"}};
    const struct mt_numerics *num = &v->choice.numerics;
    size_t now = mt_master_lo_bytes(num->master);
    if (num->dtype == MT_F32 || !num->optimizer->lean_masters || v->layout->n_adapters)
        return;
    for (size_t i = 0; i < MT_ARRAY_LEN(lean); i++)
        if (mt_master_lo_bytes(lean[i].master) < now)
            printf("          optimizer.master = %s: masters of %.4g GB less\n", lean[i].name,
                   (double)v->layout->n_trained *
                       (double)(now - mt_master_lo_bytes(lean[i].master)) * 1e-9);
}

/* Under backward no gradient is on a drive, and what host memory had of them keeps states. */
static void print_backward(const struct plan_view *v)
{
    const struct mt_numerics *n = &v->choice.numerics;
    double gradients = (double)v->layout->n_trained * (double)mt_dtype_size(n->grad_dtype);
    if (v->choice.placement.update == MT_UPDATE_FORWARD)
        printf("          %smemory.update = backward: gradients of %.4g GB less\n",
               mt_clips_by_block(n) ? "" : "train.clip = unit, ", gradients * 1e-9);
}

static void print_alternatives(const struct plan_view *v)
{
    const struct mt_layout *l = v->layout;
    uint64_t experts = 0;
    for (size_t t = 0; t < l->n_tensors; t++)
        experts += l->tensors[t].expert >= 0 && l->tensors[t].trainable ? l->tensors[t].n : 0;
    uint64_t rest = l->n_trained - experts;
    if (experts && rest)
        printf("          model.freeze = *.experts.*: %.3gB parameters are trained, states of %.4g GB\n"
               "            instead of %.4g GB; experts are read and never written\n",
               (double)rest * 1e-9, state_bytes(v, rest) * 1e-9, state_bytes(v, l->n_trained) * 1e-9);
    print_lean(v);
    print_masters(v);
    print_backward(v);
    if (!l->by_blocks && mt_config_may_train_blocks(v->cfg))
        printf("          train.blocks = layers: states of %.4g GB, of a layer at a time\n",
               state_bytes(v, l->n_trained / (uint64_t)l->cfg.n_layers) * 1e-9);
    if (!l->n_adapters)
        printf("          adapter.kind = lora: the model is read and never written\n");
    printf("          host memory for the states: %.4g GB in all\n", state_bytes(v, l->n_trained) * 1e-9);
}

void plan_print_wear(const struct plan_view *v)
{
    struct plan_wear w;
    plan_wear(&w, v);
    if (!(w.tb_a_day > 0))
        return;
    printf("Wear      %.3g TB written a day: %.2g%% of what %d drive%s rated for, %g TB each%s\n", w.tb_a_day,
           100 / w.days, w.drives, w.drives == 1 ? " is" : "s are", w.rated_tb, w.assumed ? " (assumed)" : "");
    double run = plan_run_tokens(v);
    if (run > 0)
        printf("          The run writes %.4g TB, %.2g%% of that.\n", run / w.tokens * w.rated_tb * w.drives, 100 * run / w.tokens);
    if (w.days >= LONG_ENOUGH || (run > 0 && run * RUNS_ENOUGH <= w.tokens))
        return;
    bool many = w.tokens >= 1e9;
    printf("          Such training wears the drives out in %.3g days, after %.3g %s\n          tokens. What would not:\n",
           w.days, w.tokens * (many ? 1e-9 : 1e-6), many ? "billion" : "million");
    print_alternatives(v);
}
