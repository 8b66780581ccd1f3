/* SPDX-License-Identifier: Apache-2.0 */
/* Where the module of cuDNN and CUDA's libraries are looked for, and which error is reported where they cannot be loaded:
 * this program runs again in folders that look like a build's. meson.build makes the installed module a text file. The
 * argument is a library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused.h"
#include "libraries.h"
#include "test.h"

static const char *library;

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

TEST(the_module_of_a_build_is_used_wherever_the_build_is)
{
    char why[300];
    for (int i = 0; i < 2; i++) {
        why_in(i ? "tests/device" : "cli", true, why, sizeof(why));
        if (!strstr(why, "/cuda/megatrain-cudnn.so: ") || !strstr(why, "/tmp/fused-module-"))
            fail_msg("it said: %s", why);
    }
}

TEST(the_reason_is_that_of_the_first_place)
{
    char why[300];
    why_in("cli", false, why, sizeof(why));
    if (!strstr(why, "test_fused_module.c") || strstr(why, "/nowhere"))
        fail_msg("it said: %s", why);
}

/* What a copy of this program in `root`/`folder` says of a library that lies in `root`/`place`. */
static void found_in(const char *folder, const char *place, const char *env, char *said, int len)
{
    char root[] = "/tmp/cuda-library-XXXXXX", command[1000];
    assert_non_null(mkdtemp(root));
    snprintf(command, sizeof(command),
             "mkdir -p %s/%s %s/%s && cp \"$(readlink /proc/$PPID/exe)\" %s/%s/t && cp %s %s/%s/libof.so.1 && "
             "env -u VIRTUAL_ENV -u CONDA_PREFIX %s%s%s %s/%s/t library; rm -r %s",
             root, folder, root, place, root, folder, library, root, place, env, *env ? "=" : "", *env ? root : "", root, folder,
             root);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    if (!fgets(said, len, f))
        said[0] = 0;
    assert_int_equal(pclose(f), 0);
}

TEST(libraries_are_found_in_python_packages)
{
    static const char *const cases[][3] = {
        {"build/cli", ".venv-cuda/nvidia/cu13/lib", ""},               /* what scripts/setup installs */
        {"bin", "lib/python3.13/site-packages/nvidia/cu13/lib", ""},   /* a wheel beside NVIDIA's */
        {"bin", "lib/python3.11/site-packages/nvidia/cublas/lib", "VIRTUAL_ENV"},
        {"bin", "lib/python3.12/site-packages/nvidia/cu13/lib", "CONDA_PREFIX"},
    };
    char said[700];
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        found_in(cases[i][0], cases[i][1], cases[i][2], said, sizeof(said));
        if (strcmp(said, "loaded\n"))
            fail_msg("case %zu: %s", i, said);
    }
    found_in("build/cli", "elsewhere", "VIRTUAL_ENV", said, sizeof(said));
    if (!strstr(said, "libof.so.1") || !strstr(said, "/the/toolkit") || !strstr(said, ".venv-cuda") ||
        !strstr(said, "and of /tmp/cuda-library-"))
        fail_msg("it said: %s", said);
}

int main(int argc, char **argv)
{
    char why[700] = "";
    library = argv[1];
    if (argc < 2)
        return 2;
    if (!strcmp(library, "library"))
        return puts(mt_cuda_library("libof.so.1", "/the/toolkit", why, sizeof(why)) ? "loaded" : why) < 0;
    if (strcmp(library, "why"))
        return test_run();
    printf("%s\n", mt_cuda_fused_engine(why, 256) ? "loaded" : why);
    return 0;
}
