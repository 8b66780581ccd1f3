/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_FS_H
#define MT_BASE_FS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/** The whole file, with a NUL after it; *text is the caller's, freed with free(). */
int mt_read_file(const char *path, char **text, size_t *len, struct mt_err *err);
/** Writes to a temporary name, syncs, renames: readers see the old file or the new, never a part. */
int mt_write_file(const char *path, const void *data, size_t len, struct mt_err *err);
/**
 * Makes the names in a folder durable. 0 or a negative errno; a file system without such a call is reported
 * once, and it is 0.
 */
int mt_sync_dir(const char *path);
/** The same, of the folder that a path is in. */
int mt_sync_parent(const char *path);
/** Like mkdir -p; what is made is synced. */
int mt_mkdir_p(const char *path, struct mt_err *err);
/** Removes a file or a folder with all that is in it; a missing one is no error. */
int mt_remove_tree(const char *path, struct mt_err *err);
bool mt_path_exists(const char *path);
bool mt_is_dir(const char *path);
/** The absolute path without links, "." and ".."; where it does not exist, that of its folder with its last name; else
 * absolute alone. The caller's; NULL: no memory. */
char *mt_path_canonical(const char *path);
/** "dir/name", or name alone where it is absolute; freed with free(); NULL where memory is short. */
char *mt_path_join(const char *dir, const char *name);
/**
 * Takes the lock of an open file (flock), for as long as it is open; `wait`: until whoever has it lets go. 0;
 * -EWOULDBLOCK: another has it; or what the file system says that has no locks.
 */
int mt_lock_file(int fd, bool wait);
/** Writes all of it, going on after short writes and EINTR. 0 or a negative errno. */
int mt_write_all(int fd, const void *data, size_t len);
int mt_pread_all(int fd, void *data, size_t len, uint64_t offset);

#endif
