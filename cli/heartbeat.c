/* SPDX-License-Identifier: Apache-2.0 */
#include "heartbeat.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "log_lines.h"

/* Seconds before the first report, and between two. */
enum { FIRST_S = 20, NEXT_S = 30, POLL_MS = 200 };

struct io {
    unsigned long long read, written;          /* bytes, page cache included, but not what io_uring moves past it */
    unsigned long long from_drives, to_drives; /* bytes past the page cache, and what it moved itself */
};

static unsigned long long larger(unsigned long long a, unsigned long long b)
{
    return a > b ? a : b;
}

static struct io io_now(void)
{
    struct io io = {0};
    FILE *f = fopen("/proc/self/io", "re");
    char line[128];
    while (f && fgets(line, sizeof(line), f)) {
        unsigned long long v;
        if (sscanf(line, "rchar: %llu", &v) == 1)
            io.read = v;
        else if (sscanf(line, "wchar: %llu", &v) == 1)
            io.written = v;
        else if (sscanf(line, "read_bytes: %llu", &v) == 1)
            io.from_drives = v;
        else if (sscanf(line, "write_bytes: %llu", &v) == 1)
            io.to_drives = v;
    }
    if (f)
        fclose(f);
    return io;
}

static void say(const struct mt_train_control *c, const char *phase, double seconds,
                 const struct io *since)
{
    struct io now = io_now();
    char r[32], w[32];
    cli_say("status: %s for %.0f s, %llu steps done; read %s, written %s in it\n", phase, seconds,
            (unsigned long long)atomic_load(&c->step),
            mt_format_bytes(r, sizeof(r), larger(now.read - since->read, now.from_drives - since->from_drives)),
            mt_format_bytes(w, sizeof(w), larger(now.written - since->written, now.to_drives - since->to_drives)));
}

static void *heartbeat_main(void *arg)
{
    struct cli_heartbeat *h = arg;
    struct mt_train_control *c = h->control;
    struct io since = io_now();
    int64_t began = 0, next = 0;
    pthread_mutex_lock(&h->lock);
    while (!h->quit) {
        const char *phase = atomic_load(&c->phase);
        int64_t begun = atomic_load(&c->phase_ns), now = mt_now_ns();
        if (begun != began) {
            began = begun;
            next = begun + FIRST_S * INT64_C(1000000000);
            since = io_now();
        }
        bool asked = atomic_exchange(&c->status, false);
        if (phase && (asked || (now >= next && !h->quiet)))
            say(c, phase, (double)(now - began) * 1e-9, &since);
        if (now >= next)
            next = now + NEXT_S * INT64_C(1000000000);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += POLL_MS * 1000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&h->changed, &h->lock, &until);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

void cli_heartbeat_start(struct cli_heartbeat *h, struct mt_train_control *control, bool quiet)
{
    pthread_condattr_t attr;
    *h = (struct cli_heartbeat){.control = control, .quiet = quiet};
    pthread_mutex_init(&h->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attr);
    pthread_condattr_destroy(&attr);
    h->started = !pthread_create(&h->thread, NULL, heartbeat_main, h); /* the run does not need it */
}

void cli_heartbeat_stop(struct cli_heartbeat *h)
{
    if (!h->control)
        return;
    pthread_mutex_lock(&h->lock);
    h->quit = true;
    pthread_cond_signal(&h->changed);
    pthread_mutex_unlock(&h->lock);
    if (h->started)
        pthread_join(h->thread, NULL);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    h->control = NULL;
}
