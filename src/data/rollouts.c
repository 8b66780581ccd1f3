/* SPDX-License-Identifier: Apache-2.0 */
#include "data/rollouts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "data/dataset.h"

/* Samplers compute log-probabilities as differences of rounded numbers: so much above 0 is 0. */
static const double LOGPROB_SLACK = 1e-5;
static const double LEAST_DEVIATION = 1e-4;

enum { ADVANTAGE, LOGPROB, OLD, REF, N_COLUMNS };
/* Of a group's word: the lowest bit says that it was cut off, the 7 above it 1 and the noise. */
enum { MOST_NOISE = 126, BESIDE_GROUP = 255 };
static const char *const names[N_COLUMNS] = {"advantage", "logprobs", "old_logprobs", "ref_logprobs"};

struct rollout {
    struct mt_sample_reader *r;
    const char *where;
    size_t n, first; /* tokens; those of the prompt, where it is given apart */
};

static int push_text(struct rollout *of, const cJSON *o, struct mt_err *err)
{
    static const char *const parts[] = {"prompt", "completion"};
    if (!of->r->bytes)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a rollout has \"token_ids\" and \"mask\", or \"prompt_ids\" and "
                       "\"completion_ids\": keep those of text in a file of their own", of->where);
    int rc = mt_sample_needs_bytes(of->r, of->where, err)
          ?: mt_sample_push(of->r, MT_BYTE_BOS, false, err);
    for (size_t k = 0; k < MT_ARRAY_LEN(parts) && !rc; k++) {
        const cJSON *s = mt_json_get(o, parts[k]);
        of->first = of->r->n;
        if (!cJSON_IsString(s))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" is missing or no string: a rollout has token_ids, prompt_ids and "
                           "completion_ids, or prompt and completion", of->where, parts[k]);
        rc = mt_sample_push_bytes(of->r, s->valuestring, strlen(s->valuestring), false, err);
    }
    return rc || cJSON_IsTrue(mt_json_get(o, "truncated")) ? rc : mt_sample_push(of->r, MT_BYTE_EOS, false, err);
}

static int push_tokens(struct rollout *of, const cJSON *o, struct mt_err *err)
{
    const cJSON *all = mt_json_get(o, "token_ids"), *prompt = mt_json_get(o, "prompt_ids");
    of->r->n = 0;
    const cJSON *ids = all ? all : prompt;
    int rc = ids ? mt_sample_push_ids(of->r, ids, ids->string, false, of->where, err) : push_text(of, o, err);
    if (!rc && prompt && !all) {
        of->first = of->r->n;
        rc = mt_sample_push_ids(of->r, mt_json_get(o, "completion_ids"), "completion_ids", false, of->where, err);
    }
    of->n = of->r->n;
    return rc;
}

/* The first token of a list of each token, or of each of the completion. */
static int begin_list(const struct rollout *of, const cJSON *list, const char *name, size_t *first, struct mt_err *err)
{
    size_t n = cJSON_IsArray(list) ? (size_t)cJSON_GetArraySize(list) : 0;
    *first = n == of->n ? 0 : of->first;
    if (cJSON_IsArray(list) && n == of->n - *first)
        return 0;
    if (of->first)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" has %zu values, the rollout %zu tokens, of which %zu are the completion's",
                       of->where, name, n, of->n, of->n - of->first);
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" has %zu values, the rollout %zu tokens", of->where, name, n, of->n);
}

static int read_mask(struct rollout *of, const cJSON *o, struct mt_err *err)
{
    const char *name = of->first ? "completion_mask" : "mask";
    const cJSON *mask = mt_json_get(o, name);
    size_t i = of->first;
    if (!mask && of->first) {
        memset(of->r->mask + of->first, 1, of->n - of->first);
        return 0;
    }
    if (!mask)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"mask\" is missing: it is 1 for the tokens that the policy sampled, 0 for "
                       "prompts and results of tools", of->where);
    int rc = begin_list(of, mask, name, &i, err);
    for (const cJSON *v = rc ? NULL : mask->child; v; v = v->next, i++) {
        bool one = cJSON_IsTrue(v) || (cJSON_IsNumber(v) && v->valuedouble == 1);
        if (!one && !cJSON_IsFalse(v) && !(cJSON_IsNumber(v) && v->valuedouble == 0))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %s[%zu] must be 0 or 1", of->where, name, i);
        of->r->mask[i] = one;
    }
    return rc;
}

