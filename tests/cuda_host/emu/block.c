/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One block: its threads run one at a time, in an order drawn from the seed, until each waits or has left. A
 * thread that never waits needs no stack of its own: the fiber that ran it runs the next. A collective lets its
 * lanes go on when the last of them arrives, a barrier when every thread of the block waits at it, at the same
 * line. When nothing can run and threads are left, the kernel is wrong. That is stricter than a GPU of today,
 * which counts a thread that has left as arrived.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"
#include "base/mem.h"
#include "sanitizers.h"

__thread struct mt_emu_dim mt_emu_thread_idx, mt_emu_block_idx, mt_emu_block_dim, mt_emu_grid_dim;
__thread uint64_t mt_emu_epoch, mt_emu_block_epoch;

enum state { READY, AT_BARRIER, AT_COLLECTIVE, LEFT };
enum { MAX_SHARED = 227 << 10, SHARED_GAP = 128, MAX_WARPS = MT_EMU_MAX_THREADS / MT_EMU_WARP };

struct thread {
    struct mt_emu_dim idx;
    unsigned id;
    enum state state;
    struct runner *runner; /* NULL: not begun */
    const char *file;      /* where it waits */
    int line;
    unsigned mask;
};

/* A fiber, and the thread it runs. */
struct runner {
    struct mt_emu_fiber fiber;
    struct thread *thread;
};

/* Lanes that wait for each other. */
struct group {
    enum mt_emu_collective_op op;
    unsigned mask, arrived;
    const char *file;
    int line;
};

struct warp {
    unsigned ready; /* bit i: lane i ^ order, so that the lowest bit comes first */
    unsigned order;
    unsigned n_groups, generation;
    struct group groups[MT_EMU_WARP];
    uint64_t value[MT_EMU_WARP], result[MT_EMU_WARP];
    int arg[MT_EMU_WARP], width[MT_EMU_WARP];
    char sync[2];
};

/* What an OS thread needs to run blocks; made when it runs its first. */
struct team {
    struct mt_emu_fiber here; /* the OS thread's own flow */
    struct thread threads[MT_EMU_MAX_THREADS];
    struct runner runners[MT_EMU_MAX_THREADS], *idle[MT_EMU_MAX_THREADS];
    unsigned n_runners, n_idle, n_threads, n_warps;
    struct warp warps[MAX_WARPS];
    unsigned warp_order[MAX_WARPS], current; /* the warp that runs, a place in warp_order */
    struct thread *running;
    const struct mt_emu_launch *launch;
    struct mt_emu_dim shape; /* of the block that the threads' indices are for */
    uint64_t random;         /* 0: in order */
    char *shared;            /* mapping of MAX_SHARED + 2 * SHARED_GAP */
    unsigned n_at_barrier, barriers;
    const char *barrier_file; /* of the first to arrive */
    int barrier_line;
    bool divergent; /* others came by another line */
    char begin_sync, end_sync, barrier_sync[2];
};

static pthread_key_t team_key;
static pthread_once_t team_once = PTHREAD_ONCE_INIT;
static __thread struct team *team;

static void destroy_team(void *p)
{
    MT_FREED struct team *t = p;
    for (unsigned i = 0; i < t->n_runners; i++)
        mt_emu_fiber_finish(&t->runners[i].fiber);
    mt_asan_unpoison(t->shared, MAX_SHARED + 2 * SHARED_GAP);
    munmap(t->shared, MAX_SHARED + 2 * SHARED_GAP);
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
    mt_emu_fiber_adopt(&team->here);
    pthread_setspecific(team_key, team);
    return team;
}

/* --- reports -------------------------------------------------------------------------------- */

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

static void fail_collective(struct thread *th, const char *why)
{
    char at[256], is[256];
    th->state = AT_COLLECTIVE;
    mt_emu_die("%s %s: %s", where(team, th, at), doing(th, is), why);
}

