/* SPDX-License-Identifier: Apache-2.0 */
#include "data/samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

const char *mt_format_name(enum mt_cfg_format f)
{
    static const char *const names[] = {"auto",   "messages",          "sharegpt", "alpaca",
                                        "prompt_completion", "text", "input_ids"};
    return names[f];
}

static int push(struct mt_sample_reader *r, uint32_t id, bool trained, struct mt_err *err)
{
    if (!mt_grow(&r->ids, &r->cap_ids, r->n + 1, sizeof(*r->ids)) ||
        !mt_grow(&r->mask, &r->cap_mask, r->n + 1, 1))
        return mt_fail_nomem(err, "a sample", r->n * 5);
    r->ids[r->n] = id;
    r->mask[r->n++] = trained;
    return 0;
}

static int push_bytes(struct mt_sample_reader *r, const char *text, size_t len, bool trained,
                      struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < len && !rc; i++)
        rc = push(r, (unsigned char)text[i], trained, err);
    return rc;
}

static void note_place(char *list, size_t size, const char *where)
{
    size_t len = strlen(list);
    int commas = 0;
    for (size_t i = 0; i < len; i++)
        commas += list[i] == ',';
    if (commas < 2)
        snprintf(list + len, size - len, "%s%.48s", len ? ", " : "", where);
}

static int emit(struct mt_sample_reader *r, size_t first, size_t n, const char *where,
                struct mt_err *err)
{
    uint64_t trained = 0;
    for (size_t i = first + 1; i < first + n; i++) /* the first token has no predecessor */
        trained += r->mask[i];
    if (!trained) {
        r->stats.n_untrained++;
        note_place(r->untrained_at, sizeof(r->untrained_at), where);
        return 0;
    }
    r->stats.n_samples++;
    r->stats.n_tokens += n;
    r->stats.n_trained += trained;
    r->stats.max_len = MT_MAX(r->stats.max_len, n);
    return mt_shard_writer_add(r->out, r->ids + first, r->mask + first, n, err);
}

/* The sample under way is whole. */
static int finish_sample(struct mt_sample_reader *r, const char *where, struct mt_err *err)
{
    size_t max = r->p->seq_len, n = r->n;
    enum mt_cfg_overlong rule = r->plain_text ? MT_OVERLONG_SPLIT : r->p->overlong;
    r->n = 0;
    if (n <= max)
        return emit(r, 0, n, where, err);
    r->stats.n_overlong += !r->plain_text;
    note_place(r->overlong_at, sizeof(r->overlong_at), where);
    if (rule == MT_OVERLONG_TRUNCATE) {
        r->stats.n_truncated++;
        return emit(r, 0, max, where, err);
    }
    if (rule == MT_OVERLONG_DROP)
        r->stats.n_dropped++;
    if (rule == MT_OVERLONG_DROP || rule == MT_OVERLONG_ERROR)
        return 0;
    int rc = 0;
    r->stats.n_split += !r->plain_text;
    for (size_t at = 0; at < n && !rc; at += max)
        rc = emit(r, at, MT_MIN(max, n - at), where, err);
    return rc;
}

static int need_bytes(struct mt_sample_reader *r, const char *where, struct mt_err *err)
{
    if (strcmp(r->p->tokenizer, "byte"))
        return mt_fail(err, MT_ERR_USAGE, -ENOTSUP,
                       "%s: text needs data.tokenizer = byte; the model's own tokenizer is not "
                       "supported yet (input_ids data needs none)",
                       where);
    if (r->p->vocab < MT_BYTE_VOCAB)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "the byte tokenizer has %d tokens, the model's vocab_size is %zu",
                       MT_BYTE_VOCAB, r->p->vocab);
    return 0;
}

static int read_text(struct mt_sample_reader *r, const cJSON *o, const char *where,
                     struct mt_err *err)
{
    const cJSON *text = mt_json_get(o, "text");
    int rc = need_bytes(r, where, err);
    if (rc)
        return rc;
    if (!cJSON_IsString(text))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"text\" is missing or no string", where);
    rc = push(r, MT_BYTE_BOS, false, err);
    if (!rc)
        rc = push_bytes(r, text->valuestring, strlen(text->valuestring), true, err);
    return rc ? rc : push(r, MT_BYTE_EOS, true, err);
}

