/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_print.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/units.h"
#include "engine/memory.h"
#include "engine/records.h"
#include "objective/objective.h"
#include "report.h"

static const char *const tier_names[] = {"host", "states on disk", "all on disk"};
static const char *const phase_names[] = {"forward, with the update", "backward"};

/* --- figures of both the table and the JSON ------------------------------------------------------ */

struct figures {
    double tokens, tok_s, model_flops, tflops, peak, days_run, run_tokens, joules_token;
    double disk_write; /* bytes a step */
};

static int lanes_of(const struct plan_view *v)
{
    return mt_program_own_lanes(&v->choice.engine.program);
}

static struct figures figure(const struct plan_view *v)
{
    const struct mt_plan_request *r = &v->request;
    const struct mt_rate *rate = v->machine.rate;
    struct figures f = {.tokens = (double)(r->numerics.rows_per_step * r->numerics.seq_len)};
    double s = v->choice.sim.seconds, gpus = v->machine.cpu ? 1 : lanes_of(v); /* on the cpu device they share cores */
    f.tok_s = f.tokens / s;
    f.model_flops = f.tokens * mt_layout_flops_per_token(v->layout, (size_t)r->numerics.seq_len) *
                    (r->train ? mt_optimizer_flops_share(&r->numerics) : 1.0 / 3);
    f.tflops = f.model_flops / s * 1e-12;
    f.peak = rate[mt_machine_peak(&r->numerics)].value * gpus;
    f.run_tokens = plan_run_tokens(v) > 0 ? plan_run_tokens(v) : 1e9;
    f.days_run = f.run_tokens / f.tok_s / 86400;
    f.joules_token = lanes_of(v) > 1 ? 0 : rate[MT_RATE_POWER].value / f.tok_s; /* known of a machine with one */
    f.disk_write = v->choice.sim.bytes[MT_Q_DISK_WRITE];
    return f;
}

/* The best candidate with another value of a knob; 0: none was found. */
enum knob { KNOB_MICRO_BATCH, KNOB_SLOTS, KNOB_ACTIVATIONS, KNOB_CHUNK, N_KNOBS };

static bool same_records(const struct mt_plan_choice *c, const struct mt_placement *p)
{
    struct mt_records a = mt_records_of(c->layout, &c->placement), b = mt_records_of(c->layout, p);
    bool same = true;
    for (size_t i = 0; i < c->layout->n_segments; i++)
        same = same && a.layers[i] == MT_MAX(b.layers[i], 0);
    return same;
}

static bool same_value(const struct mt_plan_choice *c, const struct mt_plan_tried *t, enum knob k)
{
    switch (k) {
    case KNOB_MICRO_BATCH:
        return t->numerics.micro_batch == c->numerics.micro_batch;
    case KNOB_SLOTS:
        return t->placement.slots == c->placement.slots;
    case KNOB_ACTIVATIONS:
        return t->placement.activations == c->placement.activations &&
               t->placement.keep_layers == c->placement.keep_layers && same_records(c, &t->placement);
    default:
        return t->numerics.logits_chunk == c->numerics.logits_chunk;
    }
}

static int64_t attention_of(const struct mt_placement *p)
{
    return p->offload_attention == MT_AUTO ? MT_MAX(p->offload_layers, 0) : p->offload_attention;
}

