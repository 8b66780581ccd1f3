/* SPDX-License-Identifier: Apache-2.0 */
#include "rounds.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/history.h"
#include "checkpoint/output.h"
#include "log_lines.h"
#include "objective/policy.h"
#include "plan/resolve.h"
#include "rewards.h"

enum { MOST_WORDS = 64, STREAM_PROMPTS = 7000 };

struct rounds {
    const struct cli *cli;
    const struct cli_args *args;
    const struct mt_config *cfg;
    const char *dir;
    cJSON *prompts;
    const cJSON **prompt;           /* [n_prompts] of them */
    size_t n_prompts;               /* of the file */
    uint64_t per, steps;            /* steps of a round, of the run */
    char *policy;                   /* newest checkpoint; NULL: none yet */
    char *base; /* what its adapters are added to, where earlier ones were merged; NULL: the model */
};

/* The child that a signal is passed on to; what it was. */
static volatile sig_atomic_t child, caught;

static void pass_on(int signo)
{
    caught = signo;
    if (child > 0)
        kill((pid_t)child, signo);
}

/* Of what a round makes in turn: the first has the round's name. */
static void path_of(const struct rounds *r, uint64_t round, uint64_t again, const char *end, char path[4200])
{
    char name[64] = "";
    if (again)
        snprintf(name, sizeof(name), "-%llu", (unsigned long long)again);
    mt_path_printf(path, 4200, "%s/round-%llu%s%s", r->dir, (unsigned long long)round, name, end);
}

/* --- processes ------------------------------------------------------------------------------------------------- */

struct job {
    const char *argv[MOST_WORDS * 4];
    size_t n;
    const char *in, *out; /* files of its standard streams, or NULL */
    const char *env[10][2];
    size_t n_env;
    double seconds; /* 0: no limit */
};

static void word(struct job *j, const char *text)
{
    if (j->n + 1 < MT_ARRAY_LEN(j->argv))
        j->argv[j->n++] = text;
}

static void give(struct job *j, const char *name, const char *value)
{
    j->env[j->n_env][0] = name;
    j->env[j->n_env++][1] = value;
}

/* Words of a command, which is cut where it has spaces; no shell reads it. */
static void words(struct job *j, char *text)
{
    for (char *save = NULL, *w = strtok_r(text, " \t", &save); w; w = strtok_r(NULL, " \t", &save))
        word(j, w);
}

