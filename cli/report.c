/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "hw/hw.h"
#include "log_lines.h"
#include "train/cluster.h"

/* A line for people: of a number what can be meant. */
static void print_line(const cJSON *v, int width)
{
    if (cJSON_IsString(v)) {
        printf("%-*s %s\n", width, v->string, v->valuestring);
    } else if (cJSON_IsNumber(v) && v->valuedouble != floor(v->valuedouble)) {
        printf("%-*s %.4g\n", width, v->string, v->valuedouble);
    } else {
        MT_FREED char *value = mt_json_print(v, false);
        printf("%-*s %s\n", width, v->string, value ? value : "");
    }
}

int cli_print_object(cJSON *o, bool json)
{
    enum { LEAST = 28, MOST = 40 };
    size_t width = LEAST;
    for (const cJSON *v = o->child; v && !json; v = v->next)
        width = MT_MAX(width, strlen(v->string));
    for (const cJSON *v = o->child; v && !json; v = v->next)
        print_line(v, (int)MT_MIN(width, (size_t)MOST));
    MT_FREED char *text = json ? mt_json_print(o, true) : NULL;
    bool lost = json && !text;
    if (text)
        printf("%s\n", text);
    cJSON_Delete(o);
    return lost ? EXIT_RUNTIME : 0;
}

void cli_add_memory(cJSON *o, const struct mt_memory_rows *rows)
{
    cJSON *list = cJSON_AddArrayToObject(o, "memory");
    for (int i = 0; i < rows->n; i++) {
        mt_json_append(list, mt_json_put(NULL, "tier=%s, use=%s, bytes=%f", rows->row[i].tier, rows->row[i].tag,
                                         (double)rows->row[i].bytes));
    }
}

void cli_print_memory(const struct mt_memory *m)
{
    char a[32], b[32];
    const char *tier = "";
    cli_say("\nMemory            use                            bytes\n");
    for (int i = 0; i < m->rows.n; i++) {
        const struct mt_memory_row *r = &m->rows.row[i];
        cli_say("  %-14s  %-28s  %12s\n", strcmp(tier, r->tier) ? r->tier : "", r->tag,
                mt_format_bytes(a, sizeof(a), r->bytes));
        tier = r->tier;
    }
    cli_say("  %-14s  %-28s  %12s\n", "sum", "device", mt_format_bytes(a, sizeof(a), m->device_bytes));
    for (int lane = 0; lane < m->n_lanes && m->n_lanes > 1; lane++) {
        char name[32];
        snprintf(name, sizeof(name), "of them, device %d", lane + 1);
        cli_say("  %-14s  %-28s  %12s\n", "", name, mt_format_bytes(a, sizeof(a), m->lane_bytes[lane]));
    }
    cli_say("  %-14s  %-28s  %12s\n", "", "host", mt_format_bytes(a, sizeof(a), m->host_bytes));
    for (int i = 0; i < m->n_limits; i++)
        cli_say("  %-14s  %s of %s%s\n", m->limits[i].source,
                mt_format_bytes(a, sizeof(a), m->limits[i].wanted),
                mt_format_bytes(b, sizeof(b), m->limits[i].available),
                m->limits[i].wanted > m->limits[i].available ? "  <- short" : "");
    cli_say("\n");
}

const char *cli_active_params(char *buf, size_t len, const struct mt_layout *l)
{
    if (l->cfg.moe.n_experts)
        snprintf(buf, len, ", %.3g%c of them active", (double)l->n_active / (l->n_active < 1000000000 ? 1e6 : 1e9),
                 l->n_active < 1000000000 ? 'M' : 'B');
    else
        buf[0] = 0;
    return buf;
}

