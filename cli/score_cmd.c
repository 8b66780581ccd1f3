/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "score_choices.h"
#include "score_journal.h"
#include "report.h"
#include "train/memory.h"

/* Arrays for a step. */
struct scratch {
    struct mt_arrays arrays; /* owned: mt_arrays_finish() */
    float *loss;
    int32_t *correct;
    uint32_t *sample, *length;
    struct score_token *token;
    size_t n_top;
    struct mt_top *top; /* with --top */
    float *rest;
};

static int init(struct scratch *k, const struct mt_step_data *data, size_t n_top, struct mt_err *err)
{
    size_t rows = data->cap * data->micro[0].cap_tokens, docs = data->cap * data->micro[0].cap_docs;
    k->n_top = n_top;
    k->loss = mt_arrays_add(&k->arrays, rows, sizeof(*k->loss));
    k->correct = mt_arrays_add(&k->arrays, rows, sizeof(*k->correct));
    k->sample = mt_arrays_add(&k->arrays, docs, sizeof(*k->sample));
    k->length = mt_arrays_add(&k->arrays, docs, sizeof(*k->length));
    k->token = mt_arrays_add(&k->arrays, rows, sizeof(*k->token));
    k->top = n_top ? mt_arrays_add(&k->arrays, rows * n_top, sizeof(*k->top)) : NULL;
    k->rest = n_top ? mt_arrays_add(&k->arrays, rows, sizeof(*k->rest)) : NULL;
    return k->arrays.failed ? mt_fail_nomem(err, "scores", rows * (n_top + 1) * sizeof(*k->token)) : 0;
}

