/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"

/**
 * Raw asynchronous file I/O, implemented by a backend (io_uring, or threads with pread and pwrite). An operation is one
 * request to the kernel; its result is what the kernel returned, short counts and errors included. store/disk.h
 * continues short transfers and retries.
 *
 * Thread-safety: one thread, except wake().
 */
typedef struct mt_io mt_io;

enum mt_io_kind { MT_IO_AUTO, MT_IO_URING, MT_IO_THREADS };

struct mt_io_op {
    bool write;
    int file;        /* index into the list of set_files() */
    void *buf;       /* must be valid until the result is returned */
    size_t bytes;
    uint64_t offset;
    void *tag;
};

struct mt_io_result {
    void *tag;
    int64_t res; /* bytes moved, or a negative errno */
};

/** Functions of a backend. `destroy` waits for operations under way. */
struct mt_io_backend {
    const char *name; /* "io_uring" or "threads" */
    void (*destroy)(mt_io *io);
    /** The caller keeps the descriptors open and closes them. Nothing may be under way. */
    int (*set_files)(mt_io *io, const int *fds, int n, struct mt_err *err);
    /** Memory that operations will use, to be registered with the kernel if possible. Nothing may be under way. Returns
     * 0, or the error for which the memory is used unregistered, which is no failure. */
    int (*set_buffers)(mt_io *io, const struct iovec *iov, int n);
    /** An error is the backend's, not a file's: submit nothing more after it. */
    int (*submit)(mt_io *io, const struct mt_io_op *ops, int n);
    /** Waits for up to `max` results; returns their number, 0 after wake() or MT_IO_WAIT_MS, or a negative errno: then no
     * more results come, and operations under way may never end. */
    int (*wait)(mt_io *io, struct mt_io_result *out, int max);
    /** Makes a waiting (or the next) wait() return. Any thread. */
    void (*wake)(mt_io *io);
};
enum { MT_IO_WAIT_MS = 500 };

/** First member of every backend's struct. */
struct mt_io {
    const struct mt_io_backend *backend;
};

/** At most `depth` operations without a result at a time. AUTO: io_uring if it is allowed, else threads; *why: the
 * reason why it is not io_uring, or NULL. `why` may be NULL. */
int mt_io_create(mt_io **out, enum mt_io_kind kind, unsigned depth, const char **why,
                 struct mt_err *err);
/** Accepts NULL. */
void mt_io_destroy(mt_io **io);
/** The backends. -ENOSYS: built without liburing; another errno: the kernel does not allow it. */
int mt_io_uring_create(mt_io **out, unsigned depth, struct mt_err *err);
int mt_io_threads_create(mt_io **out, unsigned depth, struct mt_err *err);

/* --- for tests ------------------------------------------------------------------------------- */

enum mt_io_fault_kind {
    MT_IO_FAULT_NONE,
    MT_IO_FAULT_EIO,
    MT_IO_FAULT_ENOSPC,
    MT_IO_FAULT_EAGAIN,
    MT_IO_FAULT_EINTR,
    MT_IO_FAULT_SHORT,   /* about half is transferred */
    MT_IO_FAULT_ZERO,    /* nothing is transferred, and no error is returned */
    MT_IO_FAULT_DELAY,   /* started only when all others have ended */
    MT_IO_FAULT_REORDER, /* results in reverse order */
    /* these report success: */
    MT_IO_FAULT_FLIP,  /* one bit of the data is flipped */
    MT_IO_FAULT_STALE, /* a write is done some operations later, over newer writes; a read as DROP */
    MT_IO_FAULT_SWAP,  /* it and the next operation of its size and direction exchange their offsets */
    MT_IO_FAULT_DROP,  /* nothing is transferred */
    /* faults of the backend: */
    MT_IO_FAULT_HANG,   /* it never ends */
    MT_IO_FAULT_WAIT,   /* waiting for results fails from then on */
    MT_IO_FAULT_SUBMIT, /* it is not accepted */
};
/** Applies to operations nth, nth + 1 ... nth + count - 1 (from 1) of the directions; count 0: all from nth on. */
struct mt_io_fault {
    enum mt_io_fault_kind kind;
    bool reads, writes;
    uint64_t nth, count;
};
/** "write:eio:12" or "any:short:1:0": direction (read, write, any), kind, nth, count (1). */
int mt_io_fault_parse(struct mt_io_fault *out, const char *text, struct mt_err *err);
/** Wraps `inner` and takes ownership of it. */
int mt_io_create_fault(mt_io **out, mt_io *inner, const struct mt_io_fault *f, unsigned depth,
                       struct mt_err *err);
