/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/output.h"
#include "cli.h"
#include "data/chat_template.h"
#include "follow.h"
#include "heartbeat.h"
#include "hw/ecc.h"
#include "log_lines.h"
#include "weights/peft.h"
#include "rates.h"
#include "report.h"
#include "train/blocks.h"
#include "train/cluster.h"
#include "train/feed.h"
#include "train/reference.h"
#include "train/train.h"

/* Static, since a signal handler has no other access to the run. */
static struct mt_train_control control;

static void on_stop(int signo)
{
    if (!atomic_load(&control.begun)) /* nothing has been trained: there is nothing to save */
        _exit(128 + (signo == SIGINT ? SIGINT : SIGTERM));
    if (atomic_load(&control.stop) && signo == SIGINT && !atomic_load(&control.waiting))
        _exit(130); /* the second SIGINT: end now, without saving */
    mt_train_request_stop(&control, signo);
}

static void on_user(int signo)
{
    if (signo == SIGUSR1)
        atomic_store(&control.save, true);
    else
        atomic_store(&control.status, true);
}

static void catch_signals(void)
{
    struct sigaction stop = {.sa_handler = on_stop}, user = {.sa_handler = on_user,
                                                             .sa_flags = SA_RESTART};
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < MT_ARRAY_LEN(stops); i++) {
        struct sigaction was;
        if (!sigaction(stops[i], NULL, &was) && was.sa_handler != SIG_IGN) /* ignored: nohup, no job control */
            sigaction(stops[i], &stop, NULL);
    }
    sigaction(SIGUSR1, &user, NULL);
    sigaction(SIGUSR2, &user, NULL);
}

static bool is_empty(const char *dir)
{
    DIR *d = opendir(dir);
    bool empty = true;
    for (struct dirent *e; d && (e = readdir(d));)
        empty &= !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !strcmp(e->d_name, ".lock");
    if (d)
        closedir(d);
    return empty;
}

/* What a configuration is trained to: its data, state and output folder. */
struct learner {
    const struct cli_args *args;
    struct mt_config *cfg;
    struct mt_inputs *in;
    struct mt_train_state state;
    struct mt_history history;
    struct mt_save_clock clock;
    struct mt_hf_files files; /* of the model's folder */
    char *resume; /* checkpoint to continue from, or NULL; read before the first block alone */
    char *resumed_from; /* what it was, for run.json */
    struct mt_feed *feed; /* the command of log.exec, over all blocks; or NULL */
    uint64_t first_step; /* done when the process began */
    struct mt_output out;
    struct cli_progress progress;
};

struct run {
    struct cli *cli;
    const struct cli_args *args;
    struct learner *learner; /* [n] one a configuration; they share the model, the device and the rest */
    struct mt_inputs *in;    /* [n] */
    size_t n;
    struct mt_setup setup;
    struct mt_session session;
    struct mt_cluster *cluster; /* the hosts that share it; NULL: one */
};

/* Removes request files that an earlier run has not seen. */
static void remove_requests(const char *dir)
{
    static const char *const names[] = {MT_REQUEST_STOP, MT_REQUEST_SAVE};
    char path[4200];
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        mt_path_printf(path, sizeof(path), "%s/%s", dir, names[i]);
        if (!unlink(path))
            mt_warn("removed %s, which was older than this run", path);
    }
}

/* Locks the output folder, which must be empty unless the user says otherwise. */
static int open_output(struct learner *r, struct mt_err *err)
{
    const char *dir = r->cfg->checkpoint.dir, *resume = cli_arg(r->args, "resume");
    int rc = mt_output_open(&r->out, dir, err);
    if (rc)
        return rc;
    remove_requests(dir);
    if (resume && *resume && strcmp(resume, "auto")) {
        rc = mt_checkpoint_verify(resume, err);
        r->resume = rc ? NULL : strdup(resume);
        return rc;
    }
    if (resume) {
        mt_history_adopt(NULL, dir);
        return mt_checkpoint_find_newest(dir, cli_arg(r->args, "force") != NULL, &r->resume, err);
    }
    if (!is_empty(dir) && !cli_arg(r->args, "force"))
        return mt_fail(err, MT_ERR_USAGE, -ENOTEMPTY,
                       "%s is not empty: continue with --resume, start over with --force, or choose "
                       "another checkpoint.dir",
                       dir);
    return 0;
}

