/* SPDX-License-Identifier: Apache-2.0 */
#include "data/text.h"

#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "data/dataset.h"
#include "data/helper.h"

enum { ANY_VOCAB = INT32_MAX };

bool mt_text_has_tokenizer(const char *model_dir)
{
    static const char *const names[] = {"tokenizer.json", "tekken.json", "tiktoken.model"};
    bool any = false;
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        char *path = mt_path_join(model_dir, names[i]);
        any |= path && mt_path_exists(path);
        free(path);
    }
    return any;
}

static cJSON *new_job(const struct mt_text_params *p, const char *mode)
{
    cJSON *job = cJSON_CreateObject();
    cJSON_AddStringToObject(job, "mode", mode);
    if (p->model_dir)
        cJSON_AddStringToObject(job, "model_dir", p->model_dir);
    cJSON_AddStringToObject(job, "tokenizer", p->bytes ? "byte" : "model");
    cJSON_AddStringToObject(job, "template", p->template_ ? p->template_ : "model");
    cJSON_AddNumberToObject(job, "vocab", ANY_VOCAB);
    return job;
}

static bool trained_at(const struct mt_text_sample *s, size_t i)
{
    return s->trained && s->trained[i];
}

static void decode_bytes(const struct mt_text_sample *samples, size_t n, mt_text_piece_fn fn,
                         void *ctx)
{
    static const char *const names[] = {"<bos>", "<eos>", "<pad>"};
    struct mt_str text = {0};
    for (size_t k = 0; k < n; k++) {
        const struct mt_text_sample *s = &samples[k];
        for (size_t i = 0; i < s->n; i++) {
            char c = (char)s->ids[i];
            if (s->ids[i] < 256)
                mt_str_append(&text, &c, 1);
            else if (s->ids[i] < MT_BYTE_VOCAB)
                mt_str_printf(&text, "%s", names[s->ids[i] - 256]);
            else
                mt_str_printf(&text, "<%u>", s->ids[i]);
            if (i + 1 == s->n || trained_at(s, i + 1) != trained_at(s, i)) {
                fn(ctx, k, text.p ? text.p : "", text.len, trained_at(s, i));
                mt_str_finish(&text);
            }
        }
    }
}

struct decoding {
    mt_text_piece_fn fn;
    void *ctx;
};

static void on_pieces(void *ctx, const cJSON *e)
{
    const struct decoding *d = ctx;
    const cJSON *pieces = mt_json_get(e, "pieces"), *sample = mt_json_get(e, "sample"), *p;
    if (!cJSON_IsNumber(sample))
        return;
    cJSON_ArrayForEach(p, pieces)
    {
        const cJSON *text = cJSON_GetArrayItem(p, 0), *trained = cJSON_GetArrayItem(p, 1);
        if (cJSON_IsString(text))
            d->fn(d->ctx, (size_t)sample->valuedouble, text->valuestring, strlen(text->valuestring),
                  cJSON_IsTrue(trained));
    }
}

static void add_sample(cJSON *list, const struct mt_text_sample *s)
{
    cJSON *o = cJSON_CreateObject();
    cJSON *ids = cJSON_AddArrayToObject(o, "ids"), *mask = cJSON_AddArrayToObject(o, "mask");
    for (size_t i = 0; i < s->n; i++) {
        mt_json_append(ids, cJSON_CreateNumber(s->ids[i]));
        mt_json_append(mask, cJSON_CreateNumber(trained_at(s, i)));
    }
    mt_json_append(list, o);
}

int mt_text_decode(const struct mt_text_params *p, const struct mt_text_sample *samples, size_t n,
                   mt_text_piece_fn fn, void *ctx, struct mt_err *err)
{
    struct decoding d = {fn, ctx};
    if (p->bytes) {
        decode_bytes(samples, n, fn, ctx);
        return 0;
    }
    cJSON *job = new_job(p, "decode"), *list = cJSON_AddArrayToObject(job, "samples");
    for (size_t i = 0; i < n; i++)
        add_sample(list, &samples[i]);
    int rc = mt_helper_run(job, on_pieces, &d, err);
    cJSON_Delete(job);
    return rc;
}

static uint32_t *numbers(const cJSON *list, size_t *n)
{
    uint32_t *out = mt_calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*out));
    const cJSON *v;
    *n = 0;
    cJSON_ArrayForEach(v, list) if (out) out[(*n)++] = (uint32_t)v->valuedouble;
    return out;
}

static void on_ids(void *ctx, const cJSON *e)
{
    struct mt_text_ids *t = ctx;
    mt_text_ids_finish(t);
    t->ids = numbers(mt_json_get(e, "ids"), &t->n);
    t->ends = numbers(mt_json_get(e, "ends"), &t->n_ends);
}

int mt_text_encode(const struct mt_text_params *p, const char *text, bool chat,
                   struct mt_text_ids *out, struct mt_err *err)
{
    size_t n = strlen(text);
    *out = (struct mt_text_ids){0};
    if (!p->bytes || chat) {
        cJSON *job = new_job(p, "encode");
        cJSON_AddStringToObject(job, "text", text);
        cJSON_AddBoolToObject(job, "chat", chat);
        int rc = mt_helper_run(job, on_ids, out, err);
        cJSON_Delete(job);
        if (!rc && (!out->ids || !out->n))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "the prompt has no token");
        return rc;
    }
    out->ids = mt_calloc(n + 1, sizeof(*out->ids));
    if (!out->ids)
        return mt_fail_nomem(err, "the prompt", n * sizeof(*out->ids));
    out->ids[out->n++] = MT_BYTE_BOS;
    for (size_t i = 0; i < n; i++)
        out->ids[out->n++] = (unsigned char)text[i];
    return 0;
}

void mt_text_ids_finish(struct mt_text_ids *t)
{
    free(t->ids);
    free(t->ends);
    *t = (struct mt_text_ids){0};
}
