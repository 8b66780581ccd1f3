/* SPDX-License-Identifier: Apache-2.0 */
#include "train/append.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"

static const int64_t FIRST_WAIT_NS = 1000000000, LONGEST_WAIT_NS = 60 * INT64_C(1000000000);
enum { MOST_PENDING = 256 << 20 }; /* bytes; beyond that the oldest are dropped */

int mt_append_open(struct mt_append *a, const char *path, bool keep, struct mt_err *err)
{
    *a = (struct mt_append){.fd = -1};
    snprintf(a->path, sizeof(a->path), "%s", path);
    MT_FD_CLOSED int fd = mt_open_to_write(path, O_WRONLY | O_APPEND | (keep ? 0 : O_TRUNC), err);
    if (fd < 0)
        return fd;
    a->end = lseek(fd, 0, SEEK_END);
    if (a->end < 0)
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot open %s: %s", path, strerror(errno));
    a->fd = fd;
    fd = -1;
    return 0;
}

/* What was written only in part is truncated away. */
static int write_bytes(struct mt_append *a, const void *p, size_t len)
{
    int rc = mt_write_all(a->fd, p, len);
    if (rc && ftruncate(a->fd, a->end))
        mt_debug("%s: a record that was written in part stays: %s", a->path, strerror(errno));
    a->end += rc ? 0 : (int64_t)len;
    return rc;
}

/* Writes all pending records. */
static int write_pending(struct mt_append *a)
{
    int rc = write_bytes(a, a->pending.p, a->pending.len);
    a->pending.len = rc ? a->pending.len : 0;
    return rc;
}

static void report_change(struct mt_append *a, int rc)
{
    if (rc && !a->failing)
        mt_warn("cannot write %s: %s; the run goes on, its records are kept in memory and tried again", a->path,
                strerror(-rc));
    else if (!rc && a->failing)
        mt_info("%s is written again", a->path);
    a->failing = rc;
    a->wait_ns = rc ? MT_MIN(MT_MAX(FIRST_WAIT_NS, 2 * a->wait_ns), LONGEST_WAIT_NS) : 0;
    a->retry_ns = mt_now_ns() + a->wait_ns;
}

void mt_append_put(struct mt_append *a, const void *record, size_t len)
{
    if (!a->failing && !a->pending.len && !write_bytes(a, record, len)) /* it needs no memory */
        return;
    if (a->pending.len + len > MOST_PENDING)
        a->pending.len = 0;
    mt_str_append(&a->pending, record, len);
    if (a->pending.failed) { /* out of memory: only this record is lost */
        mt_str_finish(&a->pending);
        return;
    }
    if (!a->failing || mt_now_ns() >= a->retry_ns)
        report_change(a, write_pending(a));
}

void mt_append_close(struct mt_append *a)
{
    if (a->fd >= 0 && a->pending.len && write_pending(a))
        mt_warn("%s: the last %zu bytes could not be written", a->path, a->pending.len);
    mt_close_fd(&a->fd);
    mt_str_finish(&a->pending);
    *a = (struct mt_append){.fd = -1};
}
