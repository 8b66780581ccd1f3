/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/mixer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"

static int64_t *number(struct mt_layer_spec *s, const struct mt_family_count *c)
{
    return (int64_t *)(void *)((char *)s + c->at);
}

static void check(struct mt_keys *r, const struct mt_mixer_family *f, struct mt_layer_spec *s,
                  const struct mt_family_count *c)
{
    char why[96];
    int64_t n = *number(s, c);
    for (size_t i = 0; c->divides && i < f->n_counts; i++)
        if (f->counts[i].key && !strcmp(f->counts[i].key, c->divides) &&
            *number(s, &f->counts[i]) % n) {
            snprintf(why, sizeof(why), "does not divide %s", c->divides);
            mt_keys_refuse(r, c->key, why);
        }
    if (c->multiple_of && n % c->multiple_of) {
        snprintf(why, sizeof(why), "must be a multiple of %d", (int)c->multiple_of);
        mt_keys_refuse(r, c->key, why);
    }
}

/* A number may be a word instead: "auto", which is 0 until it is known. */
static int64_t read_count(struct mt_keys *r, const struct mt_family_count *c)
{
    const cJSON *v = c->key ? mt_keys_find(r, c->key) : NULL;
    if (!c->key || (!c->by_default && (!v || (cJSON_IsString(v) && !strcmp(v->valuestring, "auto")))))
        return c->by_default;
    return mt_keys_int(r, c->key, c->by_default, 1, c->most);
}

/* [least, most]; Python writes an infinity as a word, or as an object with that word. */
static void read_limits(struct mt_keys *r, const char *key, struct mt_delta_spec *d)
{
    const cJSON *list = mt_keys_find(r, key), *least = list ? list->child : NULL, *most = least ? least->next : NULL;
    const cJSON *word = cJSON_IsObject(most) ? mt_json_get(most, "__float__") : NULL;
    if (!list)
        return;
    bool endless = cJSON_IsString(word) && !strcmp(word->valuestring, "Infinity");
    d->least = cJSON_IsNumber(least) ? least->valuedouble : NAN;
    d->most = endless ? INFINITY : cJSON_IsNumber(most) ? most->valuedouble : NAN;
    if (!cJSON_IsArray(list) || !(d->least >= 0 && d->most > d->least))
        mt_keys_refuse(r, key, "must be two numbers, the least and the largest step");
}

static void read_plain(struct mt_keys *r, const struct mt_plain_family *f, int64_t hidden, struct mt_delta_spec *d)
{
    int64_t all = f->expand_key ? mt_keys_int(r, f->expand_key, 2, 1, 1 << 10) * hidden : 0;
    d->plain = true;
    d->conv_bias = mt_keys_bool(r, f->conv_bias_key, true);
    d->least = f->least_key ? mt_keys_number(r, f->least_key, f->least) : 0;
    d->most = INFINITY;
    if (f->limits_key)
        read_limits(r, f->limits_key, d);
    if (!d->v_dim)
        d->v_dim = all / d->v_heads;
    if (all && d->v_dim * d->v_heads != all)
        mt_keys_refuse(r, f->expand_key, "times hidden_size is not the width of all heads of Mamba 2");
    for (size_t i = 0; i < sizeof(f->flags) / sizeof(f->flags[0]) && f->flags[i]; i++)
        if (mt_keys_bool(r, f->flags[i], false))
            mt_keys_refuse(r, f->flags[i], "must not be true: that is not supported in this architecture");
}

#define PATTERN "hybrid_override_pattern"

static const char *list_key(const struct mt_keys *r)
{
    return mt_keys_find(r, "layers_block_type") ? "layers_block_type" : "layer_types";
}

/* A letter for each layer; NULL: there is none, or a list is instead. */
static const char *pattern_of(const struct mt_keys *r, const struct mt_mixer_family *f)
{
    const cJSON *v = f->kinds[0].letter && !mt_keys_find(r, list_key(r)) ? mt_keys_find(r, PATTERN) : NULL;
    return cJSON_IsString(v) ? v->valuestring : NULL;
}

int64_t mt_mixer_count(struct mt_keys *r, const struct mt_family *f)
{
    const cJSON *list = f->mixer && f->mixer->kinds[0].letter ? mt_keys_find(r, list_key(r)) : NULL;
    const char *pattern = f->mixer ? pattern_of(r, f->mixer) : NULL;
    size_t n = pattern ? strlen(pattern) : cJSON_IsArray(list) ? (size_t)cJSON_GetArraySize(list) : 0;
    if (n > MT_MAX_LAYERS)
        mt_keys_refuse(r, pattern ? PATTERN : list_key(r), "names more layers than are supported");
    return (int64_t)MT_MIN(n, (size_t)MT_MAX_LAYERS);
}

/* letter: if name is NULL. */
static int find_kind(const struct mt_mixer_family *f, const char *name, char letter)
{
    for (size_t i = 0; i < f->n_kinds; i++) {
        const struct mt_layer_kind *k = &f->kinds[i];
        bool named = name && (!strcmp(name, k->name) || (k->old_name && !strcmp(name, k->old_name)));
        if (named || (!name && letter && letter == k->letter))
            return (int)i;
    }
    return -1;
}

void mt_mixer_layers(struct mt_keys *r, const struct mt_hf_config *c, uint8_t *kind)
{
    const struct mt_mixer_family *f = c->family->mixer;
    if (!f)
        return;
    const char *pattern = pattern_of(r, f), *key = pattern ? PATTERN : list_key(r);
    int64_t every = f->interval_key ? mt_keys_int(r, f->interval_key, f->interval, 1, MT_MAX_LAYERS) : INT64_MAX;
    const cJSON *v = pattern ? NULL : mt_keys_of_layers(r, key, c->n_layers);
    for (int64_t i = 0; i < c->n_layers; i++) {
        int of = v         ? find_kind(f, cJSON_IsString(v) ? v->valuestring : "", 0)
                 : pattern ? find_kind(f, NULL, pattern[i])
                           : (i + 1) % every == 0;
        if (of < 0)
            mt_keys_refuse(r, key, "names a kind of layer that is not supported");
        kind[i] = (uint8_t)MT_MAX(of, 0);
        v = v ? v->next : NULL;
    }
}

/* What a mixer applies behind its convolution. */
static void check_activation(struct mt_keys *r, const struct mt_mixer_family *f)
{
    const char *key = f->plain && f->plain->activation_key ? f->plain->activation_key : "hidden_act";
    const cJSON *act = mt_keys_find(r, key);
    if (act && !(cJSON_IsString(act) && !strcmp(act->valuestring, "silu")))
        mt_keys_refuse(r, key, "must be silu where layers have a linear recurrence");
}

void mt_mixer_read(struct mt_keys *r, const struct mt_hf_config *c, struct mt_layer_spec *s)
{
    const struct mt_mixer_family *f = c->family->mixer;
    uint8_t kind[MT_MAX_LAYERS] = {0};
    bool any = false;
    mt_mixer_layers(r, c, kind);
    for (int64_t i = 0; f && i < c->n_layers; i++)
        any |= !kind[i];
    for (size_t i = 0; any && i < f->n_counts; i++)
        *number(s, &f->counts[i]) = read_count(r, &f->counts[i]);
    if (any)
        check_activation(r, f);
    if (any && f->plain)
        read_plain(r, f->plain, c->hidden, &s->delta);
    for (size_t i = 0; any && i < f->n_counts; i++)
        check(r, f, s, &f->counts[i]);
}
