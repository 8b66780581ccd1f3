/* SPDX-License-Identifier: Apache-2.0 */
/* The first NUL ends the configuration; what follows is a file beside it that it may include, other.ini. */
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
    const uint8_t *rest;
    size_t n_rest, n = fuzz_split(data, size, &rest, &n_rest);
    fuzz_put("other.ini", rest, n_rest);
    struct mt_config *c = load(fuzz_put("first.ini", data, n), &err);
    if (!c)
        return 0;
    struct mt_str once = {0}, again = {0};
    mt_config_print(c, false, &once);
    mt_config_destroy(&c);
    c = load(fuzz_put("again.ini", once.p, once.len), &err);
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
