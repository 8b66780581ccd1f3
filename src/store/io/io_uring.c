/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The io_uring backend. Files are registered, and buffers if the limit on locked memory allows it. A read of an eventfd
 * is always under way beside the caller's operations, so that another thread can end a wait.
 */
#include <liburing.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "store/io/io.h"

enum {
    MAX_BUFFER = 1 << 30, /* the kernel registers no larger ones */
    MAX_BYTES = 1 << 30,  /* of an operation: it has 32 bits for them, and moves at most 2 GiB at once */
    MAX_TRIES = 10000,    /* one per millisecond */
};

struct uring {
    struct mt_io base;
    struct io_uring ring;
    bool has_ring, has_files, wake_armed;
    int wake_fd, wake_rc; /* error of its last read, returned by the next wait */
    uint64_t wake_count;
    struct iovec *buffers;
    int n_buffers;
    unsigned in_flight;
};

static struct uring *uring(mt_io *io)
{
    return (struct uring *)io;
}

static void drop_buffers(struct uring *u)
{
    if (u->n_buffers)
        io_uring_unregister_buffers(&u->ring);
    free(u->buffers);
    u->buffers = NULL;
    u->n_buffers = 0;
}

/* Submits all queued operations: the kernel may accept only some, or be short of memory for a moment. */
static int submit_queued(struct uring *u)
{
    for (int tries = 0; io_uring_sq_ready(&u->ring);) {
        int n = io_uring_submit(&u->ring);
        if (n > 0 || n == -EINTR)
            continue;
        if ((n && n != -EAGAIN && n != -EBUSY) || ++tries > MAX_TRIES)
            return n ?: -EBUSY;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return 0;
}

static int arm_wake(struct uring *u)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    if (!sqe)
        return -EBUSY;
    io_uring_prep_read(sqe, u->wake_fd, &u->wake_count, sizeof(u->wake_count), 0);
    io_uring_sqe_set_data(sqe, u);
    int rc = submit_queued(u);
    u->wake_armed = !io_uring_sq_ready(&u->ring); /* it is last in the queue and may not have been submitted */
    return rc;
}

/* Ends the read of the eventfd, which writes to *u. False: the ring has failed, and the read may still be under way. */
static bool end_wake(struct uring *u)
{
    struct __kernel_timespec most = {.tv_sec = MT_IO_WAIT_MS / 1000, .tv_nsec = (MT_IO_WAIT_MS % 1000) * 1000000LL};
    struct io_uring_cqe *cqe;
    int rc = 0;
    u->base.backend->wake(&u->base);
    while (u->wake_armed && (!rc || rc == -EINTR || rc == -EAGAIN)) {
        rc = io_uring_wait_cqe_timeout(&u->ring, &cqe, &most);
        if (rc)
            continue;
        u->wake_armed = io_uring_cqe_get_data(cqe) != u;
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return !u->wake_armed;
}

static void uring_destroy(mt_io *io)
{
    struct uring *u = uring(io);
    struct mt_io_result r[16];
    bool ended = true;
    while (u->in_flight && io->backend->wait(io, r, 16) >= 0)
        ;
    if (u->has_ring) {
        ended = !u->wake_armed || end_wake(u);
        drop_buffers(u);
        if (u->has_files) /* the kernel ends a ring some time later, and keeps its files open until then */
            io_uring_unregister_files(&u->ring);
        io_uring_queue_exit(&u->ring);
    }
    if (u->wake_fd >= 0)
        close(u->wake_fd);
    if (ended) /* else the kernel may still write to *u */
        free(u);
}

static int uring_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    struct uring *u = uring(io);
    if (u->has_files)
        io_uring_unregister_files(&u->ring);
    int rc = io_uring_register_files(&u->ring, fds, (unsigned)n);
    u->has_files = !rc;
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "io_uring: cannot register %d files: %s", n,
                        strerror(-rc))
              : 0;
}

/* Where a registered buffer that begins at p ends: the kernel joins the pages of one only if all are huge pages, and a
 * drive gets requests with many pages that are not joined in parts. */
static char *cut_buffer(char *p, char *end)
{
    char *huge = (char *)mt_align_up((uintptr_t)p, MT_HUGE_PAGE);
    char *last = (char *)((uintptr_t)end / MT_HUGE_PAGE * MT_HUGE_PAGE);
    if (huge >= last)
        return end;
    return p < huge ? huge : MT_MIN(last, p + MAX_BUFFER);
}

static size_t cut_buffers(struct iovec *out, const struct iovec *iov, int n)
{
    size_t cut = 0;
    for (int i = 0; i < n; i++)
        for (char *p = iov[i].iov_base, *end = p + iov[i].iov_len, *next; p < end; p = next, cut++) {
            next = cut_buffer(p, end);
            if (out)
                out[cut] = (struct iovec){p, (size_t)(next - p)};
        }
    return cut;
}

