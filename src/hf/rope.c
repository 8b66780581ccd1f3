/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary position embedding: its variants and their tables, as in transformers.modeling_rope_utils. */
#include "hf/rope.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

static const struct {
    const char *name;
    enum mt_rope_type type;
} types[] = {
    {"default", MT_ROPE_DEFAULT}, {"linear", MT_ROPE_LINEAR}, {"dynamic", MT_ROPE_DYNAMIC},
    {"llama3", MT_ROPE_LLAMA3},   {"yarn", MT_ROPE_YARN},     {"longrope", MT_ROPE_LONGROPE},
    {"su", MT_ROPE_LONGROPE},      {"proportional", MT_ROPE_PROPORTIONAL},
};

static const cJSON *get(const cJSON *o, const char *key)
{
    const cJSON *v = o ? mt_json_get(o, key) : NULL;
    return cJSON_IsNull(v) ? NULL : v;
}

static int read_type(struct mt_rope_config *r, const cJSON *p, const char *name, struct mt_err *err)
{
    const cJSON *t = get(p, "rope_type");
    if (!t)
        t = get(p, "type");
    if (!t)
        return 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(types); i++)
        if (cJSON_IsString(t) && !strcmp(t->valuestring, types[i].name)) {
            r->type = types[i].type;
            return 0;
        }
    return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                   "%s: rope type \"%.30s\" is not supported (default, linear, dynamic, llama3, yarn, "
                   "longrope, proportional are)",
                   name, cJSON_IsString(t) ? t->valuestring : "?");
}

static int read_factors(double *dst, int want, const cJSON *list, const char *key, const char *name,
                        struct mt_err *err)
{
    int n = 0;
    for (const cJSON *v = cJSON_IsArray(list) ? list->child : NULL; v; v = v->next, n++)
        if (n < want && cJSON_IsNumber(v))
            dst[n] = v->valuedouble;
    for (int i = 0; i < MT_MIN(n, want); i++)
        if (!(dst[i] > 0))
            n = -1;
    if (n != want)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %s needs %d positive numbers", name, key, want);
    return 0;
}

static int check(const struct mt_rope_config *r, const struct mt_family *f, const char *name, struct mt_err *err)
{
    const char *wrong = NULL;
    if (!(r->theta > 0) || !isfinite(r->theta))
        wrong = "rope_theta must be positive";
    else if (r->partial_rotary_factor != 1 && !(f->partial_rotary > 0) && r->type != MT_ROPE_PROPORTIONAL)
        wrong = "partial_rotary_factor other than 1 is not supported (transformers ignores it here)";
    else if (r->dims % 2)
        wrong = "partial_rotary_factor gives an odd number of dimensions, which transformers rotates as one more";
    else if (!(r->partial_rotary_factor > 0 && r->partial_rotary_factor <= 1))
        wrong = "partial_rotary_factor must be above 0 and at most 1";
    else if (r->type != MT_ROPE_DEFAULT && !(r->factor > 0 && isfinite(r->factor)))
        wrong = "the rope scaling needs a positive \"factor\"";
    else if (r->type == MT_ROPE_LLAMA3 &&
             !(r->low_freq_factor > 0 && r->high_freq_factor > r->low_freq_factor))
        wrong = "llama3 rope needs 0 < low_freq_factor < high_freq_factor";
    else if (r->type == MT_ROPE_YARN && !(r->beta_fast > 0 && r->beta_slow > 0 && r->theta > 1))
        wrong = "yarn rope needs positive beta_fast and beta_slow, and a rope_theta over 1";
    else if (r->type == MT_ROPE_LONGROPE && r->original_max_pos == 1 && r->attention_factor < 0)
        wrong = "longrope needs original_max_position_embeddings over 1, or attention_factor";
    else if (r->original_max_pos < 1)
        wrong = "original_max_position_embeddings must be positive";
    return wrong ? mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %s", name, wrong) : 0;
}