static void describe_value(char *buf, size_t len, const struct mt_plan_tried *t, enum knob k)
{
    char activations[MT_CHOICE_NAME];
    mt_choice_name(activations, MT_ACTIVATIONS_NAMES, (int)t->placement.activations);
    if (k == KNOB_MICRO_BATCH)
        snprintf(buf, len, "%lld", (long long)t->numerics.micro_batch);
    else if (k == KNOB_SLOTS)
        snprintf(buf, len, "%lld", (long long)t->placement.slots);
    else if (k == KNOB_CHUNK)
        snprintf(buf, len, "%lld", (long long)t->numerics.logits_chunk);
    else if (t->placement.activations == MT_ACT_RECOMPUTE && *t->placement.offload)
        snprintf(buf, len, "%lld offloaded, %.30s", (long long)MT_MAX(t->placement.offload_layers, 0),
                 t->placement.offload);
    else if (t->placement.activations == MT_ACT_RECOMPUTE &&
             attention_of(&t->placement) != MT_MAX(t->placement.offload_layers, 0))
        snprintf(buf, len, "%lld offloaded, %lld of attention", (long long)MT_MAX(t->placement.offload_layers, 0),
                 (long long)attention_of(&t->placement)); /* a line of 80 columns has no place for more */
    else if (t->placement.offload_layers > 0)
        snprintf(buf, len, "%s, %lld offloaded", activations, (long long)t->placement.offload_layers);
    else if (t->placement.keep_layers)
        snprintf(buf, len, "%s, %lld kept", activations, (long long)t->placement.keep_layers);
    else
        snprintf(buf, len, "%s", activations);
}

static void explain(char *buf, size_t len, const struct plan_view *v, enum knob k, bool fixed)
{
    const struct mt_plan_choice *c = &v->choice;
    const struct mt_plan_tried *best = NULL;
    size_t unfit = 0;
    char value[64];
    for (size_t i = 0; i < c->n_tried; i++) {
        const struct mt_plan_tried *t = &c->tried[i];
        if (same_value(c, t, k))
            continue;
        unfit += t->seconds == 0;
        if (t->seconds > 0 && (!best || t->seconds < best->seconds))
            best = t;
    }
    if (fixed) {
        snprintf(buf, len, "as given");
    } else if (v->unmeasured.code) {
        snprintf(buf, len, "by rule");
    } else if (best) {
        describe_value(value, sizeof(value), best, k);
        double more = 100 * (best->seconds / c->sim.seconds - 1);
        const char *with = k == KNOB_ACTIVATIONS ? "" : "with "; /* a number alone would read as the choice */
        if (more < 0.05)
            snprintf(buf, len, "%s%s: as fast", with, value);
        else
            snprintf(buf, len, "%s%s: %.1f%% longer", with, value, more);
    } else {
        snprintf(buf, len, unfit ? "nothing else fits" : "nothing else would be faster");
    }
}

/* The name as far as it fits, whole parts of it, and the memory that is planned for instead of the one in the name. */
static void print_machine(const struct mt_machine *m, const char *how)
{
    enum { MOST = 48 }; /* of a line of 80 */
    size_t end = strlen(m->name);
    const char *memory = strstr(m->name, " GiB") ? strstr(m->name, " GiB") : strstr(m->name, " TiB");
    while (end && (end > MOST || (memory && m->name + end > memory))) {
        const char *comma = memrchr(m->name, ',', end);
        end = comma ? (size_t)(comma - m->name) : MT_MIN(end, (size_t)MOST);
        if (!comma)
            break;
    }
    printf("Machine   %.*s, %.4g GiB (%s)\n", (int)end, m->name, m->rate[MT_RATE_HOST_GIB].value, how);
}

/* --- the table ------------------------------------------------------------------------------------ */