static void become(const struct job *j, int sign_of_death)
{
    prctl(PR_SET_PDEATHSIG, sign_of_death);
    int in = j->in ? open(j->in, O_RDONLY) : -1, out = j->out ? open(j->out, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    if ((j->in && dup2(in, STDIN_FILENO) < 0) || (j->out && dup2(out, STDOUT_FILENO) < 0))
        _exit(126);
    for (size_t i = 0; i < j->n_env; i++)
        setenv(j->env[i][0], j->env[i][1], 1);
    execvp(j->argv[0], (char *const *)j->argv);
    dprintf(STDERR_FILENO, "megatrain: cannot start %s: %s\n", j->argv[0], strerror(errno));
    _exit(127);
}

/* Returns its exit code, 128 and more where a signal ended it; -ETIMEDOUT: it took too long, and was ended. */
static int run_job(const struct job *j, int sign_of_death)
{
    int64_t t0 = mt_now_ns();
    int status = 0;
    pid_t pid = fork(), got = 0;
    if (!pid)
        become(j, sign_of_death);
    child = pid;
    if (caught && pid > 0)
        kill(pid, caught);
    while (pid > 0 && (got = waitpid(pid, &status, j->seconds > 0 ? WNOHANG : 0)) != pid) {
        if (got < 0 && errno != EINTR)
            return -errno;
        if (!got && mt_seconds_since(t0) > j->seconds) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            child = 0;
            return -ETIMEDOUT;
        }
        if (!got)
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    child = 0;
    return pid < 0 ? -EAGAIN : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* --- a round's rollouts ---------------------------------------------------------------------------------------- */

/* Rollouts that are made together: n prompts from place `at` in their order, for the round's try; files. */
struct batch {
    uint64_t round, again, at, n;
    char prompts[4200], sampled[4200];
};

/* Each prompt once before any comes twice, in another order each time. */
static int write_prompts(const struct rounds *r, const struct batch *b, struct mt_err *err)
{
    MT_STR_FREED struct mt_str text = {0};
    mt_json_begin();
    for (uint64_t i = 0, at = b->at; i < b->n; i++, at++) {
        uint64_t k = mt_permute(at % r->n_prompts, r->n_prompts, (uint64_t)r->cfg->train.seed,
                                STREAM_PROMPTS + at / r->n_prompts);
        MT_JSON_FREED cJSON *o = cJSON_Duplicate(r->prompt[k], true);
        cJSON_DeleteItemFromObjectCaseSensitive(o, "group");
        cJSON_AddNumberToObject(o, "group", (double)at);
        MT_FREED char *line = mt_json_print(o, false);
        mt_str_printf(&text, "%s\n", line ? line : "");
    }
    return text.failed || !mt_json_complete() ? mt_fail_nomem(err, b->prompts, text.len)
                                              : mt_write_file(b->prompts, text.p, text.len, err);
}

/* Where the command is to look and to write, in its environment; own generation gets it as options. */
static int sample(const struct rounds *r, const struct batch *b, const char *option, int *code, struct mt_err *err)
{
    const struct mt_config *c = r->cfg;
    const struct mt_policy_keys *k = &c->numerics.objective_keys.policy;
    bool lora = c->adapter.kind != MT_ADAPTER_NONE, own = !strcmp(c->policy.rollouts, "generate");
    const char *adapter = lora ? r->policy ? r->policy : c->adapter.path : "", *base = r->base ? r->base : c->model.path;
    const char *model = lora || !r->policy ? base : r->policy;
    MT_FREED char *text = strdup(c->policy.rollouts);
    char number[6][32];
    struct job j = {.n = 0};
    if (!text)
        return mt_fail_nomem(err, "a command", 1);
    snprintf(number[0], sizeof(number[0]), "%llu", (unsigned long long)b->round);
    snprintf(number[1], sizeof(number[1]), "%lld", (long long)c->policy.samples);
    snprintf(number[2], sizeof(number[2]), "%lld", (long long)k->max_tokens);
    snprintf(number[3], sizeof(number[3]), "%.17g", k->temperature);
    snprintf(number[4], sizeof(number[4]), "%llu", (unsigned long long)c->train.seed * 1000003 + b->round + b->again * 500009);
    if (own) {
        const char *const fixed[] = {"/proc/self/exe", "generate", r->args->operands[0], "--model", model, "--prompts", b->prompts, "--out", b->sampled,
                                     "--samples", number[1], "--max-tokens", number[2], "--temperature", number[3], "--seed", number[4]};
        for (size_t i = 0; i < MT_ARRAY_LEN(fixed); i++)
            word(&j, fixed[i]);
        word(&j, "-q");
        if (option)
            word(&j, option);
        for (size_t i = 0; i < r->args->n_given; i++) {
            if (strcmp(r->args->given[i].option->name, "set") != 0)
                continue;
            word(&j, "--set");
            word(&j, r->args->given[i].value);
        }
        if (mt_plan_by_rewards(c)) {
            snprintf(number[5], sizeof(number[5]), "%llu", (unsigned long long)b->round); /* of a step each */
            word(&j, "--noise");
            word(&j, number[5]);
        }
        if (*adapter) {
            word(&j, "--adapter");
            word(&j, adapter);
        }
    } else {
        const char *const env[][2] = {{"MEGATRAIN_ROUND", number[0]}, {"MEGATRAIN_MODEL", model}, {"MEGATRAIN_ADAPTER", adapter},
                                      {"MEGATRAIN_PROMPTS", b->prompts}, {"MEGATRAIN_ROLLOUTS", b->sampled}, {"MEGATRAIN_SAMPLES", number[1]},
                                      {"MEGATRAIN_MAX_TOKENS", number[2]}, {"MEGATRAIN_TEMPERATURE", number[3]}, {"MEGATRAIN_SEED", number[4]}};
        words(&j, text);
        for (size_t i = 0; i < MT_ARRAY_LEN(env); i++)
            give(&j, env[i][0], env[i][1]);
    }
    *code = run_job(&j, SIGTERM);
    if (*code)
        cli_say("megatrain: round %s: the rollouts' command ended with code %d: %s\n", number[0], *code, c->policy.rollouts);
    return *code < 0 ? mt_fail(err, MT_ERR_RUNTIME, *code, "cannot run %s: %s", c->policy.rollouts, strerror(-*code)) : 0;
}

/* A command's rewards: a number a line, or an object with "reward". */
static int ask_rewards(const struct mt_config *cfg, const char *in, const char *out, cJSON **rewards,
                       struct mt_err *err)
{
    struct job j = {.in = in, .out = out, .seconds = cfg->policy.reward_seconds};
    MT_FREED char *text = strdup(cfg->policy.reward);
    if (!text)
        return mt_fail_nomem(err, "a command", 1);
    words(&j, text);
    int code = run_job(&j, SIGTERM);
    if (code == -ETIMEDOUT)
        return mt_fail(err, MT_ERR_RUNTIME, code, "%s took longer than policy.reward_seconds = %g, and was ended",
                       cfg->policy.reward, j.seconds);
    if (code)
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "%s ended with code %d", cfg->policy.reward, code);
    int rc = mt_json_read_lines(rewards, out, err);
    unlink(out);
    return rc;
}

static int set_reward(const struct mt_config *cfg, cJSON *o, const cJSON *given, const char *place, struct mt_err *err)
{
    double reward = NAN;
    const cJSON *v = cJSON_IsObject(given) ? mt_json_get(given, "reward") : given;
    int rc = given ? 0 : cli_reward(&reward, cfg->policy.reward, o, place, err);
    if (given && !cJSON_IsNumber(v))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %s has no number for it", place, cfg->policy.reward);
    cJSON_DeleteItemFromObjectCaseSensitive(o, "reward");
    cJSON_AddNumberToObject(o, "reward", given ? v->valuedouble : reward);
    return rc;
}

/* Groups lie together. */
static void look(struct cli_rewards *t, const cJSON *o)
{
    const cJSON *before = o->prev && o->prev->next ? o->prev : NULL;
    double reward = cJSON_GetNumberValue(mt_json_get(o, "reward"));
    bool begins = !before || !cJSON_Compare(mt_json_get(o, "group"), mt_json_get(before, "group"), true), alike = true;
    t->sum += reward;
    t->cut += cJSON_IsTrue(mt_json_get(o, "truncated"));
    t->n++;
    t->groups += begins;
    for (const cJSON *of = o; begins && of && cJSON_Compare(mt_json_get(o, "group"), mt_json_get(of, "group"), true); of = of->next)
        alike &= cJSON_GetNumberValue(mt_json_get(of, "reward")) == reward;
    t->alike += begins && alike;
}

int cli_give_rewards(const struct mt_config *cfg, const char *from, const char *to, struct cli_rewards *told,
                     struct mt_err *err)
{
    const char *asked = MT_PATH("%s.rewards", to);
    MT_JSON_FREED cJSON *list = NULL, *rewards = NULL;
    cJSON *o;
    MT_STR_FREED struct mt_str text = {0};
    double none;
    bool wants = cfg->policy.reward[0], command = wants && cli_reward(&none, cfg->policy.reward, NULL, "", NULL) == -ENOENT;
    int rc = mt_path_exists(from) ? mt_json_read_lines(&list, from, err) : 0, i = 0;
    if (!rc && !cJSON_GetArraySize(list))
        rc = mt_fail(err, MT_ERR_INPUT, -ENODATA, "%s wrote no rollouts to %s", cfg->policy.rollouts, from);
    if (!rc && command)
        rc = ask_rewards(cfg, from, asked, &rewards, err);
    if (!rc && command && cJSON_GetArraySize(rewards) != cJSON_GetArraySize(list))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s gave %d rewards for %d rollouts", cfg->policy.reward, cJSON_GetArraySize(rewards),
                     cJSON_GetArraySize(list));
    mt_json_begin();
    for (o = rc ? NULL : list->child; o && !rc; o = o->next, i++) {
        const char *place = MT_PATH("%s:%d", from, i + 1);
        if (!cJSON_IsObject(o))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a JSON object", place);
        else if (wants)
            rc = set_reward(cfg, o, command ? cJSON_GetArrayItem(rewards, i) : NULL, place, err);
        MT_FREED char *line = rc ? NULL : mt_json_print(o, false);
        mt_str_printf(&text, "%s\n", line ? line : "");
    }
    rc = rc ?: text.failed || !mt_json_complete() ? mt_fail_nomem(err, to, text.len)
                                                  : mt_write_file(to, text.p, text.len, err);
    *told = (struct cli_rewards){0};
    for (o = rc ? NULL : list->child; o; o = o->next)
        look(told, o);
    if (!rc)
        unlink(from);
    return rc;
}

