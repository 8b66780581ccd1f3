/* SPDX-License-Identifier: Apache-2.0 */
#include <linux/mempolicy.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hw/homes.h"
#include "test.h"

static cpu_set_t cpus(int from, int to)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = from; i <= to; i++)
        CPU_SET((size_t)i, &set);
    return set;
}

/* A node of a made-up machine with CPUs [from, to]; to < from: it has none. */
static struct mt_numa_node node(int id, bool memory, int from, int to)
{
    return (struct mt_numa_node){.id = id, .memory = memory, .cpus = cpus(from, to)};
}

static struct mt_numa choose(const struct mt_numa_nodes *nodes)
{
    struct mt_numa numa;
    mt_numa_from_nodes(&numa, nodes);
    return numa;
}

TEST(nodes_with_memory_and_cores_are_homes)
{
    struct mt_numa_nodes nodes = {2, {node(0, true, 0, 3), node(1, true, 4, 7)}};
    struct mt_numa numa = choose(&nodes);
    assert_int_equal(numa.n, 2);
    assert_int_equal(numa.home[0].node, 0);
    assert_int_equal(numa.home[1].node, 1);
    for (int cpu = 0; cpu < 8; cpu++)
        assert_int_equal(mt_numa_home_of(&numa, cpu), cpu / 4);
    assert_int_equal(mt_numa_home_of(&numa, 8), -1);
    assert_int_equal(mt_numa_home_of(&numa, -1), -1);
    int list[] = {0, 1, 2, 3, 4, 5, 30}, want[] = {30, 0, 4, 1, 5, 2, 3};
    mt_numa_spread(&numa, list, 7);
    assert_memory_equal(list, want, sizeof(want));
}

TEST(what_the_process_may_not_use_is_no_home)
{
    struct mt_numa_nodes none = {0}, nodes = {3, {node(0, true, 0, 3), node(1, true, 4, 7), node(6, true, 8, 9)}};
    assert_int_equal(choose(&none).n, 1); /* a kernel without NUMA */
    nodes.node[1] = node(1, false, 4, 7); /* by its cpuset */
    assert_int_equal(choose(&nodes).n, 2);
    assert_int_equal(choose(&nodes).home[1].node, 6);
    nodes.node[2] = node(6, true, 8, 7); /* by its affinity */
    assert_int_equal(choose(&nodes).n, 1);
    nodes.node[0] = node(0, false, 0, 3);
    assert_int_equal(choose(&nodes).n, 1);
}

/* Nodes 0 and 3 are whole, 1 is offline, 2 has memory alone, 5, 6 and 7 cores alone: 5 is nearer to 3, 6 to 0, and of 7
 * nothing is known. */
TEST(cores_without_memory_belong_to_the_nearest_home)
{
    struct mt_numa_nodes nodes = {6, {node(0, true, 0, 1), node(2, true, 1, 0), node(3, true, 2, 3), node(5, false, 4, 4),
                                      node(6, false, 5, 5), node(7, false, 6, 6)}};
    static const int of_5[] = {32, 11, 21, 10, 40, 40}, of_6[] = {21, 11, 32, 40, 10, 40};
    memcpy(nodes.node[3].distance, of_5, sizeof(of_5));
    memcpy(nodes.node[4].distance, of_6, sizeof(of_6));
    struct mt_numa numa = choose(&nodes);
    assert_int_equal(numa.n, 2);
    assert_int_equal(numa.home[1].node, 3);
    static const int want[] = {0, 0, 1, 1, 1, 0, 0, -1};
    for (int cpu = 0; cpu < 8; cpu++)
        assert_int_equal(mt_numa_home_of(&numa, cpu), want[cpu]);
}

TEST(this_machine_has_homes)
{
    struct mt_numa numa;
    mt_numa_read(&numa);
    assert_in_range(numa.n, 1, MT_NUMA_MAX);
    assert_non_null(numa.populate);
    for (int h = 0; h < numa.n && numa.n > 1; h++)
        assert_true(CPU_COUNT(&numa.home[h].cpus) > 0);
}

/* Of the calling thread; -1: it cannot be asked. */
static int policy(void)
{
    int mode = -1;
    return syscall(SYS_get_mempolicy, &mode, NULL, 0UL, NULL, 0UL) ? -1 : mode;
}

/* Two homes that are both this machine's node 0. */
static struct mt_numa twice_here(void)
{
    struct mt_numa numa;
    mt_numa_none(&numa);
    numa.n = 2;
    sched_getaffinity(0, sizeof(cpu_set_t), &numa.home[0].cpus);
    size_t cpu = 0;
    while (!CPU_ISSET(cpu, &numa.home[0].cpus))
        cpu++;
    numa.home[1].cpus = cpus((int)cpu, (int)cpu);
    return numa;
}

static bool may_set_policies(void)
{
    return WITH_LIBNUMA && policy() == MPOL_DEFAULT && !syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0UL);
}

enum { BYTES = 5 << 20 };

/* Fills a new mapping at a home; NULL: well. */
static void *fill(void *home)
{
    static unsigned char in_core[BYTES / 4096];
    struct mt_numa numa = twice_here();
    int h = *(int *)home;
    char *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cpu_set_t now;
    if (p == MAP_FAILED || numa.populate(&numa, h, p, BYTES) || mincore(p, BYTES, in_core))
        return "no memory";
    for (size_t i = 0; i < BYTES / 4096; i++)
        if (!(in_core[i] & 1))
            return "a page is missing";
    munmap(p, BYTES);
    sched_getaffinity(0, sizeof(now), &now);
    if (h == 1 && !CPU_EQUAL(&now, &numa.home[1].cpus))
        return "the thread is not at home";
    return policy() == (h < 0 ? MPOL_DEFAULT : MPOL_PREFERRED) ? NULL : "the policy";
}

TEST(pages_are_made_at_home)
{
    if (!may_set_policies()) /* forbidden */
        skip();
    for (int home = -1; home < 2; home++) {
        pthread_t t;
        void *why = NULL;
        assert_int_equal(pthread_create(&t, NULL, fill, &home), 0);
        pthread_join(t, &why);
        if (why)
            fail_msg("home %d: %s", home, (const char *)why);
    }
}

static void *ask(void *mode)
{
    *(int *)mode = policy();
    return NULL;
}

TEST(threads_that_follow_spread_their_memory)
{
    pthread_t t;
    int of_thread = -1;
    struct mt_numa numa;
    if (!may_set_policies()) /* forbidden */
        skip();
    assert_false(mt_numa_choose(&numa, "system"));
    assert_int_equal(numa.n, 1);
    assert_false(mt_numa_interleave(&numa));
    assert_int_equal(policy(), MPOL_DEFAULT);
    numa = twice_here();
    assert_true(mt_numa_interleave(&numa));
    assert_int_equal(numa.n, 2);
    assert_int_equal(policy(), MPOL_INTERLEAVE);
    assert_int_equal(pthread_create(&t, NULL, ask, &of_thread), 0);
    pthread_join(t, NULL);
    assert_int_equal(of_thread, MPOL_INTERLEAVE);
    assert_false(mt_numa_interleave(&numa)); /* what numactl has said stays */
    assert_int_equal(numa.n, 1);
}
