/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/host.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

enum { MAX_TOUCHERS = 16, TOUCHER_BYTES = 256 << 20, HUGE_LEAST = 4 << 20 };

/* A thread that allocates the pages of its part; with homes, only those of one. */
struct toucher {
    const struct mt_host_homes *homes;
    char *mem;
    size_t from, to;
    int home, rc;
    pthread_t thread;
    bool started;
};

static bool is_mine(const struct toucher *t, size_t at)
{
    const struct mt_host_homes *h = t->homes;
    return h->numa->n == 1 || h->home(h->ctx, at, MT_MIN(t->to - at, MT_HUGE_PAGE)) == t->home;
}

static void *touch(void *arg)
{
    struct toucher *t = arg;
    const struct mt_numa *numa = t->homes->numa;
    for (size_t at = t->from, end; at < t->to && !t->rc; at = end) {
        bool mine = is_mine(t, at);
        for (end = MT_MIN(at + MT_HUGE_PAGE, t->to); end < t->to && is_mine(t, end) == mine;)
            end = MT_MIN(end + MT_HUGE_PAGE, t->to);
        if (mine)
            t->rc = numa->populate(numa, t->started ? t->home : -1, t->mem + at, end - at);
    }
    return NULL;
}

/* Allocates all pages now and not during the first update; several threads, since zeroing takes time. With several
 * homes each has its own, as a thread has the pages of its home. */
static int touch_all(char *p, size_t bytes, const struct mt_host_homes *homes)
{
    struct toucher t[MT_NUMA_MAX + MAX_TOUCHERS] = {{0}};
    size_t n_homes = (size_t)homes->numa->n, most = MT_MAX(MAX_TOUCHERS / n_homes, (size_t)1);
    size_t parts = MT_CLAMP(bytes / TOUCHER_BYTES / n_homes, (size_t)1, most), n = parts * n_homes;
    size_t share = mt_align_up(mt_div_up(bytes, parts), MT_HUGE_PAGE);
    int rc = 0;
    for (size_t i = 0; i < n; i++) {
        size_t from = MT_MIN(i / n_homes * share, bytes);
        t[i] = (struct toucher){.homes = homes, .mem = p, .from = from, .to = MT_MIN(from + share, bytes),
                                .home = (int)(i % n_homes), .started = n > 1};
        if (n == 1 || pthread_create(&t[i].thread, NULL, touch, &t[i])) {
            t[i].started = false;
            touch(&t[i]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (t[i].started)
            pthread_join(t[i].thread, NULL);
        rc = rc ? rc : t[i].rc;
    }
    return rc;
}

/* Large mappings begin where a huge page does: then all of it, but for the end, can be on huge pages. */
int mt_host_map(void **out, size_t bytes, const char *what, struct mt_err *err)
{
    size_t size = mt_align_up(MT_MAX(bytes, (size_t)1), mt_page_bytes());
    size_t more = bytes < HUGE_LEAST ? 0 : MT_HUGE_PAGE - mt_page_bytes();
    char *p = mmap(NULL, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "cannot map %zu bytes of host memory for %s: %s",
                       bytes, what, strerror(errno));
    size_t before = more ? mt_align_up((uintptr_t)p, MT_HUGE_PAGE) - (uintptr_t)p : 0;
    if (before)
        munmap(p, before);
    if (before < more)
        munmap(p + before + size, more - before);
    *out = p + before;
    return 0;
}

int mt_host_alloc_at(void **out, size_t bytes, const struct mt_host_homes *homes, const char *what, struct mt_err *err)
{
    void *p = NULL;
    int rc = mt_host_map(&p, bytes, what, err);
    if (rc)
        return rc;
    if (bytes >= HUGE_LEAST)
        madvise(p, bytes, MADV_HUGEPAGE); /* a hint: may fail */
    rc = bytes ? touch_all(p, bytes, homes) : 0;
    if (rc) {
        munmap(p, bytes);
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "the system does not have %zu bytes of host memory for %s: %s", bytes, what,
                       strerror(-rc));
    }
    *out = p;
    return 0;
}

int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err)
{
    struct mt_numa numa;
    mt_numa_none(&numa);
    return mt_host_alloc_at(out, bytes, &(struct mt_host_homes){.numa = &numa}, what, err);
}

void mt_host_free(void *p, size_t bytes)
{
    if (p)
        munmap(p, MT_MAX(bytes, (size_t)1));
}