/* An overlay has what earlier blocks trained, or what adapters were added to: it cannot go on with others. */
static int check_blocks(const struct learner *r, struct mt_err *err)
{
    static const char *const keys[] = {"train.blocks:",    "train.blocks_always:", "model.freeze:",
                                       "adapter.targets:", "adapter.train_also:",  "adapter.merge_every:"};
    struct mt_str diff = {0}, grown = {0};
    int rc = r->state.blocks.overlay ? mt_config_diff(r->cfg, r->state.config, &diff, &grown, err) : 0;
    for (char *save = NULL, *line = diff.p ? strtok_r(diff.p, "\n", &save) : NULL; line && !rc;
         line = strtok_r(NULL, "\n", &save))
        for (size_t i = 0; i < MT_ARRAY_LEN(keys) && !rc; i++)
            if (strstr(line, keys[i]))
                rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s goes on from %s, weights that were trained with another setting "
                             "(%s): set it as it was, or export the checkpoint and train that", r->resume,
                             r->state.blocks.overlay, line + strspn(line, " "));
    mt_str_finish(&diff);
    mt_str_finish(&grown);
    return rc;
}

static int read_resume(struct learner *r, struct mt_err *err)
{
    int rc = mt_checkpoint_read_state(r->resume, &r->state, err);
    if (!rc)
        rc = mt_config_keep(r->cfg, r->state.config, "checkpoint", err);
    return rc ? rc : check_blocks(r, err);
}

static bool same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Sets the lineage of this run's checkpoints, and which checkpoint in the output folder already belongs to it. */
static int begin_history(struct learner *r, struct mt_err *err)
{
    const char *dir = r->cfg->checkpoint.dir;
    struct mt_train_state *st = &r->state;
    struct mt_history *h = &r->history;
    char path[4200];
    *h = (struct mt_history){.lineage = &st->lineage};
    if (!r->resume) {
        /* checkpoints of an earlier run must not be taken for this one's, now or on resume */
        bool force = cli_arg(r->args, "force") != NULL;
        int rc = mt_lineage_begin(&st->lineage, err);
        h->removes = force && !cli_arg(r->args, "resume");
        return rc || !force ? rc : mt_history_set_all_aside(h, NULL, dir, err);
    }
    mt_path_printf(path, sizeof(path), "%s/checkpoint-%llu", dir, (unsigned long long)st->step);
    h->has = h->full = same_folder(path, r->resume);
    h->step = st->step;
    memcpy(h->sum, st->sum, sizeof(h->sum));
    return mt_lineage_go_on(&st->lineage, st->step, st->sum, err);
}

static int check_resume(struct learner *r, struct mt_err *err)
{
    struct mt_str diff = {0}, grown = {0};
    int rc = mt_config_diff(r->cfg, r->state.config, &diff, &grown, err);
    if (!rc && grown.len)
        mt_warn("the run is longer than when it was saved, and the learning-rate schedule with it:\n%s", grown.p);
    if (!rc && diff.len && !cli_arg(r->args, "force"))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "%s was made with other settings (--force continues nevertheless):\n%s", r->resume,
                     diff.p);
    if (!rc && mt_dataset_hash(r->in->data) != r->state.data_hash && !cli_arg(r->args, "force"))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "the training data are not those that %s was made with (--force continues nevertheless)", r->resume);
    mt_str_finish(&diff);
    mt_str_finish(&grown);
    return rc;
}