/* Of the numbers of one table: p is its object, NULL: none; root is config.json; theta: where neither says it. */
static void read_numbers(struct mt_rope_config *r, const struct mt_family *f, const cJSON *p, const cJSON *root,
                         double theta, int64_t head_dim)
{
    double part = f->partial_rotary > 0 ? f->partial_rotary : 1.0;
    r->theta = mt_json_number(p, "rope_theta", theta);
    if (f->partial_rotary > 0) /* older releases give the number of dimensions */
        part = mt_json_number(root, "rotary_dim", part * (double)head_dim) / (double)head_dim;
    r->partial_rotary_factor = mt_json_number(p, "partial_rotary_factor", mt_json_number(root, "partial_rotary_factor", part));
    r->factor = mt_json_number(p, "factor", 0);
    r->low_freq_factor = mt_json_number(p, "low_freq_factor", 1);
    r->high_freq_factor = mt_json_number(p, "high_freq_factor", 4);
    r->beta_fast = mt_json_number(p, "beta_fast", 32);
    r->beta_slow = mt_json_number(p, "beta_slow", 1);
    r->mscale = mt_json_number(p, "mscale", 0);
    r->mscale_all_dim = mt_json_number(p, "mscale_all_dim", 0);
    r->attention_factor = mt_json_number(p, "attention_factor", -1);
    r->truncate = !cJSON_IsFalse(get(p, "truncate"));
    double orig = mt_json_number(root, "original_max_position_embeddings",
                         mt_json_number(p, "original_max_position_embeddings", (double)r->max_pos));
    r->original_max_pos = orig >= 1 && orig < 0x1p40 ? (int64_t)orig : 0;
}

/* Whether the factor says of a whole latent head what its widths say. */
static bool is_part_of_head(const struct mt_family *f, double part, const int64_t head_dim[MT_MAX_ROPES])
{
    return f->latent && f->latent->part_of_head && part * (double)head_dim[1] == (double)head_dim[0];
}

/* The dimensions of a head that are rotated. */
static size_t rotated_dims(const struct mt_rope_config *r, int64_t head_dim)
{
    double p = r->type == MT_ROPE_PROPORTIONAL ? 1 : r->partial_rotary_factor;
    return p > 0 && p <= 1 ? (size_t)((double)head_dim * p) : 0;
}

static int read_lists(struct mt_rope_config *r, const cJSON *p, const char *name, struct mt_err *err)
{
    r->n_factors = (int)(r->dims / 2);
    if (!r->factor)
        r->factor = (double)r->max_pos / (double)MT_MAX(r->original_max_pos, (int64_t)1);
    int rc = read_factors(r->short_factor, r->n_factors, get(p, "short_factor"), "short_factor", name, err);
    return rc ? rc : read_factors(r->long_factor, r->n_factors, get(p, "long_factor"), "long_factor", name, err);
}

/* all_dims: as mt_rope_read() has them; head_dim: the table's. */
static void read_table(struct mt_keys *k, struct mt_hf_config *cfg, const cJSON *p, double theta, int64_t head_dim,
                       const int64_t all_dims[MT_MAX_ROPES])
{
    struct mt_rope_config *r = &cfg->rope[cfg->n_ropes++];
    *r = (struct mt_rope_config){.type = MT_ROPE_DEFAULT, .max_pos = cfg->max_pos};
    read_numbers(r, cfg->family, p, k->root, theta, head_dim);
    if (is_part_of_head(cfg->family, r->partial_rotary_factor, all_dims))
        r->partial_rotary_factor = 1;
    int rc = read_type(r, p, k->name, k->err);
    r->dims = rotated_dims(r, head_dim);
    if (r->type == MT_ROPE_PROPORTIONAL && !r->factor)
        r->factor = 1;
    double alpha = cfg->family->rope_alpha ? mt_json_number(p, "alpha", 0) : 0, dims = (double)head_dim;
    if (!rc && r->type == MT_ROPE_DYNAMIC && alpha > 0) { /* the same for every length: a larger base */
        r->type = MT_ROPE_DEFAULT;
        r->theta *= pow(alpha, dims / (dims - 2));
    }
    if (!rc && r->type == MT_ROPE_LONGROPE)
        rc = read_lists(r, p, k->name, k->err);
    rc = rc ?: check(r, cfg->family, k->name, k->err);
    if (!rc && r->type == MT_ROPE_YARN && r->original_max_pos != r->max_pos &&
        fabs(r->factor * (double)r->original_max_pos - (double)r->max_pos) > 1)
        mt_warn("%s: yarn factor %g differs from max_position_embeddings / original (%g)", k->name, r->factor,
                (double)r->max_pos / (double)r->original_max_pos);
    k->rc = rc;
}

