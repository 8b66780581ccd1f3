/* SPDX-License-Identifier: Apache-2.0 */
/* The first byte chooses which of a folder's files the input is: of a run with one file of others', or of a sweep. */
#include "fuzz.h"
#include "report/report.h"

static const char METRICS[] = "{\"step\":1,\"loss\":2,\"lr\":1,\"grad_norm\":1,\"tok_s\":9}\n{\"step\":2,\"loss\":1}\n";
static const char *const names[] = {"sweep.json", "run.json", "trace.json", "metrics.jsonl"};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_report r = {0};
    struct mt_str page = {0};
    struct mt_err err = {0};
    const char *dir = fuzz_folder();
    char path[300];
    if (!size)
        return 0;
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        unlink(path);
    }
    size_t which = data[0] % 4;
    if (which)
        fuzz_put("metrics.jsonl", METRICS, strlen(METRICS));
    fuzz_put(names[which], data + 1, size - 1);
    int rc = mt_report_make(&r, &dir, 1, &err);
    fuzz_assert(!rc || err.msg[0]);
    if (!rc)
        mt_report_html(&page, &r, "<title>");
    fuzz_assert(rc || (page.p && !strstr(page.p, "<script") && !strstr(page.p, "<img")));
    mt_str_finish(&page);
    mt_report_finish(&r);
    return 0;
}
