/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "store/io/io.h"

/**
 * Transfers between memory and files, each carried to its end over a backend (io.h): short ones are continued, EINTR
 * and EAGAIN retried, errors of drives that may pass tried again a few times within seconds. If a drive does not
 * answer in time (-ETIMEDOUT) or the backend fails, all transfers under way end with that error and are lost: they may
 * still be done, so that their memory must stay. Later ones end at once.
 *
 * Thread-safety: one thread, except mt_transfers_wake().
 */
typedef struct mt_transfers mt_transfers;

/* Kernels time out a drive themselves, after 30 s and some retries; this is for cases in which they do not. */
enum { MT_TRANSFER_DEADLINE_S = 300 };

struct mt_transfer_file {
    int fd;            /* the caller's */
    size_t align;      /* at which a transfer is continued: what direct I/O needs, else 1 */
    const char *drive; /* for messages; borrowed */
};

struct mt_transfer {
    bool write;
    int file;        /* index into the files */
    char *buf;
    uint64_t offset; /* in the file */
    size_t bytes;
    size_t least;    /* a read is complete with so many bytes: the file may end after them */
    void *owner;     /* the caller's */
    /* when it has ended: */
    int rc;          /* 0 or a negative errno; -ENODATA: the file ends before */
    bool lost;       /* it may still be done: it and its memory must not be used again */
    size_t done;
    uint64_t moved;  /* done, and what was transferred again to continue at an aligned offset */
    unsigned n_short, n_retried;
    /* used by the module */
    unsigned at, n_failed, n_stuck, n_errors;
    int64_t since, due_ns;
    struct mt_transfer *next; /* of those that wait to be tried again */
};

struct mt_transfers_params {
    size_t n_files;
    void (*describe)(void *ctx, size_t file, struct mt_transfer_file *out); /* called once for each file */
    unsigned depth;      /* most transfers under way */
    enum mt_io_kind io;
    double deadline_s;   /* for a drive to answer; 0: MT_TRANSFER_DEADLINE_S */
    const struct mt_io_fault *fault; /* for tests; NULL: none */
    const char *what;    /* "disk I/O", for the log; borrowed */
    /** Called once for each transfer, within mt_transfers_start() or _wait(); may start others. */
    void (*ended)(struct mt_transfer *x, void *ctx);
    void *ctx;
};

/** *why: the reason why it is not io_uring, or NULL. */
int mt_transfers_open(mt_transfers **out, const struct mt_transfers_params *p, const char **why, struct mt_err *err);
/**
 * Accepts NULL. Nothing may be under way. Returns false if transfers are lost: then its own memory and `keep`, which
 * the caller must not free, stay reachable until the process exits, and descriptors must stay open.
 */
bool mt_transfers_close(mt_transfers **t, void *keep);
/** The name of the backend, and its set_buffers(). */
const char *mt_transfers_backend(const mt_transfers *t);
int mt_transfers_set_buffers(mt_transfers *t, const struct iovec *iov, int n);

void mt_transfers_start(mt_transfers *t, struct mt_transfer *x);
/** Waits for results for up to MT_IO_WAIT_MS, or until mt_transfers_wake(). */
void mt_transfers_wait(mt_transfers *t);
void mt_transfers_wake(mt_transfers *t);
/** The error with which all was given up; 0: it was not. */
int mt_transfers_broken(const mt_transfers *t);
