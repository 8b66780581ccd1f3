/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli.h"
#include "learner.h"
#include "log_lines.h"
#include "rates.h"
#include "report.h"
#include "rounds.h"
#include "status.h"
#include "train/blocks.h"
#include "train/cluster.h"
#include "train/memory.h"
#include "train/reference.h"

struct follower {
    struct mt_cluster *cluster;
    struct mt_config *cfg;
    struct mt_inputs in;
    struct mt_setup setup;
    struct mt_session session;
};

/* Opens what the first has decided, and tells it whether that is possible here. */
static int join(struct follower *f, struct mt_err *err)
{
    struct mt_err why = {0};
    struct mt_memory memory;
    int rc = mt_cluster_take_config(f->cluster, &f->cfg, err);
    if (rc)
        return rc;
    struct mt_resumed resumed = mt_cluster_resumed(f->cluster);
    rc = mt_inputs_open(&f->in, f->cfg, MT_RUN_TRAIN, &resumed, &why)
      ?: mt_setup_open_all(&f->setup, &f->in, 1, MT_RUN_TRAIN, f->cluster, &why)
      ?: mt_setup_memory(&f->setup, &memory, &why)
      ?: mt_memory_check(&memory, &why);
    return mt_cluster_answer(f->cluster, &f->setup, &f->in, rc, &why, err);
}

static void leave(struct follower *f)
{
    mt_session_finish(&f->session);
    mt_setup_finish(&f->setup);
    mt_inputs_finish(&f->in);
    mt_config_destroy(&f->cfg);
    *f = (struct follower){.cluster = f->cluster};
}

/* All phases, one after the other. 1: there is nothing to follow. */
static int follow(struct follower *f, struct mt_train_control *control, struct mt_err *err)
{
    int rc;
    do {
        leave(f);
        rc = join(f, err);
        if (rc)
            return rc;
        rc = mt_session_start(&f->session, &f->setup, err);
        if (rc)
            mt_cluster_fail(f->cluster, err);
        rc = rc ?: mt_cluster_follow(f->cluster, &f->session, &f->setup, control, err);
    } while (rc == MT_AGAIN);
    return rc;
}

/* Says an error, and whose it is: the launcher mixes what hosts print. */
static int fail_on(struct mt_cluster *c, struct mt_err *err)
{
    if (c && strncmp(err->msg, "host ", 5) != 0)
        mt_fail_prefix(err, err->code, "host %d", mt_net_rank(mt_cluster_net(c)));
    return cli_fail(err);
}

/* `run` on a host that does not lead: takes part in what the first host does, prints errors alone, and returns the
 * first host's exit code. Closes the cluster. */
static int cli_follow(struct mt_cluster *cluster, struct mt_train_control *control, struct mt_err *err)
{
    struct follower f = {.cluster = cluster};
    mt_log_set_level(MT_LOG_ERROR);
    int rc = follow(&f, control, err);
    int code = rc < 0 ? fail_on(cluster, err) : mt_cluster_code(cluster);
    leave(&f);
    mt_cluster_close(&cluster, code);
    return code;
}

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

/* One configuration, or several on one base. */
struct run {
    struct cli *cli;
    const struct cli_args *args;
    struct learner *learner; /* [n] one a configuration; they share the model, the device and the rest */
    struct mt_inputs *in;    /* [n] */
    size_t n;
    struct mt_setup setup;
    struct mt_session session;
    struct mt_cluster *cluster; /* the hosts that share it; NULL: one */
    struct cli_status status;
    mt_watch *watch;
};

/* Asked to end before anything is trained: nothing is lost. */
static void end_early(void *, int stop)
{
    cli_say("megatrain: %s before training began: there is nothing to save\n",
            stop == MT_STOP_TIME ? "checkpoint.time_limit has ended the run" : "stopped");
    _exit(stop == MT_STOP_TIME ? EXIT_REQUEUE : 128 + SIGTERM);
}