static int read_prompt(struct mt_sample_reader *r, const cJSON *o, const char *where,
                       struct mt_err *err)
{
    const cJSON *prompt = mt_json_get(o, "prompt"), *answer = mt_json_get(o, "completion");
    int rc = need_bytes(r, where, err);
    if (rc)
        return rc;
    if (!cJSON_IsString(prompt) || !cJSON_IsString(answer))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "%s: \"prompt\" and \"completion\" must be strings (message lists are not "
                       "supported yet)",
                       where);
    rc = push(r, MT_BYTE_BOS, false, err);
    if (!rc)
        rc = push_bytes(r, prompt->valuestring, strlen(prompt->valuestring), false, err);
    if (!rc)
        rc = push_bytes(r, answer->valuestring, strlen(answer->valuestring), true, err);
    return rc ? rc : push(r, MT_BYTE_EOS, true, err);
}

static int read_ids(struct mt_sample_reader *r, const cJSON *o, const char *where,
                    struct mt_err *err)
{
    const cJSON *ids = mt_json_get(o, "input_ids"), *labels = mt_json_get(o, "labels");
    if (!cJSON_IsArray(ids) || !ids->child)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"input_ids\" is missing or empty", where);
    if (labels && cJSON_GetArraySize(labels) != cJSON_GetArraySize(ids))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"labels\" and \"input_ids\" differ in length",
                       where);
    const cJSON *l = labels ? labels->child : NULL;
    size_t i = 0;
    for (const cJSON *v = ids->child; v; v = v->next, i++, l = l ? l->next : NULL) {
        double id = cJSON_IsNumber(v) ? v->valuedouble : -1;
        if (!(id >= 0) || id != floor(id))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: input_ids[%zu] is no token id", where, i);
        if (id >= (double)r->p->vocab)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "%s: input_ids[%zu] = %.0f is beyond the model's vocab_size of %zu", where,
                           i, id, r->p->vocab);
        if (labels && (!cJSON_IsNumber(l) || (l->valuedouble != -100 && l->valuedouble != id)))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                           "%s: labels[%zu] must be -100 or input_ids[%zu]", where, i, i);
        int rc = push(r, (uint32_t)id, !labels || l->valuedouble != -100, err);
        if (rc)
            return rc;
    }
    return 0;
}

static enum mt_cfg_format detect(const cJSON *o)
{
    static const struct {
        const char *key;
        enum mt_cfg_format format;
    } by_key[] = {{"messages", MT_FORMAT_MESSAGES}, {"conversations", MT_FORMAT_SHAREGPT},
                  {"instruction", MT_FORMAT_ALPACA}, {"input_ids", MT_FORMAT_INPUT_IDS},
                  {"prompt", MT_FORMAT_PROMPT_COMPLETION}, {"text", MT_FORMAT_TEXT}};
    for (size_t i = 0; i < MT_ARRAY_LEN(by_key); i++)
        if (mt_json_get(o, by_key[i].key))
            return by_key[i].format;
    return MT_FORMAT_AUTO;
}

static int read_object(struct mt_sample_reader *r, const cJSON *o, const char *where,
                       struct mt_err *err)
{
    int rc;
    if (!cJSON_IsObject(o))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a sample must be a JSON object", where);
    if (r->format == MT_FORMAT_AUTO)
        r->format = detect(o);
    switch (r->format) {
    case MT_FORMAT_TEXT:
        rc = read_text(r, o, where, err);
        break;
    case MT_FORMAT_PROMPT_COMPLETION:
        rc = read_prompt(r, o, where, err);
        break;
    case MT_FORMAT_INPUT_IDS:
        rc = read_ids(r, o, where, err);
        break;
    case MT_FORMAT_AUTO:
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "%s: no \"text\", \"prompt\" or \"input_ids\" in the sample: set data.format",
                       where);
    default:
        return mt_fail(err, MT_ERR_USAGE, -ENOTSUP, "%s: data.format %s is not supported yet", where,
                       mt_format_name(r->format));
    }
    return rc ? rc : finish_sample(r, where, err);
}

