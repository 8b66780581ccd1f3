/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One block: a fiber a thread, run one at a time in an order drawn from the seed until each waits or has left.
 * A collective lets its lanes go on when the last of them arrives. A barrier opens when nothing else can run
 * and every thread of the block waits at it, at the same line; anything else at that point is the kernel's
 * mistake. Stricter than a GPU of today, which counts a thread that has left as arrived.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"
#include "sanitizers.h"

__thread struct mt_emu_dim mt_emu_thread_idx, mt_emu_block_idx, mt_emu_block_dim, mt_emu_grid_dim;

enum state { READY, AT_BARRIER, AT_COLLECTIVE, LEFT };
enum { MAX_SHARED = 227 << 10, SHARED_GAP = 64 };

struct thread {
    struct mt_emu_fiber fiber;
    struct mt_emu_dim idx;
    unsigned id;
    enum state state;
    const char *file; /* where it waits */
    int line;
    enum mt_emu_collective_op op;
    unsigned mask;
    int arg, width;
    unsigned generation; /* of the warp's collectives, when this one was arrived at */
    uint64_t value, result;
};

struct warp {
    unsigned generation;
    char sync[2];
};

/* What an OS thread needs to run blocks; made when it runs its first. */
struct team {
    struct mt_emu_scheduler scheduler;
    struct thread threads[MT_EMU_MAX_THREADS];
    unsigned n_fibers, n_threads;
    struct warp warps[MT_EMU_MAX_THREADS / MT_EMU_WARP];
    unsigned queue[MT_EMU_MAX_THREADS], queue_first, queue_count; /* ready threads, a ring */
    struct thread *running;
    const struct mt_emu_launch *launch;
    uint64_t random; /* 0: in order */
    char *shared;    /* mapping of MAX_SHARED + 2 * SHARED_GAP */
    char begin_sync, end_sync, barrier_sync[2];
    unsigned barriers;
};

static pthread_key_t team_key;
static pthread_once_t team_once = PTHREAD_ONCE_INIT;
static __thread struct team *team;

static void destroy_team(void *p)
{
    struct team *t = p;
    for (unsigned i = 0; i < t->n_fibers; i++)
        mt_emu_fiber_finish(&t->threads[i].fiber);
    mt_asan_unpoison(t->shared, MAX_SHARED + 2 * SHARED_GAP);
    munmap(t->shared, MAX_SHARED + 2 * SHARED_GAP);
    free(t);
}

static void make_key(void)
{
    pthread_key_create(&team_key, destroy_team);
}

static struct team *get_team(void)
{
    if (team)
        return team;
    pthread_once(&team_once, make_key);
    team = calloc(1, sizeof(*team));
    if (!team)
        mt_emu_die("no memory for the threads of a block");
    team->shared = mmap(NULL, MAX_SHARED + 2 * SHARED_GAP, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (team->shared == MAP_FAILED)
        mt_emu_die("cannot map shared memory");
    pthread_setspecific(team_key, team);
    return team;
}

static const char *where(const struct team *t, const struct thread *th, char buf[static 256])
{
    snprintf(buf, 256, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)", t->launch->name,
             mt_emu_block_idx.x, mt_emu_block_idx.y, mt_emu_block_idx.z, th->idx.x, th->idx.y, th->idx.z);
    return buf;
}

static const char *doing(const struct thread *th, char buf[static 256])
{
    if (th->state == LEFT)
        snprintf(buf, 256, "has left the kernel");
    else if (th->state == AT_BARRIER)
        snprintf(buf, 256, "waits at the barrier of %s:%d", th->file, th->line);
    else
        snprintf(buf, 256, "waits at the collective of %s:%d with mask 0x%08x", th->file, th->line,
                 th->mask);
    return buf;
}

MT_EMU_UNCHECKED static void make_ready(struct team *t, struct thread *th)
{
    th->state = READY;
    t->queue[(t->queue_first + t->queue_count++) % MT_EMU_MAX_THREADS] = th->id;
}

/* All threads, in a new order. The queue is empty. */
MT_EMU_UNCHECKED static void make_all_ready(struct team *t)
{
    t->queue_first = 0;
    for (unsigned i = 0; i < t->n_threads; i++)
        make_ready(t, &t->threads[i]);
    for (unsigned i = t->n_threads; t->random && i > 1; i--) {
        unsigned k = (unsigned)((mt_emu_random(&t->random) >> 32) * i >> 32), tmp = t->queue[k];
        t->queue[k] = t->queue[i - 1];
        t->queue[i - 1] = tmp;
    }
}

/* --- what threads call ---------------------------------------------------------------------- */

MT_EMU_UNCHECKED static void wait_here(struct team *t, struct thread *th, enum state state,
                                       const char *file, int line)
{
    th->state = state;
    th->file = file;
    th->line = line;
    mt_emu_fiber_yield(&t->scheduler, &th->fiber);
}