/* From here on time limits and the output folders are watched. */
static int watch(struct run *r, struct mt_err *err)
{
    MT_FREED struct mt_watched *of = mt_calloc(r->n, sizeof(*of));
    const struct mt_watch_events events = {.ctx = &r->status, .status = cli_tell_status, .early = end_early};
    control.asked = mt_calloc(r->n, sizeof(*control.asked));
    if (!of || !control.asked)
        return mt_fail_nomem(err, "the run", r->n * sizeof(*of));
    r->status.quiet = r->cli->quiet || r->cli->no_progress;
    for (size_t i = 0; i < r->n; i++) {
        of[i] = (struct mt_watched){r->learner[i].out.dir, r->learner[i].cfg->checkpoint.time_limit};
        r->status.quiet |= r->learner[i].cfg->log.progress == MT_PROGRESS_OFF;
    }
    control.n = r->n;
    control.hosts = r->cluster != NULL;
    mt_train_phase(&control, "reading data");
    return mt_watch_start(&r->watch, &control, of, r->cli->start_ns, &events, err);
}

/* Reads what the runs are and decides how they are placed. */
static int prepare(struct run *r, struct mt_err *err)
{
    struct mt_memory memory;
    uint64_t tbw = cli_size(r->args, "tbw", 0);
    int rc = 0;
    for (size_t i = 0; i < r->n && !rc; i++) {
        struct mt_resumed resumed = learner_resumed(&r->learner[i]);
        rc = mt_inputs_open(&r->in[i], r->learner[i].cfg, MT_RUN_TRAIN, &resumed, err);
        if (!rc)
            mt_inputs_say_rate(&r->in[i]);
    }
    bool answers = r->learner->cfg->eval.generate[0];
    if (!rc && answers && (r->n > 1 || r->cluster))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.generate is of one run on one host: remove it");
    if (!rc && answers)
        rc = cli_answers_open(&r->learner->answers, r->learner->cfg, r->in, err);
    if (!rc && r->learner->cfg->train.delink_at && cli_arg(r->args, "no-save"))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.delink_at goes on from a checkpoint: remove --no-save");
    mt_train_phase(&control, "opening the device and choosing placements");
    rc = rc ?: mt_setup_open_all(&r->setup, r->in, r->n, MT_RUN_TRAIN, r->cluster, err)
            ?: mt_setup_memory(&r->setup, &memory, err);
    if (!rc && !r->cli->quiet) {
        cli_print_setup(&r->setup);
        cli_print_wear(&r->setup, tbw);
        cli_print_memory(&memory);
    }
    rc = rc ?: mt_memory_check(&memory, err) ?: mt_setup_check_later(&r->setup, err);
    for (size_t i = 0; i < r->n && !rc && !cli_arg(r->args, "no-save"); i++)
        learner_check_space(&r->learner[i], &memory);
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
                                .watch = r->watch,
                                .control = &control,
                                .dir = l->out.dir,
                                .output = &l->out,
                                .feed = l->feed,
                                .trace = cli_arg(r->args, "trace"),
                                .no_save = cli_arg(r->args, "no-save") != NULL,
                                .first_step = l->first_step,
                                .first_update = l->first_update,
                                .block_end = mt_blocks_end_of(l->in, &l->state),
                                .max_steps = (uint64_t)cli_whole(r->args, "max-steps", 0)};
    cli_progress_events(&p.events, &l->progress);
    l->answers.control = &control;
    l->answers.dir = l->out.dir;
    l->answers.learner = i;
    l->answers.g.cfg = l->cfg;
    l->answers.g.session = &r->session;
    p.answers = &l->answers;
    p.answer = l->cfg->eval.generate[0] ? cli_answer : NULL;
    return p;
}