/* Whether a command, whose words have spaces between them, can be started. */
static bool is_there(const char *command)
{
    MT_FREED char *word = strndup(command, strcspn(command, " \t"));
    if (word && strchr(word, '/'))
        return !access(word, X_OK);
    MT_FREED char *found = word ? mt_find_program(word, false) : NULL;
    return found;
}

int cli_check_rewards(const struct mt_config *cfg, const char *file, const cJSON *prompts, struct mt_err *err)
{
    const char *by = cfg->policy.reward;
    const cJSON *o;
    double unused;
    int rc = 0, i = 0;
    for (o = *by && prompts ? prompts->child : NULL; o && !rc; o = o->next) {
        MT_JSON_FREED cJSON *t = cJSON_Duplicate(o, true);
        cJSON_DeleteItemFromObjectCaseSensitive(t, "completion");
        t = mt_json_put(t, "completion=%s", "");
        rc = cli_reward(&unused, by, t, MT_PATH("%s:%d", file, ++i), err);
    }
    if (rc != -ENOENT)
        return rc;
    return is_there(by) ? 0 : mt_fail(err, MT_ERR_USAGE, -ENOENT, "policy.reward = %s: neither exact, number, regex or schema, nor a "
                                      "command that can be started", by);
}

static int make_batch(const struct rounds *r, struct batch *b, const char *whole, int *code, struct mt_err *err)
{
    char again[32] = "";
    struct cli_rewards t;
    path_of(r, b->round, 0, ".tmp.jsonl", b->sampled);
    path_of(r, b->round, b->again, ".prompts.jsonl", b->prompts);
    if (mt_path_exists(whole))
        return 0;
    unlink(b->sampled);
    int rc = write_prompts(r, b, err) ?: sample(r, b, NULL, code, err);
    if (rc || *code)
        return rc;
    rc = cli_give_rewards(r->cfg, b->sampled, whole, &t, err);
    if (b->again)
        snprintf(again, sizeof(again), ", again %llu", (unsigned long long)b->again);
    if (!rc)
        mt_info("round %llu%s: %zu rollouts of %zu prompts, mean reward %.4g, %zu prompts whose rollouts all have the same, %.0f cut off",
                (unsigned long long)b->round, again, t.n, t.groups, t.sum / (double)t.n, t.alike, t.cut);
    return rc;
}