static void print_head(const struct plan_view *v)
{
    const struct mt_plan_request *r = &v->request;
    const struct mt_plan_choice *c = &v->choice;
    char a[32], b[32], active[48];
    bool measured = v->machine.rate[MT_RATE_GEMM_BF16].source == MT_RATE_MEASURED;
    printf("Model     %s, %.4gB parameters%s, %lld layers, %s\n", v->hf.family->architecture,
           (double)v->layout->n_params * 1e-9, cli_active_params(active, sizeof(active), v->layout),
           (long long)v->hf.n_layers, mt_numerics_name(&r->numerics));
    if (!r->train)
        printf("Pass      forward alone, as megatrain score and eval make it\n");
    else if (v->layout->n_trained < v->layout->n_params && !v->layout->n_adapters)
        printf("Trained   %.4gB parameters, the others are frozen\n", (double)v->layout->n_trained * 1e-9);
    if (r->train && v->layout->n_adapters)
        printf("Adapters  rank %lld, alpha %g: %.4gM parameters trained, the model's are read and never written\n",
               (long long)v->layout->adapter_default.rank, v->layout->adapter_default.alpha,
               (double)v->layout->n_trained * 1e-6);
    print_machine(&v->machine, v->unmeasured.code ? "free" : measured ? "measured" : "rated");
    printf("Budgets   device %s, host %s\n", mt_format_bytes(a, sizeof(a), r->placement.device_budget.bytes),
           mt_format_bytes(b, sizeof(b), r->placement.host_budget.bytes));
    long long rows = r->numerics.rows_per_step, len = r->numerics.seq_len;
    printf("Step      %lld tokens: %lld rows of %lld in %zu micro-batches\n", rows * len, rows, len, c->n_micro);
    size_t top = r->train && mt_objective_of(&r->numerics)->teacher ? (size_t)r->numerics.objective_keys.top : r->top;
    if (top)
        printf("Teacher   %zu bytes for each trained token of the data, on a drive, by megatrain score --top %zu\n",
               mt_teacher_row_bytes(top), top);
}

static void print_choices(const struct plan_view *v)
{
    const struct mt_plan_choice *c = &v->choice;
    char name[MT_CHOICE_NAME];
    const struct mt_plan_request *r = &v->request;
    char why[96];
    printf("\nChoice                  value      why\n");
    explain(why, sizeof(why), v, KNOB_MICRO_BATCH, r->numerics.micro_batch != MT_AUTO);
    printf("  train.micro_batch     %-9lld  %s\n", (long long)c->numerics.micro_batch, why);
    if (c->layout->cut.n_units > 1) {
        snprintf(why, sizeof(why), "layer: %.1f%% longer", 100 * (c->whole_seconds / c->sim.seconds - 1));
        printf("  memory.unit           half       %s\n",
               c->layout == v->layout ? "as given"
               : c->whole_seconds > 0 ? why
                                      : "whole layers are too large for the device");
    }
    if (c->placement.expert_group != MT_AUTO && v->hf.moe.n_experts)
        printf("  memory.expert_group   %-9lld  of %lld experts at once\n", (long long)c->placement.expert_group,
               (long long)v->hf.moe.n_experts);
    if (c->placement.expert_sums > 1 && v->hf.moe.n_experts)
        printf("  memory.expert_sums    %-9lld  sums of a layer's outputs of experts\n", (long long)c->placement.expert_sums);
    if (c->placement.expert_streams > 1 && v->hf.moe.n_experts)
        printf("  device.expert_streams %-9lld  experts run side by side\n", (long long)c->placement.expert_streams);
    explain(why, sizeof(why), v, KNOB_ACTIVATIONS, r->placement.activations != MT_ACT_AUTO);
    printf("  memory.activations    %-9s  %s\n", mt_choice_name(name, MT_ACTIVATIONS_NAMES, (int)c->placement.activations), why);
    if (c->placement.activations == MT_ACT_RECOMPUTE)
        printf("  memory.keep_layers    %-9lld  of %lld layers\n", (long long)c->placement.keep_layers,
               (long long)v->hf.n_layers);
    if (c->placement.offload_layers)
        printf("  memory.offload_layers %-9lld  of the others\n", (long long)c->placement.offload_layers);
    if (c->placement.offload_attention != c->placement.offload_layers)
        printf("  memory.offload_attention %-6lld  the same, of attention's\n",
               (long long)c->placement.offload_attention);
    if (*c->placement.offload)
        printf("  memory.offload        %s  the same, by name\n", c->placement.offload);
    if (c->placement.embedding == MT_EMBEDDING_HOST)
        printf("  memory.embedding      host       %s\n",
               r->placement.embedding == MT_EMBEDDING_HOST ? "as given" : "its update does not delay the step");
    if (c->placement.update == MT_UPDATE_BACKWARD) {
        printf("  memory.update         backward   %s\n", r->placement.update == MT_UPDATE_BACKWARD
                                                            ? "as given" : "gradients take no memory, and no drives");
        printf("  memory.update_pending %-9lld  layers, the first ones, are updated under the next forward\n",
               (long long)c->placement.update_pending);
    }
    if (v->layout->n_adapters)
        printf("  memory.adapters       %-9s  %s\n",
               mt_choice_name(name, MT_ADAPTERS_NAMES, (int)c->placement.adapters),
               r->placement.adapters != MT_ADAPTERS_AUTO              ? "as given"
               : c->placement.adapters == MT_ADAPTERS_RESIDENT ? "on the device, sent once a step"
                                                               : "sent with their layers");
    explain(why, sizeof(why), v, KNOB_SLOTS, r->placement.slots != MT_AUTO);
    printf("  memory.slots          %-9lld  %s\n", (long long)c->placement.slots, why);
    explain(why, sizeof(why), v, KNOB_CHUNK, r->numerics.logits_chunk != MT_AUTO);
    printf("  memory.logits_chunk   %-9lld  %s\n", (long long)c->numerics.logits_chunk, why);
    if (c->engine.uses_files) {
        printf("  memory.base           files      read in place from the model's files; nothing is written there\n");
        printf("  memory.base_blocks    %-9lld  of %zu blocks stay in host memory\n", (long long)c->engine.base_blocks,
               mt_layout_n_blocks(c->layout));
    }
    printf("  memory.states         %-9s  units:", c->n_tier[0] == c->layout->n_units ? "host" : "disk");
    const char *comma = "";
    for (int t = 0; t < MT_N_UNIT_TIERS; t++) {
        if (!c->n_tier[t])
            continue;
        printf("%s %zu %s", comma, c->n_tier[t], tier_names[t]);
        comma = ",";
    }
    printf("\n");
}