/* The prediction made before the run, for the report. */
static void add_prediction(cJSON *o, const struct mt_setup *s)
{
    struct mt_memory m;
    if (!mt_setup_memory(s, &m, NULL)) {
        cli_add_memory(o, &m.rows);
        cJSON_AddNumberToObject(o, "device_bytes", (double)m.device_bytes);
        cJSON_AddNumberToObject(o, "host_bytes", (double)m.host_bytes);
    }
    cJSON_AddNumberToObject(o, "device_budget", (double)s->choice.placement.device_budget.bytes);
    if (!s->predicted)
        return;
    const struct mt_sim_result *sim = &s->choice.sim;
    cJSON *p = cJSON_AddObjectToObject(o, "predicted");
    cJSON_AddNumberToObject(p, "t_step", sim->seconds);
    cJSON_AddNumberToObject(p, "t_fwd", sim->phase[MT_SIM_FORWARD]);
    cJSON_AddNumberToObject(p, "t_bwd", sim->phase[MT_SIM_BACKWARD]);
    cJSON_AddStringToObject(p, "forward_bound_by", mt_sim_resource_name(sim->bound[MT_SIM_FORWARD]));
    cJSON_AddStringToObject(p, "backward_bound_by", mt_sim_resource_name(sim->bound[MT_SIM_BACKWARD]));
}

static int write_run_files(struct learner *r, const struct mt_setup *setup, struct mt_err *err)
{
    char path[4200];
    struct mt_str ini = {0}, plain = {0};
    const char *dir = r->cfg->checkpoint.dir;
    mt_config_print(r->cfg, true, &ini);
    mt_config_print(r->cfg, false, &plain);
    free(r->state.config);
    r->state.config = plain.p; /* now the state's */
    mt_path_printf(path, sizeof(path), "%s/config.effective.ini", dir);
    int rc = ini.failed || plain.failed ? mt_fail_nomem(err, "the configuration", ini.len)
                                        : mt_write_file(path, ini.p, ini.len, err);
    mt_json_begin();
    cJSON *o = cJSON_CreateObject();
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    cJSON_AddStringToObject(o, "version", MT_VERSION);
    cJSON_AddStringToObject(o, "host", host);
    cJSON_AddStringToObject(o, "device", mt_device_limits(setup->dev)->name);
    if (mt_device_limits(setup->dev)->address[0])
        cJSON_AddStringToObject(o, "device_address", mt_device_limits(setup->dev)->address);
    cJSON_AddNumberToObject(o, "threads", (double)setup->choice.placement.threads);
    cJSON_AddStringToObject(o, "model", r->in->model_dir);
    cJSON_AddNumberToObject(o, "parameters", (double)setup->choice.layout->n_params);
    snprintf(host, sizeof(host), "%016llx", (unsigned long long)mt_dataset_hash(r->in->data));
    cJSON_AddStringToObject(o, "data_hash", host);
    if (r->resumed_from)
        cJSON_AddStringToObject(o, "resumed_from", r->resumed_from);
    struct mt_ecc ecc;
    mt_hw_ecc(&ecc, "");
    cJSON_AddStringToObject(o, "ecc", ecc.known ? "yes" : "not reported");
    if (setup->cluster)
        cJSON_AddNumberToObject(o, "hosts", mt_net_size(mt_cluster_net(setup->cluster)));
    if (setup->n_learners > 1) /* other runs, on the same base: times are those of all */
        cJSON_AddNumberToObject(o, "learners", (double)setup->n_learners);
    add_prediction(o, setup);
    char *text = mt_json_print(o, true);
    mt_path_printf(path, sizeof(path), "%s/run.json", dir);
    if (!rc)
        rc = text && mt_json_complete() ? mt_write_file(path, text, strlen(text), err) : mt_fail_nomem(err, path, 0);
    free(text);
    cJSON_Delete(o);
    mt_str_finish(&ini);
    return rc;
}

/* Keeps earlier findings about libraries, so that results have the same bits. */
static void adopt_findings(const struct learner *r, struct mt_setup *s)
{
    const char *found = r->state.findings;
    if (found && !mt_setup_adopt_findings(s, found))
        mt_warn("%s was made with another library or GPU, so results may differ in bits (%s)",
                r->resume, found);
}

/* Warns if there is too little space: a new checkpoint is complete before an old one is removed. Without the space,
 * saves are retried and the run goes on. */
