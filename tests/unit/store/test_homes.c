/* SPDX-License-Identifier: Apache-2.0 */
/* Where planes are placed, on made-up nodes that only note what is asked of them. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "made_planes.h"
#include "test.h"

#ifdef __SANITIZE_ADDRESS__ /* which puts gaps between planes */
enum { EXACT = 0 };
#else
enum { EXACT = 1 };
#endif
enum { MIB = 1 << 20, UNITS = 5, MOST = 4096, STEP = 8192 };
/* a unit of many stripes, small ones, one without planes, and one of stripes that are cut at both ends */
static const size_t elems[UNITS] = {9 * MIB + 300 * 2048, 4096, 0, 6144, 5 * MIB + 2048};
static const bool trainable[UNITS] = {true, true, true, true, true};

static struct {
    pthread_mutex_t lock;
    struct place {
        int home;
        char *p;
        size_t bytes;
    } place[MOST];
    size_t n;
} noted = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int note(const struct mt_numa *numa, int home, char *p, size_t bytes)
{
    (void)numa;
    pthread_mutex_lock(&noted.lock);
    assert_true(noted.n < MOST);
    noted.place[noted.n++] = (struct place){home, p, bytes};
    pthread_mutex_unlock(&noted.lock);
    return 0;
}

static struct mt_numa made_up(int n)
{
    struct mt_numa numa;
    mt_numa_none(&numa);
    numa.n = n;
    numa.populate = note;
    for (int h = 0; h < n; h++) {
        numa.home[h].node = h;
        CPU_SET((size_t)(100 + h), &numa.home[h].cpus);
    }
    return numa;
}

static struct mt_plane_set_params params(enum mt_dtype state, const struct mt_numa *numa)
{
    static struct mt_plane_elems by_kind[UNITS];
    struct mt_plane_set_params p = made_planes(UNITS, elems, trainable, by_kind, state, MT_BF16);
    p.numa = numa;
    return p;
}

/* Home at which the byte was placed; it must have been, and once. */
static int placed_at(const char *p)
{
    int home = -1, times = 0;
    for (size_t i = 0; i < noted.n; i++)
        if (p >= noted.place[i].p && p < noted.place[i].p + noted.place[i].bytes) {
            home = noted.place[i].home;
            times++;
        }
    assert_int_equal(times, 1);
    return home;
}

/* All planes' elements are at the home of their stripe; returns how many of those looked at are not. They may lie across
 * its border then, in a huge page whose larger part is at the other side. */
static size_t check_set(const mt_plane_set *s, size_t stripe, int homes)
{
    size_t wrong = 0, number = 0;
    for (size_t u = 0; u < UNITS; number += elems[u++])
        for (size_t i = 0; i < elems[u]; i += STEP) {
            int home = (int)((number + i) / stripe % (size_t)homes);
            for (int k = 0; k < MT_N_PLANES; k++) {
                const char *plane = mt_plane(s, u, k);
                if (!plane)
                    continue;
                size_t bytes = mt_plane_desc_of(s, (enum mt_plane_kind)k)->block_bytes;
                assert_int_equal(mt_plane_home(s, u, (enum mt_plane_kind)k, i), home);
                if (placed_at(plane + i * bytes) == home)
                    continue;
                size_t in = (number + i) % stripe, border = MT_MIN(in, stripe - in);
                assert_in_range(border * bytes, 0, MT_HUGE_PAGE / 2 + 4096 * UNITS);
                wrong++;
            }
        }
    return wrong;
}

TEST(a_stripe_of_all_planes_is_at_one_home)
{
    for (int homes = 2; homes <= 3; homes++)
        for (int wide = 0; wide < 2; wide++) {
            struct mt_numa numa = made_up(homes);
            struct mt_plane_set_params p = params(wide ? MT_F32 : MT_BF16, &numa);
            size_t stripe = MIB, sum = 0, range, bytes = 0;
            if (!wide) { /* states of a byte: a stripe of them must be a huge page, too */
                p.desc[MADE_V].block_bytes = 1;
                stripe = 2 * MIB;
            }
            mt_plane_set *s = NULL;
            noted.n = 0;
            assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
            assert_int_equal(mt_plane_set_numa(s)->n, homes);
            size_t wrong = check_set(s, stripe, homes);
            assert_true(!EXACT || !wrong);
            for (int k = 0; k < MT_N_PLANES; k++) {
                mt_plane_set_range(s, (enum mt_plane_kind)k, &range);
                bytes += range;
            }
            for (size_t i = 0; i < noted.n; i++)
                sum += noted.place[i].bytes;
            assert_true(sum == bytes || !EXACT);
            assert_int_equal(bytes == mt_plane_set_bytes(&p), EXACT); /* homes take no memory */
            mt_plane_set_destroy(&s);
        }
}

