/* SPDX-License-Identifier: Apache-2.0 */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "base/cgroup.h"
#include "base/fs.h"
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
    MT_STREAM_CLOSED FILE *f = open_under(root, file);
    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ':') {
            kb = strtoull(line + strlen(name) + 1, NULL, 10);
            break;
        }
    return kb * 1024;
}

/* The NUMA node that a GPU's memory is, or -1. NVIDIA's driver says so in a file for each GPU. */
static int node_of_gpu(const char *numa_status)
{
    int node = -1;
    char status[32] = "";
    MT_STREAM_CLOSED FILE *f = fopen(numa_status, "re");
    bool read = f && fscanf(f, " Node: %d Status: %31s", &node, status) == 2;
    return read && !strcmp(status, "online") ? node : -1;
}

/* GPUs that share addresses with the processor (GH200) have their memory in MemTotal and MemAvailable, too. */
static void leave_out_gpus(struct mt_hw_memory *m, const char *root)
{
    glob_t found;
    if (glob(MT_PATH("%s/proc/driver/nvidia/gpus/*/numa_status", root), 0, NULL, &found))
        return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        int node = node_of_gpu(found.gl_pathv[i]);
        const char *info = MT_PATH("/sys/devices/system/node/node%d/meminfo", node);
        uint64_t unused = proc_field(root, info, MT_PATH("Node %d MemFree", node)) +
                          proc_field(root, info, MT_PATH("Node %d FilePages", node));
        m->total -= MT_MIN(m->total, proc_field(root, info, MT_PATH("Node %d MemTotal", node)));
        m->available -= MT_MIN(m->available, unused);
    }
    globfree(&found);
}

static uint64_t free_under(uint64_t limit, uint64_t used)
{
    if (limit == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    return limit > used ? limit - used : 0;
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
        .cgroup_free = mt_cgroup_memory_free(root),
        .address_space = free_under(limit_of(RLIMIT_AS),
                                    proc_field(root, "/proc/self/status", "VmSize")),
        .memlock = limit_of(RLIMIT_MEMLOCK),
    };
    if (!out->available)
        return mt_fail(err, MT_ERR_RUNTIME, -ENODATA, "cannot read MemAvailable of /proc/meminfo");
    leave_out_gpus(out, root);
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