/* --- prompts in place of those that train nothing ---------------------------------------------------------------- */

/* Where prompts of a round begin: behind the last one of the round before, which may have taken more than its own. */
static int first_prompt(const struct rounds *r, uint64_t round, uint64_t *at, struct mt_err *err)
{
    char path[4200] = "";
    MT_JSON_FREED cJSON *list = NULL;
    *at = 0;
    if (!round)
        return 0;
    for (uint64_t k = (uint64_t)r->cfg->policy.refill + 1; k-- > 0 && !(*path && mt_path_exists(path));)
        path_of(r, round - 1, k, ".prompts.jsonl", path);
    int rc = mt_json_read_lines(&list, path, err);
    double last = rc ? 0 : mt_json_number(cJSON_GetArrayItem(list, cJSON_GetArraySize(list) - 1), "group", -1);
    *at = (uint64_t)(last + 1);
    return rc || last >= 0 ? rc : mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: its last prompt has no \"group\"", path);
}

/* Moves the rollouts of a list's first group to an array of their own, in one list or, where all have the same reward,
 * in another. */
static void take_group(cJSON *from, cJSON *kept, cJSON *alike)
{
    cJSON *rollouts = cJSON_CreateArray(), *next;
    const cJSON *group = mt_json_get(from->child, "group");
    double reward = cJSON_GetNumberValue(mt_json_get(from->child, "reward"));
    bool same = true;
    for (cJSON *o = from->child; o; o = next) {
        next = o->next;
        if (rollouts->child && !cJSON_Compare(mt_json_get(o, "group"), group, true))
            continue;
        same &= cJSON_GetNumberValue(mt_json_get(o, "reward")) == reward;
        mt_json_append(rollouts, cJSON_DetachItemViaPointer(from, o));
    }
    mt_json_append(same ? alike : kept, rollouts);
}

