/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "store/disk_priv.h"

static const char prefix[] = "megatrain-scratch-";

/* Whether the run that made a file, which its name says, has ended: its file may still be locked for a moment, as the
 * kernel takes a killed process's io_uring apart after the process is gone. */
static bool run_has_ended(const char *name)
{
    int pid = atoi(name + sizeof(prefix) - 1);
    return pid > 0 && kill(pid, 0) && errno == ESRCH;
}

/* A run in another container may look as if it had ended: then all of the wait passes. */
static bool lock_stale(int fd, const char *name)
{
    enum { WAIT_MS = 2000, EACH_MS = 10 };
    int rc;
    for (int ms = 0; (rc = mt_lock_file(fd, false)) == -EWOULDBLOCK && ms < WAIT_MS && run_has_ended(name);
         ms += EACH_MS)
        nanosleep(&(struct timespec){.tv_nsec = EACH_MS * 1000000L}, NULL);
    return !rc;
}

void mt_disk_remove_stale(const char *dir)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    char bytes[32];
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        if (strncmp(e->d_name, prefix, sizeof(prefix) - 1))
            continue;
        MT_FD_CLOSED int fd = openat(dirfd(d), e->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            continue;
        /* a living run holds the lock on its file */
        if (lock_stale(fd, e->d_name) && !fstat(fd, &st) && S_ISREG(st.st_mode) &&
            !unlinkat(dirfd(d), e->d_name, 0))
            mt_info("%s/%s: scratch of a run that is no more, %s: removed", dir, e->d_name,
                    mt_format_bytes(bytes, sizeof(bytes), (uint64_t)st.st_size));
    }
}

/* A file system may accept O_DIRECT and refuse the I/O: tries a block. */
static bool direct_works(int fd)
{
    MT_FREED void *p = mt_alloc_aligned(2 * (size_t)MT_DISK_ALIGN);
    bool ok = false;
    if (p) {
        void *block = (void *)mt_align_up((uintptr_t)p, MT_DISK_ALIGN);
        memset(block, 0, MT_DISK_ALIGN);
        ok = pwrite(fd, block, MT_DISK_ALIGN, 0) == MT_DISK_ALIGN &&
             pread(fd, block, MT_DISK_ALIGN, 0) == MT_DISK_ALIGN;
    }
    return ok;
}

/*
 * Turns copy-on-write off (btrfs): with it the reserved space would not be used, and the file would fragment. Other
 * file systems refuse the request, which does no harm.
 */
static void write_in_place(int fd)
{
    int flags;
    if (!ioctl(fd, FS_IOC_GETFLAGS, &flags)) {
        flags |= FS_NOCOW_FL;
        ioctl(fd, FS_IOC_SETFLAGS, &flags);
    }
}

static int open_locked(struct mt_disk_file *f, const char *dir, size_t index, struct mt_err *err)
{
    uint64_t id = 0;
    for (int tries = 0; tries < 4; tries++) {
        struct stat st;
        if (getrandom(&id, sizeof(id), 0) != sizeof(id))
            id = (uint64_t)getpid() + (uint64_t)tries;
        if (snprintf(f->path, sizeof(f->path), "%s/%s%d-%016llx-%zu", dir, prefix, (int)getpid(),
                     (unsigned long long)id, index) >= (int)sizeof(f->path))
            return mt_fail(err, MT_ERR_USAGE, -ENAMETOOLONG, "path too long: %s", dir);
        f->fd = open(f->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (f->fd < 0)
            return mt_fail(err, MT_ERR_USAGE, -errno, "memory.nvme_paths: cannot create %s: %s",
                           f->path, strerror(errno));
        /* before it was locked, another run that starts may have removed it as stale */
        int rc = mt_lock_file(f->fd, false);
        bool there = !fstat(f->fd, &st) && st.st_nlink;
        if (rc && rc != -EWOULDBLOCK && there) /* no run can lock files here, so none removes it as stale */
            mt_info("%s cannot be locked (%s): remove it if this run is killed", f->path, strerror(-rc));
        if (rc != -EWOULDBLOCK && there)
            return 0;
        close(f->fd);
        f->fd = -1;
    }
    return mt_fail(err, MT_ERR_RUNTIME, -EBUSY, "%s: cannot lock a new file", dir);
}

static int fail_space(const struct mt_disk_file *f, const char *dir, struct mt_err *err)
{
    char want[32], have[32], gap[32];
    struct statvfs st = {0};
    uint64_t left = statvfs(dir, &st) ? 0 : (uint64_t)st.f_bavail * st.f_frsize;
    return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                   "%s (%s): %s of scratch are needed, %s are free: %s short; free space, or name more "
                   "folders in memory.nvme_paths, or raise memory.host_budget",
                   dir, f->drive, mt_format_bytes(want, sizeof(want), f->bytes),
                   mt_format_bytes(have, sizeof(have), left),
                   mt_format_bytes(gap, sizeof(gap), f->bytes > left ? f->bytes - left : 0));
}

