/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages are placed by allocating them on a thread that runs at their home and prefers it. mbind() would make a mapping
 * of every stripe, of which a process may have 65530 (vm.max_map_count). And containers that forbid memory
 * policies, as Docker does by default, allow a thread to choose its cores, which suffices. A home is preferred and not
 * demanded, since the kernel kills a process that demands memory of a full node.
 */
#include "hw/homes.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "hw/homes_priv.h"

static int allocate_pages(char *p, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    int rc;
    while ((rc = madvise(p, bytes, MADV_POPULATE_WRITE) ? -errno : 0) == -EINTR || rc == -EAGAIN)
        ;
    if (rc != -EINVAL) /* the kernel supports it */
        return rc;
#endif
    for (size_t i = 0; i < bytes; i += mt_page_bytes())
        ((volatile char *)p)[i] = 0;
    return 0;
}

/* Either of the two suffices, and either may be forbidden. */
static void go_home(const struct mt_numa_home *h)
{
    sched_setaffinity(0, sizeof(h->cpus), &h->cpus);
    mt_numa_set_policy(false, &h->node, 1);
}

static int populate(const struct mt_numa *numa, int home, char *p, size_t bytes)
{
    if (numa->n > 1 && home >= 0)
        go_home(&numa->home[home]);
    return allocate_pages(p, bytes);
}

void mt_numa_none(struct mt_numa *out)
{
    *out = (struct mt_numa){.n = 1, .populate = populate};
}

/* The home nearest to a node, itself if it is one. */
static int nearest(const struct mt_numa *numa, const struct mt_numa_nodes *nodes, const struct mt_numa_node *node)
{
    int best = 0, least = INT_MAX;
    for (int h = 0; h < numa->n; h++)
        for (int i = 0; i < nodes->n; i++) {
            if (nodes->node[i].id != numa->home[h].node)
                continue;
            int distance = node->id == nodes->node[i].id ? 0 : node->distance[i] ? node->distance[i] : INT_MAX - 1;
            if (distance < least) {
                least = distance;
                best = h;
            }
        }
    return best;
}

void mt_numa_from_nodes(struct mt_numa *out, const struct mt_numa_nodes *nodes)
{
    int n = 0;
    mt_numa_none(out);
    for (int i = 0; i < nodes->n; i++)
        if (nodes->node[i].memory && CPU_COUNT(&nodes->node[i].cpus))
            out->home[n++].node = nodes->node[i].id;
    out->n = MT_MAX(n, 1);
    for (int i = 0; i < nodes->n; i++) {
        cpu_set_t *cpus = &out->home[nearest(out, nodes, &nodes->node[i])].cpus;
        CPU_OR(cpus, cpus, &nodes->node[i].cpus);
    }
}

void mt_numa_read(struct mt_numa *out)
{
    struct mt_numa_nodes nodes = {.n = 0};
    mt_numa_read_nodes(&nodes);
    mt_numa_from_nodes(out, &nodes);
}

bool mt_numa_interleave(struct mt_numa *numa)
{
    int node[MT_NUMA_MAX];
    if (numa->n > 1 && mt_numa_has_policy())
        mt_numa_none(numa);
    for (int h = 0; h < numa->n; h++)
        node[h] = numa->home[h].node;
    return numa->n > 1 && mt_numa_set_policy(true, node, numa->n);
}

bool mt_numa_choose(struct mt_numa *out, const char *how)
{
    mt_numa_none(out);
    if (strcmp(how, "auto"))
        return false;
    mt_numa_read(out);
    return mt_numa_interleave(out);
}

int mt_numa_home_of(const struct mt_numa *numa, int cpu)
{
    for (int h = 0; h < numa->n; h++)
        if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET((size_t)cpu, &numa->home[h].cpus))
            return h;
    return -1;
}

struct seat {
    int cpu, turn, home;
};

static int by_turn(const void *a, const void *b)
{
    const struct seat *x = a, *y = b;
    return x->turn != y->turn ? (x->turn > y->turn) - (x->turn < y->turn) : (x->home > y->home) - (x->home < y->home);
}

void mt_numa_spread(const struct mt_numa *numa, int *cpus, size_t n)
{
    int turns[MT_NUMA_MAX + 1] = {0};
    MT_FREED struct seat *seat = numa->n > 1 ? mt_calloc(n, sizeof(*seat)) : NULL;
    if (!seat) /* the order matters for speed alone */
        return;
    for (size_t i = 0; i < n; i++) {
        int home = mt_numa_home_of(numa, cpus[i]);
        seat[i] = (struct seat){.cpu = cpus[i], .turn = turns[home + 1]++, .home = home};
    }
    qsort(seat, n, sizeof(*seat), by_turn);
    for (size_t i = 0; i < n; i++)
        cpus[i] = seat[i].cpu;
}

void mt_numa_lanes(const struct mt_numa *numa, mt_pool *pool, const int *cpus)
{
    if (numa->n == 1 || !cpus)
        return;
    for (int i = 0; i < mt_pool_n_threads(pool); i++)
        mt_pool_set_lane(pool, i, MT_MAX(mt_numa_home_of(numa, cpus[i]), 0), numa->n);
}
