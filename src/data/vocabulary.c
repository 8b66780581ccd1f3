/* SPDX-License-Identifier: Apache-2.0 */
#include "data/vocabulary.h"

#include <string.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

static uint64_t hash_token(const char *text, double id)
{
    return XXH3_64bits_withSeed(text, strlen(text), (uint64_t)id);
}

/* {"token": id} of BPE and WordPiece, [["token", score]] of Unigram. A sum: of no order. */
static uint64_t hash_tokens(const cJSON *vocab)
{
    uint64_t sum = 0;
    double at = 0;
    for (const cJSON *v = cJSON_IsObject(vocab) || cJSON_IsArray(vocab) ? vocab->child : NULL; v;
         v = v->next, at++) {
        const cJSON *name = cJSON_IsArray(v) ? v->child : NULL;
        if (cJSON_IsNumber(v) && v->string && v->valuedouble >= 0)
            sum += hash_token(v->string, v->valuedouble);
        else if (cJSON_IsString(name))
            sum += hash_token(name->valuestring, at);
    }
    return sum;
}

/* Those that are in the vocabulary, too, count once: their ids are within it. */
static uint64_t hash_added(const cJSON *added, const cJSON *vocab)
{
    uint64_t sum = 0;
    double n = cJSON_GetArraySize(vocab);
    for (const cJSON *v = cJSON_IsArray(added) ? added->child : NULL; v; v = v->next) {
        const cJSON *id = mt_json_get(v, "id"), *text = mt_json_get(v, "content");
        if (cJSON_IsNumber(id) && id->valuedouble >= n && cJSON_IsString(text))
            sum += hash_token(text->valuestring, id->valuedouble);
    }
    return sum;
}

int mt_vocabulary_hash(uint64_t *out, const char *model_dir, struct mt_err *err)
{
    const char *path = MT_PATH("%s/tokenizer.json", model_dir);
    MT_JSON_FREED cJSON *o = NULL;
    *out = 0;
    int rc = mt_path_exists(path) ? mt_json_read_file(&o, path, MT_ERR_INPUT, err) : 0;
    if (o) {
        const cJSON *vocab = mt_json_get(mt_json_get(o, "model"), "vocab");
        *out = hash_tokens(vocab) + hash_added(mt_json_get(o, "added_tokens"), vocab);
    }
    return rc;
}
