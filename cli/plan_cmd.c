/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/installed.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "plan/trace.h"
#include "plan_print.h"

enum {
    N_FREE = 10, /* changes of settings that are tried */
    N_OTHER = 3, /* that the plan finds by itself */
    FEWEST = 16, /* also with steps of a quarter of the tokens, and of so small a part */
};

/* The same, and keeps the times in the profile. */
static int measure_and_keep(struct plan_view *v, struct cli *cli, struct mt_err *err)
{
    char path[4096];
    if (v->local && !v->machine.fingerprint[0])
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--measure adds to this machine's profile, but there is none: run "
                       "megatrain probe all first");
    int rc = plan_view_measure(v, cli, false, err);
    mt_machine_cache_path(path, sizeof(path), mt_machine_device_kind(&v->machine), (int)v->request.placement.threads);
    return rc ?: mt_machine_write(&v->machine, path, err);
}

/* Whether it changes types that are not lean yet; of adapters there is little to gain. */
static bool is_leaner(const struct mt_config *c, const struct plan_settings *s)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(s->key) && s->key[i]; i++) {
        bool states = !strcmp(s->key[i], "optimizer.state_dtype"),
             master = !strcmp(s->key[i], "optimizer.master");
        if ((states && c->numerics.state_type != MT_STATE_F32) ||
            (master && c->numerics.master != MT_MASTER_F32))
            return false;
    }
    return c->adapter.kind == MT_ADAPTER_NONE;
}

/* Whether a change says something new: adapters are not made of adapters, and where nothing trains only the weights'
 * types matter. */
static bool is_change(const struct plan_view *v, const struct plan_settings *s)
{
    const struct mt_config *c = v->cfg;
    if (!v->request.train)
        return !strcmp(s->key[0], "model.base_dtype") && !c->model.base_dtype;
    bool adapters = c->adapter.kind != MT_ADAPTER_NONE;
    if (!strcmp(s->key[0], "train.clip"))
        return !mt_clips_by_block(&c->numerics) && c->placement.update == MT_UPDATE_AUTO;
    if (!strncmp(s->key[0], "optimizer.", strlen("optimizer.")))
        return is_leaner(c, s);
    if (!strcmp(s->key[0], "train.blocks"))
        return !strcmp(c->train.blocks, "off") && mt_config_may_train_blocks(c);
    return !strcmp(s->key[0], "adapter.kind") ? !adapters : adapters && c->model.base_dtype == 0;
}

/* Adds the change, as options that can be given as they stand, if it makes it fit. */
static size_t try_change(struct mt_plan_change *out, const struct plan_settings *s, const struct cli_args *args)
{
    MT_CLOSED_BY(plan_view_close) struct plan_view t = {.cfg = NULL};
    int rc = plan_view_open_as(&t, args->n_operands ? args->operands[0] : NULL, args, s, NULL);
    rc = rc ?: mt_plan_could_fit(&t.request) ? plan_view_resolve(&t, NULL) : -ENOSPC;
    if (!rc) {
        size_t len = 0;
        *out = (struct mt_plan_change){.seconds = t.choice.sim.seconds};
        for (size_t i = 0; i < MT_ARRAY_LEN(s->key) && s->key[i]; i++)
            len += (size_t)snprintf(out->what + len, sizeof(out->what) - len, "%s--set %s=%s", i ? " " : "", s->key[i],
                                    s->value[i]);
        if (s->tokens_per_step)
            snprintf(out->what + len, sizeof(out->what) - len, " --tokens-per-step %lld", s->tokens_per_step);
    }
    return !rc;
}

#define RECOMPUTE "memory.activations"

/* Whether the configuration wants activations that take more memory than recomputing them. */
static bool keeps_activations(const struct plan_view *v)
{
    enum mt_activations a = v->request.placement.activations;
    return v->request.train && a != MT_ACT_AUTO && a != MT_ACT_RECOMPUTE;
}

