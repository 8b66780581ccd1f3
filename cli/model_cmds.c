/* SPDX-License-Identifier: Apache-2.0 */
/* check, eval, sample, inspect, export, verify: commands that look at models. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "cli.h"
#include "data/text.h"
#include "hf/safetensors.h"
#include "model/weights.h"
#include "report.h"

int cli_cmd_check(struct cli *cli, const struct cli_args *args)
{
    struct mt_config *cfg = NULL;
    struct mt_session s = {0};
    struct mt_memory memory;
    struct mt_st_model st;
    struct mt_err err;
    int rc = cli_load_config(&cfg, args, &err);
    if (!rc)
        rc = mt_session_prepare(&s, cfg, true, &err);
    if (!rc && cfg->model.init == MT_INIT_WEIGHTS) {
        rc = mt_st_open_dir(&st, s.model_dir, &err);
        if (!rc)
            mt_st_close(&st);
    }
    if (!rc)
        rc = mt_session_memory(&s, &memory, &err);
    if (!rc && !cli->quiet) {
        cli_print_session(&s);
        cli_print_memory(&memory);
    }
    if (!rc)
        rc = mt_memory_check(&memory, &err);
    int code = rc ? cli_fail(&err) : 0;
    if (!rc)
        printf("ok\n");
    mt_session_finish(&s);
    mt_config_destroy(&cfg);
    return code;
}

static int print_samples(struct mt_session *s, bool json, struct mt_err *err)
{
    struct mt_step_data data;
    int rc = mt_step_data_init(&data, s->eval_sampler, err);
    double *loss = NULL;
    size_t cap = 0;
    for (uint64_t i = 0; !rc && i < mt_sampler_steps_per_epoch(s->eval_sampler); i++) {
        size_t docs = 0, at = 0;
        rc = mt_sampler_fill(s->eval_sampler, i, &data, err);
        for (size_t m = 0; m < data.n; m++)
            docs += data.micro[m].n_docs;
        if (!rc && !mt_grow(&loss, &cap, docs, sizeof(*loss)))
            rc = mt_fail_nomem(err, "losses", docs * sizeof(*loss));
        struct mt_eval_result sum = {.doc_loss = loss};
        if (!rc)
            rc = mt_engine_eval(s->engine, &data, &sum, err);
        for (size_t m = 0; m < data.n && !rc; m++)
            for (size_t d = 0; d < data.micro[m].n_docs; d++, at++)
                printf(json ? "{\"sample\": %d, \"loss_sum\": %.17g}\n" : "sample %d loss_sum %.17g\n",
                       data.micro[m].sample[d], loss[at]);
    }
    free(loss);
    mt_step_data_finish(&data);
    return rc;
}

static int run_eval(struct mt_session *s, const struct cli_args *args, struct mt_err *err)
{
    struct mt_eval_report r = {0};
    bool json = cli_arg(args, "json") != NULL;
    int rc = mt_session_start(s, err);
    if (!rc)
        rc = mt_checkpoint_verify_model(s->model_dir, false, false, err);
    if (!rc)
        rc = mt_weights_load(s->layout, s->planes, s->model_dir, err);
    if (!rc && cli_arg(args, "per-sample"))
        rc = print_samples(s, json, err);
    if (!rc)
        rc = mt_train_evaluate(s, &r, err);
    if (!rc)
        printf(json ? "{\"loss\": %.17g, \"perplexity\": %.17g, \"accuracy\": %.17g, \"tokens\": %llu}\n"
                    : "loss %.6f  perplexity %.4f  accuracy %.4f  tokens %llu\n",
               r.loss, exp(r.loss), r.accuracy, (unsigned long long)r.n_loss);
    return rc;
}

int cli_cmd_eval(struct cli *cli, const struct cli_args *args)
{
    struct mt_config *cfg = NULL;
    struct mt_session s = {0};
    struct mt_err err;
    const char *model = cli_arg(args, "model");
    (void)cli;
    int rc = cli_load_config(&cfg, args, &err);
    if (!rc && model)
        rc = mt_config_override(cfg, "model.path", model, "--model", &err);
    if (!rc)
        rc = mt_session_prepare(&s, cfg, false, &err);
    if (!rc && !s.eval_sampler)
        rc = mt_fail(&err, MT_ERR_USAGE, -EINVAL, "data.eval names nothing to evaluate on");
    if (!rc)
        rc = run_eval(&s, args, &err);
    int code = rc ? cli_fail(&err) : 0;
    mt_session_finish(&s);
    mt_config_destroy(&cfg);
    return code;
}

/* Index drawn from softmax(logits / temperature); the likeliest for 0. */
static size_t draw(const float *logits, size_t n, double temperature, double u)
{
    size_t best = 0;
    double sum = 0, at = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    if (temperature <= 0)
        return best;
    for (size_t i = 0; i < n; i++)
        sum += exp((double)(logits[i] - logits[best]) / temperature);
    for (size_t i = 0; i < n; i++) {
        at += exp((double)(logits[i] - logits[best]) / temperature);
        if (at >= u * sum)
            return i;
    }
    return best;
}