static void check_space(const struct learner *r, const struct mt_memory *m)
{
    const struct mt_config *c = r->cfg;
    uint64_t n = (uint64_t)c->checkpoint.keep + 1 + c->checkpoint.keep_best, *steps = NULL;
    size_t there = 0;
    char want[32], have[32];
    if (!c->checkpoint.every.is_time) {
        uint64_t every = (uint64_t)c->checkpoint.every.steps;
        n = MT_MIN(n, 1 + (every ? r->in->total_steps / every : 0));
    }
    if (!m->checkpoint_bytes || mt_checkpoint_list(c->checkpoint.dir, &steps, &there, NULL))
        return;
    free(steps);
    uint64_t more = n > there ? n - there : 0;
    if (m->checkpoint_free / m->checkpoint_bytes < more)
        mt_warn("%s: up to %llu checkpoints will exist at once (checkpoint.keep = %lld%s), %llu more of %s each, but %s "
                "are free: free space, or lower checkpoint.keep",
                c->checkpoint.dir, (unsigned long long)n, (long long)c->checkpoint.keep,
                c->checkpoint.keep_best ? ", the best, and one being written" : " and one being written",
                (unsigned long long)more, mt_format_bytes(want, sizeof(want), m->checkpoint_bytes),
                mt_format_bytes(have, sizeof(have), m->checkpoint_free));
}

/* Tensors that the checkpoint names. Those under adapters are in the model's folder in any case: with --force nothing is
 * said of what they have to be. */
static const cJSON *named_tensors(const struct learner *r)
{
    bool adapters = r->cfg->adapter.kind != MT_ADAPTER_NONE;
    return (adapters && cli_arg(r->args, "force")) ? NULL : r->state.frozen;
}

static struct mt_resumed resumed_of(const struct learner *l)
{
    return (struct mt_resumed){.from_files = named_tensors(l), .dir = l->resume, .phase = l->state.blocks.phase,
                               .overlay = l->state.blocks.overlay};
}

/* Reads what the runs are and decides how they are placed. */
static int prepare(struct run *r, struct mt_err *err)
{
    struct mt_memory memory;
    uint64_t tbw = cli_size(r->args, "tbw", 0);
    int rc = 0;
    for (size_t i = 0; i < r->n && !rc; i++) {
        struct mt_resumed resumed = resumed_of(&r->learner[i]);
        rc = mt_inputs_open(&r->in[i], r->learner[i].cfg, MT_RUN_TRAIN, &resumed, err);
    }
    if (!rc)
        rc = r->n == 1 ? mt_setup_open_on_hosts(&r->setup, r->in, r->cluster, err)
                       : mt_setup_open_shared(&r->setup, r->in, r->n, err);
    if (!rc)
        rc = mt_setup_memory(&r->setup, &memory, err);
    if (!rc && !r->cli->quiet) {
        cli_print_setup(&r->setup);
        cli_print_wear(&r->setup, tbw);
        cli_print_memory(&memory);
    }
    if (!rc)
        rc = mt_memory_check(&memory, err);
    for (size_t i = 0; i < r->n && !rc && !cli_arg(r->args, "no-save"); i++)
        check_space(&r->learner[i], &memory);
    return rc;
}

static struct mt_train_params params_of(struct run *r, size_t i, struct cli_rates *rates)
{
    struct learner *l = &r->learner[i];
    l->progress = (struct cli_progress){r->cli, &r->setup, i ? NULL : rates,
                                        !r->cli->quiet && !r->cli->no_progress &&
                                            l->cfg->log.progress != MT_PROGRESS_OFF,
                                        r->n > 1 ? l->cfg->checkpoint.dir : NULL};
    struct mt_train_params p = {.session = &r->session,
                                .learner = i,
                                .state = &l->state,
                                .history = &l->history,
                                .clock = &l->clock,
                                .files = &l->files,
                                .start_ns = r->cli->start_ns,
                                .control = &control,
                                .dir = l->out.dir,
                                .output = &l->out,
                                .feed = l->feed,
                                .trace = cli_arg(r->args, "trace"),
                                .no_save = cli_arg(r->args, "no-save") != NULL,
                                .first_step = l->first_step,
                                .block_end = mt_blocks_end_of(l->in, &l->state),
                                .max_steps = (uint64_t)cli_whole(r->args, "max-steps", 0)};
    cli_progress_events(&p.events, &l->progress);
    return p;
}