/* Each of the settings that makes it fit; `recompute`: with activations recomputed, too. */
static size_t try_settings(struct mt_plan_change *out, const struct plan_view *v, const struct cli_args *args,
                           long long tokens_per_step, bool recompute)
{
    static const struct plan_settings all[N_FREE] = {
        {{"train.clip", "memory.update"}, {"unit", "backward"}, 0},
        {{"optimizer.state_dtype"}, {"bf16"}, 0},
        {{"optimizer.master"}, {"24bit"}, 0},
        {{"optimizer.state_dtype"}, {"8bit"}, 0},
        {{"optimizer.state_dtype", "optimizer.master"}, {"8bit", "24bit"}, 0},
        {{"optimizer.state_dtype", "optimizer.master", "train.clip", "memory.update"},
         {"8bit", "bf16", "unit", "backward"},
         0},
        {{"train.blocks"}, {"layers"}, 0},
        {{"model.base_dtype"}, {"nf4"}, 0},
        {{"adapter.kind"}, {"lora"}, 0},
        {{"adapter.kind", "model.base_dtype"}, {"lora", "nf4"}, 0},
    };
    size_t n = 0;
    for (size_t i = 0; i < N_FREE; i++) {
        struct plan_settings s = all[i];
        size_t keys = 0;
        if (!is_change(v, &s))
            continue;
        while (s.key[keys])
            keys++;
        s.key[keys] = recompute ? RECOMPUTE : NULL;
        s.value[keys] = recompute ? "recompute" : NULL;
        s.tokens_per_step = tokens_per_step;
        n += try_change(&out[n], &s, args);
    }
    return n;
}

/* Settings that make it fit, the mildest first; where none does alone, with activations recomputed, or with steps of
 * fewer tokens. */
static size_t free_changes(struct mt_plan_change *out, const struct plan_view *v, const struct cli_args *args)
{
    const struct mt_numerics *now = &v->request.numerics;
    size_t n = 0;
    for (int64_t rows = now->rows_per_step, part = 1; part <= FEWEST && rows / part >= 1 && !n; part *= 4)
        for (int recompute = 0; recompute <= keeps_activations(v) && !n; recompute++)
            n = try_settings(out, v, args, part > 1 ? (long long)(rows / part * now->seq_len) : 0, recompute);
    return n;
}

/* What the plan finds by itself. Where nothing but memory to buy helps, that with activations recomputed: far less. */
static size_t other_changes(struct mt_plan_change *out, const struct plan_view *v, bool any_free)
{
    struct mt_plan_request r = v->request;
    struct mt_plan_change less[N_OTHER];
    size_t n = mt_plan_changes(out, N_OTHER, &r), n_less;
    if (any_free || !keeps_activations(v) || (n && !out[0].hardware))
        return n;
    r.placement.activations = MT_ACT_RECOMPUTE;
    n_less = mt_plan_changes(less, N_OTHER, &r);
    for (size_t i = 0; i < n_less; i++) {
        size_t len = strlen(less[i].what);
        out[i] = less[i];
        snprintf(out[i].what + len, sizeof(out[i].what) - len, " --set " RECOMPUTE "=recompute");
    }
    return n_less ?: n;
}

/* Recomputing changes no result: it comes before what does. */
static void put_recompute_first(struct mt_plan_change *c, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        struct mt_plan_change one = c[i];
        if (strncmp(one.what, RECOMPUTE, strlen(RECOMPUTE)))
            continue;
        memmove(c + 1, c, i * sizeof(*c));
        c[0] = one;
    }
}

/* Leaves out changes that hold another setting's change and gain next to nothing by what they have besides. */
static size_t leave_out_needless(struct mt_plan_change *c, size_t n)
{
    const double gain = 0.98; /* of the time of the shorter one */
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        bool needless = false;
        for (size_t k = 0; k < n; k++)
            needless |= k != i && !c[k].hardware && strlen(c[k].what) < strlen(c[i].what) &&
                        strstr(c[i].what, c[k].what) && c[i].seconds > gain * c[k].seconds;
        if (!needless)
            c[kept++] = c[i];
    }
    return kept;
}