struct sampling {
    struct mt_text_params text;
    struct mt_text_ids prompt;
    size_t n_new;
    double temperature;
    uint64_t seed;
};

static void print_piece(void *ctx, size_t sample, const char *text, size_t len, bool trained)
{
    (void)ctx;
    (void)sample;
    if (trained)
        fwrite(text, 1, len, stdout);
}

static bool ends_turn(const struct mt_session *s, const struct sampling *p, size_t id)
{
    if (p->text.bytes)
        return id >= 256;
    for (int i = 0; i < s->hf.n_eos; i++)
        if ((size_t)s->hf.eos[i] == id)
            return true;
    for (size_t i = 0; i < p->prompt.n_ends; i++)
        if (p->prompt.ends[i] == id)
            return true;
    return false;
}

/* Generates tokens after the prompt; with the byte tokenizer each is printed at once. */
static int draw_tokens(struct mt_session *s, const struct sampling *p, uint32_t *ids, size_t *n,
                       struct mt_batch *b, float *logits, struct mt_err *err)
{
    size_t vocab = p->text.bytes ? MT_BYTE_VOCAB : (size_t)s->hf.vocab, end = *n + p->n_new;
    int rc = 0;
    for (size_t i = 0; *n < end; i++) {
        mt_batch_clear(b);
        rc = mt_batch_add(b, ids, NULL, *n, 0, err);
        if (!rc)
            rc = mt_batch_seal(b, err);
        if (!rc)
            rc = mt_engine_logits(s->engine, b, logits, err);
        if (rc)
            break;
        size_t id = draw(logits, vocab, p->temperature, mt_philox_uniform(p->seed, 0, i));
        if (ends_turn(s, p, id))
            break;
        ids[(*n)++] = (uint32_t)id;
        if (p->text.bytes) {
            putchar((int)id);
            fflush(stdout);
        }
    }
    return rc;
}

static int continue_text(struct mt_session *s, const struct sampling *p, struct mt_err *err)
{
    struct mt_batch b;
    size_t n = p->prompt.n, max_len = n + p->n_new;
    uint32_t *ids = mt_calloc(max_len, sizeof(*ids));
    uint8_t *is_new = mt_calloc(max_len, 1);
    float *logits = mt_calloc((size_t)s->hf.vocab, sizeof(*logits));
    int rc = mt_batch_init(&b, max_len, 1, err);
    if (!rc && (!ids || !logits || !is_new))
        rc = mt_fail_nomem(err, "sampling", (size_t)s->hf.vocab * sizeof(*logits));
    for (size_t i = 0; !rc && i < n; i++)
        if (p->prompt.ids[i] >= (size_t)s->hf.vocab)
            rc = mt_fail(err, MT_ERR_INPUT, -ERANGE,
                         "the prompt's token %u is beyond the model's vocab_size of %lld",
                         p->prompt.ids[i], (long long)s->hf.vocab);
        else
            ids[i] = p->prompt.ids[i];
    if (!rc)
        rc = draw_tokens(s, p, ids, &n, &b, logits, err);
    if (!rc && !p->text.bytes) {
        memset(is_new + p->prompt.n, 1, n - p->prompt.n);
        rc = mt_text_decode(&p->text, &(struct mt_text_sample){ids, is_new, n}, 1, print_piece, NULL,
                            err);
    }
    putchar('\n');
    mt_batch_finish(&b);
    free(ids);
    free(is_new);
    free(logits);
    return rc;
}

