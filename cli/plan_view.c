/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan is made of: the configuration, its model's shape, and the machine, as the options say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/installed.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "cli.h"
#include "device/device.h"
#include "hf/hf_config.h"
#include "hw/hw.h"
#include "kinds/kinds.h"
#include "machine/measure.h"
#include "machine/stored.h"
#include "optim/optimizer.h"
#include "plan_print.h"
#include "train/inputs.h"

/* "24GiB", "25GB/s", or a bare number of the option's own unit, which is `scale` bytes; -1 for other text. */
static double parse_amount(const char *text, double scale)
{
    double v = 0;
    uint64_t bytes = 0;
    int64_t count = 0;
    if (mt_parse_real(text, &v))
        return v > 0 ? v : -1;
    if (mt_parse_bytes(text, &bytes))
        v = (double)bytes;
    else if (!mt_parse_rate(text, &v) && mt_parse_count(text, &count)) /* "24G" */
        v = (double)count;
    return v > 0 ? v / scale : -1;
}

/* An option that sets rates of the machine to shares of its amount. */
struct rate_option {
    const char *name;
    double scale; /* of the amount's number without a unit */
    int n;
    enum mt_rate_id id[4];
    double share[4];
};

static int set_rates(struct mt_machine *m, const struct cli_args *args, const struct rate_option *o, struct mt_err *err)
{
    const char *text = cli_arg(args, o->name);
    if (!text)
        return 0;
    double v = parse_amount(text, o->scale);
    if (v < 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--%s: \"%s\" is not an amount such as %s", o->name, text,
                       o->scale > 1e9 ? "24GiB" : "25GB/s");
    for (int i = 0; i < o->n; i++)
        if (o->share[i] < 1)
            mt_machine_rate(m, o->id[i], v * o->share[i], "assumed: %g of --%s", o->share[i], o->name);
        else
            mt_machine_rate(m, o->id[i], v, "--%s", o->name);
    return 0;
}

/* Applies the options that change the machine. */
static int apply_options(struct mt_machine *m, const struct cli_args *args, struct mt_err *err)
{
    static const struct rate_option options[] = {
        {"gpu-mem", 1073741824.0, 1, {MT_RATE_DEVICE_GIB}, {1}},
        {"host-mem", 1073741824.0, 1, {MT_RATE_HOST_GIB}, {1}},
        {"pcie", 1e9, 4, {MT_RATE_H2D, MT_RATE_D2H, MT_RATE_H2D_BOTH, MT_RATE_D2H_BOTH}, {1, 1, 0.85, 0.85}},
        {"nvme", 1e9, 4, {MT_RATE_READ, MT_RATE_WRITE, MT_RATE_READ_BOTH, MT_RATE_WRITE_BOTH}, {1, 0.7, 0.6, 0.4}},
    };
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(options) && !rc; i++)
        rc = set_rates(m, args, &options[i], err);
    if (cli_arg(args, "link-share"))
        mt_machine_rate(m, MT_RATE_LINK_GPUS, (double)cli_whole(args, "link-share", 1), "--link-share");
    if (!rc && cli_arg(args, "nvme") && !(m->rate[MT_RATE_DRIVES].value > 0))
        mt_machine_rate(m, MT_RATE_DRIVES, 1, "--nvme");
    const char *drives = cli_arg(args, "drives");
    if (!rc && drives) {
        mt_machine_rate(m, MT_RATE_DRIVES, atof(drives), "--drives");
        if (!(m->rate[MT_RATE_DRIVES].value >= 1) || !(m->rate[MT_RATE_READ].value > 0))
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                         "--drives %s: must be a number, together with --nvme for their speed", drives);
    }
    return rc;
}

/* This machine is what it was measured to be. */
static int refuse_options(const struct cli_args *args, struct mt_err *err)
{
    static const char *const options[] = {"gpu-mem", "host-mem", "pcie", "link-share", "nvme", "drives"};
    for (size_t i = 0; i < MT_ARRAY_LEN(options); i++)
        if (cli_arg(args, options[i]))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--%s changes a stored machine: give --machine, too", options[i]);
    return 0;
}