/* For file systems without fallocate: only writing reserves space. */
static int write_zeros(int fd, uint64_t bytes)
{
    enum { PIECE = 1 << 20 };
    MT_FREED char *zeros = mt_calloc(PIECE, 1);
    int rc = zeros ? 0 : -ENOMEM;
    for (uint64_t at = 0; at < bytes && !rc; at += PIECE)
        rc = mt_write_all(fd, zeros, MT_MIN((size_t)PIECE, (size_t)(bytes - at)));
    return rc;
}

static int reserve(struct mt_disk_file *f, const char *dir, struct mt_err *err)
{
    struct statvfs st;
    int rc;
    if (!fstatvfs(f->fd, &st) && (uint64_t)st.f_bavail * st.f_frsize < f->bytes)
        return fail_space(f, dir, err);
    do
        rc = fallocate(f->fd, 0, 0, (off_t)f->bytes) ? -errno : 0;
    while (rc == -EINTR);
    if (rc == -EOPNOTSUPP) {
        mt_info("%s: the file system has no fallocate; reserving %llu bytes by writing them", f->path,
                (unsigned long long)f->bytes);
        rc = write_zeros(f->fd, f->bytes);
    }
    if (rc == -ENOSPC || rc == -EDQUOT || rc == -EFBIG)
        return fail_space(f, dir, err);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot reserve %llu bytes for %s (%s): %s",
                        (unsigned long long)f->bytes, f->path, f->drive, strerror(-rc))
              : 0;
}

static void choose_direct(struct mt_disk_file *f, bool buffered)
{
    int flags = fcntl(f->fd, F_GETFL);
    f->align = mt_drive_alignment(f->fd);
    f->direct = !buffered && f->align <= MT_DISK_ALIGN &&
                !fcntl(f->fd, F_SETFL, flags | O_DIRECT) && direct_works(f->fd);
    if (f->direct)
        return;
    fcntl(f->fd, F_SETFL, flags);
    if (!buffered)
        mt_warn("%s (%s): the file system has no direct I/O; using the page cache", f->path, f->drive);
}

int mt_disk_file_open(struct mt_disk_file *f, const char *dir, size_t index, uint64_t bytes,
                      bool buffered, struct mt_err *err)
{
    *f = (struct mt_disk_file){.fd = -1, .bytes = bytes};
    int rc = open_locked(f, dir, index, err);
    if (!rc) {
        mt_drive_name(f->fd, f->drive);
        write_in_place(f->fd);
        if (bytes)
            rc = reserve(f, dir, err);
    }
    if (rc) {
        mt_disk_file_close(f);
        return rc;
    }
    if (bytes)
        choose_direct(f, buffered);
    return 0;
}

void mt_disk_file_close(struct mt_disk_file *f)
{
    if (f->fd < 0)
        return;
    unlink(f->path);
    close(f->fd);
    f->fd = -1;
}
