/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_DISK_H
#define MT_STORE_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "store/disk_sums.h"
#include "store/io.h"

/**
 * Scratch space on drives: one address space [0, bytes), striped over a file in each of several folders.
 *
 * It is scratch: the last checkpoint is what a run is restored from. The files carry the id of their run in
 * their names and a lock for as long as it lives; they are made new, are never opened by another run, and
 * are removed at the end. Files of a killed run are recognised by their free lock, and removed by the next
 * run that uses the folder.
 *
 * Space is reserved when the disk is opened. Requests bypass the page cache (O_DIRECT) where the file
 * system allows it, many at a time; every result is checked, short transfers are finished, EINTR and
 * EAGAIN retried; any other error ends the request and names file, offset and drive. What is read of an area that
 * has sums must agree with them: else it is read once more, and then the request ends with -EBADMSG. A drive that does
 * not answer in time (-ETIMEDOUT) or I/O as such that fails ends all requests, those to come too.
 *
 * Thread-safety: mt_disk_submit() and mt_disk_run() from any thread; the rest from one.
 */
typedef struct mt_disk mt_disk;

/* Kernels give up on a drive themselves, after 30 s and some retries: this is for where they do not. */
enum { MT_DISK_DEADLINE_S = 300 };
enum { MT_DISK_ALIGN = 4096, MT_DISK_MAX_SPANS = 6 };

struct mt_disk_params {
    const char *const *dirs; /* must exist */
    size_t n_dirs;
    uint64_t bytes;
    size_t chunk_bytes;      /* stripe unit, a multiple of MT_DISK_ALIGN; 0: 1 MiB */
    size_t request_bytes;    /* largest request to the kernel; 0: 1 MiB */
    unsigned depth;          /* requests under way in each direction; 0: 32 */
    const double *rates;     /* [n_dirs] weights of the drives; NULL: measured where there are several */
    enum mt_io_kind io;
    double deadline_s;       /* for a drive to answer a request; 0: MT_DISK_DEADLINE_S */
    bool buffered;           /* through the page cache even where O_DIRECT works */
    const struct mt_io_fault *fault; /* for tests; NULL: none */
};

/**
 * -ENOSPC (MT_ERR_NO_FIT): the message has the bytes wanted and available, by folder. Logs the kind of I/O
 * where it is not io_uring with O_DIRECT.
 */
int mt_disk_open(mt_disk **out, const struct mt_disk_params *p, struct mt_err *err);
/** Removes the files; accepts NULL. Nothing may be under way. After a drive that did not answer, or a backend that
 * failed, transfers may still end at any time: what they need is then left as it is until the process exits. */
void mt_disk_close(mt_disk **d);

/** Registers memory that requests will use with the kernel, where that is allowed. Nothing may be under way. */
void mt_disk_set_buffers(mt_disk *d, const struct iovec *iov, int n);

struct mt_disk_span {
    uint64_t offset; /* offset, address and bytes are multiples of MT_DISK_ALIGN */
    void *buf;
    size_t bytes;
    const struct mt_disk_sums *sums; /* of the area that it is in; NULL: none are kept */
};

/**
 * Several spans, read or written in any order. Owned by the caller, who leaves it unchanged until done() is
 * called.
 */
struct mt_disk_request {
    bool write;
    int n_spans;
    struct mt_disk_span span[MT_DISK_MAX_SPANS];
    /** Called once, on the disk's thread; may submit, must not wait. Afterwards the request is the
     * caller's again. */
    void (*done)(struct mt_disk_request *r);
    void *ctx;
    int rc;            /* 0 or a negative errno, and why */
    struct mt_err err;
    /* the disk's own */
    struct mt_disk_request *next;
    int at_span;
    size_t at_byte;
    unsigned in_flight;
};
/** Starts a request. Requests of one direction start in order; they may end in any. */
void mt_disk_submit(mt_disk *d, struct mt_disk_request *r);
/** Submits and waits; sets `done` and `ctx` itself. */
int mt_disk_run(mt_disk *d, struct mt_disk_request *r, struct mt_err *err);

struct mt_disk_stats {
    uint64_t bytes[2];   /* read, written */
    int64_t busy_ns[2];  /* with at least one request under way */
    uint64_t n_short, n_retried, n_reread; /* reread: a sum did not agree at first */
    int64_t sum_ns; /* CPU time of sums */
};
void mt_disk_stats(mt_disk *d, struct mt_disk_stats *out);

struct mt_disk_info {
    const char *io;     /* "io_uring", "threads" */
    bool direct, buffers_registered;
    size_t align;       /* that the drives ask for: 512, 4096 */
    unsigned depth;
    size_t n_dirs;
};
void mt_disk_info(const mt_disk *d, struct mt_disk_info *out);
/**
 * Makes what was written durable, and so learns of what the system could not write back: no read says so. Where sums
 * are kept they say it. No request may be under way.
 */
int mt_disk_sync(mt_disk *d, struct mt_err *err);
/** Block size of sums: as much as one request to the kernel moves. Where nothing is said of chunks and requests: */
enum { MT_DISK_BLOCK = 1 << 20 };
size_t mt_disk_block(const mt_disk *d);
/** Path of the file in folder i, bytes of it and the share of requests it gets. */
const char *mt_disk_file(const mt_disk *d, size_t i, uint64_t *bytes, double *share);

/** Reads and writes a scratch file of `bytes` in `dir`: bytes a second (1e9), CPU seconds a second. */
struct mt_disk_rates {
    double read, write, together;      /* together: both at once, summed */
    double cpu_read, cpu_write;
    struct mt_disk_info info;
};
struct mt_disk_probe {
    const char *dir;
    uint64_t bytes;        /* 0: 1 GiB */
    size_t request_bytes;  /* as above */
    unsigned depth;
    double seconds;        /* of each measurement at least; 0: one pass */
    enum mt_io_kind io;
    bool both;             /* measure `together` too */
};
int mt_disk_measure(struct mt_disk_rates *out, const struct mt_disk_probe *p, struct mt_err *err);

#endif