static int load_local(struct plan_view *v, const struct mt_plan_limits *limits, struct mt_err *err)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    int n = (int)v->request.placement.threads;
    struct mt_measure_params p = {
        .device_kind = limits->kind, .device_index = limits->gpu[0], .n_threads = n};
    v->device_index = p.device_index;
    int rc = mt_measure_device(&dev, &p, 0, err);
    rc = rc ?: mt_hw_resident(&v->request.resident, err)
            ?: mt_machine_load(&v->machine, mt_device_limits(dev), n, &v->unmeasured);
    v->request.makes_products = dev && mt_device_limits(dev)->makes_products;
    if (rc == -ENOENT || rc == -ESTALE) { /* memory needs no rates */
        v->machine = (struct mt_machine){.cpu = mt_device_limits(dev)->shares_host_memory};
        snprintf(v->machine.name, sizeof(v->machine.name), "%s", mt_device_limits(dev)->name);
        mt_machine_rate(&v->machine, MT_RATE_HOST_GIB, (double)limits->host_bytes / 0x1p30, "free now");
        rc = 0;
    } else if (rc && err) {
        *err = v->unmeasured;
    }
    return rc;
}

/* By the rules that a run has on such a machine. */
static int resolve_by_rules(struct mt_plan_choice *out, const struct plan_view *v, const struct mt_plan_request *r,
                            struct mt_err *err)
{
    const struct mt_placement *p = &r->placement;
    struct mt_device_params params = {.kind = mt_machine_device_kind(&v->machine), .index = v->device_index,
                                      .budget_bytes = p->device_budget.bytes, .n_threads = (int)p->threads};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    int rc = mt_device_create(&dev, &params, err) ?: mt_resolve_by_rules(out, r, dev, err);
    char a[32], b[32];
    if (!rc && out->host_bytes > mt_plan_host_limit(r))
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "the host memory budget of %s (memory.host_budget) is too small: %s are needed",
                     mt_format_bytes(a, sizeof(a), p->host_budget.bytes),
                     mt_format_need(b, sizeof(b), out->host_bytes));
    return rc;
}

static int resolve(struct mt_plan_choice *out, const struct plan_view *v, const struct mt_plan_request *r,
                   struct mt_err *err)
{
    return v->unmeasured.code ? resolve_by_rules(out, v, r, err) : mt_resolve(out, r, err);
}

/* A block that does not fit becomes the view's, so that changes are looked for that make it fit. */
static int try_block(void *ctx, struct mt_layout **layout, struct mt_layout **halves, struct mt_err *err)
{
    struct plan_view *v = ctx;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {.layout = NULL};
    struct mt_plan_request r = v->request;
    r.layout = *layout;
    r.halves = *halves;
    r.numerics = v->choice.numerics;
    int rc = resolve(&c, v, &r, err);
    if (rc != -ENOSPC)
        return rc;
    mt_layout_destroy(&v->layout);
    mt_layout_destroy(&v->halves);
    v->request.layout = v->layout = MT_GIVE(*layout);
    v->request.halves = v->halves = MT_GIVE(*halves);
    return rc;
}

static int keep_block(void *ctx, struct mt_layout **layout, struct mt_layout **halves, struct mt_err *err)
{
    struct plan_view *v = ctx;
    if (!mt_grow(&v->blocks, &v->cap_blocks, v->n_blocks + 1, sizeof(*v->blocks)))
        return mt_fail_nomem(err, "the blocks", (v->n_blocks + 1) * sizeof(*v->blocks));
    v->blocks[v->n_blocks++] = (struct mt_plan_cuts){MT_GIVE(*layout), MT_GIVE(*halves)};
    return 0;
}

/* Calls it for each block that is trained. */
static int each_block(struct plan_view *v,
                      int (*fits)(void *, struct mt_layout **, struct mt_layout **, struct mt_err *),
                      struct mt_err *err)
{
    const uint64_t steps = (uint64_t)v->cfg->train.steps;
    const struct mt_plan_blocks blocks = {{v->cfg, &v->hf, v->model_dir, NULL}, v->layout, steps, fits, v};
    return v->request.train ? mt_plan_check_blocks(&blocks, err) : 0;
}

int plan_view_keep_blocks(struct plan_view *v, struct mt_err *err)
{
    int rc = each_block(v, keep_block, err);
    v->request.also = v->blocks;
    v->request.n_also = v->n_blocks;
    return rc;
}

int plan_view_needs_rates(const struct plan_view *v, struct mt_err *err)
{
    if (v->unmeasured.code && err)
        *err = v->unmeasured;
    return v->unmeasured.code
               ? mt_fail_prefix(err, v->unmeasured.code, "name a machine (--machine rtx4090), or measure this one") : 0;
}

int plan_view_resolve(struct plan_view *v, struct mt_err *err)
{
    return resolve(&v->choice, v, &v->request, err) ?: each_block(v, try_block, err);
}

int plan_read_machine(struct mt_machine *out, const struct cli_args *args, struct mt_err *err)
{
    char path[4096];
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    int rc = mt_machine_find(path, sizeof(path), cli_arg(args, "machine"), err)
          ?: mt_machine_read(&m, path, err)
          ?: apply_options(&m, args, err);
    if (!rc)
        *out = MT_GIVE(m);
    return rc;
}

