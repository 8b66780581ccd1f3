/* SPDX-License-Identifier: Apache-2.0 */
/* Losses of a policy in double: against formulas in NumPy (scripts/reference/policy_fixtures.py) and against differences of formulas. */
#include "objective/policy.h"
#include "test.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "data/rollouts.h"

static const struct mt_policy_keys automatic = {.clip_low = MT_AUTO, .clip_high = MT_AUTO, .beta = MT_AUTO, .tau_positive = 1,
                                                .tau_negative = 1.05, .mismatch_max = 3, .temperature = 1};

static double number(const cJSON *o, const char *name, double otherwise)
{
    const cJSON *v = mt_json_get(o, name);
    return v ? v->valuedouble : otherwise;
}

static double item(const cJSON *o, const char *name, int i)
{
    return cJSON_GetArrayItem(mt_json_get(o, name), i)->valuedouble;
}

static struct mt_policy_token token_of(const cJSON *row, int i)
{
    return (struct mt_policy_token){item(row, "lp", i), item(row, "old", i), item(row, "ref", i), item(row, "sampler", i),
                                    number(row, "advantage", 0)};
}

static struct mt_objective_keys keys_of(const struct mt_objective *o, const cJSON *keys, double max_len)
{
    struct mt_objective_keys k = {.policy = automatic};
    const cJSON *mismatch = mt_json_get(keys, "mismatch");
    k.policy.clip_low = number(keys, "low", 0.2);
    k.policy.clip_high = number(keys, "high", 0.2);
    k.policy.dual_clip = number(keys, "dual", 0);
    k.policy.beta = number(keys, "beta", MT_AUTO);
    k.policy.kl_weight = number(keys, "kl", 0);
    k.policy.kl = mt_json_get(keys, "k1") ? MT_KL_K1 : mt_json_get(keys, "ratio") ? MT_KL_K3_RATIO : MT_KL_K3;
    k.policy.max_tokens = (int64_t)max_len;
    k.policy.mismatch_max = number(keys, "max", 3);
    k.policy.beyond = number(keys, "drop", 0) > 0 ? MT_BEYOND_DROP : MT_BEYOND_CUT;
    if (mismatch)
        k.policy.mismatch = strcmp(mismatch->valuestring, "row") ? MT_MISMATCH_TOKEN : MT_MISMATCH_ROW;
    assert_int_equal(mt_policy_resolve(o, &k.policy, NULL), 0);
    return k;
}

static size_t trained(const cJSON *row)
{
    size_t n = 0;
    for (int i = 0; i < cJSON_GetArraySize(mt_json_get(row, "lp")); i++)
        n += item(row, "mask", i) > 0;
    return n;
}

TEST(losses_are_the_formulas)
{
    cJSON *root = NULL, *c, *row;
    assert_int_equal(mt_json_read_file(&root, FIXTURES "/policy.json", MT_ERR_INPUT, NULL), 0);
    const cJSON *rows = mt_json_get(root, "rollouts");
    cJSON_ArrayForEach(c, mt_json_get(root, "cases")) {
        const struct mt_objective *o = mt_objective_find(mt_json_get(c, "loss")->valuestring);
        struct mt_objective_keys keys = keys_of(o, mt_json_get(c, "keys"), number(root, "max_len", 0));
        struct mt_objective_step s = {.objective = o, .keys = &keys, .n_micro = 1, .n_items = (size_t)cJSON_GetArraySize(rows)};
        double value = 0;
        int r = 0;
        cJSON_ArrayForEach(row, rows) s.n_policy_tokens += trained(row);
        cJSON_ArrayForEach(row, rows) {
            const cJSON *slopes = cJSON_GetArrayItem(mt_json_get(c, "slopes"), r++);
            struct mt_policy_sums sums = {0};
            int n = cJSON_GetArraySize(slopes);
            for (int pass = 0; pass < 2; pass++)
                for (int i = 0; i < n; i++) {
                    struct mt_policy_token t = token_of(row, i);
                    if (!(item(row, "mask", i) > 0))
                        continue;
                    if (!pass) {
                        mt_policy_add(&sums, &t);
                        continue;
                    }
                    struct mt_policy_term of = mt_policy_term(o, &keys.policy, &sums, &t);
                    double by = mt_policy_divisor(&s, trained(row), s.n_policy_tokens);
                    assert_float_equal(of.slope / by, cJSON_GetArrayItem(slopes, i)->valuedouble, 1e-9);
                    value += of.loss / by;
                }
        }
        assert_float_equal(value, number(c, "value", NAN), 1e-9);
    }
    cJSON_Delete(root);
}

/* The formulas of the two losses without a reference in NumPy, of one token. held: lp where no gradient goes. */
static double formula(bool opd, const struct mt_policy_keys *k, const struct mt_policy_token *t, double held)
{
    double r = exp(t->lp - t->old), moved = exp(held) - exp(t->old), d = t->lp - t->old;
    if (opd)
        return moved < -k->clip_low ? 0 : -(t->ref - held) * r;
    bool masked = t->advantage > 0 ? moved > k->clip_high : moved < -k->clip_low;
    return (masked ? 0 : -r * t->advantage) + k->beta * d * d;
}

