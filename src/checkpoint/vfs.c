/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/vfs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/mem.h"

enum { HOLE = 64 << 10 }; /* smaller ones would make more extents than they save */

static int posix_create(void *, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return fd < 0 ? -errno : fd;
}

static int posix_write(void *, int fd, const void *data, size_t len)
{
    return mt_write_all(fd, data, len);
}

/* Makes a hole; file systems without holes write zeros. */
static int posix_hole(void *, int fd, size_t len)
{
    off_t at = lseek(fd, (off_t)len, SEEK_CUR);
    return at < 0 || ftruncate(fd, at) ? -errno : 0;
}

static int posix_sync(void *, int fd)
{
    return fsync(fd) ? -errno : 0;
}

static int posix_close(void *, int fd)
{
    return close(fd) ? -errno : 0;
}

static int posix_make_dir(void *, const char *path)
{
    return mkdir(path, 0777) ? -errno : 0;
}

static int posix_sync_dir(void *, const char *path)
{
    return mt_sync_dir(path);
}

static int posix_rename(void *, const char *from, const char *to)
{
    return rename(from, to) ? -errno : 0;
}

static int posix_remove_tree(void *, const char *path)
{
    return mt_remove_tree(path, NULL);
}

static int posix_link(void *, const char *target, const char *path)
{
    char tmp[4200];
    snprintf(tmp, sizeof(tmp), "%s.tmp", path);
    unlink(tmp);
    if (!symlink(target, tmp) && !rename(tmp, path))
        return 0;
    int rc = -errno;
    unlink(tmp);
    return rc;
}

static int posix_share(void *, const char *from, const char *to)
{
    return link(from, to) ? -errno : 0;
}

static int posix_exchange(void *, const char *a, const char *b)
{
    return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) ? -errno : 0;
}

const struct mt_vfs mt_vfs_posix = {
    .create = posix_create,
    .write = posix_write,
    .hole = posix_hole,
    .sync = posix_sync,
    .close = posix_close,
    .make_dir = posix_make_dir,
    .sync_dir = posix_sync_dir,
    .rename = posix_rename,
    .remove_tree = posix_remove_tree,
    .link = posix_link,
    .share = posix_share,
    .exchange = posix_exchange,
};

static int fail(struct mt_out_file *f, int rc, const char *verb, struct mt_err *err)
{
    return mt_fail(err, rc == -ENOSPC || rc == -EDQUOT ? MT_ERR_NO_FIT : MT_ERR_RUNTIME, rc,
                   "cannot %s %s: %s", verb, f->path, strerror(-rc));
}

int mt_out_open(struct mt_out_file *f, const struct mt_vfs *vfs, const char *path,
                struct mt_err *err)
{
    *f = (struct mt_out_file){.vfs = vfs, .fd = -1};
    if (snprintf(f->path, sizeof(f->path), "%s", path) >= (int)sizeof(f->path))
        return fail(f, -ENAMETOOLONG, "create", err);
    f->fd = vfs->create(vfs->ctx, path);
    if (f->fd < 0)
        return fail(f, f->fd, "create", err);
    f->hash = XXH3_createState();
    if (!f->hash)
        return fail(f, -ENOMEM, "create", err);
    XXH3_64bits_reset(f->hash);
    return 0;
}

/* Length of the run at the start of `data`: whole blocks of zeros in the file, or everything up to the next one. */
static size_t run_length(const struct mt_out_file *f, const char *data, size_t len, bool *zeros)
{
    size_t n = 0;
    *zeros = false;
    while (n < len) {
        size_t block = MT_MIN(HOLE - (size_t)((f->bytes + n) % HOLE), len - n);
        bool zero = block == HOLE && !data[n] && !memcmp(data + n, data + n + 1, HOLE - 1);
        if (n && zero != *zeros)
            break;
        *zeros = zero;
        n += block;
    }
    return n;
}

static int put(struct mt_out_file *f, const char *data, size_t len)
{
    int rc = 0;
    for (size_t n; len && !rc; data += n, len -= n) {
        bool zeros;
        n = run_length(f, data, len, &zeros);
        rc = zeros ? f->vfs->hole(f->vfs->ctx, f->fd, n) : f->vfs->write(f->vfs->ctx, f->fd, data, n);
        f->bytes += n;
    }
    return rc;
}

int mt_out_write(struct mt_out_file *f, const void *data, size_t len, struct mt_err *err)
{
    int rc = put(f, data, len);
    if (rc)
        return fail(f, rc, "write", err);
    XXH3_64bits_update(f->hash, data, len);
    return 0;
}

int mt_out_commit(struct mt_out_file *f, struct mt_err *err)
{
    int fd = f->fd, rc = f->vfs->sync(f->vfs->ctx, fd);
    f->sum = XXH3_64bits_digest(f->hash);
    if (rc)
        return fail(f, rc, "sync", err);
    f->fd = -1;
    rc = f->vfs->close(f->vfs->ctx, fd);
    mt_out_abort(f);
    return rc ? fail(f, rc, "close", err) : 0;
}

void mt_out_abort(struct mt_out_file *f)
{
    if (f->fd >= 0)
        f->vfs->close(f->vfs->ctx, f->fd);
    f->fd = -1;
    XXH3_freeState(f->hash);
    f->hash = NULL;
}

int mt_out_put(struct mt_out_file *f, const struct mt_vfs *vfs, const char *path, const void *data, size_t len,
               struct mt_err *err)
{
    int rc = mt_out_open(f, vfs, path, err) ?: mt_out_write(f, data, len, err) ?: mt_out_commit(f, err);
    mt_out_abort(f);
    return rc;
}

int mt_out_make_folder(const struct mt_vfs *vfs, const char *dir, const char *name, struct mt_err *err)
{
    const char *slash = strrchr(name, '/'), *path = MT_PATH("%s/%.*s", dir, slash ? (int)(slash - name) : 0, name);
    int rc = slash ? vfs->make_dir(vfs->ctx, path) : 0;
    return !rc || rc == -EEXIST ? 0 : mt_fail(err, MT_ERR_RUNTIME, rc, "cannot create %s: %s", path, strerror(-rc));
}

int mt_out_sync_folder(const struct mt_vfs *vfs, const char *dir, const char *name, struct mt_err *err)
{
    const char *slash = strrchr(name, '/'), *path = MT_PATH("%s/%.*s", dir, slash ? (int)(slash - name) : 0, name);
    int rc = slash ? vfs->sync_dir(vfs->ctx, path) : 0;
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot sync %s: %s", path, strerror(-rc)) : 0;
}

int mt_out_copy(const struct mt_vfs *vfs, const char *from, const char *to, struct mt_err *err)
{
    enum { PIECE = 1 << 20 };
    MT_CLOSED_BY(mt_out_abort) struct mt_out_file f = {.fd = -1};
    MT_FREED char *piece = mt_calloc(PIECE, 1);
    MT_FD_CLOSED int fd = mt_open_regular(from, NULL);
    ssize_t n = 0;
    int rc = !piece ? mt_fail_nomem(err, from, PIECE)
             : fd < 0 ? mt_fail(err, MT_ERR_RUNTIME, fd, "cannot read %s: %s", from, strerror(-fd))
                      : mt_out_open(&f, vfs, to, err);
    while (!rc && (n = read(fd, piece, PIECE)) > 0)
        rc = mt_out_write(&f, piece, (size_t)n, err);
    if (!rc && n < 0)
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot read %s: %s", from, strerror(errno));
    return rc ?: mt_out_commit(&f, err);
}
