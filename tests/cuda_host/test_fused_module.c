/* SPDX-License-Identifier: Apache-2.0 */
/* Where the module of cuDNN is looked for, and which error is reported where it cannot be loaded: this program runs
 * again in folders that look like a build's. meson.build makes the installed module a text file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fused.h"

/* Why the module cannot be loaded by a program in `folder` of a build folder, with a module that is a text file, or
 * without one. */
static void why_in(const char *folder, bool module, char *why, int len)
{
    char root[] = "/tmp/fused-module-XXXXXX", command[600];
    assert_non_null(mkdtemp(root));
    snprintf(command, sizeof(command),
             "mkdir -p %s/cuda %s/%s && cp \"$(readlink /proc/$PPID/exe)\" %s/%s/t && if [ %d = 1 ]; then echo text > "
             "%s/cuda/megatrain-cudnn.so; fi; %s/%s/t why; rm -r %s",
             root, root, folder, root, folder, module, root, root, folder, root);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    if (!fgets(why, len, f))
        why[0] = 0;
    assert_int_equal(pclose(f), 0);
}

static void the_module_of_a_build_is_used_wherever_the_build_is(void **state)
{
    char why[300];
    (void)state;
    for (int i = 0; i < 2; i++) {
        why_in(i ? "tests/device" : "cli", true, why, sizeof(why));
        if (!strstr(why, "/cuda/megatrain-cudnn.so: ") || !strstr(why, "/tmp/fused-module-"))
            fail_msg("it said: %s", why);
    }
}

static void the_reason_is_that_of_the_first_place(void **state)
{
    char why[300];
    (void)state;
    why_in("cli", false, why, sizeof(why));
    if (!strstr(why, "test_fused_module.c") || strstr(why, "/nowhere"))
        fail_msg("it said: %s", why);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_module_of_a_build_is_used_wherever_the_build_is),
                                       cmocka_unit_test(the_reason_is_that_of_the_first_place)};
    char why[256] = "";
    if (argc == 1)
        return cmocka_run_group_tests(tests, NULL, NULL);
    printf("%s\n", mt_cuda_fused_engine(why, sizeof(why)) ? "loaded" : why);
    return strcmp(argv[1], "why");
}
