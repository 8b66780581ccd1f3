/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces io_uring.c in a build without liburing. */
#include "store/io/io.h"

int mt_io_uring_create(mt_io **, unsigned, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_USAGE, -ENOSYS,
                   "this build has no io_uring: install liburing-dev and build again");
}
