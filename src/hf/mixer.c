/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/mixer.h"

#include <stdio.h>
#include <string.h>

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

void mt_mixer_read(struct mt_keys *r, const struct mt_mixer_family *f, struct mt_layer_spec *s)
{
    for (size_t i = 0; i < f->n_counts; i++) {
        const struct mt_family_count *c = &f->counts[i];
        *number(s, c) = c->key ? mt_keys_int(r, c->key, c->by_default, 1, c->most) : c->by_default;
    }
    for (size_t i = 0; i < f->n_counts; i++)
        check(r, f, s, &f->counts[i]);
}

void mt_mixer_layers(struct mt_keys *r, const struct mt_hf_config *c, bool *of)
{
    const struct mt_mixer_family *f = c->family->mixer;
    if (!f)
        return;
    int64_t every = mt_keys_int(r, f->interval_key, f->interval, 1, MT_MAX_LAYERS);
    const cJSON *v = mt_keys_of_layers(r, "layer_types", c->n_layers);
    for (int64_t i = 0; i < c->n_layers; i++) {
        of[i] = v ? cJSON_IsString(v) && !strcmp(v->valuestring, f->type) : (i + 1) % every != 0;
        if (v && !of[i] && !(cJSON_IsString(v) && !strcmp(v->valuestring, "full_attention")))
            mt_keys_refuse(r, "layer_types", "names a kind of attention that is not supported");
        v = v ? v->next : NULL;
    }
}