/* Allocates, reads weights and writes the first files of the output folders. */
static int start(struct run *r, struct cli_rates *rates, struct mt_err *err)
{
    const char *rates_path = cli_arg(r->args, "rates"), **resume = mt_calloc(r->n, sizeof(*resume));
    int rc = resume ? 0 : mt_fail_nomem(err, "the run", r->n);
    if (!rc && r->cluster)
        rc = mt_cluster_send_config(r->cluster, r->in, err);
    if (!rc)
        rc = mt_session_start(&r->session, &r->setup, err);
    if (!rc && !r->cli->quiet)
        cli_print_disk(&r->session);
    if (!rc && rates_path) { /* before anything is written: it fails without a profile of the machine */
        uint64_t step = r->learner->state.step;
        rc = cli_rates_open(rates, &r->setup, rates_path, step, step > r->learner->first_step, err);
    }
    for (size_t i = 0; resume && i < r->n; i++) {
        adopt_findings(&r->learner[i], &r->setup);
        resume[i] = r->learner[i].resume;
    }
    if (!rc)
        rc = mt_session_fill_weights(&r->session, resume, err);
    if (!rc && r->cluster)
        rc = mt_cluster_send_state(r->cluster, &r->session, &r->learner->state, err);
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = write_run_files(&r->learner[i], &r->setup, err);
    free(resume);
    return rc;
}

static int train(struct run *r, enum mt_train_end *end, struct mt_err *err)
{
    struct cli_rates rates = {0};
    struct cli_heartbeat heartbeat;
    struct mt_train_params *p = mt_calloc(r->n, sizeof(*p));
    if (!p)
        return mt_fail_nomem(err, "the run", r->n * sizeof(*p));
    for (size_t i = 0; i < r->n; i++)
        p[i] = params_of(r, i, &rates);
    mt_train_phase(&control, "reading weights");
    atomic_store(&control.step, r->learner->state.step);
    cli_heartbeat_start(&heartbeat, &control, r->cli->quiet);
    int rc = 0;
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = mt_reference_take(&r->setup, i, &r->learner[i].state, err);
    if (!rc)
        rc = start(r, &rates, err);
    if (!rc)
        rc = mt_train_run(p, r->n, end, err);
    int code = cli_rates_close(&rates, rc ? NULL : err);
    cli_heartbeat_stop(&heartbeat);
    free(p);
    return rc ? rc : code;
}

/* Why no step is left, and where the best weights are. */
static void say_stopped_early(const struct learner *l)
{
    const struct mt_train_state *s = &l->state;
    const char *by = l->cfg->eval.best_by;
    char best[240] = "";
    if (s->best_saved_step)
        snprintf(best, sizeof(best), "; best: checkpoint-%llu, %s %.4f", (unsigned long long)s->best_saved_step,
                 by, s->best_saved_loss);
    else if (isfinite(s->best_loss))
        snprintf(best, sizeof(best), "; best: step %llu, %s %.4f, which is not kept%s", (unsigned long long)s->best_step,
                 by, s->best_loss, l->cfg->checkpoint.keep_best ? "" : " (checkpoint.keep_best = off)");
    cli_say("megatrain: stopped early at step %llu: no better %s in %llu evaluations (eval.early_stop_patience)%s\n",
            (unsigned long long)s->step, by, (unsigned long long)s->bad_evals, best);
}

static int exit_code(const struct run *r, enum mt_train_end end)
{
    for (size_t i = 0; i < r->n; i++) {
        int64_t patience = r->learner[i].cfg->eval.early_stop_patience;
        if (patience && r->learner[i].state.bad_evals >= (uint64_t)patience)
            say_stopped_early(&r->learner[i]);
    }
    if (end == MT_END_TIME)
        return EXIT_REQUEUE;
    if (end != MT_END_SIGNAL)
        return 0;
    int signo = atomic_load(&control.stop);
    cli_say("megatrain: stopped; continue with --resume\n");
    return 128 + (signo == SIGINT ? SIGINT : SIGTERM);
}

