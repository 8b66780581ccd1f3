/* SPDX-License-Identifier: Apache-2.0 */
#include "status.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "log_lines.h"

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
    MT_STREAM_CLOSED FILE *f = fopen("/proc/self/io", "re");
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
    return io;
}

/* How far the phase is: pieces of it, or else what it has read and written, as far as that is worth a word. */
static void say_part(struct cli_status *s, const struct mt_train_control *c, double seconds, struct mt_str *out)
{
    enum { LEAST = 1 << 20 };
    uint64_t done = atomic_load(&c->part), all = atomic_load(&c->n_parts);
    const struct io now = io_now();
    unsigned long long read = larger(now.read, now.from_drives), written = larger(now.written, now.to_drives);
    char n[32];
    if (s->phase_ns != atomic_load(&c->phase_ns)) {
        s->phase_ns = atomic_load(&c->phase_ns);
        s->read = read;
        s->written = written;
    }
    if (all) {
        mt_str_printf(out, ", %.0f%% done", 100 * (double)done / (double)all);
        if (done && done < all)
            mt_str_printf(out, ", about %.0f s left", seconds * (double)(all - done) / (double)done);
        return;
    }
    if (read - s->read >= LEAST)
        mt_str_printf(out, ", %s read", mt_format_bytes(n, sizeof(n), read - s->read));
    if (written - s->written >= LEAST)
        mt_str_printf(out, ", %s written", mt_format_bytes(n, sizeof(n), written - s->written));
}

void cli_tell_status(void *ctx, const struct mt_train_control *c, double seconds, bool asked)
{
    struct cli_status *s = ctx;
    MT_STR_FREED struct mt_str out = {0};
    uint64_t step = atomic_load(&c->step), all = atomic_load(&c->total_steps);
    if (all)
        mt_str_printf(&out, "%" PRIu64 " of %" PRIu64 " steps done, ", step, all);
    mt_str_printf(&out, "%s for %.0f s", atomic_load(&c->phase), seconds);
    say_part(s, c, seconds, &out);
    if ((asked || !s->quiet) && !out.failed)
        cli_say("status: %s\n", out.p);
}
