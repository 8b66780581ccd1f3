/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "hw/ecc.h"
#include "test.h"

static void put(const char *root, const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof(full), "%s/sys/devices/system/edac/mc/%s", root, path);
    char *slash = strrchr(full, '/');
    *slash = 0;
    assert_int_equal(mt_mkdir_p(full, NULL), 0);
    *slash = '/';
    assert_int_equal(mt_write_file(full, text, strlen(text), NULL), 0);
}

TEST(errors_of_all_controllers_are_counted)
{
    struct mt_ecc ecc;
    char root[] = "/tmp/mt-ecc-XXXXXX";
    assert_non_null(mkdtemp(root));
    mt_hw_ecc(&ecc, root);
    assert_false(ecc.known || ecc.corrected || ecc.uncorrected);
    put(root, "mc0/ce_count", "3\n");
    put(root, "mc0/ue_count", "0\n");
    put(root, "mc1/ce_count", "4\n");
    put(root, "mc1/ue_count", "1\n");
    put(root, "power/ce_count", "100\n");
    mt_hw_ecc(&ecc, root);
    assert_true(ecc.known);
    assert_int_equal(ecc.corrected, 7);
    assert_int_equal(ecc.uncorrected, 1);
    assert_int_equal(mt_remove_tree(root, NULL), 0);
}