/* Queues of a resource. */
static int queues_of(const struct plan_view *v, int resource)
{
    return mt_queues[resource].device ? lanes_of(v) : 1;
}

static void print_memory(const struct plan_view *v)
{
    struct mt_memory_rows rows = {0};
    mt_plan_add_rows(&rows, &v->choice);
    char a[32];
    const char *tier = "";
    printf("\nMemory     use                                 bytes\n");
    for (int i = 0; i < rows.n; i++) {
        const struct mt_memory_row *r = &rows.row[i];
        printf("  %-7s  %-28s  %14llu  %12s\n", strcmp(tier, r->tier) ? r->tier : "", r->tag,
               (unsigned long long)r->bytes, mt_format_bytes(a, sizeof(a), r->bytes));
        tier = r->tier;
    }
    printf("  %-7s  %-28s  %14llu  %12s\n", "sum", "device",
           (unsigned long long)v->choice.engine.device_bytes,
           mt_format_bytes(a, sizeof(a), v->choice.engine.device_bytes));
    for (int lane = 0; lane < lanes_of(v) && lanes_of(v) > 1; lane++) {
        char name[32];
        snprintf(name, sizeof(name), "of them, GPU %d", lane + 1);
        printf("  %-7s  %-28s  %14llu  %12s\n", "", name, (unsigned long long)v->choice.engine.lane_bytes[lane],
               mt_format_bytes(a, sizeof(a), v->choice.engine.lane_bytes[lane]));
    }
    printf("  %-7s  %-28s  %14llu  %12s\n", "", v->machine.cpu ? "host, with the device's" : "host",
           (unsigned long long)v->choice.host_bytes, mt_format_bytes(a, sizeof(a), v->choice.host_bytes));
}

