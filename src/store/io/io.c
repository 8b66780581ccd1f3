/* SPDX-License-Identifier: Apache-2.0 */
#include "store/io/io.h"

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
