/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/manifest.h"

int mt_output_lock(const char *dir, int *fd, struct mt_err *err)
{
    char path[4200], pid[32] = "";
    struct stat st;
    mt_path_printf(path, sizeof(path), "%s/.lock", dir);
    int f = mt_open_to_write(path, O_RDWR, err);
    if (f == -EACCES) /* another user's: it can be locked, too */
        f = mt_open_regular(path, err);
    if (f < 0)
        return f;
    int rc = mt_lock_file(f, false);
    if (rc && rc != -EWOULDBLOCK)
        mt_warn("%s cannot be locked (%s): make sure that no other run writes to this folder", path, strerror(-rc));
    if (rc == -EWOULDBLOCK) {
        ssize_t n = read(f, pid, sizeof(pid) - 1);
        close(f);
        pid[n > 0 ? strcspn(pid, "\n") : 0] = 0;
        bool own = atoi(pid) == getpid(); /* of several configurations */
        return mt_fail(err, MT_ERR_USAGE, -EBUSY, "%s is in use by another run (%s%s): choose another checkpoint.dir", dir,
                       own ? "of this command" : "process ", own ? "" : pid[0] ? pid : "unknown");
    }
    int n = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
    bool ours = !fstat(f, &st) && st.st_uid == geteuid() && st.st_nlink == 1; /* under no other name */
    if (!ours || ftruncate(f, 0) || pwrite(f, pid, (size_t)n, 0) != n)
        mt_debug("the lock file does not name its holder");
    *fd = f;
    return 0;
}

bool mt_output_in_use(const char *dir)
{
    MT_FD_CLOSED int f = open(MT_PATH("%s/.lock", dir), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool held = f >= 0 && mt_lock_file(f, false) == -EWOULDBLOCK;
    return held;
}

static void replace(int *fd, int by)
{
    if (*fd >= 0)
        close(*fd);
    *fd = by;
}

/* Makes the folder and takes its lock; on success, *o is that folder. */
static int take(struct mt_output *o, const char *dir, struct mt_err *err)
{
    int lock = -1;
    if (strlen(dir) >= 4000)
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "cannot create a folder of such a long name: %s", dir);
    int rc = mt_mkdir_p(dir, err);
    int fd = rc ? -1 : open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!rc && fd < 0 && errno != EACCES) /* it may be one that can be written and not read */
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot open %s: %s", dir, strerror(errno));
    rc = rc ?: mt_output_lock(dir, &lock, err);
    if (rc) {
        mt_close_fd(&fd);
        return rc;
    }
    replace(&o->fd, fd);
    replace(&o->lock, lock);
    memmove(o->dir, dir, strlen(dir) + 1);
    return 0;
}

/* A rehearsal of a save (checkpoint.h), or a file that was to replace another one (mt_write_file()). */
static bool is_leftover(const char *name)
{
    static const char rehearsal[] = ".rehearsal-";
    return !strncmp(name, rehearsal, sizeof(rehearsal) - 1) || !fnmatch("*?.??????.tmp", name, 0);
}

/* The lock's holder alone may do this: else another process may be writing them. */
static void remove_leftovers(const char *dir)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *path = MT_PATH("%s/%s", dir, e->d_name);
        if (is_leftover(e->d_name) && mt_remove_tree(path, NULL))
            mt_debug("%s, which a killed run left, stays", path);
    }
}

int mt_output_open(struct mt_output *o, const char *dir, struct mt_err *err)
{
    *o = (struct mt_output){.fd = -1, .lock = -1};
    int rc = take(o, dir, err);
    if (!rc)
        remove_leftovers(dir);
    return rc;
}

void mt_output_close(struct mt_output *o)
{
    replace(&o->fd, -1);
    replace(&o->lock, -1);
}

/* Is the path what the descriptor is open on? Where one of them cannot be asked, nothing says that it is not. */
static bool is_same(int fd, const char *path)
{
    struct stat a, b;
    if (fd < 0 || fstat(fd, &a))
        return true;
    if (stat(path, &b))
        return errno != ENOENT && errno != ENOTDIR;
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* The name that the folder has now, if it was renamed. */
static bool find_renamed(const struct mt_output *o, char to[4096])
{
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", o->fd);
    ssize_t n = readlink(link, to, 4000);
    if (n <= 0 || n >= 4000)
        return false;
    to[n] = 0;
    return mt_is_dir(to) && is_same(o->fd, to);
}

static int take_beside(struct mt_output *o, const char *run, struct mt_err *err)
{
    char dir[4096];
    if (snprintf(dir, sizeof(dir), "%.3900s-%s", o->dir, run) >= 4000)
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", o->dir);
    mt_warn("%s is now another folder, or in use by another run: this run goes on in %s", o->dir, dir);
    return take(o, dir, err);
}

/* Another folder may be used in place of the one that is gone if no run uses it and it has no checkpoints. */
static int take_other(struct mt_output *o, const char *run, struct mt_err *err)
{
    MT_FREED uint64_t *steps = NULL;
    size_t n = 0;
    struct mt_err why;
    int rc = mt_checkpoint_list(o->dir, &steps, &n, err);
    if (rc)
        return rc;
    return n || take(o, o->dir, &why) ? take_beside(o, run, err) : 0;
}

static int find_folder(struct mt_output *o, const char *run, struct mt_err *err)
{
    char to[4096];
    if (is_same(o->fd, o->dir))
        return 0;
    if (find_renamed(o, to)) {
        mt_warn("%s was renamed to %s while the run used it: checkpoints go there", o->dir, to);
        memcpy(o->dir, to, sizeof(to));
        return 0;
    }
    if (mt_path_exists(o->dir))
        return take_other(o, run, err);
    mt_warn("%s was removed while the run used it: it is made again", o->dir);
    return take(o, o->dir, err);
}

int mt_output_find(struct mt_output *o, const char *run, struct mt_err *err)
{
    struct mt_err why;
    int lock, rc = find_folder(o, run, err);
    const char *path = MT_PATH("%s/.lock", o->dir);
    if (rc || is_same(o->lock, path))
        return rc;
    rc = mt_output_lock(o->dir, &lock, &why);
    if (rc == -EBUSY)
        return take_beside(o, run, err);
    if (rc)
        return mt_fail(err, why.kind, rc, "%s", why.msg);
    mt_warn("%s was removed or replaced while the run used the folder: it is locked again", path);
    replace(&o->lock, lock);
    return 0;
}