static struct thread *caller(const char *what)
{
    if (!team || !team->running)
        mt_emu_die("%s outside a kernel", what);
    return team->running;
}

MT_EMU_UNCHECKED void mt_emu_barrier(const char *file, int line)
{
    struct thread *th = caller("a barrier");
    struct team *t = team;
    char *sync = &t->barrier_sync[t->barriers & 1];
    mt_tsan_release(sync);
    wait_here(t, th, AT_BARRIER, file, line);
    mt_tsan_acquire(sync);
}

static void fail_collective(struct thread *th, const char *why)
{
    char at[256], is[256];
    th->state = AT_COLLECTIVE;
    mt_emu_die("%s %s: %s", where(team, th, at), doing(th, is), why);
}

/* The lane that `th` reads, or its own where CUDA says that it keeps its value. */
MT_EMU_UNCHECKED static unsigned source_lane(const struct thread *th)
{
    unsigned lane = th->id % MT_EMU_WARP, width = (unsigned)th->width, arg = (unsigned)th->arg;
    unsigned first = lane & ~(width - 1), last = first + width - 1;
    switch (th->op) {
    case MT_EMU_SHFL: return first + (arg & (width - 1));
    case MT_EMU_SHFL_UP: return arg <= lane - first ? lane - arg : lane;
    case MT_EMU_SHFL_DOWN: return arg <= last - lane ? lane + arg : lane;
    case MT_EMU_SHFL_XOR: /* a lane of a later group is out of reach, one of an earlier group is not */
        arg %= MT_EMU_WARP;
        return (lane ^ arg) <= last ? lane ^ arg : lane;
    default: return lane;
    }
}

/* All lanes of the mask have arrived: computes what each gets, and lets the others go on. */
MT_EMU_UNCHECKED static void complete(struct team *t, struct thread *last, struct thread *lanes)
{
    unsigned ballot = 0, mask = last->mask;
    for (unsigned i = 0; i < MT_EMU_WARP; i++)
        if (mask >> i & 1 && lanes[i].value)
            ballot |= 1u << i;
    for (unsigned i = 0; i < MT_EMU_WARP; i++) {
        if (!(mask >> i & 1))
            continue;
        struct thread *th = &lanes[i];
        th->result = ballot;
        if (th->op != MT_EMU_BALLOT) {
            unsigned src = source_lane(th);
            if (!(mask >> src & 1))
                fail_collective(th, "it reads from a lane that is not in the mask");
            th->result = lanes[src].value;
        }
    }
    t->warps[last->id / MT_EMU_WARP].generation++;
    unsigned turn = t->random ? (unsigned)mt_emu_random(&t->random) % MT_EMU_WARP : 0;
    for (unsigned i = 0; i < MT_EMU_WARP; i++) {
        unsigned lane = i ^ turn;
        if (mask >> lane & 1 && &lanes[lane] != last)
            make_ready(t, &lanes[lane]);
    }
    last->state = READY;
}

MT_EMU_UNCHECKED uint64_t mt_emu_collective(enum mt_emu_collective_op op, unsigned mask, uint64_t value,
                                            int arg, int width, const char *file, int line)
{
    struct thread *th = caller("a warp collective");
    struct team *t = team;
    unsigned lane = th->id % MT_EMU_WARP, first = th->id - lane;
    struct warp *w = &t->warps[th->id / MT_EMU_WARP];
    th->op = op;
    th->mask = mask;
    th->value = value;
    th->arg = arg;
    th->width = width;
    th->file = file;
    th->line = line;
    th->generation = w->generation;
    if (!(mask >> lane & 1))
        fail_collective(th, "the caller is not in its own mask");
    if (width < 1 || width > MT_EMU_WARP || (width & (width - 1)))
        fail_collective(th, "the width is not a power of two up to 32");
    char *sync = &w->sync[th->generation & 1];
    if (op == MT_EMU_SYNCWARP)
        mt_tsan_release(sync);
    bool all = true;
    for (unsigned i = 0; i < MT_EMU_WARP; i++) {
        const struct thread *other = &t->threads[first + i];
        if (!(mask >> i & 1) || i == lane)
            continue;
        if (first + i >= t->n_threads)
            fail_collective(th, "the mask names a lane that the block does not have");
        all = all && other->state == AT_COLLECTIVE && other->mask == mask && other->op == op &&
              other->line == line && other->file == file;
    }
    if (all)
        complete(t, th, &t->threads[first]);
    else
        wait_here(t, th, AT_COLLECTIVE, file, line);
    if (op == MT_EMU_SYNCWARP)
        mt_tsan_acquire(sync);
    return th->result;
}

