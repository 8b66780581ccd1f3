/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"

/**
 * The file operations of a save, so that tests can record them and make them fail. Each returns 0 (create: a
 * descriptor) or a negative errno. `ctx` is passed back.
 */
struct mt_vfs {
    void *ctx;
    int (*create)(void *ctx, const char *path);
    int (*write)(void *ctx, int fd, const void *data, size_t len);
    int (*hole)(void *ctx, int fd, size_t len); /* writes zeros, without taking space if possible */
    int (*sync)(void *ctx, int fd);
    int (*close)(void *ctx, int fd);
    int (*make_dir)(void *ctx, const char *path);
    int (*sync_dir)(void *ctx, const char *path);
    int (*rename)(void *ctx, const char *from, const char *to);
    int (*remove_tree)(void *ctx, const char *path);
    int (*link)(void *ctx, const char *target, const char *path); /* symbolic, replaced atomically */
    int (*share)(void *ctx, const char *from, const char *to);    /* a second name of a file; NULL: as if refused */
    int (*exchange)(void *ctx, const char *a, const char *b);     /* of two folders' names, at once; NULL: as if refused */
};

/** The real ones. */
extern const struct mt_vfs mt_vfs_posix;

/**
 * A file that is written through a vfs, with a checksum (XXH3) made while writing. Blocks of zeros, such as the moments
 * of vocabulary rows that no sample has, become holes, which are not written and take no space.
 */
struct mt_out_file {
    const struct mt_vfs *vfs;
    int fd;
    void *hash;
    unsigned long long bytes, sum;
    unsigned long long header; /* the writer's: the sum of the bytes before a safetensors file's tensors */
    char path[4096];
};
int mt_out_open(struct mt_out_file *f, const struct mt_vfs *vfs, const char *path,
                struct mt_err *err);
int mt_out_write(struct mt_out_file *f, const void *data, size_t len, struct mt_err *err);
/** Syncs and closes; bytes and sum are then final. */
int mt_out_commit(struct mt_out_file *f, struct mt_err *err);
/** Closes a file that was not committed. */
void mt_out_abort(struct mt_out_file *f);
/** All of this for a file of these bytes. */
int mt_out_put(struct mt_out_file *f, const struct mt_vfs *vfs, const char *path, const void *data, size_t len,
               struct mt_err *err);
/** For a file of that name in `dir`, if the name has a folder: makes that unless it is there; syncs it. */
int mt_out_make_folder(const struct mt_vfs *vfs, const char *dir, const char *name, struct mt_err *err);
int mt_out_sync_folder(const struct mt_vfs *vfs, const char *dir, const char *name, struct mt_err *err);
/** Copies a regular file, durably. */
int mt_out_copy(const struct mt_vfs *vfs, const char *from, const char *to, struct mt_err *err);