/* A file by its place, size and time of change. */
static uint64_t hash_file(const char *path, uint64_t h)
{
    struct stat st = {0};
    if (stat(path, &st))
        return h;
    const int64_t of[] = {st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
    return XXH3_64bits_withSeed(of, sizeof(of), XXH3_64bits_withSeed(path, strlen(path), h));
}

static int is_of_model(const struct dirent *e)
{
    return mt_ends_with(e->d_name, ".safetensors") || mt_ends_with(e->d_name, ".json");
}

/* Its weights, all shards, and configurations. */
static uint64_t hash_folder(const char *dir, uint64_t h)
{
    MT_FREED struct dirent **names = NULL;
    int n = dir && *dir ? scandir(dir, &names, is_of_model, alphasort) : 0;
    for (int i = 0; i < n; i++) {
        h = hash_file(MT_PATH("%s/%s", dir, names[i]->d_name), h);
        free(names[i]);
    }
    return h;
}

/* What results depend on. */
static uint64_t key_of(const struct mt_setup *setup)
{
    const struct mt_inputs *in = setup->in;
    const struct mt_numerics *n = mt_setup_numerics_of(setup, 0);
    int64_t chunks = (int64_t)(mt_row_chunks(n) - 1) << 32; /* 0: rows are whole */
    const int64_t of[] = {(int64_t)mt_dataset_hash(in->eval_data), n->seq_len + chunks, n->rows_per_step,
                          n->micro_batch, n->logits_chunk, n->logits_piece, in->cfg->data.packing,
                          (int64_t)in->cfg->model.base_dtype, n->dtype, n->compute, (int64_t)n->seed,
                          in->cfg->model.init};
    return hash_folder(in->cfg->adapter.path, hash_folder(in->model_dir, XXH3_64bits(of, sizeof(of))));
}

static bool is_done(const struct score_journal *j, const struct mt_step_data *data)
{
    size_t n;
    const struct mt_batch *b = mt_step_whole(data, &n);
    for (const struct mt_batch *end = b + n; b < end; b++)
        for (size_t d = 0; d < b->n_docs; d++)
            if (!j->sample[b->sample[d]].done)
                return false;
    return true;
}

/* Adds the completions of a micro-batch, whose rows begin at `at`, without what is trained of prompts
 * (preference.sft_tokens). */
static void add_docs(struct scratch *k, struct score_block *b, const struct mt_batch *of, size_t at)
{
    for (size_t d = 0; d < of->n_docs; d++) {
        size_t end = (size_t)of->doc_rows[d + 1], first = (size_t)of->answer_rows[d];
        k->sample[b->n_samples] = (uint32_t)of->sample[d];
        k->length[b->n_samples++] = (uint32_t)(end - first);
        for (size_t i = at + first; i < at + end; i++)
            k->token[b->n_tokens++] = (struct score_token){k->loss[i], k->correct[i]};
    }
}

/* Where the results of a sample are kept: the journal, and the teacher's file (NULL without --top). */
struct sinks {
    struct score_journal *journal;
    mt_teacher_out *teacher;
};

/* The likeliest tokens of a micro-batch's samples, whose rows begin at `at`. */
static int write_top(mt_teacher_out *t, const struct scratch *k, const struct mt_batch *of, size_t at,
                     struct mt_err *err)
{
    int rc = 0;
    for (size_t d = 0; d < of->n_docs && !rc; d++) {
        size_t n = (size_t)(of->doc_rows[d + 1] - of->doc_rows[d]), first = at + (size_t)of->doc_rows[d];
        rc = mt_teacher_write(t, (uint64_t)of->sample[d], k->top + first * k->n_top, k->rest + first, n, err);
    }
    return rc;
}

/* A log-probability that is not finite is no result. */
static int check_losses(const struct mt_inputs *in, const struct mt_batch *of, const float *loss, struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(in->eval_data);
    char place[4200];
    for (size_t d = 0; d < of->n_docs; d++)
        for (int32_t i = of->doc_rows[d]; i < of->doc_rows[d + 1]; i++)
            if (!isfinite(loss[i])) {
                uint64_t sample = (uint64_t)of->sample[d];
                mt_dataset_place(in->eval_data, s->answers ? sample / 2 % s->n_samples : sample, place, sizeof(place));
                return mt_fail(err, MT_ERR_TRAINING, -EDOM, "%s: its log-probability is not finite: the model's weights, or "
                               "values that it computes of this sample, are too large (megatrain verify says whether its "
                               "files are whole)", place);
            }
    return 0;
}

static int run_step(struct mt_session *s, const struct mt_step_data *data, struct scratch *k, const struct sinks *to,
                    struct mt_err *err)
{
    struct mt_eval_result res = {.row_loss = k->loss, .row_correct = k->correct, .row_top = k->top,
                                 .row_rest = k->rest};
    struct score_block b = {.sample = k->sample, .length = k->length, .token = k->token};
    int rc = mt_engine_eval(s->engine, 0, data, &res, err);
    size_t n;
    const struct mt_batch *whole = mt_step_whole(data, &n);
    if (rc)
        return rc;
    for (size_t m = 0, at = 0; m < n && !rc; at += whole[m++].n_loss) {
        add_docs(k, &b, &whole[m], at);
        rc = check_losses(s->setup->in, &whole[m], k->loss + at, err);
        if (!rc && to->teacher)
            rc = write_top(to->teacher, k, &whole[m], at, err);
    }
    if (!rc && to->teacher) /* before the journal says that it is done */
        rc = mt_teacher_sync(to->teacher, err);
    return rc ? rc : score_journal_add(to->journal, &b, err);
}

static int run_steps(struct mt_session *s, const struct sinks *to, size_t n_top, struct mt_err *err)
{
    struct score_journal *j = to->journal;
    mt_sampler *sampler = s->setup->in->eval_sampler;
    uint64_t n = mt_sampler_stats(sampler)->steps_per_epoch;
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data data = {.n = 0};
    struct scratch k = {.n_top = 0};
    int rc = mt_step_data_init(&data, sampler, err) ?: init(&k, &data, n_top, err);
    int64_t t0 = mt_now_ns(), said = t0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        rc = mt_sampler_fill(sampler, i, &data, err);
        if (!rc && !is_done(j, &data))
            rc = run_step(s, &data, &k, to, err);
        if (mt_now_ns() - said > 10000000000 && i + 1 < n) {
            said = mt_now_ns();
            mt_info("scored %.0f%% of %zu samples", 100 * (double)(i + 1) / (double)n, j->n_samples);
        }
    }
    mt_arrays_finish(&k.arrays);
    return rc;
}