/* The planes of unit 1, and of unit 0 all but the weights, are elsewhere: rows of kinds in memory then differ. */
TEST(borders_are_met_as_well_as_pages_allow_if_some_planes_are_elsewhere)
{
    struct mt_numa numa = made_up(2);
    struct mt_plane_set_params p = params(MT_F32, &numa);
    static const mt_plane_bits on_disk[UNITS] = {~(1u << MT_PLANE_HI), ~0u};
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = NULL;
    p.on_disk = on_disk;
    noted.n = 0;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    size_t wrong = check_set(s, MIB, 2);
    assert_true(wrong > 0 && wrong < (9 + 5 * 5) * MIB / STEP / 4);
}

TEST(what_is_never_updated_alternates)
{
    struct mt_numa numa = made_up(2);
    struct mt_plane_set_params p = params(MT_F32, &numa);
    size_t bytes;
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = NULL;
    p.desc[MT_PLANE_FROZEN] = (struct mt_plane_desc){"base", NULL, MT_ROLE_WEIGHT, MT_RANGE_PACKED, MT_BF16, 64, 34};
    p.elems[3].n[MT_PLANE_FROZEN] = 20 * MIB;
    noted.n = 0;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    const char *from = mt_plane_set_range(s, MT_PLANE_FROZEN, &bytes);
    assert_int_equal(bytes, mt_align_up(20 * MIB / 64 * 34, 4096));
    from -= EXACT ? 0 : 4096;
    for (size_t at = 4096; at < bytes; at += 65536)
        assert_int_equal(placed_at(from + at), at / MT_HUGE_PAGE % 2);
}

TEST(with_one_home_nothing_is_divided)
{
    struct mt_numa numa = made_up(1);
    struct mt_plane_set_params p = params(MT_F32, &numa);
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = NULL;
    noted.n = 0;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    assert_int_equal(noted.n, 5); /* one mapping of each kind */
    for (size_t i = 0; i < noted.n; i++) {
        assert_int_equal((uintptr_t)noted.place[i].p % MT_HUGE_PAGE, 0);
        assert_int_equal(noted.place[i].home, -1);
    }
}

/* --- loops over elements --- */

struct loop {
    const mt_plane_set *s;
    size_t unit;
    unsigned char *runs; /* [elements] */
    atomic_int begun;
    int threads;
    _Atomic(pthread_t) first[4]; /* by home: the thread of its first chunk */
};

static _Thread_local bool has_begun;

static void run(void *ctx, size_t first, size_t n)
{
    struct loop *l = ctx;
    int home = mt_plane_home(l->s, l->unit, MT_PLANE_HI, first);
    assert_true(n > 0 && n <= MT_PLANE_CHUNK);
    assert_int_equal(mt_plane_home(l->s, l->unit, MT_PLANE_HI, first + n - 1), home);
    for (size_t i = first; i < first + n; i++)
        l->runs[i]++;
    if (!has_begun && l->threads) {
        has_begun = true;
        l->first[home] = pthread_self();
        for (atomic_fetch_add(&l->begun, 1); atomic_load(&l->begun) < l->threads;)
            usleep(100);
    }
}

/* Thread i is bound to a CPU of home i, so its first chunk is there: all have begun before one takes a second. */
TEST(elements_are_updated_once_and_at_home)
{
    static const size_t from[] = {0, 1, 2048, 3 * MIB - 5, 5 * MIB}, n[] = {9 * MIB, 1, 70000, 4 * MIB, 0};
    static const int cpus[] = {100, 101, 102};
    struct mt_numa numa = made_up(3);
    struct mt_plane_set_params p = params(MT_F32, &numa);
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = NULL;
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *pool = NULL;
    noted.n = 0;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    assert_int_equal(mt_pool_create(&pool, &(struct mt_pool_params){"homes", 3, NULL, NULL}, NULL), 0);
    mt_numa_lanes(&numa, pool, cpus);
    for (size_t i = 0; i < MT_ARRAY_LEN(from); i++)
        for (size_t unit = 0; unit < UNITS; unit += UNITS - 1) {
            size_t some = MT_MIN(n[i], elems[unit] - from[i]);
            struct loop l = {.s = s, .unit = unit, .runs = mt_calloc(elems[unit], 1), .threads = i || unit ? 0 : 3};
            mt_planes_run(s, unit, from[i], some, pool, run, &l);
            for (size_t e = 0; e < elems[unit]; e++)
                if (l.runs[e] != (e >= from[i] && e < from[i] + some))
                    fail_msg("element %zu of unit %zu: %d times", e, unit, l.runs[e]);
            assert_true(!l.threads || (l.first[0] == pthread_self() && l.first[1] && l.first[2] &&
                                       l.first[1] != l.first[0] && l.first[2] != l.first[1]));
            free(l.runs);
        }
}

int main(void)
{
    alarm(100);
    return test_run();
}
