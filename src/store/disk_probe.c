/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of drives, measured; opening a disk that is striped by them. */
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/philox.h"
#include "hw/host.h"
#include "store/disk_priv.h"

enum { SLOTS = 4 }; /* requests at once, each of as many bytes as the depth allows */

struct probe {
    mt_disk *disk;
    uint64_t bytes;
    size_t slot_bytes;
    char *memory;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool busy[2 * SLOTS];
    struct mt_disk_request r[2 * SLOTS];
    uint64_t at[2], moved[2];
    int rc;
    struct mt_err err;
};

static void ended(struct mt_disk_request *r)
{
    struct probe *p = r->ctx;
    MT_LOCKED(&p->lock);
    if (r->rc && !p->rc) {
        p->rc = r->rc;
        p->err = r->err;
    }
    p->moved[r->write] += r->span[0].bytes;
    p->busy[r - p->r] = false;
    pthread_cond_signal(&p->ended);
}

static void start(struct probe *p, int slot, bool write)
{
    uint64_t left = p->bytes - p->at[write];
    p->r[slot] = (struct mt_disk_request){
        .write = write,
        .n_spans = 1,
        .span = {{p->at[write], p->memory + (size_t)slot * p->slot_bytes,
                  (size_t)MT_MIN(left, (uint64_t)p->slot_bytes)}},
        .done = ended,
        .ctx = p,
    };
    p->at[write] += p->r[slot].span[0].bytes;
    p->busy[slot] = true;
    mt_disk_submit(p->disk, &p->r[slot]);
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* Reads or writes the whole file in each direction again and again until the time is over. */
static void run(struct probe *p, const bool wanted[2], double seconds, double *rate, double *cpu)
{
    int64_t t0 = mt_now_ns();
    double c0 = cpu_seconds(), took;
    p->at[0] = p->at[1] = p->moved[0] = p->moved[1] = 0;
    pthread_mutex_lock(&p->lock);
    for (bool more = true; more;) {
        bool any = false;
        took = mt_seconds_since(t0);
        for (int slot = 0; slot < 2 * SLOTS; slot++) {
            int dir = slot / SLOTS;
            if (p->at[dir] == p->bytes && took < seconds)
                p->at[dir] = 0;
            if (wanted[dir] && !p->busy[slot] && !p->rc && p->at[dir] < p->bytes)
                start(p, slot, dir);
            any |= p->busy[slot];
        }
        if (any)
            pthread_cond_wait(&p->ended, &p->lock);
        more = any;
    }
    pthread_mutex_unlock(&p->lock);
    took = mt_seconds_since(t0);
    *rate = (double)(p->moved[0] + p->moved[1]) / took * 1e-9;
    *cpu = (cpu_seconds() - c0) / took;
}

/* Random data: zeros would make drives that compress or detect them look faster. */
static void fill_random(uint32_t *dst, size_t n)
{
    for (size_t i = 0; i + 4 <= n; i += 4) {
        struct mt_philox x = mt_philox(1, 2, i);
        memcpy(dst + i, x.v, sizeof(x.v));
    }
}

static int measure(struct probe *p, struct mt_disk_rates *out, const struct mt_disk_probe *a)
{
    static const bool reads[2] = {true, false}, writes[2] = {false, true}, both[2] = {true, true};
    double unused;
    run(p, writes, 0, &out->write, &out->cpu_write); /* first: drives return blocks that were never written too fast */
    if (!p->rc && a->seconds > 0)
        run(p, writes, a->seconds, &out->write, &out->cpu_write);
    if (!p->rc)
        run(p, reads, a->seconds, &out->read, &out->cpu_read);
    if (!p->rc && a->both)
        run(p, both, a->seconds, &out->together, &unused);
    return p->rc;
}

int mt_disk_measure(struct mt_disk_rates *out, const struct mt_disk_probe *a, struct mt_err *err)
{
    struct probe p = {.bytes = mt_align_up(a->bytes ? a->bytes : 1 << 30, MT_DISK_ALIGN),
                      .lock = PTHREAD_MUTEX_INITIALIZER,
                      .ended = PTHREAD_COND_INITIALIZER};
    struct mt_disk_params dp = {.dirs = &a->dir, .n_dirs = 1, .bytes = p.bytes, .depth = a->depth,
                                .request_bytes = a->request_bytes, .io = a->io};
    *out = (struct mt_disk_rates){0};
    int rc = mt_disk_open_rated(&p.disk, &dp, err);
    if (rc)
        return rc;
    struct mt_disk_info info;
    mt_disk_info(p.disk, &info);
    p.slot_bytes = info.depth / 2 * (a->request_bytes ? a->request_bytes : 1 << 20);
    p.slot_bytes = mt_align_up(MT_MAX(p.slot_bytes, (size_t)MT_DISK_ALIGN), MT_DISK_ALIGN);
    size_t bytes = 2 * SLOTS * p.slot_bytes;
    void *memory = NULL; /* on huge pages, like staging: a request then needs few segments */
    rc = mt_host_alloc(&memory, bytes, "the disk probe", err);
    if (!rc) {
        p.memory = memory;
        fill_random((uint32_t *)(void *)p.memory, bytes / 4);
        mt_disk_set_buffers(p.disk, &(struct iovec){p.memory, bytes}, 1);
        rc = measure(&p, out, a);
        if (rc && err)
            *err = p.err;
        mt_disk_info(p.disk, &out->info);
    }
    mt_disk_close(&p.disk);
    mt_host_free(memory, bytes);
    return rc;
}

static int measure_rates(double *rates, const struct mt_disk_params *p, struct mt_err *err)
{
    for (size_t i = 0; i < p->n_dirs; i++) {
        struct mt_disk_rates r;
        int rc = mt_disk_measure(&r,
                                 &(struct mt_disk_probe){.dir = p->dirs[i], .bytes = 64 << 20,
                                                         .depth = p->depth, .io = p->io},
                                 err);
        if (rc)
            return rc;
        rates[i] = 2 / (1 / r.read + 1 / r.write);
    }
    return 0;
}

int mt_disk_open(mt_disk **out, const struct mt_disk_params *p, struct mt_err *err)
{
    struct mt_disk_params rated = *p;
    MT_FREED double *measured = NULL;
    int rc = 0;
    if (!p->rates && p->n_dirs > 1) {
        rated.rates = measured = mt_calloc(p->n_dirs, sizeof(*measured));
        rc = measured ? measure_rates(measured, p, err) : mt_fail_nomem(err, "stripes", p->n_dirs);
    }
    return rc ?: mt_disk_open_rated(out, &rated, err);
}
