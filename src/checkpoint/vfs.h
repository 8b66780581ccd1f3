/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_VFS_H
#define MT_CHECKPOINT_VFS_H

#include <stddef.h>

#include "base/err.h"

/**
 * The file operations that a save makes, so that tests can record and break them. Each returns 0 (open: a
 * descriptor) or a negative errno. `ctx` is passed back.
 */
struct mt_vfs {
    void *ctx;
    int (*create)(void *ctx, const char *path);
    int (*write)(void *ctx, int fd, const void *data, size_t len);
    int (*hole)(void *ctx, int fd, size_t len); /* writes zeros, without taking space where it can */
    int (*sync)(void *ctx, int fd);
    int (*close)(void *ctx, int fd);
    int (*make_dir)(void *ctx, const char *path);
    int (*sync_dir)(void *ctx, const char *path);
    int (*rename)(void *ctx, const char *from, const char *to);
    int (*remove_tree)(void *ctx, const char *path);
    int (*link)(void *ctx, const char *target, const char *path); /* symbolic, replaced at once */
};

/** The real ones. */
extern const struct mt_vfs mt_vfs_posix;

/**
 * A file being written through a vfs, summed on the way (XXH3). Blocks of zeros, such as the moments of
 * vocabulary rows that no sample has, become holes: neither written nor taking space.
 */
struct mt_out_file {
    const struct mt_vfs *vfs;
    int fd;
    void *hash;
    unsigned long long bytes, sum;
    char path[4096];
};
int mt_out_open(struct mt_out_file *f, const struct mt_vfs *vfs, const char *path,
                struct mt_err *err);
int mt_out_write(struct mt_out_file *f, const void *data, size_t len, struct mt_err *err);
/** Syncs and closes; bytes and sum are then final. */
int mt_out_commit(struct mt_out_file *f, struct mt_err *err);
/** Closes what was not committed. */
void mt_out_abort(struct mt_out_file *f);

#endif
