/* SPDX-License-Identifier: Apache-2.0 */
/* The first byte chooses which of a folder's files the input is: of a run with one file of others', or of a sweep. */
#include "fuzz.h"
#include "report/report.h"

static const char METRICS[] = "{\"step\":1,\"loss\":2,\"lr\":1,\"grad_norm\":1,\"tok_s\":9}\n{\"step\":2,\"loss\":1}\n";
static const char *const names[] = {"sweep.json", "run.json", "trace.json", "metrics.jsonl"};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
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
    int rc = mt_report_page(&page, &dir, 1, "<title>", 0, &err);
    fuzz_assert(!rc || err.msg[0]);
    const char *element = rc ? NULL : strstr(page.p, "id=\"data\">"); /* ends where its element does */
    static const char next[] = "</script>\n<script id=\"draw\">";
    fuzz_assert(rc || (element && !strncmp(strchr(element, '<'), next, strlen(next))));
    mt_str_finish(&page);
    return 0;
}