static int load_machine(struct plan_view *v, const struct cli_args *args, struct mt_err *err)
{
    struct mt_plan_limits limits;
    v->local = !cli_arg(args, "machine");
    int rc = v->local ? refuse_options(args, err) ?: mt_plan_limits_here(&limits, v->cfg, err)
                      : plan_read_machine(&v->machine, args, err);
    if (rc)
        return rc;
    if (!v->local)
        limits = mt_plan_limits_of(&v->machine);
    limits.n_hosts = (int)cli_whole(args, "hosts", 1);
    return mt_resolve_request(&v->request, v->cfg, &limits, err) ?: v->local ? load_local(v, &limits, err) : 0;
}

static int read_model_file(struct plan_view *v, const char *path, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc && err)
        err->kind = MT_ERR_INPUT;
    return rc ?: mt_hf_config_parse(&v->hf, text, len, path, err);
}

/* A plan needs no more of a published model than its shape, which is stored. */
static int read_model(struct plan_view *v, bool says, struct mt_err *err)
{
    const char *model = v->cfg->model.path;
    char stored[4096];
    if (!*model)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "nothing to plan: give a configuration, or --model with a config.json or a model's name");
    if (mt_ends_with(model, ".json"))
        return read_model_file(v, model, err);
    int rc = mt_hf_find_model(&v->model_dir, model, err);
    if (!rc)
        return mt_hf_config_read(&v->hf, v->model_dir, err);
    if (rc != -ENOENT)
        return rc;
    if (!mt_hf_find_stored(stored, sizeof(stored), model)) {
        const char *slash = strrchr(model, '/');
        MT_STR_FREED struct mt_str names = {0};
        mt_installed_names(&names, "models", ".json", slash ? slash + 1 : model);
        if (names.p)
            rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "model \"%s\": neither a folder nor known by that name to plan; there are %s", model,
                         names.p);
        return rc;
    }
    if (says)
        mt_info("model \"%s\" is not here; planned from %s", model, stored);
    return read_model_file(v, stored, err);
}

static int set_tokens_per_step(struct mt_config *cfg, const char *tokens, struct mt_err *err)
{
    return mt_config_override(cfg, "train.batch_size", "0", "command line", err)
        ?: mt_config_override(cfg, "train.tokens_per_step", tokens, "command line", err);
}

/* Applies the options that are shorthands for keys. */
static int shorthand(struct mt_config *cfg, const struct cli_args *args, struct mt_err *err)
{
    static const struct {
        const char *option, *key;
    } keys[] = {{"model", "model.path"}, {"seq-len", "data.seq_len"}, {"micro-batch", "train.micro_batch"},
                {"gpus", "device.gpus"}};
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(keys) && !rc; i++)
        if (cli_arg(args, keys[i].option))
            rc = mt_config_override(cfg, keys[i].key, cli_arg(args, keys[i].option), "command line", err);
    const char *tokens = cli_arg(args, "tokens-per-step");
    return rc || !tokens ? rc : set_tokens_per_step(cfg, tokens, err);
}

/* Keys of other optimizers than the one that is tried. */
static int reset_other_keys(struct mt_config *cfg, struct mt_err *err)
{
    char name[64];
    double unused;
    int rc = 0;
    for (size_t i = 0; i < mt_optimizer_n_slots() && !rc; i++) {
        const char *key = mt_optimizer_slot(i)->key.name;
        snprintf(name, sizeof(name), "optimizer.%s", key);
        if (!mt_optimizer_default(cfg->optimizer.type, key, &unused))
            rc = mt_config_reset(cfg, name, err);
    }
    if (!rc && !mt_optimizer_find(cfg->optimizer.type, MT_STATE_F32, NULL)->matrices)
        rc = mt_config_reset(cfg, "optimizer.matrices", err);
    return rc;
}

static int apply_settings(struct mt_config *cfg, const struct plan_settings *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; s && i < MT_ARRAY_LEN(s->key) && s->key[i] && !rc; i++)
        rc = mt_config_override(cfg, s->key[i], s->value[i], "a change", err);
    if (s && s->key[0] && !strcmp(s->key[0], "optimizer.type") && !rc)
        rc = reset_other_keys(cfg, err);
    char tokens[32] = "";
    if (s && s->tokens_per_step)
        snprintf(tokens, sizeof(tokens), "%lld", s->tokens_per_step);
    return rc || !*tokens ? rc : set_tokens_per_step(cfg, tokens, err);
}

