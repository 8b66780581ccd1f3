/* SPDX-License-Identifier: Apache-2.0 */
#include "data/answers.h"

#include <string.h>

#include "base/mem.h"

/* Prompt and answer: strings, or arrays of token ids. */
struct parts {
    const char *prompt;
    size_t prompt_len;
    const char *answer;
    const cJSON *prompt_ids, *answer_ids;
};

static int push_answer(struct mt_sample_reader *r, const struct parts *p, const char *where, struct mt_err *err)
{
    if (p->answer_ids)
        return mt_sample_push_ids(r, p->prompt_ids, "prompt_ids", false, where, err)
            ?: mt_sample_push_ids(r, p->answer_ids, p->answer_ids->string, true, where, err);
    return mt_sample_needs_bytes(r, where, err) ?: mt_sample_push_text(r, p->prompt, p->prompt_len, p->answer, err);
}

/* Trained tokens of [from, to), the first of which has no predecessor. */
static uint64_t count_trained(struct mt_sample_reader *r, size_t from, size_t to)
{
    uint64_t n = 0;
    if (from < to)
        r->mask[from] = 0;
    for (size_t i = from; i < to; i++)
        n += r->mask[i];
    return n;
}

/* Ends the item in r->ids: the chosen answer is [0, first), the rejected one [first, n). */
static int finish_item(struct mt_sample_reader *r, size_t first, const char *where, uint64_t place, struct mt_err *err)
{
    size_t n = r->n;
    uint64_t chosen = count_trained(r, 0, first), rejected = count_trained(r, first, n);
    r->n = 0;
    if (2 * first == n && !memcmp(r->ids, r->ids + first, first * sizeof(*r->ids))) {
        r->header.n_equal++;
        return 0;
    }
    bool lacks = (first && !chosen) || (first < n && !rejected);
    if (!mt_sample_counts(r, n, lacks ? 0 : chosen + rejected, where))
        return 0;
    return mt_shard_writer_append(r->out, r->ids, r->mask, first, err)
        ?: mt_shard_writer_end(r->out, place, err)
        ?: mt_shard_writer_append(r->out, r->ids + first, r->mask + first, n - first, err)
        ?: mt_shard_writer_end(r->out, place, err);
}

/* Without a prompt, the common beginning of both answers, less a space before the difference. */
static size_t common_prompt(const char *a, const char *b)
{
    size_t n = 0;
    while (a[n] && a[n] == b[n])
        n++;
    return n - (n && a[n - 1] == ' ');
}

/* What a pair without a "prompt" seems to call it, or NULL. */
static const char *question_of(const cJSON *o)
{
    static const char *const names[] = {"question", "query", "input", "problem", "context"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
        if (cJSON_IsString(mt_json_get(o, names[i])) && *mt_json_get(o, names[i])->valuestring)
            return names[i];
    return NULL;
}

static int read_pair(struct mt_sample_reader *r, const cJSON *o, size_t *first, const char *where, struct mt_err *err)
{
    const cJSON *prompt = mt_json_get(o, "prompt"), *c = mt_json_get(o, "chosen"), *j = mt_json_get(o, "rejected");
    struct parts chosen = {.prompt_ids = mt_json_get(o, "prompt_ids"), .answer_ids = mt_json_get(o, "chosen_ids")};
    struct parts rejected = {.prompt_ids = chosen.prompt_ids, .answer_ids = mt_json_get(o, "rejected_ids")};
    if (!chosen.answer_ids) {
        if (!cJSON_IsString(c) || !cJSON_IsString(j) || (prompt && !cJSON_IsString(prompt)))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, !j && c ? "%s: there is a \"chosen\", but no \"rejected\": name yours by "
                           "data.columns = rejected:..." : !c && j ? "%s: there is a \"rejected\", but no \"chosen\": name yours by "
                           "data.columns = chosen:..." : "%s: \"chosen\" and \"rejected\" must be strings, and \"prompt\" if there is one",
                           where);
        const char *asked = prompt ? NULL : question_of(o);
        if (asked)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: there is no \"prompt\", but \"%s\": name it by data.columns = prompt:%s", where,
                           asked, asked);
        size_t common = prompt ? 0 : common_prompt(c->valuestring, j->valuestring);
        chosen.prompt = rejected.prompt = prompt ? prompt->valuestring : c->valuestring;
        chosen.prompt_len = rejected.prompt_len = prompt ? strlen(prompt->valuestring) : common;
        chosen.answer = c->valuestring + common;
        rejected.answer = j->valuestring + common;
    }
    int rc = push_answer(r, &chosen, where, err);
    *first = r->n;
    return rc ?: push_answer(r, &rejected, where, err);
}

/* 1 or 0, also as a number; -1: it is no label. */
static int value_of(const cJSON *label)
{
    if (cJSON_IsNumber(label) && (label->valuedouble == 0 || label->valuedouble == 1))
        return label->valuedouble == 1;
    return cJSON_IsBool(label) ? cJSON_IsTrue(label) : -1;
}

static int read_rated(struct mt_sample_reader *r, const cJSON *o, size_t *first, const char *where, struct mt_err *err)
{
    const cJSON *prompt = mt_json_get(o, "prompt"), *c = mt_json_get(o, "completion"), *label = mt_json_get(o, "label");
    struct parts p = {.prompt_ids = mt_json_get(o, "prompt_ids"), .answer_ids = mt_json_get(o, "completion_ids")};
    int good = value_of(label);
    if (good < 0)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"label\" must be true or false", where);
    if (!p.answer_ids) {
        if (!cJSON_IsString(prompt) || !cJSON_IsString(c))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"prompt\" and \"completion\" must be strings", where);
        p.prompt = prompt->valuestring;
        p.prompt_len = strlen(p.prompt);
        p.answer = c->valuestring;
    }
    int rc = push_answer(r, &p, where, err);
    *first = good ? r->n : 0;
    return rc;
}

int mt_answers_read(struct mt_sample_reader *r, const cJSON *o, const char *where, uint64_t place, struct mt_err *err)
{
    size_t first = 0;
    r->header.flags |= MT_SHARD_ANSWERS;
    r->n = 0;
    int rc = (r->format == MT_FORMAT_PREFERENCE ? read_pair : read_rated)(r, o, &first, where, err);
    return rc ?: finish_item(r, first, where, place, err);
}
