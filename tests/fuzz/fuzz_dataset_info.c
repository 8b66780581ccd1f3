/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a dataset_info.json beside a file and a folder; one of its entries is asked for, then all. */
#include "data/sources.h"
#include "fuzz.h"

static void resolve(const char *what)
{
    struct mt_source_list list = {0};
    char path[300];
    char *item = path;
    struct mt_err err = {0};
    snprintf(path, sizeof(path), "%s/dataset_info.json%s", fuzz_folder(), what);
    struct mt_cfg_list files = {&item, 1};
    int rc = mt_sources_resolve(&list, &files, "data.train", &err);
    fuzz_assert(!rc || err.msg[0]);
    for (size_t i = 0; i < list.n && !rc; i++) {
        fuzz_assert(list.items[i].path && list.items[i].entry && list.items[i].weight > 0);
        mt_source_needs_helper(&list.items[i], MT_FORMAT_AUTO, "bytes");
    }
    mt_sources_finish(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    if (!made)
        fuzz_put("a.json", "[]", 2), fuzz_put("d/b.jsonl", "", 0);
    made = true;
    fuzz_put("dataset_info.json", data, size);
    resolve("#a");
    resolve("");
    return 0;
}