static int no_fit(struct plan_view *v, const struct cli_args *args, const struct mt_err *err)
{
    struct mt_plan_change changes[N_FREE + N_OTHER];
    size_t n = free_changes(changes, v, args);
    n += v->unmeasured.code ? 0 : other_changes(changes + n, v, n > 0);
    n = leave_out_needless(changes, n);
    put_recompute_first(changes, n);
    if (cli_arg(args, "json")) {
        plan_print_no_fit_json(v, err, changes, n);
        return EXIT_NO_FIT;
    }
    cli_fail(err);
    fprintf(stderr, !n && v->unmeasured.code ? "No lean setting makes it fit. Other changes are tried once this machine is measured: megatrain probe all\n"
                    : !n                     ? "No single change makes it fit.\n"
                    : v->unmeasured.code ? "It would fit with any one of these changes:\n"
                                         : "It would fit with any one of these changes (with its seconds per step):\n");
    for (size_t i = 0; i < n; i++)
        if (v->unmeasured.code)
            fprintf(stderr, "  %s\n", changes[i].what);
        else
            fprintf(stderr, "  %-60s %10.4g s  (%s)\n", changes[i].what, changes[i].seconds,
                    changes[i].hardware ? "hardware" : "setting");
    return EXIT_NO_FIT;
}

static void print_names(const char *what, const char *folder, const char *ending)
{
    MT_STR_FREED struct mt_str names = {0};
    mt_installed_names(&names, folder, ending, NULL);
    printf("%s\n", what);
    char *save = NULL;
    for (char *name = names.p ? strtok_r(names.p, ", ", &save) : NULL; name; name = strtok_r(NULL, ", ", &save))
        printf("  %s\n", name);
}

static int list_names(void)
{
    print_names("Machines (--machine)", "machines", ".ini");
    print_names("Models (--model)", "models", ".json");
    return 0;
}

/* The simulated step of the choice, as a trace. */
static int write_trace(const struct plan_view *v, const char *path, struct mt_err *err)
{
    struct mt_plan_request r = mt_plan_request_as(&v->request, &v->choice);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph graph = {0};
    int rc = plan_view_needs_rates(v, err)
          ?: mt_plan_evaluate(&c, &r, &graph, err)
          ?: mt_trace_write(path, NULL, 0, &graph, v->choice.layout, err);
    return rc;
}

int cli_cmd_plan(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(plan_view_close) struct plan_view v = {.cfg = NULL};
    if (cli_arg(args, "list"))
        return list_names();
    if (cli_arg(args, "prices"))
        return plan_print_prices(args, err);
    mt_mem_keep_freed();
    if (cli_arg(args, "generate"))
        return plan_print_generation(args, err);
    if (cli_arg(args, "optimizers") && cli_arg(args, "measure"))
        return cli_usage("plan: --measure times one configuration: give it first, then --optimizers");
    if (cli_arg(args, "optimizers") && cli_arg(args, "score"))
        return cli_usage("plan: --optimizers compares updates, and --score plans a pass without: give one of both");
    if (cli_arg(args, "optimizers"))
        return plan_print_optimizers(args, err);
    int rc = plan_view_open(&v, args->n_operands ? args->operands[0] : NULL, args, err);
    if (!rc && cli_arg(args, "measure"))
        rc = measure_and_keep(&v, cli, err);
    rc = rc ?: plan_view_resolve(&v, err);
    if (!rc && cli_arg(args, "trace"))
        rc = write_trace(&v, cli_arg(args, "trace"), err);
    if (rc == -ENOSPC && err->kind == MT_ERR_NO_FIT && v.layout)
        return plan_view_keep_blocks(&v, err) ?: no_fit(&v, args, err);
    if (rc)
        return rc;
    rc = plan_compare_hosts(&v, err);
    if (!cli_arg(args, "json")) {
        plan_print(&v);
        return rc;
    }
    plan_print_json(&v, rc ? err->msg : NULL); /* has all that is known, for programs */
    return 0;
}