/* Groups of which rollouts differ, as many as there are, and others in their stead where they are too few. */
static int write_groups(cJSON *kept, cJSON *alike, size_t n, const char *whole, struct mt_err *err)
{
    MT_STR_FREED struct mt_str text = {0};
    const cJSON *group, *o;
    while ((size_t)cJSON_GetArraySize(kept) < n && alike->child)
        mt_json_append(kept, cJSON_DetachItemFromArray(alike, 0));
    cJSON_ArrayForEach(group, kept)
        cJSON_ArrayForEach(o, group) {
            MT_FREED char *line = mt_json_print(o, false);
            mt_str_printf(&text, "%s\n", line ? line : "");
        }
    return text.failed || !mt_json_complete() ? mt_fail_nomem(err, whole, text.len)
                                              : mt_write_file(whole, text.p, text.len, err);
}

/* Each batch has files of its own, so that after a kill those that are whole are not made again. */
static int refill(const struct rounds *r, uint64_t round, const char *whole, int *code, struct mt_err *err)
{
    MT_JSON_FREED cJSON *kept = cJSON_CreateArray(), *alike = cJSON_CreateArray();
    size_t n = (size_t)r->cfg->policy.prompts_per_round, most = (size_t)r->cfg->policy.refill, differ = 0;
    struct batch b = {.round = round, .n = n};
    char part[4200];
    int rc = first_prompt(r, round, &b.at, err);
    for (; !rc && !*code && b.again <= most && differ < n; b.again++, b.at += b.n) {
        MT_JSON_FREED cJSON *list = NULL;
        b.n = n - differ;
        path_of(r, round, b.again, ".part.jsonl", part);
        rc = make_batch(r, &b, part, code, err);
        if (!rc && !*code)
            rc = mt_json_read_lines(&list, part, err);
        mt_json_begin();
        while (list && list->child)
            take_group(list, kept, alike);
        if (!rc && !mt_json_complete())
            rc = mt_fail_nomem(err, part, 1);
        differ = (size_t)cJSON_GetArraySize(kept);
    }
    if (rc || *code)
        return rc;
    for (size_t k = b.again; k <= most; k++) { /* of an earlier making of this round */
        path_of(r, round, k, ".prompts.jsonl", b.prompts);
        unlink(b.prompts);
    }
    rc = write_groups(kept, alike, n, whole, err);
    for (size_t k = 0; k < b.again && !rc; k++) {
        path_of(r, round, k, ".part.jsonl", part);
        unlink(part);
    }
    if (!rc)
        mt_info("round %llu: rollouts of %zu prompts differ in their rewards, of %zu that are trained", (unsigned long long)round, differ, n);
    return rc;
}

