/* SPDX-License-Identifier: Apache-2.0 */
/* Planes on this machine's NUMA nodes: where the kernel has put each page, and which cores compute with it. Needs two
 * nodes; scripts/numa-check runs it on an emulated machine. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/mempolicy.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "hw/hw.h"
#include "made_planes.h"
#include "test.h"

enum { MIB = 1 << 20, UNITS = 3, PAGE = 4096, SKIPPED = 77 };
static const size_t elems[UNITS] = {6 * MIB + 2048, 4096, 5 * MIB};
static const bool trainable[UNITS] = {true, true, true};
static struct mt_numa numa;

static int node_of(void *p)
{
    int node = -1;
    assert_int_equal(syscall(SYS_move_pages, 0, 1UL, &p, NULL, &node, 0), 0);
    return node;
}

static mt_plane_set *make(void)
{
    static struct mt_plane_elems by_kind[UNITS];
    struct mt_plane_set_params p = made_planes(UNITS, elems, trainable, by_kind, MT_F32, MT_BF16);
    mt_plane_set *s = NULL;
    p.numa = &numa;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    return s;
}

TEST(every_page_is_on_the_node_of_its_stripe)
{
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = make();
    size_t pages[MT_NUMA_MAX] = {0}, wrong = 0;
    for (size_t u = 0; u < UNITS; u++)
        for (int k = 0; k < MT_N_PLANES; k++) {
            char *plane = mt_plane(s, u, (enum mt_plane_kind)k);
            size_t size = mt_plane_desc_of(s, (enum mt_plane_kind)k)->block_bytes;
            for (size_t at = 0; plane && at < elems[u] * size; at += PAGE) {
                int home = mt_plane_home(s, u, (enum mt_plane_kind)k, at / size), node = node_of(plane + at);
                wrong += node != numa.home[home].node;
                pages[home]++;
            }
        }
    for (int h = 0; h < numa.n; h++)
        printf("node %d: %zu pages\n", numa.home[h].node, pages[h]);
    assert_int_equal(wrong, 0);
}

struct loop {
    const mt_plane_set *s;
    atomic_size_t at_home, chunks;
};

static void run(void *ctx, size_t first, size_t n)
{
    struct loop *l = ctx;
    usleep(1000); /* so that every thread takes part, on few cores, too */
    atomic_fetch_add(&l->chunks, 1);
    if (mt_numa_home_of(&numa, sched_getcpu()) == mt_plane_home(l->s, 2, MT_PLANE_HI, first + n - 1))
        atomic_fetch_add(&l->at_home, 1);
}

TEST(most_chunks_are_computed_at_home)
{
    mt_plane_set *s = make();
    struct loop l = {.s = s};
    int *cpus = NULL, n = 0;
    mt_pool *pool = NULL;
    assert_int_equal(mt_hw_cores(&cpus, &n, NULL), 0);
    for (int i = 0; i < MT_MIN(n, numa.n); i++)
        assert_int_equal(mt_numa_home_of(&numa, cpus[i]), i); /* cores of each node in turn */
    assert_int_equal(mt_pool_create(&pool, &(struct mt_pool_params){"pages", n, cpus, NULL}, NULL), 0);
    mt_numa_lanes(&numa, pool, cpus);
    mt_bind_thread(cpus[0]);
    mt_planes_run(s, 2, 0, elems[2], pool, run, &l);
    printf("%zu of %zu chunks at home\n", atomic_load(&l.at_home), atomic_load(&l.chunks));
    assert_true(atomic_load(&l.at_home) * 4 >= atomic_load(&l.chunks) * 3);
    mt_pool_destroy(&pool);
    mt_plane_set_destroy(&s);
    free(cpus);
}

/* As in a container of Docker. From here on, in this thread and those that it starts. */
static void forbid_policies(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_mempolicy, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_get_mempolicy, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog filter = {MT_ARRAY_LEN(code), code};
    assert_int_equal(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    assert_int_equal(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0), 0);
}

TEST(pages_are_placed_where_policies_are_forbidden)
{
    assert_int_equal(syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0UL), 0);
    cpu_set_t all = numa.home[0].cpus;
    for (int h = 1; h < numa.n; h++)
        CPU_OR(&all, &all, &numa.home[h].cpus);
    sched_setaffinity(0, sizeof(all), &all); /* the test before has bound this thread */
    forbid_policies();
    assert_false(mt_numa_choose(&numa, "auto"));
    assert_true(numa.n > 1);
    every_page_is_on_the_node_of_its_stripe(state);
}

int main(void)
{
    mt_numa_choose(&numa, "auto");
    if (numa.n == 1) {
        printf("this machine has one NUMA node\n");
        return SKIPPED;
    }
    return test_run();
}
