/* SPDX-License-Identifier: Apache-2.0 */
#include "config/config.h"
#include "fuzz.h"

static struct mt_config *load(const char *path, struct mt_err *err)
{
    struct mt_config *c = NULL;
    int rc = mt_config_load(&c, path, NULL, 0, err);
    fuzz_assert(!rc == (c != NULL) && (!rc || err->msg[0]));
    return c;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_err err = {0};
    if (memmem(data, size, "include", 7)) /* of itself, many times: only slow */
        return 0;
    struct mt_config *c = load(fuzz_file(data, size), &err);
    if (!c)
        return 0;
    struct mt_str once = {0}, again = {0};
    mt_config_print(c, false, &once);
    mt_config_destroy(&c);
    c = load(fuzz_file((const uint8_t *)once.p, once.len), &err);
    if (!c)
        fprintf(stderr, "%s\n%s", err.msg, once.p);
    fuzz_assert(c); /* what was read can be written and read again */
    mt_config_print(c, false, &again);
    fuzz_assert(once.len == again.len && !memcmp(once.p, again.p, once.len));
    mt_config_destroy(&c);
    mt_str_finish(&once);
    mt_str_finish(&again);
    return 0;
}