/* --- rounds ---------------------------------------------------------------------------------------------------- */

/* Of adapters that are merged while they are trained, the model with the merged ones. */
static int find_base(struct rounds *r, struct mt_err *err)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state of = {.step = 0};
    free(r->base);
    r->base = NULL;
    int rc = r->policy && r->cfg->adapter.merge_every ? mt_checkpoint_read_state(r->policy, &of, err) : 0;
    if (rc || !of.blocks.overlay)
        return rc;
    r->base = mt_path_join(r->dir, of.blocks.overlay);
    return r->base ? 0 : mt_fail_nomem(err, r->dir, strlen(r->dir));
}

static int newest(struct rounds *r, uint64_t *step, struct mt_err *err)
{
    free(r->policy);
    r->policy = NULL;
    int rc = mt_checkpoint_find_newest(r->dir, false, &r->policy, err);
    const char *dash = r->policy ? strrchr(r->policy, '-') : NULL;
    *step = dash ? strtoull(dash + 1, NULL, 10) : 0;
    return rc ?: find_base(r, err);
}

int cli_link_as(const char *data, const char *whole, struct mt_err *err)
{
    const char *tmp = MT_PATH("%s.tmp", data);
    unlink(tmp);
    int rc = link(whole, tmp) || rename(tmp, data) ? mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot make %s: %s", data, strerror(errno)) : 0;
    unlink(tmp); /* it stays where data is the same file */
    return rc;
}

/* What trained before may have been killed and still be ending, or before a checkpoint that is whole had its name.
 * Training would go on from that, and not from the one by which a round is known and its steps are counted. */
static int settle(const struct rounds *r, struct mt_err *err)
{
    struct mt_output out;
    int rc = mt_output_open(&out, r->dir, err);
    if (!rc)
        mt_history_adopt(NULL, r->dir);
    mt_output_close(&out);
    return rc;
}

/* `run` as it was started, with other options besides. */
static int run_self(const struct rounds *r, bool quiet, const char *const *more, size_t n_more, int *code)
{
    struct job j = {.n = 0};
    char *given[MOST_WORDS] = {NULL};
    size_t n = 0;
    word(&j, "/proc/self/exe");
    if (quiet)
        word(&j, "-q");
    if (r->cli->no_progress)
        word(&j, "--no-progress");
    word(&j, "run");
    word(&j, r->args->operands[0]);
    for (size_t i = 0; i < r->args->n_given && n < MOST_WORDS; i++) {
        const struct cli_given *g = &r->args->given[i];
        bool own = !strcmp(g->option->name, "resume") || !strcmp(g->option->name, "max-steps");
        if (!own && asprintf(&given[n], g->value ? "--%s=%s" : "--%s", g->option->name, g->value) > 0)
            word(&j, given[n++]);
    }
    word(&j, "--resume");
    for (size_t i = 0; i < n_more; i++)
        word(&j, more[i]);
    *code = run_job(&j, SIGTERM);
    for (size_t i = 0; i < n; i++)
        free(given[i]);
    return *code < 0 ? *code : 0;
}

