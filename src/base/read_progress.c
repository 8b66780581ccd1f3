/* SPDX-License-Identifier: Apache-2.0 */
#include "base/read_progress.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

static const int64_t EVERY_NS = 500000000;

void mt_read_progress_begin(struct mt_read_progress *m, const char *what, uint64_t total_bytes)
{
    int64_t now = mt_now_ns();
    *m = (struct mt_read_progress){.what = what, .total_bytes = total_bytes, .begin_ns = now, .reported_ns = now};
}

void mt_read_progress_add(struct mt_read_progress *m, uint64_t bytes)
{
    char rate[32], eta[32];
    int64_t now = mt_now_ns();
    m->done_bytes += bytes;
    if (now - m->reported_ns < EVERY_NS || !m->done_bytes)
        return;
    m->reported_ns = now;
    double per_second = (double)m->done_bytes / (double)(now - m->begin_ns) * 1e9;
    uint64_t left = m->total_bytes - MT_MIN(m->done_bytes, m->total_bytes);
    mt_progress("%.0f%%, %s/s, eta %s (%s)",
                100 * (double)m->done_bytes / (double)MT_MAX(m->total_bytes, m->done_bytes),
                mt_format_bytes(rate, sizeof(rate), (uint64_t)per_second),
                mt_format_seconds(eta, sizeof(eta), (double)left / per_second), m->what);
}

void mt_read_progress_end(struct mt_read_progress *m)
{
    if (m->reported_ns != m->begin_ns)
        mt_progress_end();
}
