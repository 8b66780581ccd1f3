/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers have a window, a mixture of experts, another rotary table: the specification of each. */
#include "hf/layers.h"

#include <assert.h>
#include <string.h>

#include "base/mem.h"
#include "hf/mixer.h"

/* types: the first of layer_types. */
static void windows_from_types(struct mt_keys *r, const cJSON *types, int64_t window, int64_t *of)
{
    int64_t i = 0;
    for (const cJSON *v = types; v; v = v->next, i++) {
        bool sliding = cJSON_IsString(v) && !strcmp(v->valuestring, "sliding_attention");
        if (!sliding && !(cJSON_IsString(v) && !strcmp(v->valuestring, "full_attention")))
            mt_keys_refuse(r, "layer_types", "names a kind of attention that is not supported");
        if (sliding && !window)
            mt_keys_refuse(r, "layer_types", "has sliding attention, but sliding_window is missing");
        of[i] = sliding ? window : 0;
    }
}

static bool needs_flag(enum mt_window_rule w)
{
    return w == MT_WINDOW_UPPER_LAYERS || w == MT_WINDOW_BY_FLAG || w == MT_WINDOW_EVEN_LOWER_LAYERS;
}

/* Whether the rule gives layer i a window. */
static bool has_window(enum mt_window_rule w, int64_t i, int64_t n_layers, int64_t max_window_layers, int64_t pattern)
{
    switch (w) {
    case MT_WINDOW_ALL_BUT_FIRST:
        return i != 0 && (i + 1) % pattern != 0;
    case MT_WINDOW_ALL_BUT_BACKWARD:
        return (n_layers - 1 - i) % pattern != 0;
    case MT_WINDOW_ALL_BUT:
        return (i + 1) % pattern != 0;
    case MT_WINDOW_ALL_AFTER:
        return i % pattern != 0;
    case MT_WINDOW_UPPER_LAYERS:
    case MT_WINDOW_FROM_LAYER:
        return i >= max_window_layers;
    case MT_WINDOW_EVEN_LAYERS:
        return i % 2 == 0;
    case MT_WINDOW_EVEN_LOWER_LAYERS:
        return i % 2 == 0 && i < max_window_layers;
    default:
        return true;
    }
}

/* Classes of one rule for all layers do not read layer_types: a list of anything else is of another program. */
static void refuse_other_types(struct mt_keys *r, const struct mt_hf_config *c, int64_t window, const int64_t *of)
{
    bool one_rule = c->family->windows == MT_WINDOW_EVERY_LAYER || c->family->windows == MT_WINDOW_BY_FLAG;
    for (int64_t i = 0; one_rule && i < c->n_layers; i++)
        if (of[i] != window)
            mt_keys_refuse(r, "layer_types", "gives layers other windows than sliding_window, which is all that "
                           "transformers reads in this architecture");
}

static void read_windows(struct mt_keys *r, const struct mt_hf_config *c, int64_t *of)
{
    const struct mt_family *f = c->family;
    int64_t window = mt_keys_int(r, "sliding_window", f->window, 0, INT64_C(1) << 40);
    int64_t from_layer = mt_keys_int(r, "max_window_layers", f->windows == MT_WINDOW_FROM_LAYER ? 62 : 28, 0,
                                     INT64_C(1) << 40);
    const cJSON *types = f->windows == MT_WINDOW_NONE ? NULL : mt_keys_of_layers(r, "layer_types", c->n_layers);
    int64_t pattern = MT_MAX(f->full_every, (int64_t)1);
    if (!types) /* beside which releases may have it as "LLLG" */
        pattern = mt_keys_int(r, f->full_every_key ? f->full_every_key : "sliding_window_pattern", pattern, 1,
                              MT_MAX_LAYERS);
    if (f->window_before_key && mt_keys_find(r, f->window_before_key))
        window = mt_keys_int(r, f->window_before_key, 0, 0, INT64_C(1) << 40) + 1;
    if (f->windows == MT_WINDOW_NONE || mt_keys_is_null(r, "sliding_window") ||
        (needs_flag(f->windows) && !mt_keys_bool(r, "use_sliding_window", false)))
        window = 0;
    for (int64_t i = 0; i < c->n_layers; i++)
        of[i] = has_window(f->windows, i, c->n_layers, from_layer, pattern) ? window : 0;
    if (types) {
        windows_from_types(r, types, window, of);
        refuse_other_types(r, c, window, of);
    }
    if (f->last_is_full)
        of[c->n_layers - 1] = 0;
}

/* position_embedding_type: whether anything is rotated. */
static bool rotates(struct mt_keys *r)
{
    const cJSON *v = mt_keys_find(r, "position_embedding_type");
    bool rope = cJSON_IsString(v) && !strcmp(v->valuestring, "rope");
    if (v && !rope && !(cJSON_IsString(v) && !strcmp(v->valuestring, "nope")))
        mt_keys_refuse(r, "position_embedding_type", "must be \"rope\", \"nope\" or null");
    return rope;
}

