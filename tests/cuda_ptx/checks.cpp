/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accesses to memory: in bounds and aligned always. Shared memory has a shadow of every byte: who wrote and read it
 * since when. Two threads' accesses, one of them a write, need a barrier between (or bar.warp.sync of their warp); what
 * is read must have been written, and a copy be waited for. With MT_PTX_GLOBAL=1 the same of every two bytes of global
 * memory during a launch, across blocks too, and what `.nc` loads read is written by nobody in that launch. With
 * MT_PTX_TRAFFIC or MT_PTX_BANKS, bytes and bank conflicts are counted.
 */
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ptx.h"

namespace ptx {

enum { WARP = 32, MAX_THREADS = 1024, MAX_SHARED = 227 << 10 };

/* --- reports ------------------------------------------------------------------------------------- */

static std::string text_of(const kernel &k, unsigned line)
{
    std::ifstream in(k.path);
    std::string s;
    for (unsigned i = 0; i < line && std::getline(in, s); i++)
        ;
    size_t first = s.find_first_not_of(" \t");
    return first == std::string::npos ? "" : s.substr(first);
}

void fault(const thread &t, unsigned line, const char *fmt, ...)
{
    char what[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    unsigned x = mt_emu_block_dim.x, y = mt_emu_block_dim.y;
    mt_emu_die("kernel %s, %s:%u `%s`, block (%u, %u, %u), thread (%u, %u, %u): %s", t.l->name, t.l->k->file, line,
               text_of(*t.l->k, line).c_str(), mt_emu_block_idx.x, mt_emu_block_idx.y, mt_emu_block_idx.z, t.id % x,
               t.id / x % y, t.id / x / y, what);
}

void unset(const thread &t, unsigned line, const char *reg)
{
    fault(t, line, "register %s is read and was never written", reg);
}

/* --- who touched what ------------------------------------------------------------------------------ */

namespace {

/* When a thread of a block did something: what two do at one epoch no barrier orders. */
struct moment {
    uint32_t epoch;
    uint16_t thread, warp_epoch;
};

/* The last write of a grain of memory, and the reads since. */
struct cell {
    moment write, read;
    uint16_t others_warp_epoch; /* of reads by other threads than the last, the latest */
    uint8_t others;             /* whether there are, at read.epoch: 1 in its warp, 2 in another */
};

bool ordered(const moment &a, const moment &b)
{
    return a.epoch != b.epoch || a.thread == b.thread ||
           (a.thread / WARP == b.thread / WARP && a.warp_epoch < b.warp_epoch);
}

void note_read(cell &c, const moment &now)
{
    if (c.read.epoch != now.epoch) {
        c.others = 0;
    } else if (c.read.thread != now.thread) {
        uint8_t far = c.read.thread / WARP != now.thread / WARP ? 2 : 1;
        if (!c.others || c.others_warp_epoch < c.read.warp_epoch)
            c.others_warp_epoch = c.read.warp_epoch;
        c.others = c.others > far ? c.others : far;
    }
    c.read = now;
}

/* Whether a read since the last barrier conflicts with a write now. */
bool reads_conflict(const cell &c, const moment &now)
{
    if (c.read.epoch != now.epoch)
        return false;
    bool by_others = c.others == 2 || (c.others && c.others_warp_epoch >= now.warp_epoch);
    return !ordered(c.read, now) || by_others;
}

struct shared_cell {
    cell c;
    uint16_t copier; /* the thread whose copy to here has not been waited for, plus 1 */
};

/* A grain of global memory in one launch. */
struct global_cell {
    cell c;
    uint32_t launch, write_block, read_block; /* blocks plus 1; 0: none in this launch */
    bool blocks, constant;                    /* read by several blocks; by .nc */
};

struct pending {
    uint32_t to, from_bytes, bytes, group;
    uint64_t from;
};

} // namespace

struct shadow {
    std::vector<shared_cell> cells{MAX_SHARED + 8 * SHARED_GAP};
    uint16_t warp_epoch[MAX_THREADS / WARP];
    std::vector<pending> copies[MAX_THREADS];
    uint32_t groups[MAX_THREADS];
};

/* --- traffic and bank conflicts -------------------------------------------------------------------- */

/* What the threads of a kernel moved. A warp's access to global memory touches a cache line for each 128 bytes at best,
 * one to shared memory takes a wavefront for each. */
struct traffic {
    std::atomic<uint64_t> loaded, stored, lines, wavefronts, conflicts;
};

/* One access of a warp: what its lanes touch at the same instruction, the same number of times since the last barrier. */
struct warp_access {
    uint64_t address[WARP];
    uint32_t mask;
    uint8_t bytes;
    bool global;
    unsigned line;
};

struct accesses {
    uint64_t epoch;
    std::map<std::pair<unsigned, unsigned>, unsigned> times;          /* by line and thread */
    std::map<std::tuple<unsigned, unsigned, unsigned>, warp_access> warps; /* by line, warp and time */
};

namespace {

const char *const traffic_path = getenv("MT_PTX_TRAFFIC"), *const no_conflicts_in = getenv("MT_PTX_BANKS");
const bool counting = traffic_path || no_conflicts_in;
std::mutex traffic_lock;
std::map<std::string, traffic> traffic_of;

void write_traffic()
{
    FILE *f = fopen(traffic_path, "a");
    if (!f)
        mt_emu_die("cannot write MT_PTX_TRAFFIC = %s", traffic_path);
    for (const auto &t : traffic_of)
        fprintf(f, "%s\t%llu\t%llu\t%llu\t%llu\t%llu\n", t.first.c_str(), (unsigned long long)t.second.loaded,
                (unsigned long long)t.second.stored, (unsigned long long)t.second.lines,
                (unsigned long long)t.second.wavefronts, (unsigned long long)t.second.conflicts);
    fclose(f);
}

traffic &traffic_in(const launch &l)
{
    std::lock_guard<std::mutex> own(traffic_lock);
    static const bool once = traffic_path && !atexit(write_traffic);
    (void)once;
    return traffic_of[l.name];
}

/* Wavefronts of lanes [first, first + n): of each bank as many as different words of it are touched. */
unsigned wavefronts(const warp_access &w, unsigned first, unsigned n)
{
    std::set<uint64_t> words[WARP];
    size_t most = 0;
    for (unsigned i = first; i < first + n; i++)
        for (uint64_t a = w.address[i] & ~3ull; (w.mask >> i & 1) && a < w.address[i] + w.bytes; a += 4)
            words[a / 4 % WARP].insert(a);
    for (const auto &of_bank : words)
        most = most > of_bank.size() ? most : of_bank.size();
    return static_cast<unsigned>(most);
}

size_t lines(const warp_access &w)
{
    std::set<uint64_t> touched;
    for (unsigned i = 0; i < WARP; i++)
        if (w.mask >> i & 1)
            touched.insert(w.address[i] / 128);
    return touched.size();
}

/* 16 bytes a lane go by quarters of a warp, 8 by halves. */
void finish(const thread &t, const warp_access &w)
{
    if (w.global) {
        t.c->moved->lines += lines(w);
        return;
    }
    unsigned lanes = w.bytes == 16 ? 8 : w.bytes == 8 ? 16 : WARP;
    for (unsigned i = 0; i < WARP; i += lanes) {
        unsigned n = wavefronts(w, i, lanes);
        if (!n)
            continue;
        t.c->moved->wavefronts += n;
        t.c->moved->conflicts += n - 1;
        if (n > 1 && no_conflicts_in && strstr(t.l->name, no_conflicts_in))
            fault(t, w.line, "bank conflict: lanes %u to %u take %u wavefronts", i, i + lanes - 1, n);
    }
}

void finish_all(const thread &t)
{
    accesses &a = *t.c->accesses;
    for (const auto &w : a.warps)
        finish(t, w.second);
    a.warps.clear();
    a.times.clear();
}

} // namespace

static void note_access(thread &t, uint64_t at, unsigned bytes, unsigned line, bool global)
{
    accesses &a = *t.c->accesses;
    if (a.epoch != mt_emu_epoch)
        finish_all(t);
    a.epoch = mt_emu_epoch;
    unsigned time = a.times[{line, t.id}]++;
    warp_access &w = a.warps[{line, t.id / WARP, time}];
    w.address[t.id % WARP] = at;
    w.mask |= 1u << t.id % WARP;
    w.bytes = static_cast<uint8_t>(bytes);
    w.global = global;
    w.line = line;
}

static void note_global(thread &t, uint64_t at, unsigned bytes, unsigned line, access how)
{
    (how == WRITE ? t.c->moved->stored : t.c->moved->loaded) += bytes;
    note_access(t, at, bytes, line, true);
}

static const bool watch_global = getenv("MT_PTX_GLOBAL") && atoi(getenv("MT_PTX_GLOBAL"));
static const int moved_ulps = getenv("MT_PTX_APPROX") ? atoi(getenv("MT_PTX_APPROX")) : 0;

static context &own_context()
{
    static thread_local struct owner {
        context c = {};
        owner()
        {
            c.shadow = new shadow;
            c.accesses = new accesses();
        }
        ~owner()
        {
            delete c.shadow;
            delete c.accesses;
        }
    } o;
    return o.c;
}

static moment now_of(const thread &t)
{
    return {static_cast<uint32_t>(mt_emu_epoch), static_cast<uint16_t>(t.id), t.c->shadow->warp_epoch[t.id / WARP]};
}

static void begin_block(context &c, const launch *l)
{
    c.l = l;
    c.moved = counting ? &traffic_in(*l) : nullptr;
    c.living = mt_emu_block_dim.x * mt_emu_block_dim.y * mt_emu_block_dim.z;
    c.block_epoch = mt_emu_block_epoch;
    c.block = (mt_emu_block_idx.z * mt_emu_grid_dim.y + mt_emu_block_idx.y) * mt_emu_grid_dim.x + mt_emu_block_idx.x;
    c.shared = static_cast<char *>(mt_emu_dynamic_shared());
    memset(c.near, 0, sizeof(c.near));
    memset(c.shadow->warp_epoch, 0, sizeof(c.shadow->warp_epoch));
    memset(c.shadow->groups, 0, sizeof(c.shadow->groups));
}

thread::thread(const void *launch)
{
    context &own = own_context();
    c = &own;
    l = static_cast<const ptx::launch *>(launch);
    const mt_emu_dim &i = mt_emu_thread_idx, &b = mt_emu_block_dim;
    id = i.x + b.x * (i.y + b.y * i.z);
    if (own.block_epoch != mt_emu_block_epoch)
        begin_block(own, l);
}

void leave(thread &t, unsigned line)
{
    if (!t.c->shadow->copies[t.id].empty())
        fault(t, line, "the thread leaves with a copy to shared memory that it has not waited for");
    if (counting && !--t.c->living)
        finish_all(t);
}

/* --- global memory -------------------------------------------------------------------------------------- */

enum { GRAIN = 2, CHUNK = 1 << 16 };

/* The cells of the 64 KiB that hold a, made when they are first touched. */
static global_cell *chunk_of(uint64_t a)
{
    static global_cell **table[1 << 17];
    global_cell **&middle = table[a >> 30 & ((1 << 17) - 1)];
    if (!middle)
        middle = static_cast<global_cell **>(calloc(1 << 14, sizeof(global_cell *)));
    global_cell *&chunk = middle[a >> 16 & ((1 << 14) - 1)];
    if (!chunk)
        chunk = static_cast<global_cell *>(calloc(CHUNK / GRAIN, sizeof(global_cell)));
    return chunk;
}

static void race(const thread &t, unsigned line, uint64_t a, const char *done, const char *before, uint32_t block,
                 unsigned by)
{
    fault(t, line, "race: global memory at 0x%llx is %s here and was %s by block %u, thread %u in the same launch%s",
          (unsigned long long)a, done, before, block - 1, by,
          block - 1 == t.c->block ? ", with no barrier between" : ", another block");
}

static void watch(thread &t, uint64_t a, unsigned line, access how, global_cell &g)
{
    moment now = now_of(t);
    uint32_t me = t.c->block + 1;
    if (g.launch != t.l->serial) {
        g = global_cell();
        g.launch = t.l->serial;
    }
    if (g.write_block && (g.write_block != me || !ordered(g.c.write, now)))
        race(t, line, a, how == WRITE ? "written" : "read", "written", g.write_block, g.c.write.thread);
    if (how == READ_CONSTANT && g.write_block)
        fault(t, line, "global memory at 0x%llx is read as constant (.nc) and was written in the same launch",
              (unsigned long long)a);
    if (how != WRITE) {
        g.constant |= how == READ_CONSTANT;
        g.blocks |= g.read_block && g.read_block != me;
        g.read_block = me;
        note_read(g.c, now);
        return;
    }
    if (g.constant)
        fault(t, line, "global memory at 0x%llx is written and was read as constant (.nc) in the same launch",
              (unsigned long long)a);
    if (g.blocks || (g.read_block && (g.read_block != me || reads_conflict(g.c, now))))
        race(t, line, a, "written", "read", g.read_block, g.c.read.thread);
    g.write_block = me;
    g.c.write = now;
}

static range check_allocated(const thread &t, uint64_t a, unsigned bytes, unsigned line)
{
    uintptr_t base;
    size_t size;
    if (!mt_emu_allocation_of(reinterpret_cast<void *>(a), &base, &size))
        fault(t, line, "0x%llx is not in device memory that is allocated", (unsigned long long)a);
    if (a + bytes > base + size)
        fault(t, line, "out of bounds: %u bytes at 0x%llx, where %zu are left of its allocation", bytes,
              (unsigned long long)a, static_cast<size_t>(base + size - a));
    return {base, base + size};
}

static void watch_range(thread &t, uint64_t a, unsigned bytes, unsigned line, access how)
{
    static std::atomic_flag busy = ATOMIC_FLAG_INIT;
    while (busy.test_and_set(std::memory_order_acquire))
        ;
    for (uint64_t at = a / GRAIN * GRAIN; at < a + bytes; at += GRAIN)
        watch(t, at, line, how, chunk_of(at)[at % CHUNK / GRAIN]);
    busy.clear(std::memory_order_release);
}

void *global_slow(thread &t, uint64_t a, unsigned bytes, unsigned line, access how)
{
    if (a % bytes)
        fault(t, line, "misaligned: %u bytes of global memory at 0x%llx", bytes, (unsigned long long)a);
    range r = check_allocated(t, a, bytes, line);
    if (counting)
        note_global(t, a, bytes, line, how);
    if (watch_global)
        watch_range(t, a, bytes, line, how);
    else if (!counting)
        t.c->near[line % 16] = r;
    return reinterpret_cast<void *>(a);
}

/* --- shared memory --------------------------------------------------------------------------------------- */

/* In one variable, and aligned. */
static void check_bounds(const thread &t, uint32_t a, unsigned bytes, unsigned line)
{
    const launch &l = *t.l;
    if (a % bytes)
        fault(t, line, "misaligned: %u bytes of shared memory at %u", bytes, a);
    for (uint32_t i = 0; i < l.k->n_shared; i++) {
        const variable &v = l.k->shared[i];
        if (a >= v.address && a + bytes <= v.address + v.bytes)
            return;
    }
    if (a >= l.dynamic_address && a + bytes <= l.dynamic_address + l.dynamic_bytes)
        return;
    fault(t, line, "out of bounds: %u bytes at %u of shared memory, where no variable is", bytes, a);
}

static void check_not_copied(const thread &t, uint32_t a, const shared_cell &s, unsigned line)
{
    if (s.copier)
        fault(t, line, "shared byte %u is the target of a copy of thread %u that has not been waited for", a,
              s.copier - 1u);
}

static void shared_write(const thread &t, uint32_t a, const moment &now, shared_cell &s, unsigned line)
{
    check_not_copied(t, a, s, line);
    if (!ordered(s.c.write, now))
        fault(t, line, "race: shared byte %u is written, and written by thread %u, with no barrier between", a,
              s.c.write.thread);
    if (reads_conflict(s.c, now))
        fault(t, line, "race: shared byte %u is written, and read by thread %u, with no barrier between", a,
              s.c.read.thread);
    s.c.write = now;
}

static void shared_read(const thread &t, uint32_t a, const moment &now, shared_cell &s, unsigned line)
{
    check_not_copied(t, a, s, line);
    if (s.c.write.epoch < static_cast<uint32_t>(t.c->block_epoch))
        fault(t, line, "shared byte %u is read and was never written", a);
    if (!ordered(s.c.write, now))
        fault(t, line, "race: shared byte %u is read, and written by thread %u, with no barrier between", a,
              s.c.write.thread);
    note_read(s.c, now);
}

void *shared_at(thread &t, uint32_t a, unsigned bytes, unsigned line, access how)
{
    check_bounds(t, a, bytes, line);
    if (counting)
        note_access(t, a, bytes, line, false);
    moment now = now_of(t);
    uint32_t first = a - SHARED_BASE;
    shared_cell *s = &t.c->shadow->cells[first];
    for (unsigned i = 0; i < bytes; i++)
        if (how == WRITE)
            shared_write(t, a + i, now, s[i], line);
        else
            shared_read(t, a + i, now, s[i], line);
    return t.c->shared + first;
}

namespace {
struct syncing : mt_emu_lane {
    thread *t;
};
void next_warp_epoch(mt_emu_lane *const lanes[WARP], unsigned)
{
    for (unsigned i = 0; i < WARP; i++)
        if (lanes[i]) {
            const thread *t = static_cast<syncing *>(lanes[i])->t;
            t->c->shadow->warp_epoch[t->id / WARP]++;
            return;
        }
}
} // namespace

void sync_warp(thread &t, unsigned mask, const char *file, unsigned line)
{
    if (mask != 0xffffffffu)
        fault(t, line, "bar.warp.sync of a part of the warp (0x%08x) is not modelled", mask);
    syncing s;
    s.all = next_warp_epoch;
    s.t = &t;
    mt_emu_warp_call(mask, &s, file, static_cast<int>(line));
}

/* --- copies to shared memory that are waited for ---------------------------------------------------------- */

void copy_async(thread &t, uint32_t to, uint64_t from, unsigned bytes, unsigned from_bytes, unsigned line)
{
    if (from_bytes > bytes)
        fault(t, line, "a copy of %u bytes from %u", bytes, from_bytes);
    check_bounds(t, to, bytes, line);
    if (from % bytes)
        fault(t, line, "misaligned: a copy of %u bytes of global memory at 0x%llx", bytes, (unsigned long long)from);
    if (from_bytes)
        check_allocated(t, from, from_bytes, line);
    if (counting) {
        note_access(t, to, bytes, line, false);
        note_global(t, from, from_bytes, line, READ);
    }
    if (from_bytes && watch_global)
        watch_range(t, from, from_bytes, line, READ);
    moment now = now_of(t);
    uint32_t first = to - SHARED_BASE;
    for (unsigned i = 0; i < bytes; i++) {
        shared_cell &s = t.c->shadow->cells[first + i];
        shared_write(t, to + i, now, s, line);
        s.copier = static_cast<uint16_t>(t.id + 1);
    }
    memset(t.c->shared + first, 0xFF, bytes);
    t.c->shadow->copies[t.id].push_back({to, from_bytes, bytes, t.c->shadow->groups[t.id], from});
}

void commit_group(thread &t)
{
    t.c->shadow->groups[t.id]++;
}

void wait_group(thread &t, int n)
{
    shadow &sh = *t.c->shadow;
    std::vector<pending> &copies = sh.copies[t.id];
    uint32_t groups = sh.groups[t.id], keep = 0;
    moment now = now_of(t);
    for (const pending &p : copies) {
        if (n >= 0 && p.group + static_cast<uint32_t>(n) >= groups) {
            copies[keep++] = p;
            continue;
        }
        char *to = t.c->shared + (p.to - SHARED_BASE);
        memset(to, 0, p.bytes);
        memcpy(to, reinterpret_cast<const void *>(p.from), p.from_bytes);
        for (uint32_t i = 0; i < p.bytes; i++) {
            shared_cell &s = sh.cells[p.to - SHARED_BASE + i];
            s.copier = 0;
            s.c.write = now;
        }
    }
    copies.resize(keep);
}

/* --- approximations -------------------------------------------------------------------------------------------- */

float approximate(float y, float x)
{
    if (!moved_ulps || !std::isfinite(y) || y == 0)
        return y;
    bool up = bits(x) * 0x9e3779b9u >> 31;
    for (int i = 0; i < moved_ulps; i++)
        y = std::nextafterf(y, up ? INFINITY : -INFINITY);
    return y;
}

} // namespace ptx