void *mt_emu_dynamic_shared(void)
{
    return team->shared + SHARED_GAP;
}

/* --- the scheduler -------------------------------------------------------------------------- */

MT_EMU_UNCHECKED static void thread_main(struct mt_emu_scheduler *s, void *arg)
{
    struct thread *th = arg;
    struct team *t = team;
    mt_tsan_acquire(&t->begin_sync);
    t->launch->run(t->launch->args);
    mt_tsan_release(&t->end_sync);
    th->state = LEFT;
    mt_emu_fiber_exit(s, &th->fiber);
}

MT_EMU_UNCHECKED static void run_ready(struct team *t)
{
    while (t->queue_count) {
        struct thread *th = &t->threads[t->queue[t->queue_first]];
        t->queue_first = (t->queue_first + 1) % MT_EMU_MAX_THREADS;
        t->queue_count--;
        t->running = th;
        mt_emu_thread_idx = th->idx;
        mt_emu_fiber_resume(&t->scheduler, &th->fiber);
    }
    t->running = NULL;
}

/* A lane that `th` waits for in its collective and that is elsewhere. */
static const struct thread *missing_lane(const struct team *t, const struct thread *th)
{
    const struct thread *lanes = th - th->id % MT_EMU_WARP, *other = th;
    for (unsigned i = 0; i < MT_EMU_WARP && lanes[i].id < t->n_threads; i++)
        if (th->mask >> i & 1 && (lanes[i].state != AT_COLLECTIVE || lanes[i].line != th->line ||
                                  lanes[i].mask != th->mask || lanes[i].op != th->op))
            other = &lanes[i];
    return other;
}

/* Nothing can run. Either all have left, or all wait at one barrier, or the kernel is wrong. */
static bool all_left(const struct team *t)
{
    const struct thread *first = &t->threads[0];
    char at[256], is[256], other[256], does[256];
    for (unsigned i = 0; i < t->n_threads; i++) {
        const struct thread *th = &t->threads[i];
        if (th->state == first->state && th->state != AT_COLLECTIVE &&
            (th->state == LEFT || (th->line == first->line && th->file == first->file)))
            continue;
        const struct thread *waits = th->state == AT_COLLECTIVE || first->state == LEFT ? th : first;
        const struct thread *peer = waits == th ? first : th;
        if (waits->state == AT_COLLECTIVE)
            peer = missing_lane(t, waits);
        mt_emu_die("%s: %s %s; %s %s",
                   waits->state == AT_COLLECTIVE ? "a lane of the mask does not arrive"
                                                 : "divergent barrier",
                   where(t, waits, at), doing(waits, is), where(t, peer, other), doing(peer, does));
    }
    return first->state == LEFT;
}

static void prepare(struct team *t, const struct mt_emu_launch *l, uint64_t index)
{
    struct mt_emu_dim b = l->block, g = l->grid;
    t->launch = l;
    t->n_threads = b.x * b.y * b.z;
    t->barriers = 0;
    memset(t->warps, 0, sizeof(t->warps));
    mt_emu_block_dim = b;
    mt_emu_grid_dim = g;
    mt_emu_block_idx = (struct mt_emu_dim){(unsigned)(index % g.x), (unsigned)(index / g.x % g.y),
                                           (unsigned)(index / g.x / g.y)};
    for (; t->n_fibers < t->n_threads; t->n_fibers++)
        mt_emu_fiber_init(&t->threads[t->n_fibers].fiber);
    for (unsigned i = 0; i < t->n_threads; i++) {
        struct thread *th = &t->threads[i];
        th->id = i;
        th->idx = (struct mt_emu_dim){i % b.x, i / b.x % b.y, i / b.x / b.y};
        mt_emu_fiber_prepare(&th->fiber, &t->scheduler, thread_main, th);
    }
    mt_asan_unpoison(t->shared, MAX_SHARED + 2 * SHARED_GAP);
    memset(t->shared + SHARED_GAP, 0xFF, l->shared_bytes);
    mt_asan_poison(t->shared, SHARED_GAP);
    mt_asan_poison(t->shared + SHARED_GAP + l->shared_bytes,
                   MAX_SHARED + SHARED_GAP - l->shared_bytes);
}

void mt_emu_run_block(const struct mt_emu_launch *l, uint64_t index, uint64_t seed)
{
    struct team *t = get_team();
    uint64_t random = seed + index * 0x9e3779b97f4a7c15u;
    t->random = seed ? mt_emu_random(&random) | 1 : 0;
    t->scheduler.here.tsan = mt_tsan_this_fiber();
    prepare(t, l, index);
    mt_tsan_release(&t->begin_sync);
    do {
        make_all_ready(t);
        run_ready(t);
        t->barriers++;
    } while (!all_left(t));
    mt_tsan_acquire(&t->end_sync);
}