static float *place_of(union mt_rollout_values *v, int column)
{
    float *const places[N_COLUMNS] = {&v->advantage, &v->logprob, &v->old, &v->ref};
    return places[column];
}

/* The sampler's log-probabilities are of another temperature than its tokens: no ratio to them means anything. */
static bool of_another_temperature(const cJSON *o)
{
    double drawn = mt_json_number(o, "temperature", 1);
    return mt_json_number(o, "logprobs_temperature", drawn) != drawn;
}

static int read_column(struct rollout *of, const cJSON *o, int column, struct mt_err *err)
{
    const cJSON *list = mt_json_get(o, names[column]);
    size_t i = 0;
    if (!list || cJSON_IsNull(list) || (column == LOGPROB && of_another_temperature(o)))
        return 0;
    if (column == ADVANTAGE && cJSON_IsNumber(list)) {
        for (; i < of->n; i++)
            of->r->values[i].advantage = (float)list->valuedouble;
        return isfinite(list->valuedouble) ? 0 : mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: \"advantage\" is not finite", of->where);
    }
    int rc = begin_list(of, list, names[column], &i, err);
    for (const cJSON *v = rc ? NULL : list->child; v; v = v->next, i++) {
        if (!i || !of->r->mask[i]) /* of what is not trained nothing is asked */
            continue;
        double x = cJSON_IsNumber(v) ? v->valuedouble : NAN;
        if (!isfinite(x))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %s[%zu] is no number, but its token is trained", of->where, names[column], i);
        if (column != ADVANTAGE && x > LOGPROB_SLACK)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: %s[%zu] = %g: a log-probability is at most 0", of->where, names[column], i, x);
        *place_of(&of->r->values[i], column) = (float)(column == ADVANTAGE ? x : fmin(x, 0));
    }
    return rc;
}

static int number_of(const struct rollout *of, const cJSON *o, const char *name, float *out, struct mt_err *err)
{
    const cJSON *v = mt_json_get(o, name);
    *out = NAN;
    if (!v || cJSON_IsNull(v))
        return 0;
    if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" must be a number", of->where, name);
    *out = (float)v->valuedouble;
    return 0;
}

/* The sample's own values; advantage: it has one. */
static int read_sample(struct rollout *of, const cJSON *o, bool advantage, struct mt_err *err)
{
    union mt_rollout_values *own = &of->r->values[0];
    const cJSON *group = mt_json_get(o, "group"), *cut = mt_json_get(o, "truncated");
    double noise = mt_json_number(o, "noise", -1);
    int rc = number_of(of, o, "reward", &own->of.reward, err)
          ?: number_of(of, o, "temperature", &own->of.temperature, err);
    if (rc)
        return rc;
    if (noise != floor(noise) || noise < -1 || noise > MOST_NOISE)
        return mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: \"noise\" is a whole number up to %d", of->where, MOST_NOISE);
    if (!advantage && (isnan(own->of.reward) || !group))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a rollout has an \"advantage\", or a \"reward\" and a \"group\" (which the "
                       "rollouts of its prompt have in common)", of->where);
    MT_FREED char *text = group && !advantage ? mt_json_print(group, false) : NULL;
    if (group && !advantage && !text)
        return mt_fail_nomem(err, of->where, 64);
    own->of.group = text ? (XXH3_64bits(text, strlen(text)) | (BESIDE_GROUP + 1)) & ~(uint64_t)BESIDE_GROUP : 0;
    own->of.group |= (uint64_t)(noise + 1) << 1 | cJSON_IsTrue(cut);
    return cut && !cJSON_IsBool(cut) ? mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"truncated\" must be true or false", of->where) : 0;
}

