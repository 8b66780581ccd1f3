/* SPDX-License-Identifier: Apache-2.0 */
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "hw/hw.h"
#include "hw/homes.h"

/* CPUs granted by the cgroup's quota (version 2, own group), or a large number if there is none. */
static int quota_cpus(void)
{
    char quota[32];
    double period = 0;
    int n = 1 << 20;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (f && fscanf(f, "%31s %lf", quota, &period) == 2 && quota[0] != 'm' && period > 0)
        n = MT_MAX((int)(strtod(quota, NULL) / period + 0.5), 1);
    if (f)
        fclose(f);
    return n;
}

static int collect(hwloc_topology_t topo, int **cpus, int *n, struct mt_err *err)
{
    cpu_set_t allowed;
    struct mt_numa numa;
    int cores = hwloc_get_nbobjs_by_type(topo, HWLOC_OBJ_CORE), count = 0;
    if (sched_getaffinity(0, sizeof(allowed), &allowed))
        CPU_ZERO(&allowed);
    int *list = mt_calloc((size_t)MT_MAX(cores, 1), sizeof(int));
    if (!list)
        return mt_fail_nomem(err, "the list of cores", (size_t)cores * sizeof(int));
    for (int i = 0; i < cores; i++) {
        hwloc_obj_t core = hwloc_get_obj_by_type(topo, HWLOC_OBJ_CORE, (unsigned)i);
        int cpu;
        hwloc_bitmap_foreach_begin(cpu, core->cpuset)
            if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) {
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
    *n = MT_MIN(count, quota_cpus());
    return 0;
}

int mt_hw_cores(int **cpus, int *n, struct mt_err *err)
{
    hwloc_topology_t topo;
    if (hwloc_topology_init(&topo))
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "hwloc cannot be initialised");
    int rc = hwloc_topology_load(topo)
                 ? mt_fail(err, MT_ERR_RUNTIME, -EIO, "hwloc cannot read this machine's topology")
                 : collect(topo, cpus, n, err);
    hwloc_topology_destroy(topo);
    return rc;
}

int mt_hw_allowed(int *there)
{
    cpu_set_t allowed;
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    *there = n > 0 ? (int)n : 1;
    return sched_getaffinity(0, sizeof(allowed), &allowed) ? *there : CPU_COUNT(&allowed);
}

double mt_hw_busy_seconds(void)
{
    cpu_set_t allowed;
    char line[512];
    double ticks = 0;
    FILE *f = sched_getaffinity(0, sizeof(allowed), &allowed) ? NULL : fopen("/proc/stat", "re");
    while (f && fgets(line, sizeof(line), f)) {
        unsigned cpu;
        double user, nice, system, irq, softirq;
        if (sscanf(line, "cpu%u %lf %lf %lf %*f %*f %lf %lf", &cpu, &user, &nice, &system, &irq, &softirq) == 6 &&
            cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed))
            ticks += user + nice + system + irq + softirq;
    }
    if (f)
        fclose(f);
    return ticks / (double)sysconf(_SC_CLK_TCK);
}
