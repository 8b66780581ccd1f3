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
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
        any |= mt_path_exists(MT_PATH("%s/%s", model_dir, names[i]));
    return any;
}

static cJSON *new_job(const struct mt_text_params *p, const char *mode)
{
    cJSON *job = cJSON_CreateObject();
    cJSON_AddStringToObject(job, "mode", mode);
    if (p->model_dir)
        cJSON_AddStringToObject(job, "model_dir", p->model_dir);
    mt_json_put(job, "tokenizer=%s, template=%s, vocab=%f", p->bytes ? "byte" : "model",
                p->template_ ? p->template_ : "model", (double)ANY_VOCAB);
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
    MT_JSON_FREED cJSON *job = new_job(p, "decode");
    cJSON *list = cJSON_AddArrayToObject(job, "samples");
    for (size_t i = 0; i < n; i++)
        add_sample(list, &samples[i]);
    return mt_helper_run(job, on_pieces, &d, err);
}

static uint32_t *numbers(const cJSON *list, size_t *n)
{
    uint32_t *out = mt_calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*out));
    const cJSON *v;
    *n = 0;
    cJSON_ArrayForEach(v, list) if (out) out[(*n)++] = (uint32_t)v->valuedouble;
    return out;
}

struct encoding {
    struct mt_text_ids *out;
    size_t n;
};

static void on_ids(void *ctx, const cJSON *e)
{
    const struct encoding *to = ctx;
    const cJSON *sample = mt_json_get(e, "sample");
    size_t i = cJSON_IsNumber(sample) && sample->valuedouble >= 0 ? (size_t)sample->valuedouble : to->n;
    if (i >= to->n)
        return;
    mt_text_ids_finish(&to->out[i]);
    to->out[i].ids = numbers(mt_json_get(e, "ids"), &to->out[i].n);
    to->out[i].ends = numbers(mt_json_get(e, "ends"), &to->out[i].n_ends);
}

static int encode_bytes(const char *text, struct mt_text_ids *out, struct mt_err *err)
{
    size_t n = strlen(text);
    out->ids = mt_calloc(n + 1, sizeof(*out->ids));
    if (!out->ids)
        return mt_fail_nomem(err, "the prompt", n * sizeof(*out->ids));
    out->ids[out->n++] = MT_BYTE_BOS;
    for (size_t i = 0; i < n; i++)
        out->ids[out->n++] = (unsigned char)text[i];
    return 0;
}

int mt_text_encode(const struct mt_text_params *p, const cJSON *prompts, bool chat, struct mt_text_ids *out,
                   struct mt_err *err)
{
    struct encoding to = {out, (size_t)cJSON_GetArraySize(prompts)};
    bool plain = p->bytes && !chat;
    const cJSON *one;
    int rc = 0;
    size_t i = 0;
    memset(out, 0, to.n * sizeof(*out));
    cJSON_ArrayForEach(one, prompts) plain = plain && cJSON_IsString(mt_json_get(one, "prompt"));
    if (!plain) {
        MT_JSON_FREED cJSON *job = new_job(p, "encode");
        cJSON_AddItemReferenceToObject(job, "prompts", (cJSON *)prompts);
        cJSON_AddBoolToObject(job, "chat", chat);
        rc = mt_helper_run(job, on_ids, &to, err);
    }
    cJSON_ArrayForEach(one, prompts)
    {
        const cJSON *place = mt_json_get(one, "place");
        if (plain && !rc)
            rc = encode_bytes(mt_json_get(one, "prompt")->valuestring, &out[i], err);
        if (!rc && (!out[i].ids || !out[i].n))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s%sthe prompt has no token", cJSON_IsString(place) ? place->valuestring : "",
                         cJSON_IsString(place) ? ": " : "");
        i++;
    }
    return rc;
}

void mt_text_ids_finish(struct mt_text_ids *t)
{
    free(t->ids);
    free(t->ends);
    *t = (struct mt_text_ids){0};
}
