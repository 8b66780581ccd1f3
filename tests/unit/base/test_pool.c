/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/pool.h"
#include "base/thread.h"
#include "test.h"

enum { CHUNKS = 1000, ROUNDS = 300 };

struct job {
    atomic_int runs[CHUNKS];
    atomic_int threads_seen; /* a bit a thread */
    int plain[CHUNKS];       /* without atomics: a race shows under ThreadSanitizer */
};

static void count(void *ctx, size_t chunk, int thread)
{
    struct job *j = ctx;
    atomic_fetch_add(&j->runs[chunk], 1);
    atomic_fetch_or(&j->threads_seen, 1 << thread);
    j->plain[chunk]++;
}

static mt_pool *pool_of(int n)
{
    mt_pool *p = NULL;
    struct mt_pool_params params = {"test", n, NULL, NULL};
    assert_int_equal(mt_pool_create(&p, &params, NULL), 0);
    assert_int_equal(mt_pool_n_threads(p), n);
    return p;
}

TEST(each_chunk_runs_once_and_is_over_at_return)
{
    static const size_t sizes[] = {0, 1, 2, 3, 7, 64, CHUNKS};
    for (int threads = 1; threads <= 5; threads++) {
        static struct job j;
        mt_pool *p = pool_of(threads);
        memset(&j, 0, sizeof(j));
        int want = 0;
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            want++;
            mt_pool_run(p, count, &j, sizes[i]);
            for (size_t c = 0; c < CHUNKS; c++) {
                int expected = 0;
                for (size_t k = 0; k <= i; k++)
                    expected += c < sizes[k];
                assert_int_equal(atomic_load(&j.runs[c]), expected);
                assert_int_equal(j.plain[c], expected);
            }
        }
        assert_int_equal(atomic_load(&j.threads_seen) >> threads, 0);
        mt_pool_destroy(&p);
        assert_null(p);
    }
}

TEST(loops_in_quick_succession_do_not_mix)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *p = pool_of(4);
    static struct job j[2];
    memset(j, 0, sizeof(j));
    for (int r = 0; r < ROUNDS; r++)
        mt_pool_run(p, count, &j[r % 2], 3 + (size_t)r % 5);
    for (int k = 0; k < 2; k++)
        for (size_t c = 0; c < CHUNKS; c++) {
            int expected = 0;
            for (int r = k; r < ROUNDS; r += 2)
                expected += c < 3 + (size_t)r % 5;
            assert_int_equal(j[k].plain[c], expected);
        }
}

static void slow(void *ctx, size_t chunk, int thread)
{
    (void)chunk;
    usleep(1000);
    atomic_fetch_or((atomic_int *)ctx, 1 << thread);
}

TEST(all_threads_take_part)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *p = pool_of(3);
    atomic_int seen = 0;
    for (int r = 0; r < 200 && atomic_load(&seen) != 7; r++)
        mt_pool_run(p, slow, &seen, 6);
    assert_int_equal(atomic_load(&seen), 7);
}

static atomic_int inits;
static void init(void)
{
    atomic_fetch_add(&inits, 1);
}

TEST(each_started_thread_is_initialised_once)
{
    mt_pool *p = NULL;
    int cpus[4] = {0, 0, 0, 0};
    struct mt_pool_params params = {"a name that is far too long", 4, cpus, init};
    struct job *j = test_calloc(1, sizeof(*j));
    assert_int_equal(mt_pool_create(&p, &params, NULL), 0);
    for (int r = 0; r < 10; r++)
        mt_pool_run(p, count, j, CHUNKS);
    mt_pool_destroy(&p); /* joins: all have begun */
    assert_int_equal(atomic_load(&inits), 3);
    mt_pool_destroy(&p); /* NULL is fine */
    test_free(j);
}

static void note_priority(void *ctx, size_t chunk, int thread)
{
    int *nice = ctx;
    (void)chunk;
    nice[thread] = getpriority(PRIO_PROCESS, 0);
    usleep(1000);
}

/* Only the team: the thread that calls it, and those that others start, stay as they are. */
TEST(a_team_may_give_way)
{
    int nice[3] = {99, 99, 99}, before = getpriority(PRIO_PROCESS, 0), n = 0;
    struct mt_pool_params params = {"test", 3, NULL, mt_thread_gives_way};
    mt_pool *p = NULL;
    assert_int_equal(mt_pool_create(&p, &params, NULL), 0);
    for (int round = 0; round < 200 && nice[1] == 99 && nice[2] == 99; round++) /* a busy machine may keep the team away */
        mt_pool_run(p, note_priority, nice, 50);
    mt_pool_destroy(&p);
    for (int i = 1; i < 3; i++) {
        assert_true(nice[i] == 99 || nice[i] == MT_MAX(before, 5));
        n += nice[i] != 99;
    }
    assert_true(n > 0);
    assert_int_equal(getpriority(PRIO_PROCESS, 0), before);
}

