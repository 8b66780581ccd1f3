/* SPDX-License-Identifier: Apache-2.0 */
/* If nothing fits: the changes that would make it fit, each tried alone. */
#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"
#include "plan/resolve.h"
#include "plan/search.h"

enum {
    MAX_CHANGES = 16,
    BISECTIONS = 10,
    MORE = 8, /* sizes of memory from the least on: what could fit may need a little more to be searched */
};
static const uint64_t NO_LIMIT = (uint64_t)1 << 50; /* bytes */

enum rank { SETTING, HARDWARE, HARDLY_SOLD, N_RANKS }; /* the last: more memory than a workstation takes */

struct list {
    struct mt_plan_change c[MAX_CHANGES];
    enum rank rank[MAX_CHANGES];
    double per_token[MAX_CHANGES];
    size_t n;
};

/* The same request of another of the layouts that have to fit. */
static struct mt_plan_request request_also(const struct mt_plan_request *r, size_t i)
{
    struct mt_plan_request t = *r;
    t.layout = r->also[i].layout;
    t.halves = r->also[i].halves;
    t.n_also = 0;
    return t;
}

bool mt_plan_could_fit(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    for (size_t i = 0; i < r->n_also; i++) {
        t = request_also(r, i);
        if (!mt_plan_could_fit(&t))
            return false;
    }
    t = *r;
    if (t.numerics.micro_batch == MT_AUTO)
        t.numerics.micro_batch = 1;
    if (t.placement.slots == MT_AUTO)
        t.placement.slots = 2;
    t.placement.keep_layers = MT_MAX(r->placement.keep_layers, 0);
    if (t.placement.activations == MT_ACT_AUTO)
        t.placement.activations = MT_ACT_RECOMPUTE;
    if (t.placement.base == MT_BASE_AUTO && !(r->machine->rate[MT_RATE_READ].value > 0))
        t.placement.base = MT_BASE_HOST; /* files on a drive of unknown rate are no choice of a search */
    return !mt_plan_fits(&t, NULL);
}

static void add(struct list *l, const struct mt_plan_request *r, double seconds, bool hardware, const char *what)
{
    struct mt_plan_change *c = &l->c[l->n];
    *c = (struct mt_plan_change){.seconds = seconds, .hardware = hardware};
    snprintf(c->what, sizeof(c->what), "%s", what);
    l->rank[l->n] = hardware ? HARDWARE : SETTING;
    l->per_token[l->n++] = seconds / (double)(r->numerics.rows_per_step * r->numerics.seq_len);
}

/* Whether the others fit with the numerics that are chosen. */
static bool all_fit(const struct mt_plan_choice *chosen, const struct mt_plan_request *r)
{
    bool fits = true;
    for (size_t i = 0; i < r->n_also && fits; i++) {
        struct mt_plan_request t = request_also(r, i);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        t.numerics = chosen->numerics;
        fits = !mt_plan_search(&c, &t, NULL);
    }
    return fits;
}

/* Adds the change if it makes the request fit; true: *chosen is its placement, for the caller to finish. */
static bool search(struct mt_plan_choice *chosen, struct list *l, const struct mt_plan_request *r, bool hardware,
                   const char *what)
{
    if (l->n == MAX_CHANGES || !mt_plan_could_fit(r) || mt_plan_search(chosen, r, NULL))
        return false;
    const bool fits = all_fit(chosen, r);
    if (fits)
        add(l, r, chosen->sim.seconds, hardware, what);
    else
        mt_plan_choice_finish(chosen);
    return fits;
}

/* Adds it in these words if it makes the request fit; returns whether it does. */
__attribute__((format(printf, 4, 5))) static bool consider(struct list *l, const struct mt_plan_request *r,
                                                           bool hardware, const char *words, ...)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    char what[256];
    va_list ap;
    va_start(ap, words);
    vsnprintf(what, sizeof(what), words, ap);
    va_end(ap);
    return search(&c, l, r, hardware, what);
}

