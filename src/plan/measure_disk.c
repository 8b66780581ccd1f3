/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A drive as the state files use it: large requests in order, several at once, past the page cache (through
 * it where the file system has no direct I/O; then figures are those of the cache and say so by their size).
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "hw/hw.h"
#include "plan/measure_priv.h"

enum { FILE_MIB = 512, REQUEST = 4 << 20, IN_FLIGHT = 4 };

struct stream {
    int fd, first; /* this thread's requests: first, first + IN_FLIGHT, ... */
    bool write;
    char *buf;
    pthread_t thread;
    bool started;
    int rc;
};

static void *stream_main(void *arg)
{
    struct stream *s = arg;
    const int n = FILE_MIB / (REQUEST >> 20);
    for (int i = s->first; i < n && !s->rc; i += IN_FLIGHT) {
        off_t at = (off_t)i * REQUEST;
        ssize_t done = s->write ? pwrite(s->fd, s->buf, REQUEST, at) : pread(s->fd, s->buf, REQUEST, at);
        if (done != REQUEST)
            s->rc = done < 0 ? -errno : -EIO;
    }
    return NULL;
}

/* IN_FLIGHT threads read or write the whole file. */
static int start_streams(struct stream *s, int fd, bool write)
{
    for (int i = 0; i < IN_FLIGHT; i++) {
        s[i] = (struct stream){.fd = fd, .first = i, .write = write};
        if (posix_memalign((void **)&s[i].buf, 4096, REQUEST))
            return -ENOMEM;
        memset(s[i].buf, 0x5a + i, REQUEST);
        if (pthread_create(&s[i].thread, NULL, stream_main, &s[i]))
            return -EAGAIN;
        s[i].started = true;
    }
    return 0;
}

static int join_streams(struct stream *s)
{
    int rc = 0;
    for (int i = 0; i < IN_FLIGHT; i++) {
        if (s[i].started)
            pthread_join(s[i].thread, NULL);
        rc = rc ? rc : s[i].rc;
        free(s[i].buf);
        s[i] = (struct stream){0};
    }
    return rc;
}

static int time_file(int fd, bool write, double *gbs)
{
    struct stream s[IN_FLIGHT] = {{0}};
    int64_t t0 = mt_now_ns();
    int rc = start_streams(s, fd, write), end = join_streams(s);
    if (!rc)
        rc = end;
    if (!rc && write && fdatasync(fd))
        rc = -errno;
    *gbs = (double)FILE_MIB * (1 << 20) / (double)(mt_now_ns() - t0);
    return rc;
}

static int time_both(int fd_read, int fd_write, double *gbs)
{
    struct stream r[IN_FLIGHT] = {{0}}, w[IN_FLIGHT] = {{0}};
    int64_t t0 = mt_now_ns();
    int rc = start_streams(r, fd_read, false);
    if (!rc)
        rc = start_streams(w, fd_write, true);
    int a = join_streams(r), b = join_streams(w);
    if (!rc)
        rc = a ? a : b;
    if (!rc && fdatasync(fd_write))
        rc = -errno;
    *gbs = (double)FILE_MIB * (1 << 20) / (double)(mt_now_ns() - t0);
    return rc;
}

static int open_direct(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
    return fd >= 0 ? fd : open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    char path[2][4096];
    double write = 0, read = 0, both = 0;
    uint64_t room = 0;
    int fd[2] = {-1, -1}, rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        snprintf(path[i], sizeof(path[i]), "%.4000s/megatrain-probe-%d-%d", p->disk_dir, (int)getpid(), i);
        fd[i] = open_direct(path[i]);
        if (fd[i] < 0)
            rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "%s: %s", path[i], strerror(errno));
    }
    int io = rc;
    if (!rc)
        io = time_file(fd[0], true, &write);
    if (!io)
        io = time_file(fd[0], false, &read);
    if (!io)
        io = time_both(fd[0], fd[1], &both);
    for (int i = 0; i < 2; i++)
        if (fd[i] >= 0) {
            close(fd[i]);
            unlink(path[i]);
        }
    if (rc)
        return rc;
    if (io)
        return mt_fail(err, MT_ERR_RUNTIME, io, "measuring %s: %s", p->disk_dir, strerror(-io));
    const double v[] = {1, read, write, both, both};
    static const enum mt_rate_id id[] = {MT_RATE_DRIVES, MT_RATE_READ, MT_RATE_WRITE, MT_RATE_READ_BOTH,
                                         MT_RATE_WRITE_BOTH};
    for (size_t i = 0; i < MT_ARRAY_LEN(id); i++)
        m->rate[id[i]] = (struct mt_rate){v[i], MT_RATE_MEASURED};
    if (!mt_hw_disk_free(p->disk_dir, &room, NULL))
        m->rate[MT_RATE_DISK_GIB] = (struct mt_rate){(double)room / (double)(1 << 30), MT_RATE_MEASURED};
    return 0;
}
