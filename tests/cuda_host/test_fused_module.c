/* SPDX-License-Identifier: Apache-2.0 */
/* Which error is reported where the module of cuDNN cannot be loaded: meson.build makes the installed one a text file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fused.h"

static void the_reason_is_that_of_the_first_place(void **state)
{
    char why[256] = "";
    (void)state;
    assert_null(mt_cuda_fused_engine(why, sizeof(why)));
    if (!strstr(why, "test_fused_module.c") || strstr(why, "/nowhere"))
        fail_msg("it said: %s", why);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_reason_is_that_of_the_first_place)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
