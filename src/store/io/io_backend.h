/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "store/io/io.h"

/** Functions of a backend, with the contracts of the public functions (io.h). */
struct mt_io_backend {
    const char *name;
    void (*destroy)(mt_io *io);
    int (*set_files)(mt_io *io, const int *fds, int n, struct mt_err *err);
    int (*set_buffers)(mt_io *io, const struct iovec *iov, int n);
    int (*submit)(mt_io *io, const struct mt_io_op *ops, int n);
    int (*wait)(mt_io *io, struct mt_io_result *out, int max);
    void (*wake)(mt_io *io);
};

/** First member of every backend's struct. */
struct mt_io {
    const struct mt_io_backend *backend;
};

/** -ENOSYS: built without liburing; another errno: the kernel does not allow it. */
int mt_io_uring_create(mt_io **out, unsigned depth, struct mt_err *err);
int mt_io_threads_create(mt_io **out, unsigned depth, struct mt_err *err);
