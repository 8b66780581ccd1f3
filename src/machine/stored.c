/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/stored.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "base/installed.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "hw/hw.h"

int mt_machine_find(char *buf, size_t len, const char *name, struct mt_err *err)
{
    char folder[3200];
    struct stat st;
    bool stored = mt_installed_dir(folder, sizeof(folder), "machines"); /* else there is none */
    if (stored && !strchr(name, '/')) {
        snprintf(buf, len, "%s/%.200s.ini", folder, name);
        if (mt_path_exists(buf))
            return 0;
    }
    snprintf(buf, len, "%s", name);
    if (!stat(buf, &st) && S_ISREG(st.st_mode))
        return 0;
    MT_STR_FREED struct mt_str names = {0};
    mt_installed_names(&names, "machines", ".ini", NULL);
    return stored ? mt_fail(err, MT_ERR_USAGE, -ENOENT, "no machine \"%s\": it is neither a file nor one of %s, which are in %s; "
                            "of another one, write such a file", name, names.p ? names.p : "none", folder)
                  : mt_fail(err, MT_ERR_USAGE, -ENOENT,
                          "no machine \"%s\": it is not a file, and there is no folder configs/machines near the program",
                            name);
}

static int is_ini(const struct dirent *e)
{
    return mt_ends_with(e->d_name, ".ini");
}

/* Replaces the stored machine's cores and memory by this host's. */
static int move_here(struct mt_machine *m, const char *path, int threads, struct mt_err *err)
{
    struct mt_hw_memory mem;
    int rc = mt_hw_memory(&mem, "", err);
    if (rc)
        return rc;
    double gib = (double)MT_MIN(mem.total, mem.cgroup_free) / (double)(1 << 30);
    mt_machine_rate(m, MT_RATE_CORES, threads, "of this machine");
    mt_machine_rate(m, MT_RATE_HOST_GIB, gib, "of this machine");
    return mt_machine_complete(m, path, err);
}

/* Loads the first stored machine, by file name, whose `gpu` is the product; -ENOENT: none. */
static int load_stored(struct mt_machine *out, const char *product, int threads, struct mt_err *err)
{
    char folder[3200];
    MT_FREED struct dirent **files = NULL;
    bool any = product[0] && mt_installed_dir(folder, sizeof(folder), "machines");
    int n = any ? scandir(folder, &files, is_ini, alphasort) : 0, rc = -ENOENT;
    for (int i = 0; i < n; i++) {
        MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
        MT_FREED struct dirent *file = files[i];
        const char *path = MT_PATH("%s/%.255s", folder, file->d_name);
        if (rc != -ENOENT)
            continue;
        rc = mt_machine_parse(&m, path, err) ?: strcmp(m.gpu, product) ? -ENOENT : move_here(&m, path, threads, err);
        if (!rc)
            *out = MT_GIVE(m);
    }
    return rc;
}

int mt_machine_load(struct mt_machine *out, const struct mt_device_limits *device, int threads, struct mt_err *err)
{
    struct mt_err why = {0};
    int cached = mt_machine_load_cached(out, device->kind, device->name, threads, &why), rc = cached;
    if (cached == -ENOENT || cached == -ESTALE)
        rc = load_stored(out, device->product, threads, err);
    if (rc == -ENOENT || rc == cached) {
        if (rc && err)
            *err = why;
        return cached;
    }
    if (!rc && cached == -ESTALE)
        mt_warn("%s", why.msg);
    return rc;
}
