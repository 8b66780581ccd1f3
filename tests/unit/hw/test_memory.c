/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "hw/hw.h"
#include "test.h"

static char root[64];

#define MEMINFO "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\nMemAvailableX: 3 kB\n"

static void put(const char *path, const char *text)
{
    char full[512], folder[512];
    snprintf(full, sizeof(full), "%s%s", root, path);
    snprintf(folder, sizeof(folder), "%s", full);
    *strrchr(folder, '/') = 0;
    assert_int_equal(mt_mkdir_p(folder, NULL), 0);
    assert_int_equal(mt_write_file(full, text, strlen(text), NULL), 0);
}

static int set_up(void **)
{
    snprintf(root, sizeof(root), "/tmp/mt-hw-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

static struct mt_hw_memory look(void)
{
    struct mt_hw_memory m;
    MUST(mt_hw_memory, &m, root);
    return m;
}

TEST_WITH(proc_is_read_in_bytes, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    struct mt_hw_memory m = look();
    assert_int_equal(m.total, UINT64_C(16000000) * 1024);
    assert_int_equal(m.available, UINT64_C(8000000) * 1024);
    assert_true(m.cgroup_free == UINT64_MAX);
}

/* GH200: 480 GB of the processor and 96 GB of the GPU are one /proc/meminfo. */
TEST_WITH(memory_of_a_gpu_is_not_the_hosts, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 9000 kB\nNode 0 MemFree: 9000 kB\n");
    put("/sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:       6000000 kB\nNode 1 MemFree:        2900000 kB\nNode 1 FilePages:       100000 kB\n");
    put("/proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node:      1\nStatus:    online\nAddress:   0\nSize:      0\n");
    put("/proc/driver/nvidia/gpus/0019:01:00.0/numa_status", "Node:      -1\nStatus:    disabled\n");
    struct mt_hw_memory m = look();
    assert_int_equal(m.total, UINT64_C(10000000) * 1024);
    assert_int_equal(m.available, UINT64_C(5000000) * 1024);
    put("/proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node:      1\nStatus:    offline\n");
    m = look();
    assert_int_equal(m.total, UINT64_C(16000000) * 1024);
}

TEST_WITH(without_mem_available_there_is_an_error, set_up, tear_down)
{
    struct mt_hw_memory m;
    struct mt_err err = {0};
    assert_int_equal(mt_hw_memory(&m, root, &err), -ENODATA);
    put("/proc/meminfo", "MemTotal: 5 kB\n");
    assert_int_equal(mt_hw_memory(&m, root, &err), -ENODATA);
    assert_non_null(strstr(err.msg, "MemAvailable"));
}

TEST_WITH(the_tightest_group_of_version_2_counts, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/a/b/c\n");
    put("/sys/fs/cgroup/a/b/c/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/c/memory.current", "100\n");
    assert_true(look().cgroup_free == UINT64_MAX);
    put("/sys/fs/cgroup/a/b/memory.max", "5000\n");
    put("/sys/fs/cgroup/a/b/memory.current", "1000\n");
    assert_int_equal(look().cgroup_free, 4000);
    put("/sys/fs/cgroup/a/memory.max", "9000\n");
    put("/sys/fs/cgroup/a/memory.current", "8500\n");
    assert_int_equal(look().cgroup_free, 500);
    put("/sys/fs/cgroup/a/memory.current", "9001\n"); /* over its limit: nothing is free */
    assert_int_equal(look().cgroup_free, 0);
}

TEST_WITH(a_container_sees_its_limit_at_the_root, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "1000000\n");
    put("/sys/fs/cgroup/memory.current", "1000\n");
    assert_int_equal(look().cgroup_free, 999000);
    put("/proc/self/cgroup", "0::/../../other\n"); /* a path outside the name space */
    assert_int_equal(look().cgroup_free, 999000);
}

TEST_WITH(version_1_is_read_too, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job/step\n1:name=systemd:/y\n0::/z\nbroken line\n");
    put("/sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    put("/sys/fs/cgroup/memory/job/step/memory.usage_in_bytes", "100\n");
    assert_true(look().cgroup_free == UINT64_MAX);
    put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n");
    put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3000\n");
    assert_int_equal(look().cgroup_free, 4000);
}

TEST_WITH(cached_files_count_as_free, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "10000\n");
    put("/sys/fs/cgroup/memory.current", "9000\n");
    put("/sys/fs/cgroup/memory.stat", "anon 4000\nfile 5000\nactive_file 2000\ninactive_file 3000\nslab 1\n");
    assert_int_equal(look().cgroup_free, 6000);
    put("/sys/fs/cgroup/memory.current", "100\n"); /* the numbers are not of one moment */
    assert_int_equal(look().cgroup_free, 10000);
    put("/proc/self/cgroup", "4:memory:/job\n");
    put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n");
    put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "6000\n");
    put("/sys/fs/cgroup/memory/job/memory.stat",
        "active_file 1\ninactive_file 2\ntotal_active_file 1000\ntotal_inactive_file 2000\n");
    assert_int_equal(look().cgroup_free, 4000);
}