/* Adds more hardware for a placement that less was enough for. */
static void consider_more(struct list *l, const struct mt_plan_request *r, const struct mt_plan_choice *enough,
                          const char *what)
{
    struct mt_plan_request t = mt_plan_request_as(r, enough);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    if (l->n < MAX_CHANGES && !mt_plan_evaluate(&c, &t, NULL, NULL))
        add(l, r, c.sim.seconds, true, what);
}

/* Memory that a budget is a part of: the machine's, of which an option has the size. */
struct memory {
    const char *what, *option, *key;
    enum mt_rate_id rate;
    uint64_t most; /* GiB that are sold */
    uint64_t host; /* bytes of the host's, of which a GPU keeps page tables */
};

static uint64_t bytes_of(const struct mt_machine *m, enum mt_rate_id rate)
{
    return (uint64_t)(m->rate[rate].value * (double)(1 << 30));
}

static uint64_t budget_of(const struct memory *m, uint64_t whole)
{
    return m->rate == MT_RATE_HOST_GIB ? mt_plan_host_budget(whole)
                                       : whole - MT_MIN(whole, mt_plan_device_reserve(whole, m->host, false));
}

/* Whole GiB of the machine of which the budget is at least that. */
static uint64_t whole_gib(const struct memory *m, uint64_t budget)
{
    uint64_t gib = budget >> 30;
    while (budget_of(m, gib << 30) < budget)
        gib++;
    return gib;
}

static bool is_of_machine(const struct mt_plan_request *t, const struct memory *m, uint64_t budget)
{
    return budget_of(m, bytes_of(t->machine, m->rate)) == budget;
}

/* The device's memory beside so much of the host's. */
static struct memory beside(const struct memory *device, uint64_t host_bytes)
{
    struct memory m = *device;
    m.host = host_bytes;
    return m;
}

/* The least sufficient value of `budget`, a field of *t, which it keeps; false: there is none. */
static bool find_least(struct mt_plan_request *t, uint64_t *budget)
{
    uint64_t lo = *budget, hi = MT_MAX(lo, (uint64_t)1 << 20);
    *budget = NO_LIMIT;
    if (!mt_plan_could_fit(t))
        return false;
    for (*budget = hi; !mt_plan_could_fit(t) && hi < NO_LIMIT; *budget = hi)
        hi *= 2;
    for (int i = 0; i < BISECTIONS && hi - lo > MT_MAX(hi / 64, (uint64_t)1 << 20); i++) {
        *budget = lo + (hi - lo) / 2;
        if (mt_plan_could_fit(t))
            hi = *budget;
        else
            lo = *budget;
    }
    *budget = hi;
    return true;
}

/* Considers the least sufficient budget of `m`, the device's memory or the host's: in whole GiB of the machine, if the
 * budget is what follows from its memory; else of the budget, above 1 GiB in whole ones. */
static void consider_budget(struct list *l, const struct mt_plan_request *r, const struct memory *m,
                            const struct memory *device)
{
    struct mt_plan_request t = *r;
    uint64_t *of_device = &t.placement.device_budget.bytes, *of_host = &t.placement.host_budget.bytes;
    uint64_t *budget = m == device ? of_device : of_host;
    const uint64_t have = *budget;
    const bool of_machine = is_of_machine(r, m, have), follows = m != device && is_of_machine(r, device, *of_device);
    bool fits = false;
    char a[32], b[32];
    if (!find_least(&t, budget))
        return;
    const uint64_t least = *budget;
    for (int tries = 0; of_machine && tries < MORE && !fits; tries++) {
        unsigned long long whole = whole_gib(m, tries ? *budget + (*budget >> 5) : least);
        *budget = budget_of(m, whole << 30);
        if (follows) {
            const struct memory its = beside(device, whole << 30);
            *of_device = budget_of(&its, bytes_of(r->machine, device->rate));
        }
        fits = consider(l, &t, true, "%s of %llu GiB instead of %.4g GiB (%s %lluGiB)", m->what, whole,
                        r->machine->rate[m->rate].value, m->option, whole);
        if (fits && whole > m->most)
            l->rank[l->n - 1] = HARDLY_SOLD;
    }
    *budget = least > (uint64_t)1 << 30 ? mt_align_up(least, (size_t)1 << 30) : least;
    if (!of_machine)
        consider(l, &t, true, "%s of %s instead of %s (%s)", m->what, mt_format_bytes(a, sizeof(a), *budget),
                 mt_format_bytes(b, sizeof(b), have), m->key);
}

