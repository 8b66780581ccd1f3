/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"
#include "store/io/drive.h"

/** A file of the user's that is read past the page cache, if its file system allows that; through it if not. */
struct mt_direct_file {
    char *path; /* owned */
    int fd;
    bool direct;  /* O_DIRECT */
    size_t align; /* that direct I/O needs */
    dev_t dev;    /* that the file lies on */
    char drive[MT_DRIVE_NAME];
};

/**
 * `buffered`: through the page cache in any case. `buf`: MT_DISK_ALIGN bytes, aligned to as many, for a first read:
 * some file systems refuse only that. On failure (MT_ERR_INPUT) the file is to be closed as well.
 */
int mt_direct_file_open(struct mt_direct_file *out, const char *path, bool buffered, char *buf, struct mt_err *err);
void mt_direct_file_close(struct mt_direct_file *f);
