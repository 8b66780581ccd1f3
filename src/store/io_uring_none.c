/* SPDX-License-Identifier: Apache-2.0 */
/* In place of io_uring.c where liburing is not there. */
#include "store/io_backend.h"

int mt_io_uring_create(mt_io **out, unsigned depth, struct mt_err *err)
{
    (void)out;
    (void)depth;
    return mt_fail(err, MT_ERR_USAGE, -ENOSYS,
                   "this build has no io_uring: install liburing-dev and build again");
}
