/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "net/net_priv.h"

int mt_net_fail_late(const mt_net *n, int host, const char *what, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_RUNTIME, -ETIMEDOUT,
                   "host %d: nothing %s host %d in %.0f s: it is lost, stopped or cut off (cluster.timeout)", n->rank, what, host,
                   n->deadline_s);
}

int mt_net_fail_told(int host, const char *why, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_RUNTIME, -ECONNABORTED, "host %d has ended: %s", host, why);
}

int mt_net_fail_size(int host, size_t sent, size_t expected, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host %d sent %zu bytes where %zu were expected: it runs another step", host, sent,
                   expected);
}