TEST(slopes_are_differences)
{
    int n_masked[2] = {0};
    for (int opd = 0; opd < 2; opd++) {
        const struct mt_objective *o = mt_objective_find(opd ? "opd" : "dppo");
        struct mt_policy_keys k = automatic;
        assert_int_equal(mt_policy_resolve(o, &k, NULL), 0);
        for (int i = 0; i < 400; i++) {
            struct mt_policy_token t = {-0.02 - 0.1 * (i % 20), -0.03 - 0.13 * (i / 20), -0.5, -1, i % 3 - 0.9}, up = t, down = t;
            struct mt_policy_sums sums = {0};
            mt_policy_add(&sums, &t);
            struct mt_policy_term got = mt_policy_term(o, &k, &sums, &t);
            up.lp += 1e-6;
            down.lp -= 1e-6;
            double slope = (formula(opd, &k, &up, t.lp) - formula(opd, &k, &down, t.lp)) / 2e-6;
            assert_float_equal(got.slope, slope, 1e-8);
            assert_float_equal(got.loss, formula(opd, &k, &t, t.lp), 1e-12);
            n_masked[opd] += got.clipped != 0;
        }
    }
    assert_true(n_masked[0] > 20 && n_masked[1] > 20);
}

/* Where old is lp, every ratio is exactly 1, and weights need no losses. */
TEST(one_update_a_batch_has_ratios_of_one)
{
    static const char *const names[] = {"grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "dro"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        struct mt_numerics n = {.objective = mt_objective_find(names[i]), .objective_keys.policy = automatic};
        struct mt_policy_keys *k = &n.objective_keys.policy;
        k->max_tokens = 8;
        assert_int_equal(mt_policy_resolve(n.objective, k, NULL), 0);
        assert_false(mt_objective_is_late(&n));
        for (int j = 0; j < 50; j++) {
            struct mt_policy_token t = {-0.37 * j, -0.37 * j, -1, -2, j % 2 ? 0.7 : -1.3}, none = {0, 0, -1, -2, t.advantage};
            struct mt_policy_sums sums = {0}, other = {0};
            mt_policy_add(&sums, &t);
            mt_policy_add(&other, &none);
            double slope = mt_policy_term(n.objective, k, &sums, &t).slope;
            assert_true(slope == mt_policy_term(n.objective, k, &other, &none).slope);
            assert_float_equal(slope, -t.advantage, 1e-15);
        }
        k->kl_weight = 0.1;
        assert_true(mt_objective_is_late(&n));
    }
}

TEST(far_ratios_have_no_slope_and_are_finite)
{
    struct mt_policy_keys k = automatic;
    struct mt_policy_token t = {-1, -900, -1, -1, -1};
    struct mt_policy_sums sums = {0};
    assert_int_equal(mt_policy_resolve(mt_objective_find("dapo"), &k, NULL), 0);
    mt_policy_add(&sums, &t);
    struct mt_policy_term got = mt_policy_term(mt_objective_find("dapo"), &k, &sums, &t);
    assert_true(isfinite(got.loss) && got.slope == 0);
}

TEST(advantages_are_relative_to_a_group)
{
    static const float reward[] = {1, 0, 0, 1, 0.5f, 0.2f, 3, 3};
    static const uint64_t group[] = {2, 4, 2, 4, 4, 4, 6, 6};
    struct mt_rollout out[MT_ARRAY_LEN(reward)];
    for (int scale = MT_SCALE_GROUP; scale <= MT_SCALE_NONE; scale++)
        for (int truncated = 0; truncated < 3; truncated++) {
            struct mt_rollout_sample s[MT_ARRAY_LEN(reward)];
            struct mt_policy_keys k = {.scale = scale, .truncated = truncated};
            uint32_t alone;
            double all = 0, n = 0;
            for (uint32_t i = 0; i < MT_ARRAY_LEN(reward); i++) {
                s[i] = (struct mt_rollout_sample){group[i], 0, i, reward[i], i == 5};
                bool in = i != 5 || truncated != MT_TRUNCATED_DROP;
                all += in ? (double)reward[i] : 0;
                n += in;
            }
            double mean = all / n, squares = 0;
            for (int i = 0; i < 8; i++)
                squares += i == 5 && truncated == MT_TRUNCATED_DROP ? 0 : ((double)reward[i] - mean) * ((double)reward[i] - mean);
            assert_int_equal(mt_rollouts_weigh(out, s, MT_ARRAY_LEN(reward), &k, &alone), 0);
            double by = scale == MT_SCALE_GROUP ? sqrt(0.5) + 1e-4 : scale == MT_SCALE_BATCH ? sqrt(squares / (n - 1)) + 1e-4 : 1;
            assert_float_equal(out[0].advantage, 0.5 / by, 1e-12);
            assert_float_equal(out[2].advantage, -0.5 / by, 1e-12);
            assert_true(out[6].advantage == 0 && out[6].deviation == 0);
            assert_int_equal(out[5].left_out, truncated != MT_TRUNCATED_KEEP);
            double four = truncated == MT_TRUNCATED_DROP ? 0.5 : (double)(0 + 1 + 0.5f + 0.2f) / 4;
            assert_float_equal(out[4].advantage * (scale == MT_SCALE_NONE ? 1 : 0), scale == MT_SCALE_NONE ? 0.5 - four : 0, 1e-7);
        }
    struct mt_rollout_sample lone[] = {{2, 0, 0, 1, false}, {2, 0, 1, 0, false}, {2, 1, 2, 1, false}};
    uint32_t alone = 9; /* files have groups of their own */
    assert_int_equal(mt_rollouts_weigh(out, lone, 3, &automatic, &alone), -EINVAL);
    assert_int_equal(alone, 2);
}