TEST_WITH(rubbish_in_a_limit_is_no_limit, set_up, tear_down)
{
    static const char *const text[] = {"", "\n", "-5\n", "lots\n"};
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/a\n");
    put("/sys/fs/cgroup/a/memory.current", "1\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(text); i++) {
        put("/sys/fs/cgroup/a/memory.max", text[i]);
        assert_true(look().cgroup_free == UINT64_MAX);
    }
}

/* Above it the kernel holds the group back, so that it crawls: it is as good as a limit. */
TEST_WITH(memory_high_counts_as_a_limit, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "9000\n");
    put("/sys/fs/cgroup/a/b/memory.high", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "1000\n");
    assert_int_equal(look().cgroup_free, 8000);
    put("/sys/fs/cgroup/a/memory.high", "5000\n");
    put("/sys/fs/cgroup/a/memory.current", "2000\n");
    assert_int_equal(look().cgroup_free, 3000);
    put("/sys/fs/cgroup/a/b/memory.high", "1500\n");
    assert_int_equal(look().cgroup_free, 500);
}

TEST_WITH(a_quota_is_that_of_the_group_or_of_any_parent, set_up, tear_down)
{
    assert_int_equal(mt_cgroup_cpus(root), INT_MAX);
    put("/proc/self/cgroup", "0::/user.slice/run.scope\n");
    put("/sys/fs/cgroup/user.slice/run.scope/cpu.max", "max 100000\n");
    assert_int_equal(mt_cgroup_cpus(root), INT_MAX);
    put("/sys/fs/cgroup/user.slice/cpu.max", "765000 100000\n"); /* what is begun of a processor would be waited for */
    assert_int_equal(mt_cgroup_cpus(root), 7);
    put("/sys/fs/cgroup/user.slice/run.scope/cpu.max", "50000 100000\n");
    assert_int_equal(mt_cgroup_cpus(root), 1);
    put("/sys/fs/cgroup/user.slice/run.scope/cpu.max", "200000 50000\n");
    assert_int_equal(mt_cgroup_cpus(root), 4);
    static const char *const rubbish[] = {"", "3\n", "lots 5\n", "100000 0\n", "100000 max\n"};
    put("/sys/fs/cgroup/user.slice/cpu.max", "");
    for (size_t i = 0; i < MT_ARRAY_LEN(rubbish); i++) {
        put("/sys/fs/cgroup/user.slice/run.scope/cpu.max", rubbish[i]);
        assert_int_equal(mt_cgroup_cpus(root), INT_MAX);
    }
}