/* Both memories are short: the least of the device's where the host's is no limit, then of the host's. */
static void consider_both(struct list *l, const struct mt_plan_request *r, const struct memory *device,
                          const struct memory *host)
{
    struct mt_plan_request t = *r;
    uint64_t *of_device = &t.placement.device_budget.bytes, *of_host = &t.placement.host_budget.bytes;
    const uint64_t have = *of_host;
    if (!is_of_machine(r, device, *of_device) || !is_of_machine(r, host, have))
        return;
    *of_host = NO_LIMIT;
    if (!find_least(&t, of_device))
        return;
    unsigned long long gib = whole_gib(device, *of_device), host_gib;
    const uint64_t least = *of_device;
    *of_device = budget_of(device, gib << 30);
    *of_host = have;
    if (!find_least(&t, of_host))
        return;
    for (int tries = 0; tries < MORE && !l->n; tries++) {
        host_gib = whole_gib(host, *of_host + (tries ? *of_host >> 5 : 0));
        *of_host = budget_of(host, host_gib << 30);
        const struct memory its = beside(device, host_gib << 30);
        gib = whole_gib(&its, least);
        *of_device = budget_of(&its, gib << 30);
        bool fits = consider(l, &t, true, "device memory of %llu GiB and host memory of %llu GiB (%s %lluGiB %s %lluGiB)",
                             gib, host_gib, device->option, gib, host->option, host_gib);
        if (fits && (gib > device->most || host_gib > host->most))
            l->rank[l->n - 1] = HARDLY_SOLD;
    }
}

/* Drives alone do not help: the least device memory with them. */
static void consider_with_drives(struct list *l, const struct mt_plan_request *r, const struct memory *device,
                                 const char *drives, const char *options)
{
    struct mt_plan_request t = *r;
    uint64_t *budget = &t.placement.device_budget.bytes;
    bool fits = false;
    if (!is_of_machine(r, device, *budget) || !find_least(&t, budget))
        return;
    const uint64_t least = *budget;
    for (int tries = 0; tries < MORE && !fits; tries++) {
        unsigned long long gib = whole_gib(device, tries ? *budget + (*budget >> 5) : least);
        *budget = budget_of(device, gib << 30);
        fits = consider(l, &t, true, "device memory of %llu GiB and %s (%s %lluGiB %s%d; memory.nvme_paths)", gib, drives,
                        device->option, gib, options, (int)r->drives);
    }
}

/* The longest chunks of rows with which it fits, of at least FEWEST tokens. */
static void consider_chunks(struct list *l, const struct mt_plan_request *r)
{
    enum { FEWEST = 1024 };
    const struct mt_numerics *n = &r->numerics;
    struct mt_plan_request t = *r;
    int64_t len = mt_row_chunks(n) > 1 ? n->chunk : n->seq_len;
    bool fits = false;
    if (mt_layout_unchunked(r->layout, (size_t)n->seq_len) || r->draws || mt_optimizer_variants(n) ||
        (n->groups > 1 && n->rows_per_step % n->groups))
        return;
    t.numerics.micro_batch = 1;
    while (!fits && len % 2 == 0 && (len /= 2) >= FEWEST) {
        t.numerics.chunk = len;
        fits = consider(l, &t, false, "train.chunk = %lld (--set train.chunk=%lld%s)", (long long)len, (long long)len,
                        n->micro_batch > 1 ? " --micro-batch 1" : "");
    }
}

