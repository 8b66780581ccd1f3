/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/ecc.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"

static bool read_count(const char *dir, const char *controller, const char *name, uint64_t *sum)
{
    unsigned long long n;
    const char *path = MT_PATH("%s/%s/%s", dir, controller, name);
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    bool read = f && fscanf(f, "%llu", &n) == 1;
    *sum += read ? n : 0;
    return read;
}

void mt_hw_ecc(struct mt_ecc *out, const char *root)
{
    *out = (struct mt_ecc){.known = false};
    const char *dir = MT_PATH("%s/sys/devices/system/edac/mc", root);
    MT_DIR_CLOSED DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strncmp(e->d_name, "mc", 2) || e->d_name[2] < '0' || e->d_name[2] > '9')
            continue;
        out->known |= read_count(dir, e->d_name, "ue_count", &out->uncorrected);
        out->known |= read_count(dir, e->d_name, "ce_count", &out->corrected);
    }
}