/* The model's own tokenizer where it has one, else bytes. */
static int encode_prompt(struct sampling *p, const char *model, const char *prompt, bool chat,
                         char **dir, struct mt_err *err)
{
    int rc = mt_hf_find_model(dir, model, err);
    char *path = rc ? NULL : mt_path_join(*dir, "tokenizer.json");
    p->text.model_dir = *dir;
    p->text.bytes = !path || !mt_path_exists(path);
    free(path);
    return rc ? rc : mt_text_encode(&p->text, prompt, chat, &p->prompt, err);
}

int cli_cmd_sample(struct cli *cli, const struct cli_args *args)
{
    const char *model = cli_arg(args, "model"), *prompt = cli_arg(args, "prompt");
    bool chat = cli_arg(args, "chat") != NULL;
    struct mt_config *cfg = NULL;
    struct mt_session s = {0};
    struct mt_err err;
    char *dir = NULL;
    struct sampling p = {.n_new = (size_t)cli_whole(args, "max-tokens", 128),
                         .temperature = cli_real(args, "temperature", 0.8),
                         .seed = (uint64_t)cli_whole(args, "seed", 0)};
    (void)cli;
    if (!model) {
        fprintf(stderr, "megatrain sample: --model is missing\n");
        return EXIT_USAGE;
    }
    prompt = prompt ? prompt : "";
    if (mt_utf8_error(prompt) >= 0) {
        fprintf(stderr, "megatrain sample: byte %ld of --prompt is not UTF-8\n", mt_utf8_error(prompt) + 1);
        return EXIT_USAGE;
    }
    int rc = mt_config_load(&cfg, NULL, NULL, 0, &err);
    if (!rc)
        rc = mt_config_override(cfg, "model.path", model, "--model", &err);
    if (!rc)
        rc = encode_prompt(&p, model, prompt, chat, &dir, &err);
    if (!rc)
        rc = mt_session_prepare_model(&s, cfg, p.prompt.n + p.n_new, &err);
    if (!rc && p.text.bytes && s.hf.vocab < MT_BYTE_VOCAB)
        rc = mt_fail(&err, MT_ERR_INPUT, -EINVAL, "%s: the byte tokenizer needs a vocabulary of %d",
                     model, MT_BYTE_VOCAB);
    if (!rc)
        rc = mt_session_start(&s, &err);
    if (!rc)
        rc = mt_checkpoint_verify_model(s.model_dir, false, false, &err);
    if (!rc)
        rc = mt_weights_load(s.layout, s.planes, s.model_dir, &err);
    if (!rc && !chat)
        fputs(prompt, stdout);
    if (!rc)
        rc = continue_text(&s, &p, &err);
    int code = rc ? cli_fail(&err) : 0;
    mt_session_finish(&s);
    mt_config_destroy(&cfg);
    mt_text_ids_finish(&p.prompt);
    free(dir);
    return code;
}

static cJSON *tensor_json(const struct mt_st_tensor *t)
{
    cJSON *o = cJSON_CreateObject(), *shape = cJSON_AddArrayToObject(o, "shape");
    cJSON_AddStringToObject(o, "name", t->name);
    cJSON_AddStringToObject(o, "dtype", mt_st_dtype_name(t->dtype));
    for (int i = 0; i < t->n_dims; i++)
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[i]));
    return o;
}

