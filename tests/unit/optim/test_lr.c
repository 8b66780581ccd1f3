/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates against those of transformers.optimization (lr.json, by scripts/reference/fixtures.py). */
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "optim/lr.h"
#include "test.h"

static enum mt_lr_schedule schedule_of(const char *name)
{
    static const char *const names[] = {"constant", "linear", "cosine", "wsd"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(names[i], name))
            return (enum mt_lr_schedule)i;
    fail_msg("no schedule is called %s", name);
    return MT_LR_CONSTANT;
}

TEST(rates_are_those_of_transformers)
{
    MT_JSON_FREED cJSON *root = NULL;
    MUST(mt_json_read_file, &root, FIXTURES "/lr.json", MT_ERR_INPUT);
    int n = 0;
    for (const cJSON *c = mt_json_get(root, "cases")->child; c; c = c->next, n++) {
        const char *name = mt_json_get(c, "schedule")->valuestring;
        uint64_t warmup = (uint64_t)mt_json_get(c, "warmup")->valueint, k = 0;
        uint64_t total = (uint64_t)mt_json_get(c, "total")->valueint;
        double ratio = mt_json_get(c, "min_ratio")->valuedouble;
        struct mt_lr lr = {schedule_of(name), 2e-5, ratio, warmup, total / 10, total};
        for (const cJSON *r = mt_json_get(c, "rates")->child; r; r = r->next, k++) {
            double got = mt_lr_at(&lr, k);
            if (!(fabs(got - 2e-5 * r->valuedouble) <= 2e-5 * 1e-12))
                fail_msg("%s, warm-up %d of %d, least %g: rate %d is %.17g, transformers has %.17g", name, (int)warmup,
                         (int)total, ratio, (int)k, got, 2e-5 * r->valuedouble);
        }
        assert_int_equal(k, total);
    }
    assert_true(n >= 18);
}

TEST(rates_stay_between_zero_and_the_peak)
{
    for (int s = MT_LR_CONSTANT; s <= MT_LR_WSD; s++)
        for (uint64_t total = 1; total < 40; total++)
            for (uint64_t warmup = 0; warmup < 45; warmup += 3)
                for (uint64_t k = 0; k < 50; k++) {
                    struct mt_lr lr = {(enum mt_lr_schedule)s, 1, 0.1, warmup, k % 7, total};
                    double r = mt_lr_at(&lr, k);
                    assert_true(r >= 0 && r <= 1);
                    assert_true(k < warmup || r >= 0.1 - 1e-15);
                }
}

TEST(the_clip_factor_is_that_of_torch)
{
    assert_true(mt_clip_factor(5, 0) == 1);
    assert_true(mt_clip_factor(0.5, 1) == 1);
    assert_true(mt_clip_factor(0, 1) == 1);
    assert_true(mt_clip_factor(4, 1) == (float)(1 / (4 + 1e-6)));
    assert_true(mt_clip_factor(1, 1) == (float)(1 / (1 + 1e-6))); /* as torch has it: a hair below one */
    assert_true(mt_clip_factor(1e300, 1) >= 0);
}