/* Warns where the data, as the steps divide them, give few updates, and says which step would give enough. */
static void warn_of_few_steps(const struct mt_inputs *in, uint64_t rows)
{
    enum { ENOUGH = 100 };
    const struct mt_config *c = in->cfg;
    uint64_t filled = mt_sampler_stats(in->sampler)->rows_per_epoch, steps = in->total_steps;
    uint64_t len = (uint64_t)c->numerics.seq_len;
    bool whole = filled < rows, by_rows = c->train.batch_size > 0;
    if (mt_objective_of(&in->numerics)->rollouts || (!whole && (c->train.steps || steps >= CLI_FEW_UPDATES)))
        return; /* a policy's rollouts are those of a round, and meant to be trained at once */
    uint64_t pass = MT_MAX(MT_MIN(filled, rows), UINT64_C(1)), better = MT_MAX(steps * pass / ENOUGH, UINT64_C(1));
    char what[200], mend[120] = "";
    if (whole)
        snprintf(what, sizeof(what), "the data fill %llu of a step's %llu sequences of %llu tokens, so that each step is a whole pass over "
                 "them, and the run has %llu", (unsigned long long)filled, (unsigned long long)rows, (unsigned long long)len,
                 (unsigned long long)steps);
    else
        snprintf(what, sizeof(what), "the run has %llu updates, which may be too few to learn from its data", (unsigned long long)steps);
    if (better < pass && !c->train.steps)
        snprintf(mend, sizeof(mend), "set %s = %llu for %llu, or ", by_rows ? "train.batch_size" : "train.tokens_per_step",
                 (unsigned long long)(by_rows ? better : better * len), (unsigned long long)(steps * pass / better));
    else if (whole)
        snprintf(mend, sizeof(mend), "lower %s, or ", by_rows ? "train.batch_size" : "train.tokens_per_step");
    mt_warn("%s: for more of them %slower data.seq_len, or raise train.epochs", what, mend);
}

static void print_data(const struct mt_setup *s, const struct mt_inputs *in, const struct mt_numerics *n)
{
    const struct mt_dataset_stats *d = mt_dataset_stats(in->data);
    const struct mt_sampler_stats *of = mt_sampler_stats(in->sampler);
    const struct mt_layout *l = mt_setup_layout_of(s, (size_t)(in - s->in));
    size_t rows = (size_t)n->rows_per_step, micro = mt_div_up(rows, (size_t)n->micro_batch) * mt_row_chunks(n);
    if (s->n_learners > 1)
        cli_say("Run      %s\n", in->cfg->checkpoint.dir);
    if (l->n_adapters)
        cli_say("Adapters rank %lld, alpha %g, %.2fM parameters trained in FP32; learning rate %g\n",
                (long long)l->adapter_default.rank, l->adapter_default.alpha, (double)l->n_trained / 1e6,
                in->cfg->train.learning_rate);
    cli_say("Data     %s%s: %llu samples, %llu tokens, %.1f%% trained; %llu rows of %lld, %.1f%% full\n",
            d->format, d->from_cache ? " (cached)" : "", (unsigned long long)d->n_samples,
            (unsigned long long)d->n_tokens, 100.0 * (double)d->n_trained / (double)d->n_tokens,
            (unsigned long long)of->n_rows, (long long)in->cfg->numerics.seq_len, 100 * of->efficiency);
    if (d->n_truncated || d->n_dropped || d->n_split || d->n_untrained)
        cli_say("         %llu samples truncated, %llu dropped, %llu split, %llu without a "
                        "trained token\n",
                (unsigned long long)d->n_truncated, (unsigned long long)d->n_dropped,
                (unsigned long long)d->n_split, (unsigned long long)d->n_untrained);
    cli_say("Steps    %llu of %zu sequences in %zu micro-batches; %llu a pass over the data\n",
            (unsigned long long)in->total_steps, rows, micro, (unsigned long long)of->steps_per_epoch);
    warn_of_few_steps(in, rows);
}

/* Also where one has other memory, or owns more, than another, or the launcher keeps this process to less than half of
 * the processors, as mpirun may. */
static void print_hosts(const struct mt_setup *s)
{
    const struct mt_plan_request *r = &s->request;
    int there, may = mt_hw_allowed(&there), n = mt_net_size(mt_cluster_net(s->cluster));
    bool differ = s->choice.engine.n_deals > 0;
    char a[32], b[32];
    cli_say("Hosts    %d, which share %lld groups of micro-batches; this is the first\n", n, (long long)s->choice.numerics.groups);
    for (int i = 0; i < n; i++)
        differ |= r->more[i] > 0;
    for (int i = 0; i < n && differ; i++)
        cli_say("         host %d may use %s%s%s, and owns %zu of %zu parts of the model\n", i,
                mt_format_bytes(a, sizeof(a), r->placement.host_budget.bytes + r->more[i]), r->drive_room[i] ? ", of drives " : "",
                r->drive_room[i] ? mt_format_bytes(b, sizeof(b), r->drive_room[i]) : "",
                mt_program_n_owned(&s->choice.engine.program, i), s->choice.engine.program.n_units);
    if (getenv("OMPI_COMM_WORLD_SIZE"))
        cli_say("         ^C ends mpirun of Open MPI and all hosts without a save: use megatrain stop %s\n",
                s->in->cfg->checkpoint.dir);
    if (2 * may < there)
        mt_warn("this process " MT_HW_BOUND, may, there);
}

