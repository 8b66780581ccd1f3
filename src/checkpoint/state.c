/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/state.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/json.h"
#include "base/mem.h"

enum { VERSION = 1 };

#define COUNT(name) {#name, offsetof(struct mt_train_state, name), false, false}
#define HASH(name) {#name, offsetof(struct mt_train_state, name), true, false}
#define NEWER(name, hash) {#name, offsetof(struct mt_train_state, name), hash, true}
static const struct {
    const char *name;
    size_t offset;
    bool hash, newer; /* newer: checkpoints of earlier versions lack it, which is 0 */
} counts[] = {COUNT(step),          COUNT(updates),         COUNT(skips),
              COUNT(skips_in_row),  COUNT(tokens),          COUNT(loss_tokens),
              HASH(data_hash),      COUNT(steps_per_epoch), COUNT(total_steps),
              COUNT(best_step),     COUNT(bad_evals),       NEWER(rows, false),
              NEWER(rows_per_epoch, false), NEWER(shares_up, false), NEWER(share_layers, false), NEWER(eval_hash, true),
              NEWER(reference_data, true), NEWER(reference_eval, true)};
#undef COUNT
#undef HASH
#undef NEWER

void mt_train_state_finish(struct mt_train_state *s)
{
    free(s->config);
    free(s->findings);
    free(s->reference);
    free(s->reference_of);
    free(s->blocks.overlay);
    mt_log_rows_finish(&s->log);
    cJSON_Delete(s->frozen);
    mt_lineage_finish(&s->lineage);
    *s = (struct mt_train_state){0};
}

uint64_t mt_train_state_reference_hash(const struct mt_train_state *s)
{
    return XXH3_64bits(s->reference, s->n_reference * sizeof(*s->reference));
}

/* 64-bit numbers are written as strings: JSON's numbers are doubles. */
cJSON *mt_train_state_to_json(const struct mt_train_state *s)
{
    cJSON *o = cJSON_CreateObject();
    char text[32];
    cJSON_AddNumberToObject(o, "version", VERSION);
    for (size_t i = 0; i < MT_ARRAY_LEN(counts); i++) {
        uint64_t v;
        memcpy(&v, (const char *)s + counts[i].offset, sizeof(v));
        snprintf(text, sizeof(text), "%llu", (unsigned long long)v);
        cJSON_AddStringToObject(o, counts[i].name, text);
    }
    mt_lineage_to_json(&s->lineage, o);
    cJSON_AddNumberToObject(o, "seconds", s->seconds);
    if (s->best_by[0])
        cJSON_AddStringToObject(o, "best_by", s->best_by);
    if (isfinite(s->best_loss))
        cJSON_AddNumberToObject(o, "best_loss", s->best_loss);
    if (s->best_saved_step)
        mt_json_put(o, "best_saved_step=%f, best_saved_loss=%f", (double)s->best_saved_step, s->best_saved_loss);
    if (s->eval_step != MT_EVAL_UNKNOWN)
        cJSON_AddNumberToObject(o, "eval_step", (double)s->eval_step);
    cJSON_AddStringToObject(o, "config", s->config ? s->config : "");
    if (s->n_reference) {
        cJSON *r = cJSON_AddObjectToObject(o, "reference");
        cJSON_AddStringToObject(r, "of", s->reference_of ? s->reference_of : "start");
        snprintf(text, sizeof(text), "%016llx",
                 (unsigned long long)mt_train_state_reference_hash(s));
        cJSON_AddStringToObject(r, "xxh3", text);
    }
    if (s->blocks.on) {
        cJSON *b = cJSON_AddObjectToObject(o, "blocks");
        mt_json_put(b, "phase=%f, updates=%f", (double)s->blocks.phase, (double)s->blocks.updates);
        if (s->blocks.overlay)
            cJSON_AddStringToObject(b, "overlay", s->blocks.overlay);
    }
    if (s->findings)
        cJSON_AddStringToObject(o, "device_findings", s->findings);
    mt_json_add(o, "log_history", mt_log_rows_json(&s->log));
    return o;
}

/* A name beside the checkpoint, never a path. */
static bool is_name(const cJSON *v)
{
    return cJSON_IsString(v) && v->valuestring[0] && v->valuestring[0] != '.' && !strchr(v->valuestring, '/');
}

/* Where a run that trains blocks was; of another run nothing. */
static int read_blocks(struct mt_train_state *s, const cJSON *o, const char *name, struct mt_err *err)
{
    const cJSON *b = mt_json_get(o, "blocks"), *overlay = mt_json_get(b, "overlay");
    double phase = mt_json_number(b, "phase", -1), updates = mt_json_number(b, "updates", -1);
    if (!b)
        return 0;
    if (phase < 0 || phase > 1e15 || updates < 0 || updates > (double)s->updates || (overlay && !is_name(overlay)))
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "%s: \"blocks\" is not what a run by blocks writes", name);
    s->blocks.on = true;
    s->blocks.phase = (uint64_t)phase;
    s->blocks.updates = (uint64_t)updates;
    s->blocks.overlay = overlay ? strdup(overlay->valuestring) : NULL;
    return overlay && !s->blocks.overlay ? mt_fail_nomem(err, name, 1) : 0;
}