static void consider_settings(struct list *l, const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    const struct mt_numerics *n = &r->numerics;
    bool fits = false;
    if (r->placement.activations != MT_ACT_AUTO && r->placement.activations != MT_ACT_RECOMPUTE) {
        t.placement.activations = MT_ACT_RECOMPUTE;
        consider(l, &t, false, "memory.activations = recompute");
        t = *r;
    }
    if (r->placement.slots > 2) {
        t.placement.slots = 2;
        consider(l, &t, false, "memory.slots = 2");
        t = *r;
    }
    for (long long mb = n->micro_batch / 2; mb >= 1 && !fits; mb /= 2) {
        t.numerics.micro_batch = mb;
        fits = consider(l, &t, false, "train.micro_batch = %lld (--micro-batch %lld)", mb, mb);
    }
    t = *r;
    if (r->placement.states == MT_STATES_HOST) {
        t.placement.states = MT_STATES_AUTO;
        consider(l, &t, false, "memory.states = auto, with nvme_paths");
        t = *r;
    }
    consider_chunks(l, r);
    fits = false;
    for (long long len = n->seq_len / 2; len >= 128 && len >= n->chunk && !fits; len /= 2) {
        t.numerics.seq_len = len;
        t.numerics.rows_per_step = n->rows_per_step * (n->seq_len / len);
        fits = consider(l, &t, false, "data.seq_len = %lld (--seq-len %lld)", len, len);
    }
    t = *r;
    fits = false;
    for (int64_t rows = n->rows_per_step / 2; rows >= 1 && !fits; rows /= 2) {
        t.numerics.rows_per_step = rows;
        t.numerics.micro_batch = MT_MIN(t.numerics.micro_batch, rows);
        fits = consider(l, &t, false, "--tokens-per-step %lld", (long long)(rows * n->seq_len));
    }
}

static void consider_hardware(struct list *l, const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    const uint64_t host_bytes = bytes_of(r->machine, MT_RATE_HOST_GIB);
    const struct memory device = {"device memory", "--gpu-mem", "memory.device_budget", MT_RATE_DEVICE_GIB, 288, host_bytes};
    const struct memory host = {"host memory", "--host-mem", "memory.host_budget", MT_RATE_HOST_GIB, 2048, host_bytes};
    consider_budget(l, r, &device, &device);
    consider_budget(l, r, &host, &device);
    struct mt_machine m = *r->machine;
    char text[160];
    const size_t alone = l->n;
    if (!alone)
        consider_both(l, r, &device, &host);
    if (r->drives > 0)
        return;
    const enum mt_rate_id id[] = {MT_RATE_READ, MT_RATE_WRITE, MT_RATE_READ_BOTH, MT_RATE_WRITE_BOTH};
    const double typical[] = {6.5, 0.7 * 6.5, 0.6 * 6.5, 0.4 * 6.5}; /* as --nvme takes them */
    for (size_t i = 0; i < MT_ARRAY_LEN(id); i++)
        m.rate[id[i]] = (struct mt_rate){typical[i], MT_RATE_RATED};
    t.machine = &m;
    const char *options = r->placement.states == MT_STATES_HOST ? "--set memory.states=auto --nvme 6.5GB/s --drives "
                                                                : "--nvme 6.5GB/s --drives ";
    t.placement.states = MT_STATES_AUTO;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice one = {0};
    bool has_one = false; /* two drives then have its placement, which is no slower with them: a search takes seconds */
    for (t.drives = 1; t.drives <= 2; t.drives++) {
        const char *drives = t.drives == 1 ? "an NVMe drive" : "two NVMe drives";
        snprintf(text, sizeof(text), "%s (%s%d; memory.nvme_paths)", drives, options, t.drives);
        if (has_one)
            consider_more(l, &t, &one, text);
        else
            has_one = search(&one, l, &t, true, text);
        if (!alone && !has_one)
            consider_with_drives(l, &t, &device, drives, options);
    }
}

size_t mt_plan_changes(struct mt_plan_change *out, size_t max, const struct mt_plan_request *r)
{
    struct list l = {.n = 0};
    consider_settings(&l, r);
    consider_hardware(&l, r);
    size_t n = 0;
    for (int rank = 0; rank < N_RANKS; rank++)
        for (;;) { /* the fastest of those not yet taken */
            size_t best = l.n;
            for (size_t i = 0; i < l.n; i++)
                if (l.rank[i] == (enum rank)rank && l.per_token[i] >= 0 &&
                    (best == l.n || l.per_token[i] < l.per_token[best]))
                    best = i;
            if (best == l.n || n == max)
                break;
            out[n++] = l.c[best];
            l.per_token[best] = -1;
        }
    return n;
}
