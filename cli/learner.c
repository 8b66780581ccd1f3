/* SPDX-License-Identifier: Apache-2.0 */
#include "learner.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "data/chat_template.h"
#include "hw/ecc.h"
#include "log_lines.h"
#include "train/cluster.h"
#include "train/watch.h"

static bool is_empty(const char *dir)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    bool empty = true;
    for (struct dirent *e; d && (e = readdir(d));)
        empty &= !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !strcmp(e->d_name, ".lock");
    return empty;
}

/* Removes request files that an earlier run has not seen. */
static void remove_requests(const char *dir)
{
    static const char *const names[] = {MT_REQUEST_STOP, MT_REQUEST_SAVE};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        const char *path = MT_PATH("%s/%s", dir, names[i]);
        if (!unlink(path))
            mt_warn("removed %s, which was older than this run", path);
    }
}

/* Locks the output folder, which must be empty unless the user says otherwise. */
static int open_output(struct learner *l, struct mt_err *err)
{
    const char *dir = l->cfg->checkpoint.dir, *resume = cli_arg(l->args, "resume");
    int rc = mt_output_open(&l->out, dir, err);
    if (rc)
        return rc;
    remove_requests(dir);
    if (resume && *resume && strcmp(resume, "auto")) {
        rc = mt_checkpoint_verify(resume, err);
        l->resume = rc ? NULL : strdup(resume);
        return rc;
    }
    if (resume) {
        mt_history_adopt(NULL, dir);
        return mt_checkpoint_find_newest(dir, cli_arg(l->args, "force") != NULL, &l->resume, err);
    }
    if (!is_empty(dir) && !cli_arg(l->args, "force"))
        return mt_fail(err, MT_ERR_USAGE, -ENOTEMPTY,
                       "%s is not empty: continue with --resume, start over with --force, or choose "
                       "another checkpoint.dir",
                       dir);
    return 0;
}

/* An overlay has what earlier blocks trained, or what adapters were added to: it cannot go on with others. */
static int check_blocks(const struct learner *l, struct mt_err *err)
{
    static const char *const keys[] = {"train.blocks:",    "train.blocks_always:", "model.freeze:",
                                       "adapter.targets:", "adapter.train_also:",  "adapter.merge_every:"};
    MT_STR_FREED struct mt_str diff = {0}, grown = {0};
    int rc = l->state.blocks.overlay ? mt_config_diff(l->cfg, l->state.config, &diff, &grown, err) : 0;
    for (char *save = NULL, *line = diff.p ? strtok_r(diff.p, "\n", &save) : NULL; line && !rc;
         line = strtok_r(NULL, "\n", &save))
        for (size_t i = 0; i < MT_ARRAY_LEN(keys) && !rc; i++)
            if (strstr(line, keys[i]))
                rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s goes on from %s, weights that were trained with another setting "
                             "(%s): set it as it was, or export the checkpoint and train that", l->resume,
                             l->state.blocks.overlay, line + strspn(line, " "));
    return rc;
}

static int read_resume(struct learner *l, struct mt_err *err)
{
    return mt_checkpoint_read_state(l->resume, &l->state, err)
        ?: mt_config_keep(l->cfg, l->state.config, "checkpoint", err)
        ?: check_blocks(l, err);
}

/* Sets the lineage of this run's checkpoints, and which checkpoint in the output folder already belongs to it. */
static int begin_history(struct learner *l, struct mt_err *err)
{
    const char *dir = l->cfg->checkpoint.dir;
    struct mt_train_state *st = &l->state;
    struct mt_history *h = &l->history;
    *h = (struct mt_history){.lineage = &st->lineage};
    if (!l->resume) {
        /* checkpoints of an earlier run must not be taken for this one's, now or on resume */
        bool force = cli_arg(l->args, "force") != NULL;
        int rc = mt_lineage_begin(&st->lineage, err);
        h->removes = force && !cli_arg(l->args, "resume");
        return rc || !force ? rc : mt_history_set_all_aside(h, NULL, dir, err);
    }
    h->has = h->full = mt_is_same_file(MT_PATH("%s/checkpoint-%llu", dir, (unsigned long long)st->step), l->resume);
    h->step = st->step;
    memcpy(h->sum, st->sum, sizeof(h->sum));
    return mt_lineage_go_on(&st->lineage, st->step, st->sum, err);
}

/* What --force does to the data of the pass under way, where the changes have to do with it; else "". */
static const char *data_by_force(const struct learner *l, const char *diff, bool other_data, char *buf, size_t len)
{
    const struct mt_train_state *st = &l->state;
    bool order = other_data || strstr(diff, "  data.") || strstr(diff, "  train.seed:");
    bool steps = strstr(diff, "  train.batch_size:") || strstr(diff, "  train.tokens_per_step:");
    if (order)
        snprintf(buf, len, "; with --force the data go on as far into their pass as the run has come: other rows, or rows in another "
                 "order, so that some samples of it come twice or not at all");
    else if (steps && st->rows)
        snprintf(buf, len, "; with --force the data go on after the %llu rows of all passes that were trained: none comes twice or is "
                 "left out", (unsigned long long)st->rows);
    else if (steps)
        snprintf(buf, len, "; the version that made it did not count rows: with --force the data go on where %llu steps of the new size "
                 "end, so that rows come twice or are left out", (unsigned long long)st->step);
    else
        *buf = 0;
    return buf;
}