static void print_time(const struct plan_view *v)
{
    const struct mt_sim_result *s = &v->choice.sim;
    printf("\nTime                         seconds   bound by\n");
    for (int ph = 0; ph < MT_SIM_N_PHASES; ph++)
        printf("  %-25s %9.4g   %s\n", phase_names[ph], s->phase[ph], mt_queues[s->bound[ph]].title);
    printf("  %-25s %9.4g\n", "host, between steps", s->seconds - s->makespan);
    printf("  %-25s %9.4g\n", "a step", s->seconds);
    printf("\nResource          busy    bytes a step   compute waits for it\n");
    for (int k = 0; k < MT_N_QUEUES; k++) {
        char a[32];
        if (!(s->busy[k] > 0))
            continue;
        printf("  %-14s %5.1f%%  %14s", mt_queues[k].title, 100 * s->busy[k] / queues_of(v, k) / s->seconds,
               k == MT_Q_COMPUTE ? "" : mt_format_bytes(a, sizeof(a), (uint64_t)s->bytes[k]));
        if (k == MT_Q_COMPUTE)
            printf("\n");
        else
            printf("   %5.1f%%\n", 100 * s->idle[k] / s->seconds);
    }
}

/* The same plan if products left no multiprocessor idle at their ends: what small products, as of experts, cost. */
static double seconds_without_waves(const struct plan_view *v)
{
    struct mt_machine machine = v->machine; /* shares its samples */
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r = mt_plan_request_as(&v->request, &v->choice);
    machine.rate[MT_RATE_MULTIPROCESSORS].value = 0;
    r.machine = &machine;
    bool other = v->hf.moe.n_experts && !v->machine.cpu && !mt_plan_evaluate(&c, &r, NULL, NULL);
    return other ? c.sim.seconds : v->choice.sim.seconds;
}

/* A data sheet says what a link does in one direction for one GPU; machines with several reach half of it. */
static void print_unmeasured_link(const struct plan_view *v)
{
    const struct mt_sim_result *s = &v->choice.sim;
    static const struct {
        enum mt_rate_id rate;
        enum mt_queue resource;
        const char *way;
    } ways[] = {{MT_RATE_H2D, MT_Q_H2D, "to"}, {MT_RATE_D2H, MT_Q_D2H, "from"}};
    const double most = 0.7;
    for (size_t i = 0; i < MT_ARRAY_LEN(ways); i++) {
        double busy = s->busy[ways[i].resource] / queues_of(v, ways[i].resource) / s->seconds;
        bool binds = s->bound[MT_SIM_FORWARD] == ways[i].resource || s->bound[MT_SIM_BACKWARD] == ways[i].resource;
        if (v->machine.rate[ways[i].rate].source == MT_RATE_RATED && (binds || busy > most))
            printf("Link      copies %s the GPU bind (%.0f%% of the step), at a rate that nobody measured:\n"
                   "          megatrain probe all measures this machine\n", ways[i].way, 100 * busy);
    }
}

static void print_rates(const struct plan_view *v)
{
    struct figures f = figure(v);
    char tokens[32];
    printf("\nSpeed     %.0f tokens/s, %.4g model TFLOP/s", f.tok_s, f.tflops);
    if (f.peak > 0)
        printf(" (%.1f%% of %.4g)", 100 * f.tflops / f.peak, f.peak);
    double even = seconds_without_waves(v);
    if (even < 0.99 * v->choice.sim.seconds)
        printf("\nWaves     %.0f tokens/s if small products left no multiprocessor idle", f.tokens / even);
    printf("\n");
    print_unmeasured_link(v);
    snprintf(tokens, sizeof(tokens), f.run_tokens == 1e9 ? "a billion" : "%.4g million",
             f.run_tokens * 1e-6);
    printf("Run       %.3g days for %s tokens", f.days_run, tokens);
    if (f.joules_token > 0)
        printf(", %.3g kWh", f.joules_token * f.run_tokens / 3.6e6);
    printf("\n");
    plan_print_blocks(v);
    plan_print_merges(v);
    if (f.disk_write > 0)
        printf("Drives    %.4g GB written a step, %.4g TB for a million tokens\n", f.disk_write * 1e-9,
               f.disk_write / f.tokens * 1e-6);
    plan_print_wear(v);
    printf("Searched  %zu candidates\n", v->choice.n_searched);
}