/* Reads the configuration, and what its run goes on from. */
static int open_learner(struct learner *l, const char *path, bool alone, struct mt_err *err)
{
    const char *out = cli_arg(l->args, "out"), *resume = cli_arg(l->args, "resume");
    if (!alone && (out || (resume && *resume && strcmp(resume, "auto"))))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is of one run: with several configurations, each has its own "
                       "checkpoint.dir, and --resume goes on from the newest checkpoint there", out ? "--out" : resume);
    int rc = cli_load_file(&l->cfg, path, l->args, err);
    if (!rc && out)
        rc = mt_config_override(l->cfg, "checkpoint.dir", out, "--out", err);
    if (!rc && l->cfg->log.progress == MT_PROGRESS_OFF)
        cli_log_hide_progress();
    if (!rc && !cli_arg(l->args, "dry-run"))
        rc = open_output(l, err);
    return rc || !l->resume ? rc : read_resume(l, err);
}

/* The small files of checkpoints: the model's, with the chat template that it is trained with. */
static int read_files(struct learner *l, struct mt_err *err)
{
    const char *name = l->cfg->data.template_;
    bool other = false;
    char *text = NULL;
    int rc = mt_hf_files_read(&l->files, l->in->model_dir, err);
    if (!rc)
        rc = mt_chat_template_read(&text, name, err);
    if (!rc && text)
        rc = mt_hf_files_set_template(&l->files, text, &other, err);
    if (other)
        mt_warn("data.template = %s is another chat template than %s has: checkpoints have it in place of the model's", name,
                l->in->model_dir);
    free(text);
    return rc;
}

/* Once data and plan are known; nothing was trained yet. */
static int check_learner(struct learner *l, struct mt_err *err)
{
    bool dry = cli_arg(l->args, "dry-run") != NULL;
    int rc = l->resume ? check_resume(l, err) : 0;
    if (!rc) /* on a resume, replaces the hash of an earlier build */
        l->state.data_hash = mt_dataset_hash(l->in->data);
    if (!rc && !dry)
        rc = read_files(l, err);
    if (!rc && !dry)
        rc = mt_checkpoint_rehearse(NULL, l->cfg->checkpoint.dir, err);
    return rc || dry ? rc : begin_history(l, err);
}

/* What stays over all blocks of a run. */
static int begin_learner(struct learner *l, struct mt_err *err)
{
    l->first_step = l->state.step;
    l->resumed_from = l->resume ? strdup(l->resume) : NULL;
    if (l->resume && !l->resumed_from)
        return mt_fail_nomem(err, "the run", strlen(l->resume));
    return l->cfg->log.exec[0] ? mt_feed_open(&l->feed, l->cfg->log.exec, err) : 0;
}

/* An operand after the first that is no file is often the value of an option. */
static int check_operands(const struct cli_args *a, struct mt_err *err)
{
    struct stat st;
    for (int i = 1; i < a->n_operands; i++)
        if (stat(a->operands[i], &st) || !S_ISREG(st.st_mode))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "\"%s\" is no configuration, so one argument too many (a checkpoint "
                           "to go on from is written with an equals sign: --resume=%s)", a->operands[i], a->operands[i]);
    return 0;
}

