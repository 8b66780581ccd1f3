/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_DIRECT_FILE_H
#define MT_STORE_DIRECT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"
#include "store/disk.h"

/** A file of the user's that is read past the page cache, if its file system allows that; through it if not. */
struct mt_direct_file {
    char *path; /* owned */
    int fd;
    bool direct; /* O_DIRECT */
    dev_t dev;   /* that the file lies on */
};

/**
 * `buffered`: through the page cache in any case. `buf`: MT_DISK_ALIGN bytes, aligned to as many, for a first read:
 * some file systems refuse only that. On failure (MT_ERR_INPUT) the file is to be closed as well.
 */
int mt_direct_file_open(struct mt_direct_file *out, const char *path, bool buffered, char *buf, struct mt_err *err);
/**
 * Reads the aligned bytes around [offset, offset + bytes) to `buf`, which has up to 2 * MT_DISK_ALIGN bytes more and is
 * aligned; *data: where `offset` is in it. -ENODATA: the file ends before.
 */
int mt_direct_file_read(const struct mt_direct_file *f, uint64_t offset, size_t bytes, char *buf, char **data,
                        struct mt_err *err);
void mt_direct_file_close(struct mt_direct_file *f);

#endif