/* Which layers rotate queries and keys. */
static void read_rotated(struct mt_keys *r, const struct mt_hf_config *c, const int64_t *window, bool *of)
{
    bool by_theta = c->family->ropes == MT_ROPE_BY_THETAS, by_list = c->family->ropes == MT_ROPE_BY_LIST || by_theta;
    const char *key = by_theta ? "layer_rope_theta" : "no_rope_layers";
    int64_t interval = mt_keys_int(r, "no_rope_layer_interval", 4, 1, MT_MAX_LAYERS);
    const cJSON *v = by_list ? mt_keys_of_layers(r, key, c->n_layers) : NULL;
    bool by_type = c->family->ropes == MT_ROPE_BY_TYPE && rotates(r), all = mt_keys_is_null(r, "sliding_window");
    for (int64_t i = 0; i < c->n_layers; i++) {
        int64_t counted = by_theta ? c->n_layers - 1 - i : i + 1;
        of[i] = c->family->ropes == MT_ROPE_OF_WINDOWS         ? all || window[i]
                : c->family->ropes == MT_ROPE_OF_WINDOWS_ALONE ? window[i] != 0
                : c->family->ropes == MT_ROPE_BY_TYPE          ? by_type
                : c->family->ropes == MT_ROPE_NEVER            ? false
                : by_list                                      ? (v ? v->valuedouble != 0 : counted % interval != 0)
                                                               : true;
        v = v ? v->next : NULL;
    }
}

/* The index of the specification, which is added if no earlier layer has it. */
static uint8_t index_of(struct mt_keys *r, struct mt_hf_config *c, const struct mt_layer_spec *s)
{
    int i = 0;
    /* all are copies of one that was zeroed, padding too; an equal one that is not found only costs a place */
    while (i < c->n_specs && memcmp(&c->spec[i], s, sizeof(*s)) != 0) // NOLINT(bugprone-suspicious-memory-comparison)
        i++;
    if (i == MT_MAX_SPECS) {
        mt_keys_refuse(r, "layer_types", "describes more kinds of layers than are supported");
        return 0;
    }
    if (i == c->n_specs)
        memcpy(&c->spec[c->n_specs++], s, sizeof(*s));
    return (uint8_t)i;
}

/* Lists the layer's parts: those of its kind or family, where a mixture takes the place of the MLP. */
static void list_parts(struct mt_layer_spec *s, const struct mt_hf_config *c, int64_t layer, uint8_t kind)
{
    const struct mt_family *f = c->family;
    static const char *const usual[MT_LAYER_MAX_PARTS] = {"attention", "mlp"};
    const char *end = c->moe.latent ? "latent" : f->moe && f->moe->end ? f->moe->end : "combine";
    const char *const mixture[] = {"router", "lists", "experts", end};
    const char *const *own = f->mixer ? f->mixer->kinds[kind].parts : NULL;
    const char *const *dense = own && own[0]                  ? own
                               : !layer && f->first_parts[0] ? f->first_parts
                               : f->parts[0]                 ? f->parts
                                                             : usual;
    size_t n = 0;
    memset(s->parts, 0, sizeof(s->parts));
    for (size_t i = 0; i < MT_LAYER_MAX_PARTS && dense[i]; i++) {
        bool many = s->is_mixture && !strcmp(dense[i], "mlp");
        for (size_t k = 0; k < (many ? MT_ARRAY_LEN(mixture) : 1); k++) {
            assert(n < MT_LAYER_MAX_PARTS);
            s->parts[n++] = many ? mixture[k] : dense[i];
        }
    }
}

void mt_layers_read(struct mt_keys *r, struct mt_hf_config *c, const struct mt_layer_spec of[2])
{
    struct mt_layer_spec s;
    int64_t window[MT_MAX_LAYERS] = {0};
    bool sparse[MT_MAX_LAYERS] = {0}, rotated[MT_MAX_LAYERS];
    uint8_t kind[MT_MAX_LAYERS] = {0};
    read_windows(r, c, window);
    read_rotated(r, c, window, rotated);
    mt_mixer_layers(r, c, kind);
    for (int64_t i = 0; i < c->n_layers && c->family->mixer; i++)
        sparse[i] = c->family->mixer->kinds[kind[i]].is_mixture;
    mt_moe_read(r, c, &of[0], sparse);
    for (int64_t i = 0; i < c->n_layers && !r->rc; i++) {
        memcpy(&s, &of[window[i] != 0], sizeof(s));
        s.window = window[i];
        s.is_mixture = sparse[i];
        assert(!s.gate || s.o_scale == 1); /* attention applies one of the two */
        list_parts(&s, c, i, kind[i]);
        s.rope = !rotated[i] ? MT_NO_ROPE : window[i] && c->family->rope_by_window;
        s.q_rope = rotated[i] && c->family->q_growth ? 1 : s.rope; /* mt_rope_read() made a table of their own */
        c->layer[i] = index_of(r, c, &s);
    }
}