void cli_print_setup(const struct mt_setup *s)
{
    const struct mt_inputs *in = s->in;
    const struct mt_engine_plan *p = &s->choice.engine;
    char activations[MT_CHOICE_NAME];
    char a[32], b[32], active[48];
    cli_say("Model    %s, %.1fM parameters%s, %lld layers, hidden %lld, vocabulary %lld, %s\n",
            in->hf.family->architecture, (double)s->choice.layout->n_params / 1e6,
            cli_active_params(active, sizeof(active), s->choice.layout), (long long)in->hf.n_layers,
            (long long)in->hf.hidden, (long long)in->hf.vocab, mt_numerics_name(&s->choice.numerics));
    for (size_t i = 0; i < s->n_learners && in->sampler; i++) /* before rounds there are no data */
        print_data(s, &in[i], mt_setup_numerics_of(s, i));
    int lanes = mt_program_own_lanes(&p->program);
    char times[24] = "";
    if (lanes > 1)
        snprintf(times, sizeof(times), "%d times ", lanes);
    const struct mt_device_limits *l = mt_device_limits(s->dev[0]);
    enum mt_isa isa = mt_setup_engine_params(s).isa;
    cli_say("Device   %s%s, %d threads, %s %s, budget %s\n", times, l->name,
            (int)s->choice.placement.threads, s->choice.numerics.optimizer->title,
            mt_isa_name(isa ? isa : mt_isa_best()),
            mt_format_bytes(a, sizeof(a), l->budget_bytes + l->own_bytes));
    for (int i = 0; i < lanes && l->address[0]; i++)
        cli_say("         at %s\n", mt_device_limits(s->dev[i])->address);
    if (s->cluster)
        print_hosts(s);
    size_t sharing = s->choice.layout->n_units - (p->program.one_ring ? 0 : 2), held = 0;
    for (int lane = 0; lane < lanes; lane++)
        held += (size_t)p->program.n_buffers[lane][MT_POOL_WEIGHTS];
    cli_say("Plan     %zu of %zu %s weights on the device, activations: %s; a step moves %s "
                    "in, %s out\n",
            lanes > 1 ? MT_MIN(held, sharing) : held, sharing,
            p->program.one_ring || in->hf.moe.n_experts ? "units'"
            : s->choice.layout->cut.n_units > 1 ? "half layers'"
                                                : "layers'",
            mt_choice_name(activations, MT_ACTIVATIONS_NAMES, (int)s->choice.placement.activations),
            mt_format_bytes(a, sizeof(a), p->h2d_bytes), mt_format_bytes(b, sizeof(b), p->d2h_bytes));
    const struct mt_sim_result *sim = &s->choice.sim;
    if (s->predicted)
        cli_say("Time     %.3g s a step predicted: forward %.3g bound by %s, backward %.3g by %s\n", sim->seconds,
                sim->phase[MT_SIM_FORWARD], mt_queues[sim->bound[MT_SIM_FORWARD]].title,
                sim->phase[MT_SIM_BACKWARD], mt_queues[sim->bound[MT_SIM_BACKWARD]].title);
    if (s->predicted && !s->machine.fingerprint[0])
        cli_say("         by the data sheet of %s: megatrain probe all measures this machine\n", s->machine.gpu);
}

static void print_uses(const char *verb, const uint64_t bytes[MT_N_DISK_USES])
{
    char a[32];
    const char *sep = verb;
    for (int i = 0; i < MT_N_DISK_USES; i++)
        if (bytes[i]) {
            cli_say("%s%s %s", sep, mt_disk_use_name((enum mt_disk_use)i),
                    mt_format_bytes(a, sizeof(a), bytes[i]));
            sep = ", ";
        }
}

void cli_print_wear(const struct mt_setup *s, uint64_t tbw)
{
    struct mt_wear w;
    char a[32], b[32];
    size_t on_disk = 0;
    if (!s->choice.engine.uses_disk)
        return;
    for (size_t u = 0; u < s->choice.layout->n_units; u++)
        on_disk += s->choice.engine.on_disk[u] != 0;
    mt_setup_wear(s, tbw, &w);
    cli_say("Disk     planes of %zu of %zu units; a step reads %s", on_disk, s->choice.layout->n_units,
            mt_format_bytes(a, sizeof(a), w.read_bytes));
    print_uses(" (", s->choice.engine.traffic.read);
    cli_say("%s, writes %s", w.read_bytes ? ")" : "",
            mt_format_bytes(a, sizeof(a), w.written_bytes));
    print_uses(" (", s->choice.engine.traffic.written);
    cli_say("%s\nWear     the run writes %s to a drive", w.written_bytes ? ")" : "",
            mt_format_bytes(a, sizeof(a), w.run_bytes));
    if (w.rated_bytes)
        cli_say(", %.2g%% of the %s that %s", 100 * w.share,
                mt_format_bytes(b, sizeof(b), w.rated_bytes),
                w.measured ? "its SMART data imply" : "--tbw gives");
    cli_say("%s; a larger memory.host_budget, or fewer and larger steps, write less\n",
            w.rated_bytes ? "" : " (rated endurance not known: --tbw)");
}