void plan_print(const struct plan_view *v)
{
    print_head(v);
    print_choices(v);
    print_memory(v);
    if (v->unmeasured.code) {
        printf("\nTime      not measured: megatrain probe all measures this machine in some minutes\n          %s\n",
               v->unmeasured.msg);
        return;
    }
    print_time(v);
    plan_print_hosts(v);
    print_rates(v);
}

/* --- JSON ----------------------------------------------------------------------------------------- */

/* What is known whether it fits or not. */
static cJSON *begin_json(const struct plan_view *v, bool fits)
{
    cJSON *o = mt_json_put(NULL, "fits=%d, model=%s, parameters=%f", fits, v->hf.family->architecture,
                           (double)v->layout->n_params);
    if (v->hf.moe.n_experts)
        cJSON_AddNumberToObject(o, "active_parameters", (double)v->layout->n_active);
    mt_json_put(o, "trained_parameters=%f, machine=%s", (double)v->layout->n_trained, v->machine.name);
    return o;
}

static void add_choice(cJSON *o, const struct plan_view *v)
{
    const struct mt_plan_choice *c = &v->choice;
    char name[MT_CHOICE_NAME];
    cJSON *k = cJSON_AddObjectToObject(o, "settings");
    mt_json_put(k, "train.micro_batch=%f, memory.unit=%s, memory.activations=%s, memory.keep_layers=%f, "
                "memory.offload_layers=%f", (double)c->numerics.micro_batch, c->layout->cut.name,
                mt_choice_name(name, MT_ACTIVATIONS_NAMES, (int)c->placement.activations),
                (double)c->placement.keep_layers, (double)c->placement.offload_layers);
    if (c->engine.uses_files)
        cJSON_AddNumberToObject(k, "memory.base_blocks", (double)c->engine.base_blocks);
    cJSON_AddNumberToObject(k, "memory.offload_attention", (double)c->placement.offload_attention);
    if (*c->placement.offload)
        cJSON_AddStringToObject(k, "memory.offload", c->placement.offload);
    cJSON_AddStringToObject(k, "memory.embedding", c->placement.embedding == MT_EMBEDDING_HOST ? "host" : "device");
    if (v->layout->n_adapters)
        cJSON_AddStringToObject(k, "memory.adapters",
                                mt_choice_name(name, MT_ADAPTERS_NAMES, (int)c->placement.adapters));
    cJSON_AddStringToObject(k, "memory.update", c->placement.update == MT_UPDATE_BACKWARD ? "backward" : "forward");
    if (c->placement.update == MT_UPDATE_BACKWARD)
        cJSON_AddNumberToObject(k, "memory.update_pending", (double)c->placement.update_pending);
    cJSON_AddNumberToObject(k, "memory.slots", (double)c->placement.slots);
    cJSON_AddNumberToObject(k, "memory.logits_chunk", (double)c->numerics.logits_chunk);
    if (c->numerics.logits_piece != MT_AUTO)
        cJSON_AddNumberToObject(k, "memory.logits_piece", (double)c->numerics.logits_piece);
    if (v->hf.moe.n_experts) {
        cJSON_AddNumberToObject(k, "memory.expert_sums", (double)c->placement.expert_sums);
        cJSON_AddNumberToObject(k, "device.expert_streams", (double)c->placement.expert_streams);
    }
    cJSON *t = cJSON_AddObjectToObject(o, "units");
    for (int i = 0; i < MT_N_UNIT_TIERS; i++)
        cJSON_AddNumberToObject(t, tier_names[i], (double)c->n_tier[i]);
    cJSON_AddBoolToObject(o, "boundaries_on_disk", c->engine.disk_spill_bytes > 0);
}

