/* SPDX-License-Identifier: Apache-2.0 */
#include "store/io/io_backend.h"

#include "hw/probe.h"

int mt_io_create(mt_io **out, enum mt_io_kind kind, unsigned depth, const char **why,
                 struct mt_err *err)
{
    const char *reason = NULL;
    int rc = -EPERM;
    if (kind == MT_IO_URING)
        return mt_io_uring_create(out, depth, err);
    if (kind == MT_IO_AUTO) {
        if (!mt_hw_io_uring_allowed())
            reason = "this system does not allow io_uring";
        else
            rc = mt_io_uring_create(out, depth, NULL);
        if (rc && !reason)
            reason = rc == -ENOSYS ? "this build has no liburing" : "io_uring could not be set up";
    }
    if (why)
        *why = reason;
    return kind == MT_IO_AUTO && !rc ? 0 : mt_io_threads_create(out, depth, err);
}

void mt_io_destroy(mt_io **io)
{
    if (*io)
        (*io)->backend->destroy(*io);
    *io = NULL;
}

const char *mt_io_name(const mt_io *io)
{
    return io->backend->name;
}

int mt_io_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    return io->backend->set_files(io, fds, n, err);
}

int mt_io_set_buffers(mt_io *io, const struct iovec *iov, int n)
{
    return io->backend->set_buffers(io, iov, n);
}

int mt_io_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    return io->backend->submit(io, ops, n);
}

int mt_io_wait(mt_io *io, struct mt_io_result *out, int max)
{
    return io->backend->wait(io, out, max);
}

void mt_io_wake(mt_io *io)
{
    io->backend->wake(io);
}