void mt_rope_read(struct mt_keys *k, struct mt_hf_config *cfg, const int64_t head_dim[MT_MAX_ROPES])
{
    const struct mt_family *f = cfg->family;
    const cJSON *p = get(k->root, "rope_scaling"); /* the older name wins, unless it is null or {} */
    if (k->rc)
        return;
    if (!p || (cJSON_IsObject(p) && !p->child))
        p = get(k->root, "rope_parameters");
    const cJSON *full = get(p, "full_attention"), *window = get(p, "sliding_attention");
    double theta = mt_json_number(k->root, "rope_theta", f->rope_theta > 0 ? f->rope_theta : 10000.0);
    if (((full || window) && !f->rope_by_window) || (get(p, "mrope_section") && !f->mrope)) {
        k->rc = mt_fail(k->err, MT_ERR_INPUT, -EINVAL, "%s: rope parameters by layer type or mrope are not supported",
                        k->name);
        return;
    }
    if (f->rope_by_window && p && p == get(k->root, "rope_parameters") && !full && !window) {
        mt_keys_refuse(k, "rope_parameters", "must have full_attention or sliding_attention, all that transformers reads in this "
                       "architecture");
        return;
    }
    read_table(k, cfg, full ? full : window ? NULL : p, theta, head_dim[0], head_dim);
    if (f->q_growth && !k->rc) {
        struct mt_rope_config *q = &cfg->rope[cfg->n_ropes++];
        *q = cfg->rope[0];
        q->still = f->latent ? (size_t)(head_dim[1] - head_dim[0]) : 0;
        q->dims += q->still;
        q->growth = mt_json_number(p, "llama_4_scaling_beta", 0);
        if (!get(p, "llama_4_scaling_beta") || !get(p, "original_max_position_embeddings") || !isfinite(q->growth))
            mt_keys_refuse(k, "rope_parameters", "needs llama_4_scaling_beta and original_max_position_embeddings");
    }
    if (f->rope_by_window && !k->rc)
        read_table(k, cfg, window,
                   mt_json_number(k->root, "rope_local_base_freq", f->window_theta > 0 ? f->window_theta : theta),
                   head_dim[1], head_dim);
}

static void base_freqs(float *f, size_t half, double theta)
{
    for (size_t i = 0; i < half; i++)
        f[i] = 1.0f / (float)pow(theta, (double)(2 * i) / (double)(2 * half));
}