/* Allocates, reads weights and writes the first files of the output folders. */
static int start(struct run *r, struct cli_rates *rates, struct mt_err *err)
{
    const char *rates_path = cli_arg(r->args, "rates");
    MT_FREED const char **resume = NULL;
    int rc = MT_NEW(&resume, r->n, "the run", err);
    if (!rc && r->cluster)
        rc = mt_cluster_send_config(r->cluster, &r->setup, err);
    rc = rc ?: mt_session_start(&r->session, &r->setup, err);
    if (!rc && !r->cli->quiet)
        cli_print_disk(&r->session);
    if (!rc && rates_path) { /* before anything is written: it fails without a profile of the machine */
        uint64_t step = r->learner->state.step;
        rc = cli_rates_open(rates, &r->setup, rates_path, step, step > r->learner->first_step, err);
    }
    for (size_t i = 0; resume && i < r->n; i++) {
        learner_adopt_findings(&r->learner[i], &r->setup);
        resume[i] = r->learner[i].resume;
    }
    rc = rc ?: mt_session_fill_weights(&r->session, resume, err);
    if (!rc && r->cluster)
        rc = mt_cluster_send_state(r->cluster, &r->session, &r->learner->state, err);
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = learner_write_files(&r->learner[i], &r->setup, err);
    return rc;
}

static int train(struct run *r, enum mt_train_end *end, struct mt_err *err)
{
    struct cli_rates rates = {0};
    MT_FREED struct mt_train_params *p = mt_calloc(r->n, sizeof(*p));
    if (!p)
        return mt_fail_nomem(err, "the run", r->n * sizeof(*p));
    for (size_t i = 0; i < r->n; i++)
        p[i] = params_of(r, i, &rates);
    mt_train_phase(&control, "reading weights");
    atomic_store(&control.step, r->learner->state.step);
    int rc = 0;
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = mt_reference_take(&r->setup, i, &r->learner[i].state, err);
    rc = rc ?: start(r, &rates, err) ?: mt_train_run(p, r->n, end, err);
    int code = cli_rates_close(&rates, rc ? NULL : err);
    return rc ?: code;
}

/* Whether all runs have a checkpoint to go on from. */
static bool can_go_on(const struct run *r)
{
    bool all = true;
    for (size_t i = 0; i < r->n; i++)
        all &= r->learner[i].history.has && r->learner[i].history.full;
    return all;
}

static int exit_code(const struct run *r, enum mt_train_end end)
{
    for (size_t i = 0; i < r->n; i++) {
        int64_t patience = r->learner[i].cfg->eval.early_stop_patience;
        if (patience && r->learner[i].state.bad_evals >= (uint64_t)patience)
            learner_say_stopped_early(&r->learner[i]);
    }
    if (end == MT_END_TIME)
        return EXIT_REQUEUE;
    if (end != MT_END_SIGNAL)
        return 0;
    int signo = atomic_load(&control.stop);
    cli_say("megatrain: stopped; %s%s\n", can_go_on(r) ? "continue with --resume" : "there is no checkpoint to go on from",
            !can_go_on(r) && cli_arg(r->args, "no-save") ? " (--no-save)" : "");
    return 128 + (signo == SIGINT ? SIGINT : SIGTERM);
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

/* Opens the next phase of train.blocks, or of train.delink_at. Its placement is decided anew; its numerics are those of
 * the run. */
static int next_block(struct run *r, struct mt_err *err)
{
    struct learner *l = r->learner;
    struct mt_config *cfg = NULL;
    struct mt_memory memory;
    const bool delinks = r->setup.choice.layout->share > 1;
    mt_train_phase(&control, delinks ? "giving layers weights of their own" : "opening the next block");
    mt_session_finish(&r->session);
    mt_setup_finish(&r->setup);
    free(l->resume);
    l->resume = delinks ? strdup(MT_PATH("%s/checkpoint-%llu", l->out.dir, (unsigned long long)l->state.step)) : NULL;
    if (delinks && !l->resume)
        return mt_fail_nomem(err, "the checkpoint's path", 0);
    if (delinks)
        mt_info("step %llu: each layer goes on with its group's weights and optimizer states as its own (train.delink_at)",
                (unsigned long long)l->state.step);
    struct mt_resumed resumed = learner_resumed(l);
    int rc = mt_config_copy(&cfg, l->cfg, "chosen", err);
    if (!rc && strcmp(l->out.dir, cfg->checkpoint.dir))
        rc = mt_config_override(cfg, "checkpoint.dir", l->out.dir, "where it was moved to", err);
    rc = rc ?: mt_inputs_next_block(l->in, cfg, &resumed, err);
    if (cfg) {
        mt_config_destroy(&l->cfg);
        l->cfg = l->in->cfg = cfg;
    }
    return rc ?: mt_setup_open_all(&r->setup, l->in, 1, MT_RUN_TRAIN, r->cluster, err)
              ?: mt_setup_memory(&r->setup, &memory, err)
              ?: mt_memory_check(&memory, err);
}

static int run_all(struct run *r, enum mt_train_end *end, struct mt_err *err)
{
    int rc = r->learner && r->in ? 0 : mt_fail_nomem(err, "the run", r->n * sizeof(*r->learner));
    rc = rc ?: check_operands(r->args, err);
    if (!rc && r->cluster && r->n > 1)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "several configurations on one base are of one host: start them without mpirun");
    for (size_t i = 0; i < r->n && !rc; i++) {
        r->learner[i] = (struct learner){.args = r->args, .in = &r->in[i], .out = {.fd = -1, .lock = -1},
                                        .state = {.best_loss = NAN, .shares_up = 1}};
        rc = learner_open(&r->learner[i], r->args->operands[i], r->n == 1, err);
    }
    if (!rc && !cli_arg(r->args, "dry-run"))
        rc = watch(r, err);
    rc = rc ?: prepare(r, err);
    for (size_t i = 0; i < r->n && !rc; i++)
        rc = learner_check(&r->learner[i], err);
    if (rc || cli_arg(r->args, "dry-run"))
        return rc;
    if (cli_arg(r->args, "trace")) /* that it can be written, which it is some steps later */
        rc = mt_write_file(cli_arg(r->args, "trace"), "", 0, err);
    for (size_t i = 0; i < r->n && !r->cli->quiet; i++)
        if (r->learner[i].resume)
            cli_say("resuming from %s%s\n", r->learner[i].resume,
                    r->learner[i].state.step < r->in[i].total_steps ? "" : ", where all steps are done: train.steps or "
                    "train.epochs sets how many");
    for (size_t i = 0; i < r->n; i++)
        rc = rc ? rc : learner_begin(&r->learner[i], err);
    rc = rc ? rc : train(r, end, err);
    while (!rc && *end == MT_END_BLOCK) {
        rc = next_block(r, err) ?: train(r, end, err);
    }
    return rc;
}