/* The line of a sample. Log-probabilities are summed in double, in the order of the tokens. choice: may be NULL. */
static void put_line(struct mt_str *out, const struct mt_inputs *in, const struct score_journal *j, size_t i,
                     bool tokens, const struct score_choice *choice)
{
    const struct score_sample *s = &j->sample[i];
    const struct score_token *t = j->token + s->first;
    double sum = 0;
    size_t hits = 0;
    char place[4200];
    for (size_t k = 0; k < s->n; k++) {
        sum += (double)t[k].loss;
        hits += t[k].correct != 0;
    }
    const bool answers = mt_dataset_stats(in->eval_data)->answers;
    const size_t item = answers ? i / 2 : i;
    mt_dataset_place(in->eval_data, item, place, sizeof(place));
    const char *line = strchr(place, 0)[-1] == ']' ? NULL : strrchr(place, ':');
    mt_str_printf(out, "{\"sample\": %zu, ", item);
    if (answers)
        mt_str_printf(out, "\"chosen\": %s, ", i % 2 ? "false" : "true");
    if (line)
        mt_str_printf(out, "\"line\": %s, ", line + 1);
    mt_str_printf(out, "\"hash\": \"%016llx\", ",
                  (unsigned long long)mt_dataset_sample_hash(in->eval_data, item, !(answers && i % 2)));
    mt_str_printf(out, "\"logprob\": %.17g, \"tokens\": %zu, \"greedy_hits\": %zu, \"is_greedy\": %s", -sum, s->n, hits,
                  hits == s->n ? "true" : "false");
    if (choice)
        mt_str_printf(out, ", \"question\": %zu, \"best\": %s, \"best_mean\": %s", choice->question,
                      choice->best ? "true" : "false", choice->best_mean ? "true" : "false");
    for (size_t k = 0; tokens && k < s->n; k++)
        mt_str_printf(out, "%s%.9g", k ? ", " : ", \"token_logprobs\": [", -(double)t[k].loss);
    mt_str_printf(out, tokens ? "]}\n" : "}\n");
}

static int write_results(const struct mt_inputs *in, const struct score_journal *j, const char *path,
                         const struct cli_args *args, struct mt_err *err)
{
    MT_STR_FREED struct mt_str out = {0};
    MT_FREED struct score_choice *choice = NULL;
    const struct mt_dataset_stats *d = mt_dataset_stats(in->eval_data);
    const size_t n = (size_t)d->n_samples * (d->answers ? 2 : 1); /* mismatched answers are none of the data's */
    int rc = cli_arg(args, "choices") ? score_choices_find(&choice, in->eval_data, j, err) : 0;
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        if (j->sample[i].done)
            put_line(&out, in, j, i, cli_arg(args, "tokens") != NULL, choice ? &choice[i] : NULL);
    return out.failed ? mt_fail_nomem(err, "scores", out.len) : mt_write_file(path, out.p ? out.p : "", out.len, err);
}

/* Says what FILE.top takes before anything is computed. */
static uint64_t say_top(const struct mt_inputs *in, const char *file)
{
    const struct mt_dataset_stats *d = mt_dataset_stats(in->eval_data);
    uint64_t bytes = mt_teacher_bytes(d->n_samples, d->n_trained, in->top);
    char size[32];
    mt_info("%s takes %s: %zu bytes for each of %llu trained tokens", file, mt_format_bytes(size, sizeof(size), bytes),
            mt_teacher_row_bytes(in->top), (unsigned long long)d->n_trained);
    return bytes;
}

static int check_memory(const struct mt_setup *setup, const struct cli_args *args, const char *path, struct mt_err *err)
{
    struct mt_memory memory;
    int rc = mt_setup_memory(setup, &memory, err);
    const char *file = MT_PATH("%s.top", path);
    if (!rc && setup->in->top)
        mt_memory_add_row(&memory.rows, "disk", "FILE.top", say_top(setup->in, file));
    if (!rc && cli_arg(args, "dry-run"))
        cli_print_memory(&memory);
    return rc ? rc : mt_memory_check(&memory, err);
}

