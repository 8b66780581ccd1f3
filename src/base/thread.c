/* SPDX-License-Identifier: Apache-2.0 */
#include "base/thread.h"

#include <inttypes.h>
#include <string.h>
#include <sys/resource.h>

#include "base/cgroup.h"
#include "base/strbuf.h"

static void add_rlimit(struct mt_str *s, int which, const char *name, const char *of)
{
    struct rlimit r;
    if (!getrlimit(which, &r) && r.rlim_cur != RLIM_INFINITY)
        mt_str_printf(s, "%s%s is %" PRIu64 " %s", s->len ? ", " : "", name,
                      which == RLIMIT_AS ? (uint64_t)r.rlim_cur >> 10 : (uint64_t)r.rlim_cur, of);
}

/* Whatever may have refused a thread. */
static void name_limits(struct mt_str *s)
{
    uint64_t used, most = mt_cgroup_pids("", &used);
    if (most < UINT64_MAX)
        mt_str_printf(s, "pids.max of the control group is %" PRIu64 ", of which %" PRIu64 " are used", most, used);
    add_rlimit(s, RLIMIT_NPROC, "ulimit -u", "processes and threads of this user");
    add_rlimit(s, RLIMIT_AS, "ulimit -v", "KiB of address space");
}

int mt_thread_start(pthread_t *out, const char *name, void *(*run)(void *), void *arg, struct mt_err *err)
{
    MT_STR_FREED struct mt_str limits = {0};
    int rc = pthread_create(out, NULL, run, arg);
    if (!rc) {
        pthread_setname_np(*out, name);
        return 0;
    }
    if (rc == EAGAIN || rc == ENOMEM)
        name_limits(&limits);
    mt_fail(err, MT_ERR_RUNTIME, -rc, "cannot start the thread %s: %s%s%s", name, strerror(rc), limits.len ? ": " : "",
            limits.len && !limits.failed ? limits.p : "");
    return -rc;
}