/* To the end of a round; without a step left, for what comes after the last one. */
static int train(const struct rounds *r, const char *data, uint64_t step, uint64_t end, int *code)
{
    char number[40];
    uint64_t every = (uint64_t)r->cfg->eval.every;
    bool quiet = step && end < r->steps && !(every && end / every > step / every); /* else answers come each round */
    snprintf(number, sizeof(number), "--max-steps=%llu", (unsigned long long)MT_MAX(end - step, (uint64_t)1));
    const char *more[] = {MT_PATH("--set=data.train=%s", data), "--set=data.format=rollouts", number, "--set=eval.generate="};
    return run_self(r, r->cli->quiet, more, MT_ARRAY_LEN(more) - !quiet, code);
}

/* Before anything is sampled: whether training has room, and samples can be made of each prompt. */
static int rehearse(const struct rounds *r, int *code, struct mt_err *err)
{
    static const char *const dry[] = {"--dry-run"};
    struct batch b = {.again = 0};
    mt_path_printf(b.prompts, sizeof(b.prompts), "%s", r->cfg->policy.prompts);
    int rc = run_self(r, true, dry, 1, code);
    return rc || *code || strcmp(r->cfg->policy.rollouts, "generate") ? rc : sample(r, &b, "--dry-run", code, err);
}

static int run_round(struct rounds *r, uint64_t step, int *code, struct mt_err *err)
{
    char whole[4200];
    uint64_t round = step / r->per, end = MT_MIN((round + 1) * r->per, r->steps);
    uint64_t n = (uint64_t)r->cfg->policy.prompts_per_round;
    struct batch b = {.round = round, .n = n, .at = round * n};
    path_of(r, round, 0, ".jsonl", whole);
    const char *data = MT_PATH("%s/rollouts.jsonl", r->dir);
    int rc = r->cfg->policy.refill && !mt_path_exists(whole) ? refill(r, round, whole, code, err)
                                                             : make_batch(r, &b, whole, code, err);
    if (!rc && !*code)
        rc = cli_link_as(data, whole, err); /* one name in all rounds: checkpoints are of one configuration */
    return rc || *code ? rc : train(r, data, step, end, code);
}

/* A stop or a kill may have cut the evaluation after the last step short. */
static int evaluate_last(const struct rounds *r, uint64_t step, int *code, struct mt_err *err)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state of = {.step = 0};
    const char *data = MT_PATH("%s/rollouts.jsonl", r->dir);
    if (!r->policy || step < r->steps || !(r->cfg->data.eval[0] || r->cfg->eval.generate[0]))
        return 0;
    int rc = mt_checkpoint_read_state(r->policy, &of, err);
    return rc || of.eval_step == of.step ? rc : train(r, data, step, step, code);
}