int plan_view_open_as(struct plan_view *v, const char *ini, const struct cli_args *args,
                      const struct plan_settings *change, struct mt_err *err)
{
    *v = (struct plan_view){.generates = change && change->generates};
    enum mt_config_use use = v->generates ? MT_TO_GENERATE : cli_arg(args, "score") ? MT_TO_EVALUATE : MT_TO_TRAIN;
    const bool trains = use == MT_TO_TRAIN;
    int rc = cli_load_file(&v->cfg, ini, use, args, err);
    if (!rc && v->generates) /* as variants of the weights sample */
        v->cfg->numerics.mezo.on_load = mt_plan_by_rewards(v->cfg);
    rc = rc ?: shorthand(v->cfg, args, err)
            ?: apply_settings(v->cfg, change, err)
            ?: read_model(v, !change, err);
    if (!rc && !trains)
        rc = mt_inputs_freeze_all(v->cfg, v->generates ? "--generate" : "--score", err);
    if (!rc && v->generates && v->cfg->placement.expert_group == MT_AUTO)
        v->cfg->placement.expert_group = 1; /* as generation does */
    if (!rc && v->generates)
        rc = mt_plan_lay_out_to_generate(&v->layout, &v->halves, v->cfg, &v->hf, v->model_dir, err);
    else
        rc = rc ?: mt_plan_lay_out(&v->layout, &v->halves, v->cfg, &v->hf, v->model_dir, NULL, err);
    if (!rc && trains)
        rc = mt_plan_check_trained(v->layout, err);
    rc = rc ?: load_machine(v, args, err);
    v->request.machine = &v->machine;
    v->request.layout = v->layout;
    size_t row = v->request.draws;
    if (!rc && trains && row) /* as if there were many prompts, as long as their answers: they are not read */
        v->request.cache = mt_inputs_answers_cache(&v->request.draws, v->layout, row,
                                                   MT_MIN(row, 2 * (size_t)v->cfg->eval.generate_tokens), SIZE_MAX);
    v->request.halves = v->halves;
    v->request.train = trains;
    v->request.top = (size_t)cli_whole(args, "score", 0);
    rc = rc ?: plan_view_share(v, args, err);
    if (!rc && !change && v->request.train && v->model_dir && v->cfg->train.epochs > 0)
        v->epoch_rows = mt_inputs_prepared_rows(v->cfg, &v->hf, v->model_dir, &v->request.numerics);
    return rc;
}

int plan_view_open(struct plan_view *v, const char *ini, const struct cli_args *args, struct mt_err *err)
{
    return plan_view_open_as(v, ini, args, NULL, err);
}

void plan_view_close(struct plan_view *v)
{
    mt_plan_choice_finish(&v->choice);
    mt_machine_finish(&v->machine);
    mt_layout_destroy(&v->layout);
    mt_layout_destroy(&v->halves);
    for (size_t i = 0; i < v->n_blocks; i++) {
        mt_layout_destroy(&v->blocks[i].layout);
        mt_layout_destroy(&v->blocks[i].halves);
    }
    free(v->blocks);
    free(v->model_dir);
    mt_config_destroy(&v->cfg);
}

static void show_progress(void *ctx, const char *what)
{
    const struct cli *cli = ctx;
    if (!cli->quiet)
        fprintf(stderr, "measuring %s\n", what);
}

/* Times the operations that this configuration may run, so that candidates are compared by measured times; `anew`:
 * again, and only those of the choice. */
int plan_view_measure(struct plan_view *v, struct cli *cli, bool anew, struct mt_err *err)
{
    MT_FREED struct mt_metered *ops = NULL;
    MT_FREED int *cpus = NULL;
    size_t n = 0;
    int n_cores = 0;
    struct mt_numa numa;
    if (!v->local)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--measure measures this machine; it cannot be used with --machine");
    int rc = mt_hw_cores(&cpus, &n_cores, err);
    struct mt_plan_request r = anew ? mt_plan_request_as(&v->request, &v->choice) : v->request;
    rc = rc ?: mt_plan_operations(&ops, &n, &r, err);
    mt_numa_choose(&numa, v->cfg->device.numa);
    struct mt_measure_params mp = {.device_kind = mt_machine_device_kind(&v->machine),
                                   .device_index = v->device_index,
                                   .n_threads = (int)r.placement.threads,
                                   .cpus = r.placement.threads <= n_cores ? cpus : NULL,
                                   .numa = &numa,
                                   .progress = anew ? NULL : show_progress,
                                   .ctx = cli};
    return rc ?: (anew ? mt_measure_again : mt_measure_operations)(&v->machine, &mp, ops, n, err);
}
