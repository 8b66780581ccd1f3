/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "store/disk_sums.h"
#include "store/io/io.h"

/**
 * Scratch space on drives: one address space [0, bytes), striped over a file in each of several folders.
 *
 * It is only scratch: a run is restored from its last checkpoint. The files are new, have the id of their run in their
 * names, are locked while it runs, are never opened by another run, and are removed at its end. Files of a killed run
 * have no lock; the next run that uses the folder removes them.
 *
 * Space is reserved when the disk is opened. Requests bypass the page cache (O_DIRECT) where the file
 * system allows it, many at a time; every result is checked, short transfers are continued, EINTR and
 * EAGAIN retried; any other error ends the request and names file, offset and drive. Data read from an area with sums
 * is checked: a block that does not agree is read once more, and if it is still wrong the request ends with -EBADMSG.
 * If a drive does not answer in time (-ETIMEDOUT) or the backend fails, all requests end, and later ones are refused.
 *
 * Thread-safety: mt_disk_submit() and mt_disk_run() from any thread; the rest from one.
 */
typedef struct mt_disk mt_disk;

enum { MT_DISK_ALIGN = 4096, MT_DISK_MAX_SPANS = 6 };

struct mt_disk_params {
    const char *const *dirs; /* must exist */
    size_t n_dirs;
    uint64_t bytes;
    size_t chunk_bytes;      /* stripe unit, a multiple of MT_DISK_ALIGN; 0: 1 MiB */
    size_t request_bytes;    /* largest request to the kernel; 0: 1 MiB */
    unsigned depth;          /* requests under way in each direction; 0: 32 */
    const double *rates;     /* [n_dirs] relative rates of the drives; NULL: measured if there are several */
    enum mt_io_kind io;
    double deadline_s;       /* for a drive to answer a request; 0: MT_TRANSFER_DEADLINE_S (transfer.h) */
    bool buffered;           /* through the page cache even where O_DIRECT works */
    const struct mt_io_fault *fault; /* for tests; NULL: none */
};

/**
 * -ENOSPC (MT_ERR_NO_FIT): the message has the bytes needed and available, by folder. Logs the kind of I/O if it is not
 * io_uring with O_DIRECT.
 */
int mt_disk_open(mt_disk **out, const struct mt_disk_params *p, struct mt_err *err);
/** Removes the files; accepts NULL. Nothing may be under way. If a drive did not answer or the backend failed, late
 * transfers are possible: the module's memory for them and the descriptors are then kept until the process exits. */
void mt_disk_close(mt_disk **d);

/** Registers memory that requests will use with the kernel, if the kernel allows it. Nothing may be under way. */
void mt_disk_set_buffers(mt_disk *d, const struct iovec *iov, int n);

struct mt_disk_span {
    uint64_t offset; /* offset, address and bytes are multiples of MT_DISK_ALIGN */
    void *buf;
    size_t bytes;
    const struct mt_disk_sums *sums; /* of the area that contains it; NULL: no sums */
};

/**
 * Several spans, read or written in any order. The caller owns it and must not change it until done() is called.
 */
struct mt_disk_request {
    bool write;
    int n_spans;
    struct mt_disk_span span[MT_DISK_MAX_SPANS];
    /** Called once, on the disk's thread; may submit, must not wait. The disk does not use the request afterwards. */
    void (*done)(struct mt_disk_request *r);
    void *ctx;
    int rc;            /* 0 or a negative errno; err says why */
    struct mt_err err;
    /* used by the disk */
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
    uint64_t n_short, n_retried, n_reread; /* reread: read again after a wrong sum */
    int64_t sum_ns; /* CPU time to compute sums */
};
void mt_disk_stats(mt_disk *d, struct mt_disk_stats *out);

struct mt_disk_info {
    const char *io;     /* "io_uring", "threads" */
    bool direct, buffers_registered;
    size_t align;       /* required by the drives: 512, 4096 */
    unsigned depth;
    size_t n_dirs;
};
void mt_disk_info(const mt_disk *d, struct mt_disk_info *out);
/**
 * Makes all writes durable. Fails if the system could not write data back, which no read reports; checksums detect it
 * without this. No request may be under way.
 */
int mt_disk_sync(mt_disk *d, struct mt_err *err);
/** Block size of sums: that of one request to the kernel. MT_DISK_BLOCK: with default chunks and requests. */
enum { MT_DISK_BLOCK = 1 << 20 };
size_t mt_disk_block(const mt_disk *d);
/** Path of the file in folder i, its size and its share of the requests. */
const char *mt_disk_file(const mt_disk *d, size_t i, uint64_t *bytes, double *share);

/** Rates of a scratch file: 1e9 bytes per second, CPU seconds per second. */
struct mt_disk_rates {
    double read, write, together;      /* together: reading and writing at once, sum of both */
    double cpu_read, cpu_write;
    struct mt_disk_info info;
};
struct mt_disk_probe {
    const char *dir;
    uint64_t bytes;        /* 0: 1 GiB */
    size_t request_bytes;  /* as above */
    unsigned depth;
    double seconds;        /* least time of each measurement; 0: one pass */
    enum mt_io_kind io;
    bool both;             /* measure `together`, too */
};
int mt_disk_measure(struct mt_disk_rates *out, const struct mt_disk_probe *p, struct mt_err *err);