/* The file of --top, FILE.top. */
static int open_top(mt_teacher_out **out, const struct mt_setup *setup, const char *path, bool goes_on,
                    struct mt_err *err)
{
    const struct mt_inputs *in = setup->in;
    const char *file = MT_PATH("%s.top", path);
    struct mt_teacher_params p = {.path = file, .data = in->eval_data, .top = in->top, .vocab = (size_t)in->hf.vocab,
                                  .key = key_of(setup), .goes_on = goes_on};
    int rc = mt_inputs_tokenizer_hash(&p.tokenizer, in, err);
    return rc ? rc : mt_teacher_create(out, &p, err);
}

static int score(struct mt_setup *setup, const struct cli_args *args, const char *path, struct mt_err *err)
{
    const size_t top = setup->in->top;
    mt_teacher_out *teacher = NULL;
    struct mt_session s;
    MT_CLOSED_BY(score_journal_close) struct score_journal j = {0};
    const struct mt_inputs *in = setup->in;
    size_t answers = mt_sampler_stats(in->eval_sampler)->n_answers, before = 0;
    size_t n = answers ? answers : (size_t)mt_dataset_stats(in->eval_data)->n_samples;
    mt_setup_adopt_checkpoint(setup);
    int rc = mt_session_start(&s, setup, err);
    const char *part = MT_PATH("%s.part", path);
    if (!rc && cli_arg(args, "force"))
        unlink(part);
    rc = rc ?: score_journal_open(&j, part, key_of(setup) + top, n, err);
    for (size_t i = 0; i < n && !rc; i++)
        before += j.sample[i].done;
    if (!rc && top)
        rc = open_top(&teacher, setup, path, before > 0, err);
    if (before)
        mt_info("%zu of %zu %s are in %s already", before, n, answers ? "answers" : "samples", part);
    if (!rc && before < n)
        rc = mt_session_fill_weights(&s, NULL, err);
    rc = rc ?: run_steps(&s, &(struct sinks){&j, teacher}, top, err);
    mt_session_finish(&s);
    rc = rc ?: write_results(in, &j, path, args, err);
    int code = mt_teacher_close(&teacher, !rc, rc ? NULL : err);
    rc = rc ? rc : code;
    if (!rc)
        unlink(part);
    return rc;
}

/* Its data are those of an evaluation, all of them. */
static int take_data(struct mt_config *cfg, const struct cli_args *args, struct mt_err *err)
{
    const char *data = cli_arg(args, "data");
    int rc = data ? mt_config_override(cfg, "data.eval", data, "--data", err) : 0;
    return rc ?: mt_config_override(cfg, "data.max_samples", "0", "score", err)
              ?: mt_config_override(cfg, "eval.sets", "", "score", err)
              ?: mt_config_override(cfg, "eval.max_samples", "1000000000000000", "score", err);
}

int cli_cmd_score(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    const char *out = cli_arg(args, "out");
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {0};
    MT_CLOSED_BY(mt_setup_finish) struct mt_setup setup = {0};
    if (!out || !*out)
        return cli_usage("score: give --out: the file of results");
    int rc = cli_load_config(&cfg, MT_TO_EVALUATE, args, err);
    rc = rc ?: cli_choose_model(cfg, cli_arg(args, "model"), cli_arg(args, "adapter"), err)
            ?: take_data(cfg, args, err)
            ?: mt_inputs_open(&in, cfg, MT_RUN_EVAL, NULL, err);
    if (!rc && !in.eval_data)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "there is nothing to score: give --data, or a file as data.eval");
    if (!rc && cli_arg(args, "choices") && mt_dataset_stats(in.eval_data)->answers)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--choices is for samples of a prompt and a completion, not for answers with "
                     "a preference");
    const size_t top = in.top = (size_t)cli_whole(args, "top", 0);
    if (!rc && top && (top > (size_t)in.hf.vocab || mt_dataset_stats(in.eval_data)->answers))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--top: at most as many tokens as the vocabulary has, and of samples, not of "
                     "answers with a preference");
    rc = rc ?: mt_setup_open(&setup, &in, MT_RUN_EVAL, err)
            ?: check_memory(&setup, args, out, err);
    if (!rc && !cli_arg(args, "dry-run"))
        rc = score(&setup, args, out, err);
    return rc;
}