static int read_lines(struct mt_sample_reader *r, FILE *f, const char *path, struct mt_err *err)
{
    char *line = NULL, where[4200];
    size_t cap = 0, number = 0;
    ssize_t len;
    int rc = 0;
    while (!rc && (len = getline(&line, &cap, f)) >= 0) {
        number++;
        size_t n = (size_t)len;
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r' || line[n - 1] == ' '))
            n--;
        if (!n)
            continue;
        cJSON *o = NULL;
        snprintf(where, sizeof(where), "%s:%zu", path, number);
        if (memchr(line, 0, n))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a zero byte in the line", where);
        if (!rc)
            rc = mt_json_parse(&o, line, n, path, MT_ERR_INPUT, NULL);
        if (rc && !o) {
            const char *at = cJSON_GetErrorPtr();
            size_t col = at && at >= line && at < line + n ? (size_t)(at - line) + 1 : 1;
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s:%zu:%zu: not valid JSON", path, number, col);
        }
        if (!rc)
            rc = read_object(r, o, where, err);
        cJSON_Delete(o);
    }
    free(line);
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", path);
    return rc;
}

static int read_array(struct mt_sample_reader *r, const char *path, struct mt_err *err)
{
    cJSON *root = NULL;
    char where[4200];
    size_t i = 0;
    int rc = mt_json_read_file(&root, path, MT_ERR_INPUT, err);
    if (!rc && !cJSON_IsArray(root))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a JSON array of samples", path);
    for (const cJSON *v = rc ? NULL : root->child; v && !rc; v = v->next, i++) {
        snprintf(where, sizeof(where), "%s[%zu]", path, i);
        rc = read_object(r, v, where, err);
    }
    cJSON_Delete(root);
    return rc;
}

static int read_plain(struct mt_sample_reader *r, FILE *f, const char *path, struct mt_err *err)
{
    char buf[65536];
    size_t got, max = r->p->seq_len;
    int rc = need_bytes(r, path, err);
    r->plain_text = true;
    r->format = MT_FORMAT_TEXT;
    while (!rc && (got = fread(buf, 1, sizeof(buf), f)) > 0)
        for (size_t i = 0; i < got && !rc; i++) {
            rc = push(r, (unsigned char)buf[i], true, err);
            if (!rc && r->n == max)
                rc = finish_sample(r, path, err);
        }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", path);
    if (!rc && r->n > 1)
        rc = finish_sample(r, path, err);
    r->n = 0;
    return rc;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err)
{
    static const char *const later[] = {".gz", ".zst", ".parquet", ".arrow"};
    for (size_t i = 0; i < MT_ARRAY_LEN(later); i++)
        if (ends_with(path, later[i]))
            return mt_fail(err, MT_ERR_USAGE, -ENOTSUP, "%s: %s files are not supported yet", path,
                           later[i]);
    FILE *f = fopen(path, "re");
    if (!f || mt_is_dir(path)) {
        int e = f ? EISDIR : errno;
        if (f)
            fclose(f);
        return mt_fail(err, MT_ERR_INPUT, -e, "cannot open data file %s: %s", path, strerror(e));
    }
    int rc;
    if (ends_with(path, ".jsonl"))
        rc = read_lines(r, f, path, err);
    else if (ends_with(path, ".json"))
        rc = read_array(r, path, err);
    else
        rc = read_plain(r, f, path, err);
    fclose(f);
    return rc;
}

int mt_samples_check(const struct mt_sample_reader *r, struct mt_err *err)
{
    const struct mt_dataset_stats *s = &r->stats;
    if (s->n_overlong && r->p->overlong == MT_OVERLONG_ERROR)
        return mt_fail(err, MT_ERR_INPUT, -E2BIG,
                       "%llu samples are longer than data.seq_len = %zu (%s): raise it, or set "
                       "data.overlong = truncate, drop or split",
                       (unsigned long long)s->n_overlong, r->p->seq_len, r->overlong_at);
    if (!s->n_samples)
        return mt_fail(err, MT_ERR_INPUT, -ENODATA,
                       s->n_untrained ? "no sample has a token to train on (%s)"
                                      : "the data files hold no samples%s",
                       s->n_untrained ? r->untrained_at : "");
    if (s->n_untrained * 100 > s->n_samples + s->n_untrained)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "%llu of %llu samples have no token to train on (%s): over 1%%",
                       (unsigned long long)s->n_untrained,
                       (unsigned long long)(s->n_samples + s->n_untrained), r->untrained_at);
    return 0;
}

void mt_samples_finish(struct mt_sample_reader *r)
{
    free(r->ids);
    free(r->mask);
}