static int uring_set_buffers(mt_io *io, const struct iovec *iov, int n)
{
    struct uring *u = uring(io);
    drop_buffers(u);
    size_t total = cut_buffers(NULL, iov, n);
    if (!total)
        return 0;
    u->buffers = mt_calloc(total, sizeof(*u->buffers));
    if (!u->buffers)
        return -ENOMEM;
    cut_buffers(u->buffers, iov, n);
    int rc = io_uring_register_buffers(&u->ring, u->buffers, (unsigned)total);
    if (rc) {
        free(u->buffers);
        u->buffers = NULL;
        return rc;
    }
    u->n_buffers = (int)total;
    return 0;
}

/* Index of the registered buffer that holds all of it, or -1. */
static int find_buffer(const struct uring *u, const struct mt_io_op *op)
{
    for (int i = 0; i < u->n_buffers; i++) {
        const char *base = u->buffers[i].iov_base, *p = op->buf;
        if (p >= base && p + op->bytes <= base + u->buffers[i].iov_len)
            return i;
    }
    return -1;
}

static int uring_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    struct uring *u = uring(io);
    for (int i = 0; i < n; i++) {
        const struct mt_io_op *op = &ops[i];
        struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
        int rc = 0;
        if (!sqe) { /* the submission ring is full: submit it and continue */
            rc = submit_queued(u);
            sqe = rc ? NULL : io_uring_get_sqe(&u->ring);
        }
        if (!sqe)
            return rc ?: -EBUSY;
        int b = find_buffer(u, op);
        unsigned len = (unsigned)MT_MIN(op->bytes, (size_t)MAX_BYTES);
        if (op->write && b >= 0)
            io_uring_prep_write_fixed(sqe, op->file, op->buf, len, op->offset, b);
        else if (op->write)
            io_uring_prep_write(sqe, op->file, op->buf, len, op->offset);
        else if (b >= 0)
            io_uring_prep_read_fixed(sqe, op->file, op->buf, len, op->offset, b);
        else
            io_uring_prep_read(sqe, op->file, op->buf, len, op->offset);
        sqe->flags |= IOSQE_FIXED_FILE;
        io_uring_sqe_set_data(sqe, op->tag);
        u->in_flight++;
    }
    return submit_queued(u);
}

static int uring_wait(mt_io *io, struct mt_io_result *out, int max)
{
    struct uring *u = uring(io);
    struct io_uring_cqe *cqe;
    struct __kernel_timespec most = {.tv_sec = MT_IO_WAIT_MS / 1000, .tv_nsec = (MT_IO_WAIT_MS % 1000) * 1000000LL};
    int rc = u->wake_rc, n = 0;
    if (!rc && !u->wake_armed)
        rc = arm_wake(u);
    if (rc)
        return rc;
    do
        rc = io_uring_wait_cqe_timeout(&u->ring, &cqe, &most);
    while (rc == -EINTR || rc == -EAGAIN);
    if (rc)
        return rc == -ETIME ? 0 : rc;
    while (n < max && !io_uring_peek_cqe(&u->ring, &cqe)) {
        void *tag = io_uring_cqe_get_data(cqe);
        if (tag == u) {
            u->wake_armed = false; /* the next wait arms it again: these results are returned first */
            u->wake_rc = cqe->res < 0 && cqe->res != -EINTR && cqe->res != -EAGAIN ? cqe->res : 0;
        } else {
            out[n++] = (struct mt_io_result){tag, cqe->res};
            u->in_flight--;
        }
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return n;
}

static void uring_wake(mt_io *io)
{
    uint64_t one = 1;
    ssize_t n = write(uring(io)->wake_fd, &one, sizeof(one));
    (void)n; /* fails only if the counter is full: then the wait ends anyway */
}

static const struct mt_io_backend backend = {
    .name = "io_uring",
    .destroy = uring_destroy,
    .set_files = uring_set_files,
    .set_buffers = uring_set_buffers,
    .submit = uring_submit,
    .wait = uring_wait,
    .wake = uring_wake,
};

/* Kernels before 5.6 have io_uring without the operations that are used here. */
static bool has_operations(struct io_uring *ring)
{
    static const int used[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED};
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    bool all = probe;
    for (size_t i = 0; all && i < MT_ARRAY_LEN(used); i++)
        all = io_uring_opcode_supported(probe, used[i]);
    io_uring_free_probe(probe);
    return all;
}

int mt_io_uring_create(mt_io **out, unsigned depth, struct mt_err *err)
{
    struct uring *u = mt_calloc(1, sizeof(*u));
    if (!u)
        return mt_fail_nomem(err, "io_uring", sizeof(*u));
    u->base.backend = &backend;
    u->wake_fd = eventfd(0, EFD_CLOEXEC);
    int rc = u->wake_fd < 0 ? -errno : io_uring_queue_init(depth + 1, &u->ring, IORING_SETUP_CLAMP);
    u->has_ring = !rc && u->wake_fd >= 0;
    if (!rc && !has_operations(&u->ring))
        rc = -EOPNOTSUPP;
    rc = rc ?: arm_wake(u);
    if (rc) {
        uring_destroy(&u->base);
        return mt_fail(err, MT_ERR_RUNTIME, rc, "io_uring cannot be set up: %s", strerror(-rc));
    }
    *out = &u->base;
    return 0;
}