/* For a base that is read in place. */
static void print_base(const struct mt_session *s)
{
    size_t n_drives;
    char a[32];
    if (!s->files)
        return;
    bool direct = mt_file_weights_direct(s->files, &n_drives);
    cli_say("Base     %s of frozen weights are read in place from %s, on %zu drive%s, %s; nothing is written there\n",
            mt_format_bytes(a, sizeof(a), mt_file_weights_total(s->files)), s->setup->in->model_dir, n_drives, n_drives == 1 ? "" : "s",
            direct ? "direct" : "through the page cache");
}

void cli_print_disk(const struct mt_session *s)
{
    struct mt_disk_info d;
    char a[32];
    print_base(s);
    if (!s->disk)
        return;
    mt_disk_info(s->disk, &d);
    for (size_t i = 0; i < d.n_dirs; i++) {
        uint64_t bytes;
        double share;
        const char *path = mt_disk_file(s->disk, i, &bytes, &share);
        cli_say("Scratch  %s, %s, %.0f%% of requests\n", path,
                mt_format_bytes(a, sizeof(a), bytes), 100 * share);
    }
    cli_say("         %s, %s, %s buffers, alignment %zu, %u requests in each direction\n", d.io,
            d.direct ? "direct" : "through the page cache", d.buffers_registered ? "registered" : "plain",
            d.align, d.depth);
}

/* What lines of a run begin with: of several, which one. */
static const char *name_of(const struct cli_progress *p)
{
    return p->name ? p->name : "";
}

static cJSON *begin_event(const struct cli_progress *p)
{
    cJSON *o = cJSON_CreateObject();
    if (p->name)
        cJSON_AddStringToObject(o, "run", p->name);
    return o;
}

/* The same as a JSON event. */
static void step_event(const struct cli_progress *p, const struct mt_step_report *r)
{
    cJSON *o = begin_event(p);
    mt_json_put(o, "step=%f, total_steps=%f, loss=%f, lr=%f, grad_norm=%f, skipped=%d, tok_s=%f, seconds=%f, "
                "eta_seconds=%f", (double)r->step, (double)r->total_steps, r->result.loss, r->lr,
                r->result.grad_norm, r->result.skipped, (double)r->tokens / r->seconds, r->seconds, r->eta_seconds);
    cli_json_event("step", o);
}

static void eval_event(const struct cli_progress *p, const struct mt_eval_report *r)
{
    cJSON *o = begin_event(p);
    mt_json_put(o, "step=%f, eval_loss=%f, accuracy=%f, tokens=%f, seconds=%f, best=%d", (double)r->step, r->loss,
                r->accuracy, (double)r->n_loss, r->seconds, r->best);
    if (r->n_answers)
        mt_json_put(o, "answers=%f, reward=%f", (double)r->n_answers, r->reward);
    cJSON *sets = r->n_sets ? cJSON_AddObjectToObject(o, "sets") : NULL;
    for (size_t i = 0; i < r->n_sets; i++) {
        cJSON *set = cJSON_AddObjectToObject(sets, r->sets[i].name);
        mt_json_put(set, "eval_loss=%f, accuracy=%f, tokens=%f", r->sets[i].loss, r->sets[i].accuracy,
                    (double)r->sets[i].n_loss);
    }
    cli_json_event("eval", o);
}

/* "| margin 0.21 | acc 71.9% ", as far as the objective measures them. */
static const char *measured(const struct mt_objective *o, const struct mt_measure *m, char *buf, size_t len)
{
    size_t at = 0;
    buf[0] = 0;
    for (int i = 1; o && i < o->n_measures && at < len; i++) {
        if (!(m[i].n > 0))
            continue;
        if (!strcmp(o->measures[i], "reward"))
            at += (size_t)snprintf(buf + at, len - at, "| reward %.4g ", mt_measure_mean(&m[i]));
        else if (!strcmp(o->measures[i], "rewards/margins"))
            at += (size_t)snprintf(buf + at, len - at, "| margin %.4g ", mt_measure_mean(&m[i]));
        else if (!strcmp(o->measures[i], "rewards/accuracies"))
            at += (size_t)snprintf(buf + at, len - at, "| acc %.1f%% ", 100 * mt_measure_mean(&m[i]));
    }
    return buf;
}