/* Opens the next phase of train.blocks. Its placement is decided anew; its numerics are those of the run. */
static int next_block(struct run *r, struct mt_err *err)
{
    struct learner *l = r->learner;
    struct mt_config *cfg = NULL;
    struct mt_memory memory;
    mt_train_phase(&control, "opening the next block");
    mt_session_finish(&r->session);
    mt_setup_finish(&r->setup);
    free(l->resume);
    l->resume = NULL;
    struct mt_resumed resumed = resumed_of(l);
    int rc = mt_config_copy(&cfg, l->cfg, "chosen", err);
    if (!rc && strcmp(l->out.dir, cfg->checkpoint.dir))
        rc = mt_config_override(cfg, "checkpoint.dir", l->out.dir, "where it was moved to", err);
    if (!rc)
        rc = mt_inputs_next_block(l->in, cfg, &resumed, err);
    if (cfg) {
        mt_config_destroy(&l->cfg);
        l->cfg = l->in->cfg = cfg;
    }
    if (!rc)
        rc = mt_setup_open(&r->setup, l->in, MT_RUN_TRAIN, err);
    if (!rc)
        rc = mt_setup_memory(&r->setup, &memory, err);
    return rc ? rc : mt_memory_check(&memory, err);
}

static int run_all(struct run *r, enum mt_train_end *end, struct mt_err *err)
{
    int rc = r->learner && r->in ? 0 : mt_fail_nomem(err, "the run", r->n * sizeof(*r->learner));
    if (!rc)
        rc = check_operands(r->args, err);
    if (!rc && r->cluster && r->n > 1)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "several configurations on one base are of one host: start them without mpirun");
    for (size_t i = 0; i < r->n && !rc; i++) {
        r->learner[i] = (struct learner){.args = r->args, .in = &r->in[i], .out = {.fd = -1, .lock = -1},
                                        .state = {.best_loss = NAN}};
        rc = open_learner(&r->learner[i], r->args->operands[i], r->n == 1, err);
    }
    if (!rc)
        rc = prepare(r, err);
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = check_learner(&r->learner[i], err);
    if (rc || cli_arg(r->args, "dry-run"))
        return rc;
    for (size_t i = 0; i < r->n && !r->cli->quiet; i++)
        if (r->learner[i].resume)
            cli_say("resuming from %s\n", r->learner[i].resume);
    for (size_t i = 0; i < r->n; i++)
        rc = rc ? rc : begin_learner(&r->learner[i], err);
    rc = rc ? rc : train(r, end, err);
    while (!rc && *end == MT_END_BLOCK) {
        rc = next_block(r, err);
        if (!rc)
            rc = train(r, end, err);
    }
    return rc;
}

static void close_learner(struct learner *l)
{
    mt_feed_close(&l->feed);
    mt_inputs_finish(l->in);
    mt_train_state_finish(&l->state);
    mt_hf_files_finish(&l->files);
    mt_config_destroy(&l->cfg);
    free(l->resume);
    free(l->resumed_from);
    mt_output_close(&l->out);
}

/* Whether all runs have a checkpoint to go on from. */
static bool can_go_on(const struct run *r)
{
    bool all = true;
    for (size_t i = 0; i < r->n; i++)
        all &= r->learner[i].history.has && r->learner[i].history.full;
    return all;
}

int cli_cmd_run(struct cli *cli, const struct cli_args *args)
{
    struct run r = {.cli = cli, .args = args, .n = (size_t)args->n_operands};
    struct mt_err err = {0};
    enum mt_train_end end = MT_END_DONE;
    catch_signals(); /* a request that comes while data or weights are read is met later, and does not end the run */
    int rc = mt_cluster_open(&r.cluster, &err);
    if (r.cluster && !mt_cluster_leads(r.cluster))
        return cli_follow(r.cluster, &control);
    r.learner = mt_calloc(r.n, sizeof(*r.learner));
    r.in = mt_calloc(r.n, sizeof(*r.in));
    if (!rc)
        rc = run_all(&r, &end, &err);
    int code = rc ? cli_fail(&err) : exit_code(&r, end);
    if (rc && end == MT_END_TIME && err.kind != MT_ERR_TRAINING && can_go_on(&r))
        code = EXIT_REQUEUE; /* the last save failed, but there is a checkpoint from which a next run goes on */
    mt_session_finish(&r.session);
    mt_setup_finish(&r.setup);
    for (size_t i = 0; r.learner && r.in && i < r.n; i++)
        if (r.learner[i].in)
            close_learner(&r.learner[i]);
    free(r.learner);
    free(r.in);
    mt_cluster_close(&r.cluster, code);
    return code;
}