/* --- lanes --- */

enum { LANES = 3, LANE_CHUNKS = 60 };

struct lanes {
    struct mt_pool_stripes stripes;
    atomic_int runs[LANE_CHUNKS], done, begun;
    int order[LANES][LANE_CHUNKS], n[LANES]; /* by thread: lanes of its chunks */
    int most;
};

static int lane_of(const struct lanes *l, size_t chunk)
{
    return (int)((l->stripes.first + chunk) / l->stripes.stripe % LANES);
}

static void note(void *ctx, size_t chunk, int thread)
{
    struct lanes *l = ctx;
    atomic_fetch_add(&l->runs[chunk], 1);
    l->order[thread][l->n[thread]++] = lane_of(l, chunk);
    if (l->n[thread] == 1 && l->most)
        for (atomic_fetch_add(&l->begun, 1); atomic_load(&l->begun) < LANES;)
            usleep(100);
    while (l->most && thread == 1 && atomic_load(&l->done) < l->most - 1)
        usleep(100); /* thread 1 is slow: its first chunk lasts until the others have done all of the rest */
    atomic_fetch_add(&l->done, 1);
}

static mt_pool *pool_of_lanes(void)
{
    mt_pool *p = pool_of(LANES);
    for (int i = 0; i < LANES; i++)
        mt_pool_set_lane(p, i, (i + 1) % LANES, LANES);
    return p;
}

TEST(lanes_have_all_chunks_once)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *p = pool_of_lanes();
    for (size_t first = 0; first < 14; first++)
        for (size_t stripe = 1; stripe < 6; stripe++)
            for (size_t n = 0; n < LANE_CHUNKS; n += 1 + n / 3) {
                struct lanes l = {.stripes = {first, stripe}};
                mt_pool_run_in_lanes(p, note, &l, n, l.stripes);
                for (size_t c = 0; c < LANE_CHUNKS; c++)
                    assert_int_equal(atomic_load(&l.runs[c]), c < n);
            }
}

/* Every thread has begun before one goes on; then one is slow. */
TEST(threads_take_their_own_lane_first_and_what_others_leave)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *p = pool_of_lanes();
    for (size_t first = 0; first < 9; first++) {
        struct lanes l = {.stripes = {first, 4}, .most = LANE_CHUNKS};
        mt_pool_run_in_lanes(p, note, &l, LANE_CHUNKS, l.stripes);
        int of_slow_lane = 0;
        for (size_t c = 0; c < LANE_CHUNKS; c++)
            of_slow_lane += lane_of(&l, c) == (1 + 1) % LANES;
        for (int t = 0; t < LANES; t++) {
            int mine = (t + 1) % LANES, others = 0;
            assert_true(l.n[t] > 0);
            assert_int_equal(l.order[t][0], mine);
            for (int i = 0; i < l.n[t]; i++) {
                others += l.order[t][i] != mine;
                assert_true(l.order[t][i] != mine || !others); /* none of its own after one of another's */
                of_slow_lane -= l.order[t][i] == 2 && t == 1;
            }
        }
        assert_int_equal(l.n[1], 1);
        assert_true(of_slow_lane > 10); /* which others have taken */
    }
}

static void *nothing(void *arg)
{
    return arg;
}

/* In a child, so that the limit ends with it. */
TEST(a_thread_that_is_refused_names_the_limits)
{
    if (getenv("ASAN_OPTIONS") || getenv("TSAN_OPTIONS")) /* which need the address space */
        skip();
    pid_t pid = fork();
    if (!pid) {
        struct rlimit as = {4 << 20, 4 << 20}; /* less than it has */
        struct mt_err err = {0};
        pthread_t t;
        bool refused = !setrlimit(RLIMIT_AS, &as) && mt_thread_start(&t, "mt-test", nothing, NULL, &err) < 0;
        _exit(refused && strstr(err.msg, "mt-test") && strstr(err.msg, "ulimit -v is 4096 KiB") ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(void)
{
    alarm(100);
    return test_run();
}