int mt_rollouts_read(struct mt_sample_reader *r, const cJSON *o, const char *where, uint64_t place, struct mt_err *err)
{
    struct rollout of = {.r = r, .where = where};
    const cJSON *advantage = mt_json_get(o, names[ADVANTAGE]);
    r->header.flags |= MT_SHARD_ROLLOUTS;
    int rc = push_tokens(&of, o, err);
    if (!rc && !of.n)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the rollout has no tokens", where);
    if (!rc && !mt_grow(&r->values, &r->cap_values, of.n, sizeof(*r->values)))
        rc = mt_fail_nomem(err, "a rollout", of.n * sizeof(*r->values));
    for (size_t i = 0; i < of.n && !rc; i++)
        r->values[i] = (union mt_rollout_values){{NAN, NAN, NAN, NAN}};
    rc = rc ?: read_mask(&of, o, err);
    for (int k = 0; k < N_COLUMNS && !rc; k++)
        rc = read_column(&of, o, k, err);
    return rc ?: read_sample(&of, o, advantage && !cJSON_IsNull(advantage), err)
              ?: mt_sample_end(r, where, place, err);
}

/* --- advantages ------------------------------------------------------------------------------------------------ */

static int by_group(const void *a, const void *b)
{
    const struct mt_rollout_sample *x = a, *y = b;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    return (x->sample > y->sample) - (x->sample < y->sample);
}

struct moments {
    double mean, deviation;
    size_t n;
};

static struct moments moments_of(const struct mt_rollout_sample *s, size_t n, bool drop)
{
    struct moments m = {0};
    double squares = 0;
    for (size_t i = 0; i < n; i++)
        if (!(drop && s[i].truncated) && !isnan(s[i].reward)) {
            m.mean += (double)s[i].reward;
            m.n++;
        }
    m.mean /= m.n ? (double)m.n : 1;
    for (size_t i = 0; i < n; i++)
        if (!(drop && s[i].truncated) && !isnan(s[i].reward))
            squares += ((double)s[i].reward - m.mean) * ((double)s[i].reward - m.mean);
    m.deviation = m.n > 1 ? sqrt(squares / (double)(m.n - 1)) : 0;
    return m;
}

struct mt_rollout_sample mt_rollout_sample_of(const union mt_rollout_values *v, uint32_t source, uint32_t sample)
{
    uint64_t word = v->of.group;
    return (struct mt_rollout_sample){word & ~(uint64_t)BESIDE_GROUP, source, sample, v->of.reward, word & 1,
                                      (int)((word & BESIDE_GROUP) >> 1) - 1};
}

int mt_rollouts_weigh(struct mt_rollout *out, struct mt_rollout_sample *s, size_t n, const struct mt_policy_keys *keys,
                      uint32_t *alone)
{
    bool drop = keys->truncated == MT_TRUNCATED_DROP;
    struct moments all = moments_of(s, n, drop);
    qsort(s, n, sizeof(*s), by_group);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && s[end].source == s[i].source && s[end].group == s[i].group;)
            end++;
        struct moments m = moments_of(s + i, end - i, drop);
        *alone = s[i].sample;
        if (s[i].group && end - i == 1)
            return -EINVAL;
        double by = keys->scale == MT_SCALE_NONE    ? 1
                    : keys->scale == MT_SCALE_BATCH ? all.deviation + LEAST_DEVIATION
                                                    : m.deviation + LEAST_DEVIATION;
        for (size_t k = i; k < end; k++)
            out[s[k].sample] = (struct mt_rollout){
                .advantage = s[k].group ? ((double)s[k].reward - m.mean) / by : (double)NAN,
                .reward = (double)s[k].reward,
                .deviation = s[k].group ? m.deviation : (double)NAN,
                .truncated = s[k].truncated,
                .left_out = s[k].truncated && keys->truncated != MT_TRUNCATED_KEEP,
                .dropped = s[k].truncated && drop,
                .noise = s[k].noise,
            };
    }
    return 0;
}
