/* SPDX-License-Identifier: Apache-2.0 */
#include "store/files/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "store/disk.h"

enum { ALIGN = MT_DISK_ALIGN };

/* Opens with O_DIRECT if a first read succeeds: some file systems refuse only that. */
static bool open_direct(struct mt_direct_file *f, char *buf)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK);
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
        out->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (out->fd < 0 || fstat(out->fd, &st)) {
        int rc = -errno;
        return mt_fail(err, MT_ERR_INPUT, rc, "cannot open %s: %s", path, strerror(-rc));
    }
    if (!S_ISREG(st.st_mode))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "cannot read %s: it is not a regular file", path);
    out->dev = st.st_dev;
    out->align = mt_drive_alignment(out->fd);
    mt_drive_name(out->fd, out->drive);
    if (!out->direct && !buffered)
        mt_info("%s: its file system has no direct I/O; using the page cache", path);
    return 0;
}

void mt_direct_file_close(struct mt_direct_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (struct mt_direct_file){.fd = -1};
}
