/* SPDX-License-Identifier: Apache-2.0 */
#include "store/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

enum { ALIGN = MT_DISK_ALIGN };

/* Opens with O_DIRECT if a first read succeeds: some file systems refuse only that. */
static bool open_direct(struct mt_direct_file *f, char *buf)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0)
        return false;
    if (pread(fd, buf, ALIGN, 0) < 0) {
        close(fd);
        return false;
    }
    f->fd = fd;
    f->direct = true;
    return true;
}

int mt_direct_file_open(struct mt_direct_file *out, const char *path, bool buffered, char *buf, struct mt_err *err)
{
    struct stat st;
    *out = (struct mt_direct_file){.path = strdup(path), .fd = -1};
    if (!out->path)
        return mt_fail_nomem(err, path, strlen(path));
    if (buffered || !open_direct(out, buf))
        out->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (out->fd < 0 || fstat(out->fd, &st)) {
        int rc = -errno;
        return mt_fail(err, MT_ERR_INPUT, rc, "cannot open %s: %s", path, strerror(-rc));
    }
    out->dev = st.st_dev;
    if (!out->direct && !buffered)
        mt_info("%s: its file system has no direct I/O; using the page cache", path);
    return 0;
}

int mt_direct_file_read(const struct mt_direct_file *f, uint64_t offset, size_t bytes, char *buf, char **data,
                        struct mt_err *err)
{
    uint64_t from = offset / ALIGN * ALIGN;
    size_t want = (size_t)(offset - from) + bytes, cover = mt_align_up(want, ALIGN), got = 0;
    while (got < want) {
        ssize_t n = pread(f->fd, buf + got, cover - got, (off_t)(from + got));
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        size_t next = n > 0 ? got + (size_t)n : got;
        if (next < want) /* direct I/O continues at an aligned offset */
            next = next / ALIGN * ALIGN;
        if (next == got)
            return mt_fail(err, MT_ERR_INPUT, n < 0 ? -errno : -ENODATA, "cannot read %zu bytes at offset %llu of %s: %s",
                           want - got, (unsigned long long)(from + got), f->path,
                           n < 0 ? strerror(errno) : "the file has become shorter");
        got = next;
    }
    *data = buf + (offset - from);
    return 0;
}

void mt_direct_file_close(struct mt_direct_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (struct mt_direct_file){.fd = -1};
}