/* Whether the configuration trains in rounds, of which this process is not one; then these are run. A dry run is of the
 * training alone, without data. */
static bool runs_rounds(int *code, const struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    bool rounds = !cli_load_file(&cfg, args->operands[0], MT_TO_TRAIN, args, err) &&
                  cfg->policy.rollouts[0] && !cfg->data.train.n;
    int rc = rounds ? cli_run_rounds(code, cli, args, cfg, err) : 0;
    *code = rc ? rc : *code;
    return rounds && (rc || !cli_arg(args, "dry-run"));
}

int cli_cmd_run(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    int of_rounds = 0;
    if (runs_rounds(&of_rounds, cli, args, err))
        return of_rounds;
    struct run r = {.cli = cli, .args = args, .n = (size_t)args->n_operands};
    enum mt_train_end end = MT_END_DONE;
    catch_signals(); /* a request that comes while data or weights are read is met later, and does not end the run */
    int rc = mt_cluster_open(&r.cluster, err);
    if (r.cluster && !mt_cluster_leads(r.cluster))
        return cli_follow(r.cluster, &control, err);
    r.learner = mt_calloc(r.n, sizeof(*r.learner));
    r.in = mt_calloc(r.n, sizeof(*r.in));
    rc = rc ?: run_all(&r, &end, err);
    mt_watch_stop(&r.watch);
    int code = rc ? fail_on(r.cluster, err) : exit_code(&r, end);
    if (rc && end == MT_END_TIME && err->kind != MT_ERR_TRAINING && can_go_on(&r))
        code = EXIT_REQUEUE; /* the last save failed, but there is a checkpoint from which a next run goes on */
    mt_session_finish(&r.session);
    mt_setup_finish(&r.setup);
    for (size_t i = 0; r.learner && r.in && i < r.n; i++)
        if (r.learner[i].in)
            learner_close(&r.learner[i]);
    free(r.learner);
    free(r.in);
    free(control.asked);
    mt_cluster_close(&r.cluster, code);
    return code;
}