/* Takes the line of a key out of a list of differences; whether it was there. */
static bool drop_line(struct mt_str *diff, const char *key)
{
    char *at = diff->p ? strstr(diff->p, key) : NULL, *end = at ? strchr(at, '\n') : NULL;
    if (!end)
        return false;
    memmove(at, end + 1, strlen(end + 1) + 1);
    diff->len -= (size_t)(end + 1 - at);
    return true;
}

static int check_resume(struct learner *l, struct mt_err *err)
{
    MT_STR_FREED struct mt_str diff = {0}, grown = {0};
    char data[256];
    const bool force = cli_arg(l->args, "force") != NULL, rounds = l->cfg->policy.rollouts[0]; /* whose data are others */
    const bool other = !rounds && mt_dataset_hash(l->in->data) != l->state.data_hash;
    int rc = mt_config_diff(l->cfg, l->state.config, &diff, &grown, err);
    if (!rc && grown.len)
        mt_warn("the run is longer than when it was saved, and the learning-rate schedule with it:\n%s", grown.p);
    if (!rc && !other && !rounds && drop_line(&diff, "  data.train:"))
        mt_info("data.train is elsewhere than when %s was made; the tokens are the same", l->resume);
    if (!rc)
        data_by_force(l, diff.len ? diff.p : "", other, data, sizeof(data));
    if (!rc && force && *data)
        mt_warn("%s was made with other data or another batch size%s", l->resume, data);
    if (!rc && diff.len && strstr(diff.p, "  mezo.small:") && l->cfg->numerics.mezo.small < 1)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s has limits of another mezo.small, which are of the weights that training began with: "
                     "set it as it was, or begin a run with the model that megatrain export makes of it", l->resume);
    if (!rc && diff.len && !force)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s was made with other settings (--force continues nevertheless%s):\n%s",
                     l->resume, data, diff.p);
    if (!rc && other && !force)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "the training data are not those that %s was made with (--force continues nevertheless%s)", l->resume, data);
    return rc;
}

/* The prediction made before the run, for the report. */
static void add_prediction(cJSON *o, const struct mt_setup *s)
{
    struct mt_memory m;
    if (!mt_setup_memory(s, &m, NULL)) {
        cli_add_memory(o, &m.rows);
        mt_json_put(o, "device_bytes=%f, host_bytes=%f", (double)m.device_bytes, (double)m.host_bytes);
    }
    cJSON_AddNumberToObject(o, "device_budget", (double)s->choice.placement.device_budget.bytes);
    if (!s->predicted)
        return;
    const struct mt_sim_result *sim = &s->choice.sim;
    cJSON *p = cJSON_AddObjectToObject(o, "predicted");
    mt_json_put(p, "t_step=%f, t_fwd=%f, t_bwd=%f, forward_bound_by=%s, backward_bound_by=%s", sim->seconds,
                sim->phase[MT_SIM_FORWARD], sim->phase[MT_SIM_BACKWARD], mt_queues[sim->bound[MT_SIM_FORWARD]].title,
                mt_queues[sim->bound[MT_SIM_BACKWARD]].title);
}

int learner_write_files(struct learner *l, const struct mt_setup *setup, struct mt_err *err)
{
    MT_STR_FREED struct mt_str ini = {0};
    struct mt_str plain = {0};
    const char *dir = l->cfg->checkpoint.dir;
    mt_config_print(l->cfg, true, &ini);
    mt_config_print(l->cfg, false, &plain);
    free(l->state.config);
    l->state.config = plain.p; /* now the state's */
    int rc = ini.failed || plain.failed
                 ? mt_fail_nomem(err, "the configuration", ini.len)
                 : mt_write_file(MT_PATH("%s/config.effective.ini", dir), ini.p, ini.len, err);
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    mt_json_put(o, "version=%s, host=%s, device=%s", MT_VERSION, host, mt_device_limits(setup->dev[0])->name);
    if (mt_device_limits(setup->dev[0])->address[0])
        cJSON_AddStringToObject(o, "device_address", mt_device_limits(setup->dev[0])->address);
    mt_json_put(o, "threads=%f, model=%s, parameters=%f", (double)setup->choice.placement.threads, l->in->model_dir,
                (double)setup->choice.layout->n_params);
    snprintf(host, sizeof(host), "%016llx", (unsigned long long)mt_dataset_hash(l->in->data));
    cJSON_AddStringToObject(o, "data_hash", host);
    if (l->resumed_from)
        cJSON_AddStringToObject(o, "resumed_from", l->resumed_from);
    struct mt_ecc ecc;
    mt_hw_ecc(&ecc, "");
    cJSON_AddStringToObject(o, "ecc", ecc.known ? "yes" : "not reported");
    if (setup->cluster)
        cJSON_AddNumberToObject(o, "hosts", mt_net_size(mt_cluster_net(setup->cluster)));
    if (setup->n_learners > 1) /* other runs, on the same base: times are those of all */
        cJSON_AddNumberToObject(o, "learners", (double)setup->n_learners);
    add_prediction(o, setup);
    MT_FREED char *text = mt_json_print(o, true);
    const char *path = MT_PATH("%s/run.json", dir);
    return rc ?: text && mt_json_complete() ? mt_write_file(path, text, strlen(text), err)
                                            : mt_fail_nomem(err, path, 0);
}