TEST_WITH(quotas_and_cpusets_of_version_1_count, set_up, tear_down)
{
    put("/proc/self/cgroup", "7:cpuset:/x/y\n5:cpu,cpuacct:/job/step\n0::/\n");
    put("/sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu/job/step/cpu.cfs_period_us", "100000\n");
    assert_int_equal(mt_cgroup_cpus(root), INT_MAX);
    put("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "350000\n");
    put("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
    assert_int_equal(mt_cgroup_cpus(root), 3);
    put("/sys/fs/cgroup/cpuset/x/y/cpuset.effective_cpus", "0-3,64\n");
    assert_int_equal(mt_cgroup_cpus(root), 3);
    put("/sys/fs/cgroup/cpuset/x/cpuset.cpus", "2,5\n");
    assert_int_equal(mt_cgroup_cpus(root), 2);
    put("/proc/self/cgroup", "0::/v2\n");
    put("/sys/fs/cgroup/v2/cpuset.cpus.effective", "4-9\n");
    assert_int_equal(mt_cgroup_cpus(root), 6);
    put("/sys/fs/cgroup/v2/cpuset.cpus.effective", "\n");
    assert_int_equal(mt_cgroup_cpus(root), INT_MAX);
}

TEST_WITH(the_least_number_of_processes_counts, set_up, tear_down)
{
    uint64_t used;
    put("/proc/self/cgroup", "0::/a/b\n");
    assert_true(mt_cgroup_pids(root, &used) == UINT64_MAX && used == 0);
    put("/sys/fs/cgroup/a/b/pids.max", "max\n");
    put("/sys/fs/cgroup/a/pids.max", "64\n");
    put("/sys/fs/cgroup/a/pids.current", "63\n");
    assert_true(mt_cgroup_pids(root, &used) == 64 && used == 63);
}

/* In a child, so that the limit ends with it. */
TEST_WITH(the_address_space_limit_counts_what_is_mapped, set_up, tear_down)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/status", "Name: x\nVmPeak:  9 kB\nVmSize:  1024 kB\n");
    pid_t pid = fork();
    if (!pid) {
        struct rlimit lock = {1 << 16, 1 << 16}, as = {UINT64_C(1) << 46, UINT64_C(1) << 46};
        struct mt_hw_memory m;
        bool ok = !setrlimit(RLIMIT_MEMLOCK, &lock) && !setrlimit(RLIMIT_AS, &as) &&
                  !mt_hw_memory(&m, root, NULL) && m.memlock == 1 << 16 &&
                  m.address_space == (UINT64_C(1) << 46) - (1 << 20);
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

TEST_WITH(this_machine_has_memory_and_cores, set_up, tear_down)
{
    struct mt_hw_memory m;
    int *cpus = NULL, n = 0;
    assert_int_equal(mt_hw_memory(&m, "", NULL), 0);
    assert_true(m.available > 0 && m.available <= m.total);
    assert_int_equal(mt_hw_cores(&cpus, &n, NULL), 0);
    assert_true(n >= 1 && n <= sysconf(_SC_NPROCESSORS_CONF));
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            assert_int_not_equal(cpus[i], cpus[k]);
    free(cpus);
}

static bool refused;
static int warnings;

/* In place of the C library's, for hwloc, too. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    if (refused) {
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, size); /* of which the kernel writes its own part */
    return syscall(SYS_sched_getaffinity, pid, size, set) < 0 ? -1 : 0;
}

static void count_warning(enum mt_log_level level, const char *line)
{
    warnings += level == MT_LOG_WARN && strstr(line, "sched_getaffinity: Invalid argument): one is used");
}

/* hwloc would ask for ever. */
TEST_WITH(one_core_is_used_where_no_mask_is_given, set_up, tear_down)
{
    int *cpus = NULL, n = 0, there = 0;
    mt_log_set_sink(count_warning);
    refused = true;
    alarm(60);
    int rc = mt_hw_cores(&cpus, &n, NULL), own = mt_hw_allowed(&there);
    alarm(0);
    refused = false;
    mt_log_set_sink(NULL);
    assert_int_equal(rc, 0);
    assert_int_equal(n, 1);
    assert_true(cpus[0] >= 0 && cpus[0] < sysconf(_SC_NPROCESSORS_CONF));
    assert_int_equal(own, there);
    assert_int_equal(warnings, 1);
    free(cpus);
}

static double own_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* By ticks of 10 ms, and of each processor. */
TEST_WITH(work_shows_in_the_time_of_the_processors, set_up, tear_down)
{
    double busy = mt_hw_busy_seconds(), own = own_seconds();
    while (own_seconds() < own + 0.2)
        ;
    assert_true(busy > 0);
    assert_true(mt_hw_busy_seconds() > busy + 0.1);
}

TEST_WITH(free_space_is_that_of_the_nearest_folder_there_is, set_up, tear_down)
{
    uint64_t here = 0, there = 0;
    char path[256];
    struct mt_err err = {0};
    assert_int_equal(mt_hw_disk_free(root, &here, NULL), 0);
    snprintf(path, sizeof(path), "%s/not/yet/made", root);
    assert_int_equal(mt_hw_disk_free(path, &there, NULL), 0);
    assert_true(here > 0 && there > here / 2 && there < here * 2);
    assert_int_equal(mt_hw_disk_free("not/yet/made", &there, NULL), 0);
    put("/file", "x");
    snprintf(path, sizeof(path), "%s/file/below", root);
    assert_int_equal(mt_hw_disk_free(path, &there, &err), -ENOTDIR);
}

TEST_WITH(file_systems_are_told_apart, set_up, tear_down)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/not/yet/made", root);
    assert_true(mt_hw_same_file_system(root, path));
    assert_false(mt_hw_same_file_system(root, "/proc"));
}

TEST_WITH(what_the_process_has_grows_with_what_it_touches, set_up, tear_down)
{
    enum { BYTES = 32 << 20 };
    uint64_t before, after;
    assert_int_equal(mt_hw_resident(&before, NULL), 0);
    char *p = malloc(BYTES);
    assert_non_null(p);
    memset(p, 1, BYTES);
    assert_int_equal(mt_hw_resident(&after, NULL), 0);
    if (before) /* unknown with a sanitizer */
        assert_true(after >= before + BYTES - 65536 && after < before + BYTES + (2 << 20));
    assert_int_equal(p[BYTES / 2], 1);
    free(p);
    setenv("MEGATRAIN_RESIDENT", "12345678", 1);
    assert_int_equal(mt_hw_resident(&after, NULL), 0);
    assert_int_equal(after, 12345678);
    unsetenv("MEGATRAIN_RESIDENT");
}
