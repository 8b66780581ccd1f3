/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <errno.h>

/** The kind of failure; the command line has an exit code for each (cli/cli.h). */
enum mt_err_kind {
    MT_ERR_RUNTIME,    /* I/O, allocation, internal */
    MT_ERR_USAGE,      /* command line or config file */
    MT_ERR_INPUT,      /* model, tokenizer or data */
    MT_ERR_NO_FIT,     /* not enough host, device or pinned memory, or disk space */
    MT_ERR_DEVICE,     /* the compute device failed */
    MT_ERR_TRAINING,   /* loss or gradients are not finite, too often */
    MT_ERR_CHECKPOINT, /* checkpoint is damaged or does not match */
};

/**
 * Detail of a failure, owned by the caller and passed last; NULL where the caller needs only the
 * code. Written only on failure. `code` is the negative errno that the function returned.
 */
struct mt_err {
    int code;
    enum mt_err_kind kind;
    unsigned long long short_device, short_host; /* MT_ERR_NO_FIT: bytes that a budget lacks, where known; else 0 */
    char msg[768];
};

/** Fills *err (when not NULL) and returns `code`, so that a failure is one statement. */
int mt_fail(struct mt_err *err, enum mt_err_kind kind, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/** Puts "prefix: " before the message of an error that is already filled; returns its code. */
int mt_fail_prefix(struct mt_err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/** Fails with -ENOMEM: `bytes` wanted for `what`; few, or 0: the message has no number. */
int mt_fail_nomem(struct mt_err *err, const char *what, unsigned long long bytes);
