/* SPDX-License-Identifier: Apache-2.0 */
#include "data/samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/read_progress.h"
#include "base/strbuf.h"
#include "base/units.h"
#include "data/answers.h"
#include "data/columns.h"
#include "data/rollouts.h"

static int read_text(struct mt_sample_reader *r, const cJSON *o, const char *where,
                     struct mt_err *err)
{
    const cJSON *text = mt_json_get(o, "text");
    int rc = mt_sample_needs_bytes(r, where, err);
    if (!rc && !cJSON_IsString(text))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"text\" is missing or not a string", where);
    return rc ?: mt_sample_push_text(r, "", 0, text->valuestring, err);
}

static int read_prompt(struct mt_sample_reader *r, const cJSON *o, const char *where,
                       struct mt_err *err)
{
    const cJSON *prompt = mt_json_get(o, "prompt"), *answer = mt_json_get(o, "completion");
    int rc = mt_sample_needs_bytes(r, where, err);
    if (!rc && (!cJSON_IsString(prompt) || !cJSON_IsString(answer)))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL,
                     answer    ? "%s: \"prompt\" and \"completion\" must be strings"
                     : !prompt ? "%s: there is no \"prompt\": all samples of a file have the format of the first one, or data.format"
                               : "%s: there is a \"prompt\", but no \"completion\": name yours by data.columns = completion:...",
                     where);
    return rc ?: mt_sample_push_text(r, prompt->valuestring, strlen(prompt->valuestring), answer->valuestring, err);
}

/* Tokens with an attention_mask of 0 are padding, which is removed at both ends: [*first, *end) stays. */
static int find_padding(const cJSON *mask, size_t n, const char *where, size_t *first, size_t *end, struct mt_err *err)
{
    size_t i = 0, ones = 0;
    if (!mask || cJSON_IsNull(mask))
        return 0;
    if (!cJSON_IsArray(mask) || (size_t)cJSON_GetArraySize(mask) != n)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"attention_mask\" and \"input_ids\" differ in length", where);
    for (const cJSON *m = mask->child; m; m = m->next, i++) {
        if (!cJSON_IsNumber(m) || (m->valuedouble != 0 && m->valuedouble != 1))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: attention_mask[%zu] must be 0 or 1", where, i);
        if (m->valuedouble == 0)
            continue;
        *first = ones++ ? *first : i;
        *end = i + 1;
    }
    if (!ones || *end - *first != ones)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       ones ? "%s: \"attention_mask\" is 0 between tokens that are not padding, which is not supported"
                            : "%s: \"attention_mask\" is 0 for every token",
                       where);
    return 0;
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
    static const char *const masks[] = {"loss_mask", "completion_mask", "assistant_masks"};
    for (size_t m = 0; !labels && m < MT_ARRAY_LEN(masks); m++)
        if (cJSON_IsArray(mt_json_get(o, masks[m])))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" is not read: say by \"labels\" what is trained, with -100 "
                           "elsewhere", where, masks[m]);
    size_t i = 0, first = 0, end = (size_t)cJSON_GetArraySize(ids);
    int rc = find_padding(mt_json_get(o, "attention_mask"), end, where, &first, &end, err);
    if (rc)
        return rc;
    const cJSON *l = labels ? labels->child : NULL;
    for (const cJSON *v = ids->child; v; v = v->next, i++, l = l ? l->next : NULL) {
        double id = cJSON_IsNumber(v) ? v->valuedouble : -1;
        if (!(id >= 0) || id != floor(id))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: input_ids[%zu] is not a token id", where, i);
        if (id >= (double)r->vocab)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "%s: input_ids[%zu] = %.0f is beyond the model's vocab_size of %zu", where,
                           i, id, r->vocab);
        if (labels && (!cJSON_IsNumber(l) || (l->valuedouble != -100 && l->valuedouble != id)))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                           "%s: labels[%zu] must be -100 or input_ids[%zu]", where, i, i);
        if (i >= first && i < end)
            rc = mt_sample_push(r, (uint32_t)id, !labels || l->valuedouble != -100, err);
        if (rc)
            return rc;
    }
    return 0;
}

bool mt_samples_are_rollouts(const cJSON *o)
{
    return mt_json_get(o, "token_ids") || mt_json_get(o, "advantage") || (mt_json_get(o, "reward") && mt_json_get(o, "group"));
}