/* "11.8 GiB", and of several devices "11.8 GiB, 9.31 GiB". */
static const char *device_bytes(const struct mt_setup *s, char *buf, size_t len)
{
    char text[32];
    size_t at = 0;
    for (int i = 0; i < s->n_devs && at < len; i++)
        at += (size_t)snprintf(buf + at, len - at, "%s%s", i ? ", " : "",
                               mt_format_bytes(text, sizeof(text), mt_device_bytes_used(s->dev[i])));
    return buf;
}

static void on_step(void *ctx, const struct mt_step_report *r)
{
    const struct cli_progress *p = ctx;
    char eta[32], used[160], budget[32], more[80];
    if (p->rates)
        cli_rates_step(p->rates, r->step);
    if (!p->show)
        return;
    if (p->cli->json_log) {
        step_event(p, r);
        return;
    }
    mt_format_seconds(eta, sizeof(eta), r->eta_seconds);
    cli_say("%s%sstep %llu/%llu %.1f%% | loss %.4f %s| lr %.2e | gnorm %.3g%s | %.0f tok/s (%.0f trained) | h2d "
            "%.2f GB/s wait %.0f%% | dev %s/%s | %.2f s | eta %s\n", name_of(p), p->name ? " | " : "",
            (unsigned long long)r->step, (unsigned long long)r->total_steps,
            100.0 * (double)r->step / (double)r->total_steps, r->result.loss,
            measured(r->objective, r->result.measures, more, sizeof(more)), r->lr,
            r->result.grad_norm, r->result.skipped ? " SKIPPED" : "", (double)r->tokens / r->seconds,
            (double)r->loss_tokens / r->seconds, (double)r->h2d_bytes / r->result.t_step * 1e-9,
            100 * r->result.t_wait_h2d / r->result.t_step,
            device_bytes(p->setup, used, sizeof(used)),
            mt_format_bytes(budget, sizeof(budget), mt_device_limits(p->setup->dev[0])->budget_bytes),
            r->seconds, eta);
}

static void on_eval(void *ctx, const struct mt_eval_report *r)
{
    const struct cli_progress *p = ctx;
    char more[80];
    if (p->cli->quiet)
        return;
    if (p->cli->json_log)
        eval_event(p, r);
    else if (r->n_loss && r->objective && r->objective->weights)
        cli_say("%s%seval step %llu | loss %.4f %s| %llu tokens | %.1f s%s\n", name_of(p), p->name ? " | " : "",
                (unsigned long long)r->step, r->loss,
                measured(r->objective, r->measures, more, sizeof(more)), (unsigned long long)r->n_loss, r->seconds,
                r->best ? " | best" : "");
    else if (r->n_loss || !r->n_answers)
        cli_say("%s%seval step %llu | loss %.4f | perplexity %.2f | accuracy %.1f%% | %llu tokens | "
                        "%.1f s%s\n", name_of(p), p->name ? " | " : "",
                (unsigned long long)r->step, r->loss, exp(r->loss), 100 * r->accuracy,
                (unsigned long long)r->n_loss, r->seconds, r->best ? " | best" : "");
    more[0] = 0;
    if (!isnan(r->reward))
        snprintf(more, sizeof(more), "| reward %.4g ", r->reward);
    if (r->n_answers && !p->cli->json_log)
        cli_say("%s%seval step %llu | %zu answers %s| %.1f s%s\n", name_of(p), p->name ? " | " : "", (unsigned long long)r->step,
                r->n_answers, more, r->seconds, r->best ? " | best" : "");
    for (size_t i = 0; i < r->n_sets && !p->cli->json_log; i++)
        cli_say("%s%seval step %llu | %s: loss %.4f | perplexity %.2f | accuracy %.1f%% | %llu tokens\n", name_of(p),
                p->name ? " | " : "", (unsigned long long)r->step, r->sets[i].name, r->sets[i].loss, exp(r->sets[i].loss),
                100 * r->sets[i].accuracy, (unsigned long long)r->sets[i].n_loss);
}

static void on_saved(void *ctx, uint64_t step, double seconds)
{
    const struct cli_progress *p = ctx;
    if (!p->cli->quiet)
        cli_say("%s%ssaved checkpoint-%llu in %.1f s\n", name_of(p), p->name ? " | " : "", (unsigned long long)step, seconds);
}

void cli_progress_events(struct mt_train_events *out, struct cli_progress *p)
{
    *out = (struct mt_train_events){.ctx = p, .step = on_step, .eval = on_eval, .saved = on_saved};
}
