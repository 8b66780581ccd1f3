/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "machine/machine.h"

static bool load(struct mt_machine *m, const void *data, size_t size)
{
    struct mt_err err = {0};
    int rc = mt_machine_parse(m, fuzz_file(data, size), &err);
    fuzz_assert(!rc || err.msg[0]);
    return !rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct mt_machine m, again;
    struct mt_str once = {0}, twice = {0};
    struct mt_err err = {0};
    if (!load(&m, data, size)) {
        mt_machine_finish(&m);
        return 0;
    }
    mt_machine_print(&m, &once);
    if (!load(&again, once.p, once.len))
        fprintf(stderr, "%s", once.p);
    mt_machine_print(&again, &twice);
    fuzz_assert(once.len == twice.len && !memcmp(once.p, twice.p, once.len));
    if (!mt_machine_complete(&m, "machine.ini", &err))
        mt_machine_update_ns(&m, 4);
    mt_machine_finish(&m);
    mt_machine_finish(&again);
    mt_str_finish(&once);
    mt_str_finish(&twice);
    return 0;
}