static void print_tensors(const struct mt_st_model *m, const struct mt_hf_config *cfg, bool json)
{
    double params = 0;
    cJSON *root = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < m->n_tensors; i++) {
        params += (double)m->tensors[i].n_elems;
        cJSON_AddItemToArray(list, tensor_json(&m->tensors[i]));
    }
    cJSON_AddNumberToObject(root, "parameters", params);
    if (cfg)
        cJSON_AddStringToObject(root, "architecture", cfg->family->architecture);
    if (json) {
        char *text = mt_json_print(root, true);
        printf("%s\n", text ? text : "");
        free(text);
    } else {
        if (cfg)
            printf("%s: %lld layers, hidden %lld, ffn %lld, heads %lld of %lld, key heads %lld, "
                   "vocabulary %lld%s\n",
                   cfg->family->architecture, (long long)cfg->n_layers, (long long)cfg->hidden,
                   (long long)cfg->ffn, (long long)cfg->n_heads, (long long)cfg->head_dim,
                   (long long)cfg->n_kv_heads, (long long)cfg->vocab, cfg->tied ? ", tied" : "");
        for (size_t i = 0; i < m->n_tensors; i++) {
            printf("%-8s %s [", mt_st_dtype_name(m->tensors[i].dtype), m->tensors[i].name);
            for (int k = 0; k < m->tensors[i].n_dims; k++)
                printf("%s%lld", k ? ", " : "", (long long)m->tensors[i].shape[k]);
            printf("]\n");
        }
        printf("%zu tensors, %.0f parameters\n", m->n_tensors, params);
    }
    cJSON_Delete(root);
}

int cli_cmd_inspect(struct cli *cli, const struct cli_args *args)
{
    const char *path = args->operands[0];
    struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    struct mt_st_model m;
    struct mt_err err;
    bool dir = mt_is_dir(path);
    (void)cli;
    int rc = dir ? mt_st_open_dir(&m, path, &err) : mt_st_open_file(&m, path, &err);
    if (!rc) {
        bool config = dir && cfg && !mt_hf_config_read(cfg, path, NULL);
        print_tensors(&m, config ? cfg : NULL, cli_arg(args, "json") != NULL);
        mt_st_close(&m);
    }
    free(cfg);
    return rc ? cli_fail(&err) : 0;
}

int cli_cmd_export(struct cli *cli, const struct cli_args *args)
{
    const char *dtype = cli_arg(args, "dtype"), *size = cli_arg(args, "shard-size");
    struct mt_config *cfg = NULL;
    struct mt_err err;
    (void)cli;
    if (dtype && strcmp(dtype, "bf16") && strcmp(dtype, "f32")) {
        fprintf(stderr, "megatrain export: --dtype must be bf16 or f32\n");
        return EXIT_USAGE;
    }
    int rc = mt_config_load(&cfg, NULL, NULL, 0, &err);
    if (!rc && size)
        rc = mt_config_override(cfg, "checkpoint.shard_size", size, "--shard-size", &err);
    if (!rc)
        rc = mt_checkpoint_export(args->operands[0], args->operands[1],
                                  dtype && !strcmp(dtype, "f32"), cfg->checkpoint.shard_size, &err);
    if (!rc)
        printf("%s: load it with AutoModelForCausalLM.from_pretrained(\"%s\")\n", args->operands[1],
               args->operands[1]);
    mt_config_destroy(&cfg);
    return rc ? cli_fail(&err) : 0;
}

int cli_cmd_verify(struct cli *cli, const struct cli_args *args)
{
    struct mt_err err;
    (void)cli;
    if (mt_checkpoint_verify(args->operands[0], &err))
        return cli_fail(&err);
    printf("%s: every file is as it was written\n", args->operands[0]);
    return 0;
}
