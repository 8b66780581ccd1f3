/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/fs.h"
#include "checkpoint/checkpoint.h"

enum { HOLE = 128 << 10 };

/* Notes for messages what failed; returns rc. */
static int tried(const char **what, const char *step, int rc)
{
    *what = rc ? step : *what;
    return rc;
}

/* Writes a file with a hole and a byte after it. */
static int write_one(const struct mt_vfs *vfs, const char *path, const char **what)
{
    int fd = vfs->create(vfs->ctx, path);
    if (fd < 0)
        return tried(what, "create a file", fd);
    int rc = tried(what, "write a file", vfs->write(vfs->ctx, fd, "x", 1))
          ?: tried(what, "make a hole in a file", vfs->hole(vfs->ctx, fd, HOLE))
          ?: tried(what, "write a file", vfs->write(vfs->ctx, fd, "x", 1))
          ?: tried(what, "sync a file", vfs->sync(vfs->ctx, fd));
    int closed = vfs->close(vfs->ctx, fd);
    return rc ?: tried(what, "close a file", closed);
}

int mt_checkpoint_rehearse(const struct mt_vfs *vfs, const char *dir, struct mt_err *err)
{
    char from[4096], to[4096], file[4200], link[4200];
    const char *what = NULL;
    vfs = vfs ? vfs : &mt_vfs_posix;
    mt_path_printf(from, sizeof(from), "%s/.rehearsal-%ld.tmp", dir, (long)getpid());
    mt_path_printf(to, sizeof(to), "%s/.rehearsal-%ld", dir, (long)getpid());
    snprintf(file, sizeof(file), "%s/file", from);
    snprintf(link, sizeof(link), "%s/link", to);
    vfs->remove_tree(vfs->ctx, from); /* left by a killed process with the same id */
    vfs->remove_tree(vfs->ctx, to);
    int rc = tried(&what, "create a folder", vfs->make_dir(vfs->ctx, from))
          ?: write_one(vfs, file, &what)
          ?: tried(&what, "sync a folder", vfs->sync_dir(vfs->ctx, from))
          ?: tried(&what, "rename a folder", vfs->rename(vfs->ctx, from, to))
          ?: tried(&what, "sync a folder", vfs->sync_dir(vfs->ctx, dir));
    int linked = rc ? 0 : vfs->link(vfs->ctx, "file", link);
    if (linked)
        mt_warn("%s: no symbolic links (%s): there will be no `latest`; --resume does not need it", dir, strerror(-linked));
    int gone = vfs->remove_tree(vfs->ctx, to);
    vfs->remove_tree(vfs->ctx, from);
    rc = rc ?: tried(&what, "remove a folder", gone);
    return rc ? mt_fail(err, rc == -ENOSPC || rc == -EDQUOT ? MT_ERR_NO_FIT : MT_ERR_RUNTIME, rc,
                        "checkpoint.dir %s: a checkpoint cannot be saved there: cannot %s: %s", dir, what, strerror(-rc))
              : 0;
}