/* A lane that `th` waits for in its collective and that is elsewhere. */
static const struct thread *missing_lane(const struct team *t, const struct thread *th)
{
    const struct thread *lanes = th - th->id % MT_EMU_WARP, *other = th;
    for (unsigned i = 0; i < MT_EMU_WARP && lanes[i].id < t->n_threads; i++)
        if (th->mask >> i & 1 && (lanes[i].state != AT_COLLECTIVE || lanes[i].line != th->line ||
                                  lanes[i].mask != th->mask))
            other = &lanes[i];
    return other;
}

/* Nothing can run. Either all have left, or the kernel is wrong. */
static void check_all_left(const struct team *t)
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
}

/* --- the order of threads ------------------------------------------------------------------- */

MT_EMU_UNCHECKED static unsigned draw(struct team *t)
{
    return t->random ? (unsigned)(mt_emu_random(&t->random) >> 32) : 0;
}

/* Bit i of the result is bit i ^ order of `lanes`. */
MT_EMU_UNCHECKED static unsigned permute(unsigned lanes, unsigned order)
{
    static const unsigned half[] = {0x55555555, 0x33333333, 0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
    for (unsigned b = 0; b < 5; b++)
        if (order >> b & 1)
            lanes = (lanes & half[b]) << (1u << b) | (lanes >> (1u << b) & half[b]);
    return lanes;
}

MT_EMU_UNCHECKED static void make_lanes_ready(struct team *t, struct warp *w, unsigned lanes)
{
    if (!w->ready)
        w->order = draw(t) % MT_EMU_WARP;
    w->ready |= permute(lanes, w->order);
}

/* All threads, the warps in a new order. */
MT_EMU_UNCHECKED static void make_all_ready(struct team *t)
{
    t->n_at_barrier = 0;
    t->divergent = false;
    t->current = 0;
    for (unsigned i = 0; i < t->n_threads; i++)
        t->threads[i].state = READY;
    for (unsigned i = 0; i < t->n_warps; i++) {
        unsigned k = (unsigned)((uint64_t)draw(t) * (i + 1) >> 32), left = t->n_threads - i * MT_EMU_WARP;
        t->warp_order[i] = t->warp_order[k];
        t->warp_order[k] = i;
        make_lanes_ready(t, &t->warps[i], left < MT_EMU_WARP ? (1u << left) - 1 : ~0u);
    }
}

/* The thread to run next, or NULL: a warp goes on as long as it can. */
MT_EMU_UNCHECKED static struct thread *take_ready(struct team *t)
{
    for (unsigned i = 0; i < t->n_warps; i++) {
        unsigned warp = t->warp_order[t->current];
        struct warp *w = &t->warps[warp];
        if (w->ready) {
            unsigned lane = (unsigned)__builtin_ctz(w->ready) ^ w->order;
            w->ready &= w->ready - 1;
            return &t->threads[warp * MT_EMU_WARP + lane];
        }
        t->current = (t->current + 1) % t->n_warps;
    }
    return NULL;
}

MT_EMU_UNCHECKED static void become(struct team *t, struct thread *th)
{
    t->running = th;
    mt_emu_thread_idx = th->idx;
}

/* Goes on with th, or with the OS thread's own flow for NULL; returns when somebody goes on with `from`. */
MT_EMU_UNCHECKED static void go_on_with(struct team *t, struct thread *th, struct mt_emu_fiber *from)
{
    if (!th) {
        t->running = NULL;
        mt_emu_fiber_switch(from, &t->here);
        return;
    }
    if (!th->runner) {
        th->runner = MT_EMU_FIBER_A_THREAD ? &t->runners[th->id] : t->idle[--t->n_idle];
        th->runner->thread = th;
    }
    become(t, th);
    mt_emu_fiber_switch(from, &th->runner->fiber);
}

/* A fiber's life: one thread after another, of block after block. */
MT_EMU_UNCHECKED static void runner_main(void *arg)
{
    struct runner *r = arg;
    struct team *t = team;
    for (;;) {
        struct thread *th = r->thread;
        mt_tsan_acquire(&t->begin_sync);
        t->launch->run(t->launch->args);
        mt_tsan_release(&t->end_sync);
        th->state = LEFT;
        struct thread *next = take_ready(t);
        if (next && !next->runner && !MT_EMU_FIBER_A_THREAD) {
            next->runner = r;
            r->thread = next;
            become(t, next);
            continue;
        }
        if (!MT_EMU_FIBER_A_THREAD)
            t->idle[t->n_idle++] = r;
        go_on_with(t, next, &r->fiber);
    }
}

/* --- what threads call ---------------------------------------------------------------------- */

MT_EMU_UNCHECKED static void wait_here(struct team *t, struct thread *th)
{
    struct thread *next = take_ready(t);
    if (next == th)
        become(t, th);
    else
        go_on_with(t, next, &th->runner->fiber);
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
    th->state = AT_BARRIER;
    th->file = file;
    th->line = line;
    if (!t->n_at_barrier++) {
        t->barrier_file = file;
        t->barrier_line = line;
    }
    t->divergent = t->divergent || t->barrier_line != line || t->barrier_file != file;
    if (t->n_at_barrier == t->n_threads && !t->divergent) {
        t->barriers++;
        mt_emu_epoch++;
        make_all_ready(t);
    }
    wait_here(t, th);
    mt_tsan_acquire(sync);
}

/* The lane that `lane` reads, or its own where CUDA says that it keeps its value. */
MT_EMU_UNCHECKED static unsigned source_lane(const struct warp *w, enum mt_emu_collective_op op,
                                             unsigned lane)
{
    unsigned width = (unsigned)w->width[lane], arg = (unsigned)w->arg[lane];
    unsigned first = lane & ~(width - 1), last = first + width - 1;
    switch (op) {
    case MT_EMU_SHFL: return first + (arg & (width - 1));
    case MT_EMU_SHFL_UP: return arg <= lane - first ? lane - arg : lane;
    case MT_EMU_SHFL_DOWN: return arg <= last - lane ? lane + arg : lane;
    case MT_EMU_SHFL_XOR: /* a lane of a later group is out of reach, one of an earlier group is not */
        arg %= MT_EMU_WARP;
        return (lane ^ arg) <= last ? lane ^ arg : lane;
    default: return lane;
    }
}

/* All lanes of the mask have arrived: computes what each gets, and lets those that wait go on. */
MT_EMU_UNCHECKED static void complete(struct team *t, struct warp *w, struct thread *lanes,
                                      const struct group *g)
{
    struct mt_emu_lane *call[MT_EMU_WARP], *first = NULL;
    unsigned ballot = 0;
    for (unsigned i = MT_EMU_WARP; g->op == MT_EMU_CALL && i--;) {
        call[i] = g->mask >> i & 1 ? (struct mt_emu_lane *)(uintptr_t)w->value[i] : NULL;
        first = call[i] ? call[i] : first;
    }
    if (first)
        first->all(call, g->mask);
    for (unsigned i = 0; i < MT_EMU_WARP; i++)
        ballot |= (g->mask >> i & 1 && w->value[i] ? 1u : 0u) << i;
    for (unsigned i = 0; i < MT_EMU_WARP; i++) {
        if (!(g->mask >> i & 1))
            continue;
        unsigned src = source_lane(w, g->op, i);
        if (!(g->mask >> src & 1))
            fail_collective(&lanes[i], "it reads from a lane that is not in the mask");
        w->result[i] = g->op == MT_EMU_BALLOT ? ballot : w->value[src];
        lanes[i].state = READY;
    }
    make_lanes_ready(t, w, g->mask);
    w->generation++;
}

/* Adds a lane to the group it waits with; true when that is complete, and copied to *g. */
MT_EMU_UNCHECKED static bool join_group(struct warp *w, unsigned lane, struct group *g)
{
    unsigned i = 0;
    while (i < w->n_groups && (w->groups[i].mask != g->mask || w->groups[i].op != g->op ||
                               w->groups[i].line != g->line || w->groups[i].file != g->file))
        i++;
    if (i == w->n_groups)
        w->groups[w->n_groups++] = *g;
    w->groups[i].arrived |= 1u << lane;
    if (w->groups[i].arrived != g->mask)
        return false;
    w->groups[i] = w->groups[--w->n_groups];
    return true;
}

MT_EMU_UNCHECKED uint64_t mt_emu_collective(enum mt_emu_collective_op op, unsigned mask, uint64_t value,
                                            int arg, int width, const char *file, int line)
{
    struct thread *th = caller("a warp collective");
    struct team *t = team;
    unsigned lane = th->id % MT_EMU_WARP, first = th->id - lane;
    struct warp *w = &t->warps[th->id / MT_EMU_WARP];
    struct group g = {op, mask, 0, file, line};
    th->mask = mask;
    th->file = file;
    th->line = line;
    w->value[lane] = value;
    w->arg[lane] = arg;
    w->width[lane] = width;
    if (!(mask >> lane & 1))
        fail_collective(th, "the caller is not in its own mask");
    if (width < 1 || width > MT_EMU_WARP || (width & (width - 1)))
        fail_collective(th, "the width is not a power of two up to 32");
    if (t->n_threads - first < MT_EMU_WARP && mask >> (t->n_threads - first))
        fail_collective(th, "the mask names a lane that the block does not have");
    char *sync = &w->sync[w->generation & 1];
    if (op == MT_EMU_SYNCWARP)
        mt_tsan_release(sync);
    th->state = AT_COLLECTIVE;
    if (join_group(w, lane, &g))
        complete(t, w, &t->threads[first], &g);
    wait_here(t, th);
    if (op == MT_EMU_SYNCWARP)
        mt_tsan_acquire(sync);
    return w->result[lane];
}

void mt_emu_warp_call(unsigned mask, struct mt_emu_lane *mine, const char *file, int line)
{
    mt_emu_collective(MT_EMU_CALL, mask, (uint64_t)(uintptr_t)mine, 0, MT_EMU_WARP, file, line);
}

void *mt_emu_dynamic_shared(void)
{
    return team->shared + SHARED_GAP;
}

/* --- blocks --------------------------------------------------------------------------------- */

/* Indices and fibers for blocks of this shape. */
static void form(struct team *t, struct mt_emu_dim b)
{
    t->shape = b;
    t->n_threads = b.x * b.y * b.z;
    t->n_warps = (t->n_threads + MT_EMU_WARP - 1) / MT_EMU_WARP;
    for (unsigned i = 0; i < t->n_threads; i++) {
        t->threads[i].id = i;
        t->threads[i].idx = (struct mt_emu_dim){i % b.x, i / b.x % b.y, i / b.x / b.y};
    }
    for (; t->n_runners < t->n_threads; t->n_runners++) {
        struct runner *r = &t->runners[t->n_runners];
        mt_emu_fiber_init(&r->fiber, runner_main, r);
        if (!MT_EMU_FIBER_A_THREAD)
            t->idle[t->n_idle++] = r;
    }
}

static void prepare(struct team *t, const struct mt_emu_launch *l, uint64_t index)
{
    struct mt_emu_dim b = l->block, g = l->grid;
    if (b.x != t->shape.x || b.y != t->shape.y || b.z != t->shape.z)
        form(t, b);
    t->launch = l;
    t->barriers = 0;
    mt_emu_block_epoch = ++mt_emu_epoch;
    mt_emu_block_dim = b;
    mt_emu_grid_dim = g;
    mt_emu_block_idx = (struct mt_emu_dim){(unsigned)(index % g.x), (unsigned)(index / g.x % g.y),
                                           (unsigned)(index / g.x / g.y)};
    for (unsigned i = 0; i < t->n_threads; i++)
        t->threads[i].runner = NULL;
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
    prepare(t, l, index);
    mt_tsan_release(&t->begin_sync);
    make_all_ready(t);
    go_on_with(t, take_ready(t), &t->here);
    check_all_left(t);
    mt_tsan_acquire(&t->end_sync);
}
