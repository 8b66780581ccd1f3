/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "hw/gpu.h"
#include "test.h"

static const char *shown_with(const char *file)
{
    char root[] = "/tmp/mt-gpu-XXXXXX", path[512];
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof(path), "%s%s", root, file);
    *strrchr(path, '/') = 0;
    assert_int_equal(mt_mkdir_p(path, NULL), 0);
    snprintf(path, sizeof(path), "%s%s", root, file);
    assert_int_equal(mt_write_file(path, "", 0, NULL), 0);
    const char *by = mt_hw_gpu_shown_by(root);
    assert_int_equal(mt_remove_tree(root, NULL), 0);
    return by;
}

TEST(a_gpu_is_shown_by_the_kernels_driver_and_in_wsl)
{
    assert_string_equal(shown_with("/proc/driver/nvidia/gpus/0000:01:00.0/information"), "/proc/driver/nvidia");
    assert_string_equal(shown_with("/usr/lib/wsl/lib/libcuda.so.1"), "/usr/lib/wsl/lib");
    assert_null(shown_with("/proc/driver/nvidia/version")); /* a driver without a GPU */
    assert_null(shown_with("/usr/lib/wsl/lib/libd3d12.so"));  /* one of another maker */
}

/* PATH has a nvidia-smi of ours alone; this machine may have a GPU of its own. */
TEST(a_gpu_is_shown_by_nvidia_smi)
{
    char dir[] = "/tmp/mt-smi-XXXXXX", path[64], paths[4096];
    static const char lists[] = "#!/bin/sh\necho 8.9\n",
                      fails[] = "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n";
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/nvidia-smi", dir);
    snprintf(paths, sizeof(paths), "%s:/usr/bin:/bin", dir);
    assert_int_equal(setenv("PATH", paths, 1), 0);
    assert_int_equal(mt_write_file(path, fails, strlen(fails), NULL), 0);
    assert_int_equal(chmod(path, 0755), 0);
    const char *before = mt_hw_gpu_shown_by("");
    assert_int_equal(mt_write_file(path, lists, strlen(lists), NULL), 0);
    assert_int_equal(chmod(path, 0755), 0);
    assert_string_equal(mt_hw_gpu_shown_by(""), before ? before : "nvidia-smi");
    assert_int_equal(mt_remove_tree(dir, NULL), 0);
}
