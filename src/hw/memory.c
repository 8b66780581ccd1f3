/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "base/mem.h"
#include "hw/hw.h"

static FILE *open_under(const char *root, const char *path)
{
    char full[4096];
    if (snprintf(full, sizeof(full), "%s%s", root, path) >= (int)sizeof(full))
        return NULL;
    return fopen(full, "re");
}

/* "Name:  123 kB" of a /proc file, in bytes; 0: no such line. */
static uint64_t proc_field(const char *root, const char *file, const char *name)
{
    char line[256];
    uint64_t kb = 0;
    FILE *f = open_under(root, file);
    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ':') {
            kb = strtoull(line + strlen(name) + 1, NULL, 10);
            break;
        }
    if (f)
        fclose(f);
    return kb * 1024;
}

/* A file that holds one number; UINT64_MAX for "max", or if the file is missing. */
static uint64_t number_in(const char *root, const char *dir, const char *name)
{
    char path[4096], text[64] = "";
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = open_under(root, path);
    char *got = f ? fgets(text, sizeof(text), f) : NULL;
    if (f)
        fclose(f);
    if (!got || text[0] < '0' || text[0] > '9')
        return UINT64_MAX;
    uint64_t v = strtoull(text, NULL, 10);
    return v >= (UINT64_C(1) << 62) ? UINT64_MAX : v; /* how cgroup version 1 says "no limit" */
}

/* Page cache that counts as the group's usage, though the kernel drops it before it kills a process. After a build or a
 * download it is most of the usage. */
static uint64_t cached_in(const char *root, const char *dir)
{
    static const char *const names[] = {"active_file", "inactive_file", "total_active_file",
                                        "total_inactive_file"};
    char path[4200], line[256], name[64];
    uint64_t value, sum[2] = {0, 0}; /* of version 2; of version 1, with groups below */
    snprintf(path, sizeof(path), "%s/memory.stat", dir);
    FILE *f = open_under(root, path);
    while (f && fgets(line, sizeof(line), f))
        for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
            if (sscanf(line, "%63s %" SCNu64, name, &value) == 2 && !strcmp(name, names[i]))
                sum[i / 2] += value;
    if (f)
        fclose(f);
    return sum[1] ? sum[1] : sum[0];
}

static uint64_t free_under(uint64_t limit, uint64_t used)
{
    if (limit == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    return limit > used ? limit - used : 0;
}

/* The least free memory of the group and its parents, up to the root. */
static uint64_t walk_up(const char *root, const char *mount, char *group, const char *limit,
                        const char *usage)
{
    uint64_t least = UINT64_MAX;
    char dir[4096];
    for (;;) {
        snprintf(dir, sizeof(dir), "%s%s", mount, group);
        uint64_t used = number_in(root, dir, usage), cached = cached_in(root, dir);
        used = used == UINT64_MAX ? used : used - MT_MIN(used, cached);
        least = MT_MIN(least, free_under(number_in(root, dir, limit), used));
        char *slash = strrchr(group, '/');
        if (!slash || !group[0] || !strcmp(group, "/"))
            return least;
        *slash = 0;
    }
}

static uint64_t cgroup_free(const char *root)
{
    char line[3000];
    uint64_t least = UINT64_MAX;
    FILE *f = open_under(root, "/proc/self/cgroup");
    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        uint64_t here = UINT64_MAX;
        if (!names[1])
            here = walk_up(root, "/sys/fs/cgroup", group, "memory.max", "memory.current");
        else if (strstr(names + 1, "memory"))
            here = walk_up(root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                           "memory.usage_in_bytes");
        least = MT_MIN(least, here);
    }
    if (f)
        fclose(f);
    return least;
}

static uint64_t limit_of(int which)
{
    struct rlimit r;
    return getrlimit(which, &r) || r.rlim_cur == RLIM_INFINITY ? UINT64_MAX : r.rlim_cur;
}

int mt_hw_memory(struct mt_hw_memory *out, const char *root, struct mt_err *err)
{
    *out = (struct mt_hw_memory){
        .total = proc_field(root, "/proc/meminfo", "MemTotal"),
        .available = proc_field(root, "/proc/meminfo", "MemAvailable"),
        .cgroup_free = cgroup_free(root),
        .address_space = free_under(limit_of(RLIMIT_AS),
                                    proc_field(root, "/proc/self/status", "VmSize")),
        .memlock = limit_of(RLIMIT_MEMLOCK),
    };
    if (!out->available)
        return mt_fail(err, MT_ERR_RUNTIME, -ENODATA, "cannot read MemAvailable of /proc/meminfo");
    return 0;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool sanitized = true;
#else
static const bool sanitized = false;
#endif

int mt_hw_resident(uint64_t *bytes, struct mt_err *err)
{
    const char *fixed = getenv("MEGATRAIN_RESIDENT");
    *bytes = fixed ? strtoull(fixed, NULL, 10) : 0;
    if (fixed || sanitized)
        return 0;
    *bytes = proc_field("", "/proc/self/smaps_rollup", "Rss"); /* exact; /proc/self/status may lag */
    if (!*bytes)
        *bytes = proc_field("", "/proc/self/status", "VmRSS");
    return *bytes ? 0 : mt_fail(err, MT_ERR_RUNTIME, -ENODATA, "cannot read VmRSS of /proc/self/status");
}

/* The file system that holds the path, or would hold it once it exists. */
static int file_system_of(const char *path, struct statvfs *st)
{
    char p[4096];
    snprintf(p, sizeof(p), "%s", path);
    while (statvfs(p, st)) {
        char *slash = strrchr(p, '/');
        if (errno != ENOENT)
            return -errno;
        if (!slash)
            snprintf(p, sizeof(p), ".");
        else if (slash == p)
            slash[1] = 0;
        else
            *slash = 0;
    }
    return 0;
}

int mt_hw_disk_free(const char *path, uint64_t *bytes, struct mt_err *err)
{
    struct statvfs st;
    int rc = file_system_of(path, &st);
    if (rc)
        return mt_fail(err, MT_ERR_RUNTIME, rc, "cannot read the free space of %s: %s", path, strerror(-rc));
    *bytes = (uint64_t)st.f_bavail * st.f_frsize;
    return 0;
}

bool mt_hw_same_file_system(const char *a, const char *b)
{
    struct statvfs x, y;
    return !file_system_of(a, &x) && !file_system_of(b, &y) && x.f_fsid == y.f_fsid;
}
