/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_IO_BACKEND_H
#define MT_STORE_IO_BACKEND_H

#include "store/io.h"

/** What a backend implements; signatures are those of the public functions. */
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

/** -ENOSYS in a build without liburing; another errno where the kernel does not let us. */
int mt_io_uring_create(mt_io **out, unsigned depth, struct mt_err *err);
int mt_io_threads_create(mt_io **out, unsigned depth, struct mt_err *err);

#endif