static enum mt_cfg_format detect(const cJSON *o)
{
    static const struct {
        const char *key;
        enum mt_cfg_format format;
    } by_key[] = {{"messages", MT_FORMAT_MESSAGES}, {"conversations", MT_FORMAT_SHAREGPT},
                  {"instruction", MT_FORMAT_ALPACA}, {"input_ids", MT_FORMAT_INPUT_IDS},
                  {"prompt", MT_FORMAT_PROMPT_COMPLETION}, {"text", MT_FORMAT_TEXT}};
    if (mt_samples_are_rollouts(o))
        return MT_FORMAT_ROLLOUTS;
    bool half = mt_json_get(o, "chosen") && !mt_json_get(o, "completion") && !mt_json_get(o, "messages");
    if (mt_json_get(o, "rejected") || mt_json_get(o, "rejected_ids") || half)
        return MT_FORMAT_PREFERENCE;
    if (mt_json_get(o, "label") && (mt_json_get(o, "completion") || mt_json_get(o, "completion_ids")))
        return MT_FORMAT_RATED;
    for (size_t i = 0; i < MT_ARRAY_LEN(by_key); i++)
        if (mt_json_get(o, by_key[i].key))
            return by_key[i].format;
    return MT_FORMAT_AUTO;
}

/* Says which keys a sample has, and which tell formats. */
static int unknown_keys(const cJSON *o, const char *where, struct mt_err *err)
{
    MT_STR_FREED struct mt_str keys = {0};
    int n = 0;
    mt_str_append(&keys, "", 0);
    for (const cJSON *v = o->child; v && n < 8; v = v->next, n++)
        mt_str_printf(&keys, "%s\"%.40s\"", n ? ", " : "", v->string);
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: no known format has the keys %s: one of messages, conversations, "
                   "instruction, prompt, chosen and rejected, completion and label, text, input_ids tells it; name yours by "
                   "data.columns = instruction:..., output:... (turns of the chat template) or prompt:..., completion:... (text as it "
                   "stands), or set data.format", where, keys.failed ? "" : keys.p);
}

static int read_object(struct mt_sample_reader *r, cJSON *o, const char *where, uint64_t place, struct mt_err *err)
{
    char name[MT_CHOICE_NAME];
    int rc;
    if (!cJSON_IsObject(o))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a sample must be a JSON object", where);
    mt_columns_rename(o, r->columns);
    if (r->format == MT_FORMAT_AUTO)
        r->format = detect(o);
    switch (r->format) {
    case MT_FORMAT_PREFERENCE:
    case MT_FORMAT_RATED:
        return mt_answers_read(r, o, where, place, err);
    case MT_FORMAT_ROLLOUTS:
        return mt_rollouts_read(r, o, where, place, err);
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
        return unknown_keys(o, where, err);
    default:
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the sample does not have data.format = %s", where,
                       mt_choice_name(name, MT_FORMAT_NAMES, (int)r->format));
    }
    return rc ?: mt_sample_end(r, where, place, err);
}

static bool has_enough(const struct mt_sample_reader *r)
{
    size_t each = r->header.flags & MT_SHARD_ANSWERS ? 2 : 1;
    return r->max_samples && r->out->n_samples >= each * r->max_samples;
}

/* Has a string an escaped zero (\\u0000)? cJSON ends the string there. */
static bool escapes_zero(const char *line, size_t n)
{
    static const char escape[] = "\\u0000";
    for (const char *p = line; (p = memmem(p, n - (size_t)(p - line), escape, sizeof(escape) - 1)); p++) {
        const char *first = p;
        while (first > line && first[-1] == '\\')
            first--;
        if ((p - first) % 2 == 0)
            return true;
    }
    return false;
}

static int read_lines(struct mt_sample_reader *r, FILE *f, const char *path, struct mt_read_progress *progress,
                      struct mt_err *err)
{
    MT_FREED char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t len;
    int rc = 0;
    while (!rc && !has_enough(r) && (len = getline(&line, &cap, f)) >= 0) {
        number++;
        mt_read_progress_add(progress, (uint64_t)len);
        size_t n = (size_t)len;
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r' || line[n - 1] == ' '))
            n--;
        if (!n)
            continue;
        MT_JSON_FREED cJSON *o = NULL;
        const char *where = MT_PATH("%s:%zu", path, number);
        if (memchr(line, 0, n))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the line contains a zero byte", where);
        if (!rc && escapes_zero(line, n))
            rc = mt_fail(err, MT_ERR_INPUT, -EILSEQ, "%s: a string has a zero character (\\u0000), which bytes as tokens do not take", where);
        rc = rc ?: mt_json_parse(&o, line, n, path, MT_ERR_INPUT, err);
        if (rc == -EINVAL && !o && !memchr(line, 0, n)) {
            const char *at = cJSON_GetErrorPtr();
            size_t col = at && at >= line && at < line + n ? (size_t)(at - line) + 1 : 1;
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s:%zu:%zu: not valid JSON", path, number, col);
        }
        rc = rc ?: read_object(r, o, where, number, err);
    }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", path);
    return rc;
}

