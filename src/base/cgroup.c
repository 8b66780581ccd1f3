/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cgroup.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"

static FILE *open_in(const char *root, const char *dir, const char *name)
{
    char path[8400];
    if (snprintf(path, sizeof(path), "%s%s/%s", root, dir, name) >= (int)sizeof(path))
        return NULL;
    return fopen(path, "re");
}

/* The first line of a file, without its end; "" if it is missing. */
static const char *line_in(const char *root, const char *dir, const char *name, char line[4096])
{
    MT_STREAM_CLOSED FILE *f = open_in(root, dir, name);
    if (!f || !fgets(line, 4096, f))
        line[0] = 0;
    line[strcspn(line, "\n")] = 0;
    return line;
}

static uint64_t number_of(const char *text)
{
    if (*text < '0' || *text > '9')
        return UINT64_MAX;
    uint64_t v = strtoull(text, NULL, 10);
    return v >= UINT64_C(1) << 62 ? UINT64_MAX : v; /* how version 1 says "no limit" */
}

uint64_t mt_cgroup_number(const char *root, const char *dir, const char *name)
{
    char line[4096];
    return number_of(line_in(root, dir, name, line));
}

/* What is looked for: in each group's folder, lower *least. */
struct search {
    const char *root;
    void (*look)(struct search *s, const char *dir, bool v2);
    uint64_t least, used;
};

/* The group and its parents, up to the root. */
static void walk_up(struct search *s, const char *mount, char *group, bool v2)
{
    char dir[4096];
    for (;;) {
        snprintf(dir, sizeof(dir), "%s%s", mount, strcmp(group, "/") ? group : "");
        s->look(s, dir, v2);
        char *slash = strrchr(group, '/');
        if (!slash || !group[0] || !strcmp(group, "/"))
            return;
        *slash = 0;
    }
}

/* Is the controller one of "cpu,cpuacct"? */
static bool has_name(const char *names, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = names; *at; at += strcspn(at, ","), at += *at == ',')
        if (!strncmp(at, name, n) && (!at[n] || at[n] == ','))
            return true;
    return false;
}

/* All groups of this process that have the controller: lines of /proc/self/cgroup are "number:controllers:path". */
static uint64_t search(struct search *s, const char *controller)
{
    char line[4096], mount[64];
    MT_STREAM_CLOSED FILE *f = open_in(s->root, "/proc/self", "cgroup");
    s->least = UINT64_MAX;
    snprintf(mount, sizeof(mount), "/sys/fs/cgroup/%s", controller);
    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        if (!names[1])
            walk_up(s, "/sys/fs/cgroup", group, true);
        else if (has_name(names + 1, controller))
            walk_up(s, mount, group, false);
    }
    return s->least;
}

static void look_for_quota(struct search *s, const char *dir, bool v2)
{
    char line[4096], *end;
    uint64_t quota, period;
    if (v2) {
        quota = number_of(line_in(s->root, dir, "cpu.max", line)); /* "max 100000", "150000 100000" */
        strtoull(line, &end, 10);
        period = quota < UINT64_MAX && *end == ' ' ? number_of(end + 1) : 0;
    } else {
        quota = mt_cgroup_number(s->root, dir, "cpu.cfs_quota_us");
        period = mt_cgroup_number(s->root, dir, "cpu.cfs_period_us");
    }
    if (quota < UINT64_MAX && period && period < UINT64_MAX)
        s->least = MT_MIN(s->least, MT_MAX(quota / period, UINT64_C(1)));
}

/* How many a list names: "0-3,8". 0: it is no list. */
static uint64_t count_listed(const char *list)
{
    uint64_t n = 0;
    while (*list >= '0' && *list <= '9') {
        char *end;
        uint64_t first = strtoull(list, &end, 10), last = first;
        if (*end == '-')
            last = strtoull(end + 1, &end, 10);
        n += last >= first ? last - first + 1 : 0;
        list = *end == ',' ? end + 1 : end;
    }
    return n;
}

static void look_for_cpuset(struct search *s, const char *dir, bool v2)
{
    char line[4096];
    uint64_t n = count_listed(line_in(s->root, dir, v2 ? "cpuset.cpus.effective" : "cpuset.effective_cpus", line));
    if (!n)
        n = count_listed(line_in(s->root, dir, "cpuset.cpus", line));
    s->least = n ? MT_MIN(s->least, n) : s->least;
}

int mt_cgroup_cpus(const char *root)
{
    struct search quota = {.root = root, .look = look_for_quota}, set = {.root = root, .look = look_for_cpuset};
    uint64_t a = search(&quota, "cpu"), b = search(&set, "cpuset");
    return (int)MT_MIN(MT_MIN(a, b), (uint64_t)INT_MAX);
}

/* Page cache that counts as the group's usage, though the kernel drops it before it kills a process. After a build or a
 * download it is most of the usage. */
static uint64_t cached_in(const char *root, const char *dir)
{
    static const char *const names[] = {"active_file", "inactive_file", "total_active_file",
                                        "total_inactive_file"};
    char line[256], name[64];
    uint64_t value, sum[2] = {0, 0}; /* of version 2; of version 1, with groups below */
    MT_STREAM_CLOSED FILE *f = open_in(root, dir, "memory.stat");
    while (f && fgets(line, sizeof(line), f))
        for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
            if (sscanf(line, "%63s %" SCNu64, name, &value) == 2 && !strcmp(name, names[i]))
                sum[i / 2] += value;
    return sum[1] ? sum[1] : sum[0];
}

static void look_for_memory(struct search *s, const char *dir, bool v2)
{
    uint64_t limit = mt_cgroup_number(s->root, dir, v2 ? "memory.max" : "memory.limit_in_bytes");
    uint64_t used = mt_cgroup_number(s->root, dir, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (v2)
        limit = MT_MIN(limit, mt_cgroup_number(s->root, dir, "memory.high"));
    if (limit == UINT64_MAX || used == UINT64_MAX)
        return;
    used -= MT_MIN(used, cached_in(s->root, dir));
    s->least = MT_MIN(s->least, limit > used ? limit - used : 0);
}

uint64_t mt_cgroup_memory_free(const char *root)
{
    struct search s = {.root = root, .look = look_for_memory};
    return search(&s, "memory");
}

static void look_for_pids(struct search *s, const char *dir, bool)
{
    uint64_t limit = mt_cgroup_number(s->root, dir, "pids.max");
    if (limit >= s->least)
        return;
    s->least = limit;
    s->used = mt_cgroup_number(s->root, dir, "pids.current");
}

uint64_t mt_cgroup_pids(const char *root, uint64_t *used)
{
    struct search s = {.root = root, .look = look_for_pids};
    uint64_t least = search(&s, "pids");
    *used = least < UINT64_MAX && s.used < UINT64_MAX ? s.used : 0;
    return least;
}