void learner_adopt_findings(const struct learner *l, struct mt_setup *s)
{
    const char *found = l->state.findings;
    if (found && !mt_setup_adopt_findings(s, found))
        mt_warn("%s was made with another library or GPU, so results may differ in bits (%s)",
                l->resume, found);
}

void learner_check_space(const struct learner *l, const struct mt_memory *m)
{
    const struct mt_config *c = l->cfg;
    uint64_t n = (uint64_t)c->checkpoint.keep + 1 + c->checkpoint.keep_best, *steps = NULL;
    size_t there = 0;
    char want[32], have[32];
    if (!c->checkpoint.every.is_time) {
        uint64_t every = (uint64_t)c->checkpoint.every.steps;
        n = MT_MIN(n, 1 + (every ? l->in->total_steps / every : 0));
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

/* Tensors that the checkpoint names. Those under adapters are in the model's folder in any case: with --force nothing
 * is said of what they have to be. */
static const cJSON *named_tensors(const struct learner *l)
{
    bool adapters = l->cfg->adapter.kind != MT_ADAPTER_NONE;
    return (adapters && cli_arg(l->args, "force")) ? NULL : l->state.frozen;
}

struct mt_resumed learner_resumed(const struct learner *l)
{
    return (struct mt_resumed){.from_files = named_tensors(l), .dir = l->resume, .phase = l->state.blocks.phase,
                               .overlay = l->state.blocks.overlay, .step = l->state.step, .rows = l->state.rows,
                               .rows_per_epoch = l->state.rows_per_epoch, .rounds = !l->state.shares_up};
}

int learner_open(struct learner *l, const char *path, bool alone, struct mt_err *err)
{
    const char *out = cli_arg(l->args, "out"), *resume = cli_arg(l->args, "resume");
    if (!alone && (out || (resume && *resume && strcmp(resume, "auto"))))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is of one run: with several configurations, each has its own "
                       "checkpoint.dir, and --resume goes on from the newest checkpoint there", out ? "--out" : resume);
    int rc = cli_load_file(&l->cfg, path, MT_TO_TRAIN, l->args, err);
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
    MT_FREED char *text = NULL;
    int rc = mt_hf_files_read(&l->files, l->in->model_dir, err)
          ?: mt_chat_template_read(&text, name, err);
    if (!rc && text)
        rc = mt_hf_files_set_template(&l->files, text, &other, err);
    if (other)
        mt_warn("data.template = %s is another chat template than %s has: checkpoints have it in place of the model's", name,
                l->in->model_dir);
    return rc;
}

int learner_check(struct learner *l, struct mt_err *err)
{
    bool dry = cli_arg(l->args, "dry-run") != NULL;
    int rc = l->resume ? check_resume(l, err) : 0;
    if (!rc) /* on a resume, replaces the hash of an earlier build */
        l->state.data_hash = mt_dataset_hash(l->in->data);
    return rc || dry ? rc : read_files(l, err)
                         ?: mt_checkpoint_rehearse(NULL, l->cfg->checkpoint.dir, err)
                         ?: begin_history(l, err);
}

int learner_begin(struct learner *l, struct mt_err *err)
{
    l->first_step = l->state.step;
    l->first_update = l->state.updates;
    l->resumed_from = l->resume ? strdup(l->resume) : NULL;
    if (l->resume && !l->resumed_from)
        return mt_fail_nomem(err, "the run", strlen(l->resume));
    return l->cfg->log.exec[0] ? mt_feed_open(&l->feed, l->cfg->log.exec, err) : 0;
}

void learner_say_stopped_early(const struct learner *l)
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

void learner_close(struct learner *l)
{
    mt_feed_close(&l->feed);
    mt_inputs_finish(l->in);
    cli_answers_finish(&l->answers);
    mt_train_state_finish(&l->state);
    mt_hf_files_finish(&l->files);
    mt_config_destroy(&l->cfg);
    free(l->resume);
    free(l->resumed_from);
    mt_output_close(&l->out);
}
