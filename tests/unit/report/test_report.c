/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "report/report.h"
#include "test.h"

static int page_of(struct mt_str *page, const char *text, struct mt_err *err)
{
    char made[] = "/tmp/mt-report-XXXXXX", path[64];
    const char *dir = mkdtemp(made);
    assert_non_null(dir);
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    assert_int_equal(mt_write_file(path, text, strlen(text), err), 0);
    int rc = mt_report_page(page, &dir, 1, "<title>", 0, err);
    unlink(path);
    rmdir(dir);
    return rc;
}

TEST(records_of_a_run_are_told_apart)
{
    MT_STR_FREED struct mt_str page = {0};
    const char *text = "{\"step\": 1, \"loss\": 2.5, \"lr\": null}\n"
                       "{\"step\": 1, \"layer\": 0, \"expert_balance\": 1.5, \"expert_entropy\": 0.9}\n"
                       "{\"step\": 1, \"layer\": 1, \"expert_balance\": 2.5, \"expert_entropy\": 0.5}\n"
                       "{\"step\": 2, \"loss\": 2.25, \"lr\": 0.5, \"rewards/margins\": 0.25}\n"
                       "{\"step\": 2, \"eval_loss\": 2.375, \"eval_held_loss\": 2, \"eval_held_tokens\": 9, "
                       "\"eval_nll_loss\": 3}\n"
                       "{\"step\": 3, \"loss\": 1"; /* the run was killed here */
    static const char *const held[] = {
        "\"steps\":{\"step\":[1,2],\"loss\":[2.5,2.25],\"lr\":[null,0.5],\"rewards/margins\":[null,0.25]}",
        "\"evals\":{\"step\":[2],\"eval_loss\":[2.375],\"eval_held_loss\":[2],",
        "\"expert_balance\":[2],\"expert_balance least\":[1.5],\"expert_balance most\":[2.5]",
        "\"title\":\"\\u003ctitle>\""};
    MUST(page_of, &page, text);
    for (size_t i = 0; i < sizeof(held) / sizeof(*held); i++)
        assert_non_null(strstr(page.p, held[i]));
}

TEST(a_folder_of_neither_is_named)
{
    MT_STR_FREED struct mt_str page = {0};
    struct mt_err err = {0};
    const char *dir = "/tmp/mt-report-that-is-not-there";
    assert_true(mt_report_page(&page, &dir, 1, "", 0, &err) < 0);
    assert_non_null(strstr(err.msg, dir));
}
