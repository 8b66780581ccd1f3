/* SPDX-License-Identifier: Apache-2.0 */
#include "data/sample.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "data/dataset.h"

int mt_sample_push(struct mt_sample_reader *r, uint32_t id, bool trained, struct mt_err *err)
{
    if (!mt_grow(&r->ids, &r->cap_ids, r->n + 1, sizeof(*r->ids)) ||
        !mt_grow(&r->mask, &r->cap_mask, r->n + 1, 1))
        return mt_fail_nomem(err, "a sample", r->n * 5);
    r->ids[r->n] = id;
    r->mask[r->n++] = trained;
    return 0;
}

int mt_sample_push_bytes(struct mt_sample_reader *r, const char *text, size_t len, bool trained, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < len && !rc; i++)
        rc = mt_sample_push(r, (unsigned char)text[i], trained, err);
    return rc;
}

int mt_sample_push_text(struct mt_sample_reader *r, const char *prompt, size_t len, const char *answer,
                        struct mt_err *err)
{
    return mt_sample_push(r, MT_BYTE_BOS, false, err)
        ?: mt_sample_push_bytes(r, prompt, len, false, err)
        ?: mt_sample_push_bytes(r, answer, strlen(answer), true, err)
        ?: mt_sample_push(r, MT_BYTE_EOS, true, err);
}

int mt_sample_push_ids(struct mt_sample_reader *r, const cJSON *ids, const char *name, bool trained, const char *where,
                       struct mt_err *err)
{
    int rc = 0;
    size_t i = 0;
    if (!cJSON_IsArray(ids))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" must be an array of token ids", where, name);
    for (const cJSON *v = ids->child; v && !rc; v = v->next, i++) {
        double id = cJSON_IsNumber(v) ? v->valuedouble : -1;
        if (!(id >= 0) || id != floor(id) || id >= (double)r->vocab)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: %s[%zu] = %g is no token id of a vocabulary of %zu", where, name, i,
                           id, r->vocab);
        rc = mt_sample_push(r, (uint32_t)id, trained, err);
    }
    return rc;
}

void mt_note_place(char *list, size_t size, const char *where)
{
    size_t len = strlen(list), n = strlen(where);
    int commas = 0;
    for (size_t i = 0; i < len; i++)
        commas += list[i] == ',';
    if (commas < 2) /* only the end of a long path */
        snprintf(list + len, size - len, "%s%s", len ? ", " : "", where + (n > 48 ? n - 48 : 0));
}

bool mt_sample_counts(struct mt_sample_reader *r, size_t n, uint64_t trained, const char *where)
{
    if (!trained) {
        r->header.n_untrained++;
        mt_note_place(r->header.untrained_at, sizeof(r->header.untrained_at), where);
        return false;
    }
    r->header.n_trained += trained;
    r->header.max_len = MT_MAX(r->header.max_len, n);
    return true;
}

int mt_sample_end(struct mt_sample_reader *r, const char *where, uint64_t place, struct mt_err *err)
{
    uint64_t trained = 0;
    size_t n = r->n;
    r->n = 0;
    for (size_t i = 1; i < n; i++) /* the first token has no predecessor */
        trained += r->mask[i];
    if (!mt_sample_counts(r, n, trained, where))
        return 0;
    int rc = mt_shard_writer_append(r->out, r->ids, r->mask, n, err);
    if (!rc && r->format == MT_FORMAT_ROLLOUTS)
        rc = mt_shard_writer_values(r->out, r->values, n, err);
    return rc ?: mt_shard_writer_end(r->out, place, err);
}

int mt_sample_needs_bytes(struct mt_sample_reader *r, const char *where, struct mt_err *err)
{
    if (!r->bytes)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: data.format does not match the sample",
                       where);
    if (r->vocab < MT_BYTE_VOCAB)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "the byte tokenizer has %d tokens, the model's vocab_size is %zu",
                       MT_BYTE_VOCAB, r->vocab);
    return 0;
}
