/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <dirent.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "base/mem.h"

/** As MT_FREED (mem.h): before the declaration of a descriptor (negative: none), of a folder, or of a stream that is
 * read (NULL: none), which are closed where their scope ends. */
#define MT_FD_CLOSED MT_CLOSED_BY(mt_close_fd)
#define MT_DIR_CLOSED MT_CLOSED_BY(mt_close_dir)
#define MT_STREAM_CLOSED MT_CLOSED_BY(mt_close_stream)
void mt_close_fd(const int *fd);
void mt_close_dir(DIR **d);
void mt_close_stream(FILE **f);

/**
 * Opens a file to read it, if it is a regular one: models and checkpoints of strangers may have pipes and devices in
 * their files' places, which never end, or never begin. The descriptor, or a negative errno (MT_ERR_RUNTIME); -ENODATA
 * (MT_ERR_INPUT): git-lfs has not fetched it yet.
 */
int mt_open_regular(const char *path, struct mt_err *err);
/**
 * Opens a file in a folder of ours to write it, and makes it if it is missing. A link is refused: in a folder that
 * others can write to, it may lead to any file of this user; so is what is no regular file. flags: O_WRONLY or O_RDWR,
 * O_APPEND, O_TRUNC. The descriptor, or a negative errno (MT_ERR_RUNTIME).
 */
int mt_open_to_write(const char *path, int flags, struct mt_err *err);
/** Larger files are not read whole: 4 GiB. */
#define MT_READ_MOST ((size_t)4 << 30)
/** Reads the whole regular file and appends a NUL; the caller frees *text with free(). -EFBIG: it is larger than
 * MT_READ_MOST. */
int mt_read_file(const char *path, char **text, size_t *len, struct mt_err *err);
/** The same, and also of pipes: for files that the user names, such as <(...) of a shell. */
int mt_read_stream(const char *path, char **text, size_t *len, struct mt_err *err);
/** Writes a temporary file, syncs and renames it: readers see the old file or the new one, never a part. */
int mt_write_file(const char *path, const void *data, size_t len, struct mt_err *err);
/**
 * Syncs a folder, so that files created or renamed in it survive a power failure. 0 or a negative errno; where the
 * file system cannot sync folders, it warns once and returns 0.
 */
int mt_sync_dir(const char *path);
/** The same for the folder that contains `path`. */
int mt_sync_parent(const char *path);
/** Renames, durably: what is in a folder has been synced before. */
int mt_rename(const char *from, const char *to, struct mt_err *err);
/** Like mkdir -p; syncs the folders it makes. */
int mt_mkdir_p(const char *path, struct mt_err *err);
/** The same of the folder that contains `path`. */
int mt_make_parent(const char *path, struct mt_err *err);
/** Removes a file, or a folder with everything in it; a missing one is not an error. */
int mt_remove_tree(const char *path, struct mt_err *err);
bool mt_path_exists(const char *path);
/** The program of the first of PATH's folders that has it, which the caller frees; NULL: none has, or memory is short.
 * whole: of folders with whole names alone, since others are below the working folder. */
char *mt_find_program(const char *name, bool whole);
bool mt_is_dir(const char *path);
/** Whether both paths lead to one file or folder. */
bool mt_is_same_file(const char *a, const char *b);
/** Whether the path ends so, in upper or lower case: ".jsonl". */
bool mt_path_has_extension(const char *path, const char *end);
/** The absolute path with links, "." and ".." resolved. Where the path does not exist, only its folder is resolved;
 * where that does not exist either, the path is only made absolute. The caller frees it; NULL: out of memory. */
char *mt_path_canonical(const char *path);
/** snprintf() of a path. Returns 0; -ENAMETOOLONG: it does not fit, and becomes "", which no file is called. */
int mt_path_printf(char *path, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
/** A path in memory of the block that it is in; "", which no file is called, if it is too long. */
#define MT_PATH(...) mt_path_of((char[MT_PATH_SIZE]){""}, __VA_ARGS__)
enum { MT_PATH_SIZE = 4200 };
const char *mt_path_of(char path[MT_PATH_SIZE], const char *format, ...) __attribute__((format(printf, 2, 3)));
/** The folder of caches: $XDG_CACHE_HOME/megatrain, else ~/.cache/megatrain. */
void mt_cache_dir(char *path, size_t size);
/** The folder of this user's installed files of the program, which nothing may remove: $XDG_DATA_HOME/megatrain, else
 * ~/.local/share/megatrain. */
void mt_data_home(char *path, size_t size);
/** "dir/name", or `name` alone if it is absolute. The caller frees it; NULL: out of memory. */
char *mt_path_join(const char *dir, const char *name);
/**
 * Takes the lock of an open file (flock), for as long as it is open; `wait`: until whoever has it lets go. 0;
 * -EWOULDBLOCK: another has it; or what the file system says that has no locks.
 */
int mt_lock_file(int fd, bool wait);
/** Writes all `len` bytes, continuing after short writes and EINTR. 0 or a negative errno. */
int mt_write_all(int fd, const void *data, size_t len);
int mt_pread_all(int fd, void *data, size_t len, uint64_t offset);
int mt_pwrite_all(int fd, const void *data, size_t len, uint64_t offset);