int mt_train_state_from_json(struct mt_train_state *out, const cJSON *o, const char *name,
                             struct mt_err *err)
{
    struct mt_train_state s = {.best_loss = mt_json_number(o, "best_loss", NAN), .seconds = mt_json_number(o, "seconds", 0)};
    const cJSON *version = mt_json_get(o, "version");
    const cJSON *log = mt_json_get(o, "log_history"), *found = mt_json_get(o, "device_findings");
    if (!cJSON_IsNumber(version) || version->valueint != VERSION)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "%s: its version is not supported", name);
    for (size_t i = 0; i < MT_ARRAY_LEN(counts); i++) {
        const cJSON *v = mt_json_get(o, counts[i].name);
        if (!v && counts[i].newer)
            continue;
        char *end = NULL;
        bool digits = cJSON_IsString(v) && v->valuestring[0] >= '0' && v->valuestring[0] <= '9';
        errno = 0;
        uint64_t n = digits ? strtoull(v->valuestring, &end, 10) : 0;
        if (!end || *end || errno || (!counts[i].hash && n > INT64_MAX))
            return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "%s: \"%s\" is missing or not a number", name,
                           counts[i].name);
        memcpy((char *)&s + counts[i].offset, &n, sizeof(n));
    }
    snprintf(s.best_by, sizeof(s.best_by), "%s", mt_json_string(o, "best_by", ""));
    double saved = mt_json_number(o, "best_saved_step", 0), saved_loss = mt_json_number(o, "best_saved_loss", NAN);
    if (saved >= 1 && !isnan(saved_loss)) {
        s.best_saved_step = (uint64_t)saved;
        s.best_saved_loss = saved_loss;
    }
    double evaluated = mt_json_number(o, "eval_step", -1);
    s.eval_step = evaluated >= 0 && evaluated <= (double)s.step ? (uint64_t)evaluated : MT_EVAL_UNKNOWN;
    int rc = read_blocks(&s, o, name, err) ?: mt_lineage_from_json(&s.lineage, o, name, err);
    if (rc) {
        mt_train_state_finish(&s);
        return rc;
    }
    s.config = strdup(mt_json_string(o, "config", ""));
    s.findings = cJSON_IsString(found) ? strdup(found->valuestring) : NULL;
    const cJSON *reference = mt_json_get(mt_json_get(o, "reference"), "of");
    s.reference_of = cJSON_IsString(reference) ? strdup(reference->valuestring) : NULL;
    rc = mt_log_rows_read(&s.log, cJSON_IsArray(log) ? log : NULL, err);
    const cJSON *frozen = mt_json_get(mt_json_get(o, "frozen"), "tensors");
    s.frozen = cJSON_IsObject(frozen) ? cJSON_Duplicate(frozen, 1) : cJSON_CreateObject();
    if (rc || !s.config || !s.frozen || (cJSON_IsString(found) && !s.findings) ||
        (cJSON_IsString(reference) && !s.reference_of)) {
        mt_train_state_finish(&s);
        return mt_fail_nomem(err, name, 1);
    }
    *out = s;
    return 0;
}

double mt_train_state_epochs(const struct mt_train_state *s)
{
    if (s->rows && s->rows_per_epoch)
        return (double)s->rows / (double)s->rows_per_epoch;
    return s->steps_per_epoch ? (double)s->step / (double)s->steps_per_epoch : 0;
}

cJSON *mt_trainer_state_json(const struct mt_train_state *s)
{
    cJSON *o = cJSON_CreateObject();
    char best[64];
    double epochs = mt_train_state_epochs(s);
    mt_json_put(o, "global_step=%f, epoch=%f, max_steps=%f, num_train_epochs=%f", (double)s->step, epochs,
                (double)s->total_steps,
                s->steps_per_epoch ? ceil((double)s->total_steps / (double)s->steps_per_epoch) : 0);
    if (s->best_saved_step) {
        snprintf(best, sizeof(best), "checkpoint-%llu", (unsigned long long)s->best_saved_step);
        mt_json_put(o, "best_metric=%f, best_model_checkpoint=%s", s->best_saved_loss, best);
    } else {
        cJSON_AddNullToObject(o, "best_metric");
        cJSON_AddNullToObject(o, "best_model_checkpoint");
    }
    mt_json_add(o, "log_history", mt_log_rows_json(&s->log));
    return o;
}

const char *mt_train_state_value(const struct mt_train_state *s, const char *section, const char *key, char *buf,
                                 size_t len)
{
    char head[64], line[64];
    snprintf(head, sizeof(head), "[%s]\n", section);
    snprintf(line, sizeof(line), "\n%s = ", key);
    const char *at = s->config ? strstr(s->config, head) : NULL, *end = at ? strstr(at, "\n[") : NULL;
    buf[0] = 0;
    at = at ? strstr(at, line) : NULL;
    if (at && (!end || at < end)) {
        at += strlen(line);
        snprintf(buf, len, "%.*s", (int)strcspn(at, "\n"), at);
    }
    return buf;
}