static int read_array(struct mt_sample_reader *r, const char *path, struct mt_err *err)
{
    MT_JSON_FREED cJSON *root = NULL;
    size_t i = 0;
    int rc = mt_json_read_file(&root, path, MT_ERR_INPUT, err);
    if (!rc && !cJSON_IsArray(root))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a JSON array of samples, nor a JSON object a line", path);
    for (cJSON *v = rc ? NULL : root->child; v && !rc && !has_enough(r); v = v->next, i++)
        rc = read_object(r, v, MT_PATH("%s[%zu]", path, i), i, err);
    return rc;
}

/* The file is one text, however long; rows are cut from it later. */
static int read_plain(struct mt_sample_reader *r, FILE *f, const char *path, char first,
                      struct mt_read_progress *progress, struct mt_err *err)
{
    unsigned char buf[4096];
    uint32_t ids[sizeof(buf)];
    size_t got;
    int rc = mt_sample_needs_bytes(r, path, err);
    r->format = MT_FORMAT_TEXT;
    r->header.flags = MT_SHARD_PLAIN_TEXT;
    if (first == '{' || first == '[')
        snprintf(r->header.notes, sizeof(r->header.notes),
                 "w\tfile\t0\t\ttaken as plain text, as its name says, but it begins like JSON: name it .jsonl (an object a line) or .json (an array)\t\n");
    while (!rc && (got = fread(buf, 1, sizeof(buf), f)) > 0) {
        if (got == 1 && !r->out->n_tokens)
            break; /* the file is one byte, which nothing predicts */
        mt_read_progress_add(progress, got);
        for (size_t i = 0; i < got; i++)
            ids[i] = buf[i];
        rc = mt_shard_writer_append(r->out, ids, NULL, got, err);
    }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", path);
    r->header.max_len = r->out->n_tokens;
    r->header.n_trained = r->out->n_tokens ? r->out->n_tokens - 1 : 0;
    if (!rc && r->out->n_tokens > 1)
        rc = mt_shard_writer_end(r->out, 0, err);
    return rc;
}

/*
 * Skips a byte order mark. *first: the first character that is no white space; *object: it begins a line that ends as
 * an object does. -EILSEQ: the file is UTF-16, of which half of the bytes are zero.
 */
static int begin(FILE *f, const char *path, char *first, bool *object, struct mt_err *err)
{
    MT_FREED char *line = NULL;
    char head[3] = "";
    size_t cap = 0, n = fread(head, 1, sizeof(head), f);
    ssize_t len = 0;
    bool zero = n > 1 && !head[0] != !head[1];
    if (zero || (n > 1 && (!memcmp(head, "\xff\xfe", 2) || !memcmp(head, "\xfe\xff", 2))))
        return mt_fail(err, MT_ERR_INPUT, -EILSEQ,
                       "%s is UTF-16, not UTF-8: convert it, with iconv -f UTF-16 -t UTF-8 for example", path);
    long start = n == 3 && !memcmp(head, "\xef\xbb\xbf", 3) ? 3 : 0;
    fseek(f, start, SEEK_SET);
    while (!*first && (len = getline(&line, &cap, f)) >= 0)
        *first = line[strspn(line, " \t\r\n")];
    while (len > 0 && strchr(" \t\r\n", line[len - 1]))
        len--;
    *object = *first == '{' && line[len - 1] == '}';
    fseek(f, start, SEEK_SET);
    return 0;
}

int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err)
{
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    if (!f || mt_is_dir(path)) {
        int e = f ? EISDIR : errno;
        return mt_fail(err, MT_ERR_INPUT, -e, "cannot open data file %s: %s", path, strerror(e));
    }
    char name[MT_CHOICE_NAME], first = 0;
    struct mt_read_progress progress;
    struct stat st;
    mt_read_progress_begin(&progress, path, fstat(fileno(f), &st) ? 0 : (uint64_t)st.st_size);
    bool lines = mt_path_has_extension(path, ".jsonl"), array = mt_path_has_extension(path, ".json"), object = false;
    int rc = begin(f, path, &first, &object, err);
    if (lines || array) { /* what the file begins with tells, whatever its name is */
        array = first == '[' || (array && !object);
        lines = !array;
    }
    r->header.place_kind = lines ? MT_PLACE_LINE : MT_PLACE_INDEX;
    if (!rc && lines)
        rc = read_lines(r, f, path, &progress, err);
    else if (!rc && array)
        rc = read_array(r, path, err);
    else if (!rc)
        rc = read_plain(r, f, path, first, &progress, err);
    mt_read_progress_end(&progress);
    r->header.n_bytes = (uint64_t)MT_MAX(ftello(f), (off_t)0);
    snprintf(r->header.format, sizeof(r->header.format), "%s",
             r->header.flags & MT_SHARD_PLAIN_TEXT ? "plain text" : mt_choice_name(name, MT_FORMAT_NAMES, (int)r->format));
    return rc;
}

void mt_samples_finish(struct mt_sample_reader *r)
{
    free(r->ids);
    free(r->mask);
    free(r->values);
}