static void add_memory(cJSON *o, const struct plan_view *v)
{
    struct mt_memory_rows rows = {0};
    mt_plan_add_rows(&rows, &v->choice);
    cli_add_memory(o, &rows);
    cJSON_AddNumberToObject(o, "device_bytes", (double)v->choice.engine.device_bytes);
    cJSON *lanes = cJSON_AddArrayToObject(o, "gpu_bytes");
    for (int lane = 0; lane < lanes_of(v); lane++)
        mt_json_append(lanes, cJSON_CreateNumber((double)v->choice.engine.lane_bytes[lane]));
    mt_json_put(o, "host_bytes=%f, disk_bytes=%f, device_budget=%f, host_budget=%f", (double)v->choice.host_bytes,
                (double)v->choice.disk_bytes, (double)v->request.placement.device_budget.bytes,
                (double)v->request.placement.host_budget.bytes);
}

static void add_times(cJSON *o, const struct plan_view *v)
{
    const struct mt_sim_result *s = &v->choice.sim;
    struct figures f = figure(v);
    cJSON *phases = cJSON_AddArrayToObject(o, "phases");
    for (int ph = 0; ph < MT_SIM_N_PHASES; ph++)
        mt_json_append(phases, mt_json_put(NULL, "phase=%s, seconds=%f, bound_by=%s", phase_names[ph], s->phase[ph],
                                           mt_queues[s->bound[ph]].title));
    cJSON *res = cJSON_AddArrayToObject(o, "resources");
    for (int k = 0; k < MT_N_QUEUES; k++)
        mt_json_append(res, mt_json_put(NULL, "resource=%s, queues=%f, busy_seconds=%f, bytes=%f, compute_idle_seconds=%f",
                                        mt_queues[k].title, (double)queues_of(v, k), s->busy[k], s->bytes[k],
                                        s->idle[k]));
    mt_json_put(o, "step_seconds=%f, tokens_per_step=%f, tokens_per_second=%f, model_tflops=%f, utilisation=%f",
                s->seconds, f.tokens, f.tok_s, f.tflops, f.peak > 0 ? f.tflops / f.peak : NAN);
    mt_json_put(o, "run_tokens=%f, run_days=%f, joules_per_token=%f", f.run_tokens, f.days_run, f.joules_token);
}

static void add_wear(cJSON *o, const struct plan_view *v)
{
    struct plan_wear w;
    plan_wear(&w, v);
    if (!(w.tb_a_day > 0))
        return;
    mt_json_put(o, "drives_tb_a_day=%f, drives_rated_tb=%f, drives_worn_out_days=%f, drives_worn_out_tokens=%f",
                w.tb_a_day, w.rated_tb, w.days, w.tokens);
}

void plan_print_json(const struct plan_view *v, const char *refused)
{
    cJSON *o = begin_json(v, true);
    if (refused)
        cJSON_AddStringToObject(o, "refused", refused);
    add_choice(o, v);
    add_memory(o, v);
    if (!v->unmeasured.code) {
        add_times(o, v);
        plan_add_hosts(o, v);
        add_wear(o, v);
    }
    if (v->cfg->adapter.merge_every)
        cJSON_AddNumberToObject(o, "merge_write_bytes", (double)mt_plan_merged_bytes(v->layout));
    cJSON_AddNumberToObject(o, "candidates", (double)v->choice.n_searched);
    cli_print_object(o, true);
}

void plan_print_no_fit_json(const struct plan_view *v, const struct mt_err *err,
                            const struct mt_plan_change *changes, size_t n)
{
    cJSON *o = begin_json(v, false);
    cJSON_AddStringToObject(o, "short", err->msg);
    cJSON *list = cJSON_AddArrayToObject(o, "changes");
    for (size_t i = 0; i < n; i++)
        mt_json_append(list, mt_json_put(NULL, "change=%s, step_seconds=%f, hardware=%d", changes[i].what,
                                         changes[i].seconds, changes[i].hardware));
    cli_print_object(o, true);
}