static void llama3_freqs(float *f, size_t half, const struct mt_rope_config *r)
{
    double orig = (double)r->original_max_pos;
    for (size_t i = 0; i < half; i++) {
        double wave = 2 * M_PI / (double)f[i];
        double s = (orig / wave - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
        if (wave > orig / r->low_freq_factor)
            f[i] = (float)((double)f[i] / r->factor);
        else if (wave >= orig / r->high_freq_factor)
            f[i] = (float)((1 - s) * (double)f[i] / r->factor + s * (double)f[i]);
    }
}

/* The dimension whose rotation makes `turns` full turns over the original context (Peng et al. 2023). */
static double yarn_dim(double turns, size_t rot, const struct mt_rope_config *r)
{
    return (double)rot * log((double)r->original_max_pos / (turns * 2 * M_PI)) / (2 * log(r->theta));
}

static void yarn_freqs(float *f, size_t half, const struct mt_rope_config *r)
{
    double low = yarn_dim(r->beta_fast, 2 * half, r), high = yarn_dim(r->beta_slow, 2 * half, r);
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = MT_MAX(low, 0.0);
    high = MT_MIN(high, (double)(2 * half - 1));
    if (low == high)
        high += 0.001;
    for (size_t i = 0; i < half; i++) {
        double ramp = MT_MIN(MT_MAX(((double)i - low) / (high - low), 0.0), 1.0);
        f[i] = (float)((double)f[i] / r->factor * ramp + (double)f[i] * (1 - ramp));
    }
}

static double yarn_scale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double mt_rope_score_factor(const struct mt_rope_config *r)
{
    double g = r->type == MT_ROPE_DEFAULT || !(r->mscale_all_dim > 0) ? 1 : yarn_scale(r->factor, r->mscale_all_dim);
    return g * g;
}

static double attention_scale(const struct mt_rope_config *r)
{
    if (r->type == MT_ROPE_YARN) {
        if (r->attention_factor >= 0)
            return r->attention_factor;
        if (r->mscale > 0 && r->mscale_all_dim > 0)
            return yarn_scale(r->factor, r->mscale) / yarn_scale(r->factor, r->mscale_all_dim);
        return yarn_scale(r->factor, 1);
    }
    if (r->type == MT_ROPE_LONGROPE) {
        if (r->attention_factor >= 0)
            return r->attention_factor;
        return r->factor <= 1 ? 1 : sqrt(1 + log(r->factor) / log((double)r->original_max_pos));
    }
    return 1;
}

static void make_freqs(float *f, size_t half, const struct mt_rope_config *r, size_t seq_len)
{
    double theta = r->theta, rot = (double)(2 * half);
    if (r->type == MT_ROPE_DYNAMIC && seq_len > (size_t)r->max_pos)
        theta *= pow(r->factor * (double)seq_len / (double)r->max_pos - (r->factor - 1),
                     rot / (rot - 2));
    base_freqs(f, half, theta);
    switch (r->type) {
    case MT_ROPE_LINEAR:
        for (size_t i = 0; i < half; i++)
            f[i] = (float)((double)f[i] / r->factor);
        break;
    case MT_ROPE_LLAMA3:
        llama3_freqs(f, half, r);
        break;
    case MT_ROPE_YARN:
        yarn_freqs(f, half, r);
        break;
    case MT_ROPE_LONGROPE: {
        const double *ext = seq_len > (size_t)r->original_max_pos ? r->long_factor : r->short_factor;
        for (size_t i = 0; i < half; i++)
            f[i] = 1.0f / (float)(ext[i] * pow(theta, (double)(2 * i) / rot));
        break;
    }
    case MT_ROPE_PROPORTIONAL:
        for (size_t i = 0; i < half; i++)
            f[i] = i < (size_t)(r->partial_rotary_factor * rot / 2) ? (float)((double)f[i] / r->factor) : 0;
        break;
    default:
        break;
    }
}

void mt_rope_tables(const struct mt_rope_config *r, size_t n_pos, size_t seq_len, float *cos_t, float *sin_t)
{
    float f[MT_ROPE_MAX_FACTORS];
    size_t half = r->dims / 2, still = r->still / 2;
    float scale = (float)attention_scale(r);
    make_freqs(f + still, half - still, r, seq_len);
    memset(f, 0, still * sizeof(*f));
    for (size_t p = 0; p < n_pos; p++) {
        double turns = r->growth != 0 ? floor((double)p / (double)r->original_max_pos) : 0;
        float by = (float)(1 + r->growth * log1p(turns));
        for (size_t i = 0; i < half; i++) {
            float angle = (float)p * f[i];
            float one = i < still ? 1 : scale;
            cos_t[p * half + i] = (float)cos((double)angle) * one * by;
            sin_t[p * half + i] = (float)sin((double)angle) * one * by;
        }
    }
}

/* As vLLM has it. llama3 and longrope are released with the length that they reach. */
int64_t mt_rope_reach(const struct mt_rope_config *r)
{
    bool yarn = r->type == MT_ROPE_YARN, grows = yarn || r->type == MT_ROPE_LINEAR || r->type == MT_ROPE_DYNAMIC;
    double scaled = grows ? r->factor * (double)(yarn ? r->original_max_pos : r->max_pos) : 0;
    return MT_MAX(r->max_pos, (int64_t)MT_MIN(scaled, 0x1p40));
}

enum mt_rope_lengths mt_rope_lengths(const struct mt_rope_config *r, size_t max_len, size_t *limit)
{
    bool dynamic = r->type == MT_ROPE_DYNAMIC, longrope = r->type == MT_ROPE_LONGROPE;
    size_t most = dynamic ? (size_t)r->max_pos : longrope ? (size_t)r->original_max_pos : max_len;
    *limit = MT_MIN(most, max_len);
    if (max_len <= most)
        return MT_ROPE_ONE_TABLE;
    return dynamic ? MT_ROPE_A_TABLE_EACH : MT_ROPE_TWO_TABLES;
}