static int check(struct rounds *r, struct mt_err *err)
{
    const struct mt_config *c = r->cfg;
    const bool own = !strcmp(c->policy.rollouts, "generate");
    struct mt_numerics n;
    char first[4200];
    path_of(r, 0, 0, ".prompts.jsonl", first);
    r->steps = (uint64_t)c->train.steps;
    r->per = (uint64_t)c->policy.steps_per_round;
    if (!strcmp(c->policy.loss, "off") || !c->policy.prompts[0] || !r->steps)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts = %s: rounds need policy.loss, policy.prompts and train.steps (of all rounds)",
                       c->policy.rollouts);
    int rc = mt_resolve_numerics(&n, c, err);
    if (rc)
        return rc;
    if (r->per > 1 && c->numerics.objective_keys.policy.old == MT_OLD_BATCH)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.steps_per_round = %llu: more than one update of the same rollouts needs policy.old = file",
                       (unsigned long long)r->per);
    if (!c->numerics.objective_keys.policy.max_tokens)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts = %s: set policy.max_tokens to the most tokens of a completion", c->policy.rollouts);
    if (c->checkpoint.save != MT_SAVE_FULL)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "checkpoint.save = weights: each round goes on from a full checkpoint: set it to full");
    if (c->adapter.merge_every && !own)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts = %s with adapter.merge_every: no command has the model that adapters were "
                       "merged into: set it to generate, or adapter.merge_every to 0", c->policy.rollouts);
    const union mt_rollout_values drawn = {.ref = NAN, .old = NAN};
    const char *lacks = own ? mt_policy_lacks(mt_objective_of(&n), &n.objective_keys.policy, &drawn) : NULL;
    if (lacks)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts = generate: its rollouts have no %s", lacks);
    if (n.objective_keys.policy.max_tokens >= n.seq_len && c->data.overlong == MT_OVERLONG_ERROR)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.max_tokens = %lld: a row of data.seq_len = %lld tokens has no room for that and a "
                       "prompt: lower the one, raise the other, or set data.overlong", (long long)n.objective_keys.policy.max_tokens,
                       (long long)n.seq_len);
    if (mt_plan_by_rewards(c) && !own)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts = %s with policy.loss = es: no command has the weights' noise: set it to generate",
                       c->policy.rollouts);
    if (mt_plan_by_rewards(c) && n.rows_per_step < mt_plan_rollouts(c))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "a step of %lld rows with policy.loss = es, which takes all rollouts of a round "
                       "(prompts_per_round times samples, of 2 mezo.samples variants of the weights): set train.batch_size = %lld",
                       (long long)n.rows_per_step, (long long)mt_plan_rollouts(c));
    if (r->args->n_operands > 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.rollouts is of one configuration: start others apart");
    if (!cli_arg(r->args, "resume") && mt_path_exists(first))
        return mt_fail(err, MT_ERR_USAGE, -ENOTEMPTY, "%s has rounds already: continue with --resume, or choose another checkpoint.dir", r->dir);
    rc = mt_json_read_lines(&r->prompts, c->policy.prompts, err);
    const cJSON *o;
    if (!rc)
        cJSON_ArrayForEach(o, r->prompts)
            if (!cJSON_IsObject(o))
                return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not each line is a JSON object", c->policy.prompts);
    rc = rc ?: mt_json_items(&r->prompt, &r->n_prompts, r->prompts, err);
    if (!rc && !r->n_prompts)
        rc = mt_fail(err, MT_ERR_INPUT, -ENODATA, "%s has no prompts", c->policy.prompts);
    return rc ?: cli_check_rewards(c, c->policy.prompts, r->prompts, err);
}

/* From where the folder has come to. */
static int run_all(struct rounds *r, int *code, struct mt_err *err)
{
    uint64_t step = 0, before = UINT64_MAX;
    int rc = mt_mkdir_p(r->dir, err)
          ?: mt_checkpoint_rehearse(NULL, r->dir, err)
          ?: settle(r, err)
          ?: newest(r, &step, err);
    if (!rc && step < r->steps)
        rc = rehearse(r, code, err);
    if (!rc && !*code)
        rc = evaluate_last(r, step, code, err);
    while (!rc && !*code && !caught && step < r->steps && step != before) {
        before = step;
        rc = run_round(r, step, code, err);
        if (!rc && !*code)
            rc = newest(r, &step, err);
    }
    return rc;
}

int cli_run_rounds(int *code, const struct cli *cli, const struct cli_args *args, const struct mt_config *cfg,
                   struct mt_err *err)
{
    const char *out = cli_arg(args, "out");
    struct rounds r = {.cli = cli, .args = args, .cfg = cfg, .dir = out ? out : cfg->checkpoint.dir};
    struct sigaction pass = {.sa_handler = pass_on};
    int rc = check(&r, err);
    sigaction(SIGINT, &pass, NULL);
    sigaction(SIGTERM, &pass, NULL);
    if (!rc && !cli_arg(args, "dry-run"))
        rc = run_all(&r, code, err);
    if (!rc && !*code && caught)
        *code = 128 + caught;
    free(r.policy);
    free(r.base);
    free(r.prompt);
    cJSON_Delete(r.prompts);
    return rc;
}
