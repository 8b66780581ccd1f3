/* SPDX-License-Identifier: Apache-2.0 */
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "hw/hw.h"
#include "hw/homes.h"

/* More than any machine has: the kernel refuses a set that is smaller than its own. */
enum { MOST_CPUS = 1 << 16 };

/* CPUs that this process may use, for CPU_FREE(); NULL: unknown. */
static cpu_set_t *affinity(void)
{
    cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
    if (set && sched_getaffinity(0, CPU_ALLOC_SIZE(MOST_CPUS), set)) {
        CPU_FREE(set);
        set = NULL;
    }
    return set;
}

static bool has(const cpu_set_t *set, int cpu)
{
    return cpu >= 0 && cpu < MOST_CPUS && CPU_ISSET_S((size_t)cpu, CPU_ALLOC_SIZE(MOST_CPUS), set);
}

bool mt_hw_affinity(cpu_set_t *out)
{
    cpu_set_t *set = affinity();
    CPU_ZERO(out);
    for (int cpu = 0; set && cpu < CPU_SETSIZE; cpu++)
        if (has(set, cpu))
            CPU_SET((size_t)cpu, out);
    CPU_FREE(set);
    return set != NULL;
}

static int collect(hwloc_topology_t topo, const cpu_set_t *allowed, int **cpus, int *n, struct mt_err *err)
{
    struct mt_numa numa;
    int cores = hwloc_get_nbobjs_by_type(topo, HWLOC_OBJ_CORE), count = 0;
    int *list = mt_calloc((size_t)MT_MAX(cores, 1), sizeof(int));
    if (!list)
        return mt_fail_nomem(err, "the list of cores", (size_t)cores * sizeof(int));
    for (int i = 0; i < cores; i++) {
        hwloc_obj_t core = hwloc_get_obj_by_type(topo, HWLOC_OBJ_CORE, (unsigned)i);
        int cpu;
        hwloc_bitmap_foreach_begin(cpu, core->cpuset)
            if (has(allowed, cpu)) {
                list[count++] = cpu;
                break;
            }
        hwloc_bitmap_foreach_end();
    }
    if (!count)
        list[count++] = MT_MAX(sched_getcpu(), 0);
    mt_numa_read(&numa);
    mt_numa_spread(&numa, list, (size_t)count);
    *cpus = list;
    *n = MT_MIN(count, mt_cgroup_cpus(""));
    return 0;
}

static int collect_by_hwloc(const cpu_set_t *allowed, int **cpus, int *n, struct mt_err *err)
{
    hwloc_topology_t topo;
    if (hwloc_topology_init(&topo))
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "hwloc cannot be initialised");
    int rc = hwloc_topology_load(topo)
                 ? mt_fail(err, MT_ERR_RUNTIME, -EIO, "hwloc cannot read this machine's topology")
                 : collect(topo, allowed, cpus, n, err);
    hwloc_topology_destroy(topo);
    return rc;
}

/* hwloc asks for the mask with ever larger sets until it is given one: it is not asked where there is none. */
int mt_hw_cores(int **cpus, int *n, struct mt_err *err)
{
    cpu_set_t *allowed = affinity();
    int rc;
    if (allowed) {
        rc = collect_by_hwloc(allowed, cpus, n, err);
    } else {
        mt_warn("the system does not say which processors this process may use (sched_getaffinity: %s): one is used",
                strerror(errno));
        *cpus = mt_calloc(1, sizeof(int));
        *n = 1;
        rc = *cpus ? 0 : mt_fail_nomem(err, "the list of cores", sizeof(int));
        if (!rc)
            **cpus = MT_MAX(sched_getcpu(), 0);
    }
    CPU_FREE(allowed);
    return rc;
}

int mt_hw_allowed(int *there)
{
    cpu_set_t *allowed = affinity();
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    *there = n > 0 ? (int)n : 1;
    int own = allowed ? CPU_COUNT_S(CPU_ALLOC_SIZE(MOST_CPUS), allowed) : *there;
    CPU_FREE(allowed);
    return own;
}

double mt_hw_busy_seconds(void)
{
    cpu_set_t *allowed = affinity();
    char line[512];
    double ticks = 0;
    MT_STREAM_CLOSED FILE *f = allowed ? fopen("/proc/stat", "re") : NULL;
    while (f && fgets(line, sizeof(line), f)) {
        unsigned cpu;
        double user, nice, system, irq, softirq;
        if (sscanf(line, "cpu%u %lf %lf %lf %*f %*f %lf %lf", &cpu, &user, &nice, &system, &irq, &softirq) == 6 &&
            has(allowed, (int)cpu))
            ticks += user + nice + system + irq + softirq;
    }
    CPU_FREE(allowed);
    return ticks / (double)sysconf(_SC_CLK_TCK);
}
