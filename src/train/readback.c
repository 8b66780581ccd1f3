/* SPDX-License-Identifier: Apache-2.0 */
#include "train/readback.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/thread.h"
#include "checkpoint/checkpoint.h"

enum { DROPPED = MT_READBACK_UNREAD + 1 };

struct mt_readback {
    char *path, *older;
    atomic_int state;
    struct mt_err err; /* once it is not good */
};

/* Accepts NULL. */
static void destroy(mt_readback **r)
{
    if (*r) {
        free((*r)->path);
        free((*r)->older);
    }
    free(*r);
}

enum mt_readback_state mt_readback_of(int rc)
{
    return !rc ? MT_READBACK_GOOD : rc == -EBADMSG ? MT_READBACK_BAD : MT_READBACK_UNREAD;
}

static void *readback_main(void *readback)
{
    mt_readback *r = readback;
    struct mt_err why = {0};
    mt_thread_gives_way();
    if (r->older && mt_checkpoint_verify(r->older, &why) == -EBADMSG)
        mt_warn("an older checkpoint is damaged: %s", why.msg);
    int state = mt_readback_of(mt_checkpoint_verify(r->path, &r->err));
    int running = MT_READBACK_RUNS;
    if (!atomic_compare_exchange_strong(&r->state, &running, state))
        destroy(&r); /* nobody waits for it any more */
    return NULL;
}

int mt_readback_start(mt_readback **out, const char *path, const char *older, struct mt_err *err)
{
    MT_CLOSED_BY(destroy) mt_readback *r = NULL;
    pthread_t thread;
    int rc = MT_NEW(&r, 1, path, err);
    if (rc)
        return rc;
    r->path = strdup(path);
    r->older = older ? strdup(older) : NULL;
    rc = r->path && (r->older || !older) ? mt_thread_start(&thread, "mt-readback", readback_main, r, err)
                                         : mt_fail_nomem(err, path, sizeof(*r));
    if (rc)
        return rc;
    pthread_detach(thread);
    *out = MT_GIVE(r);
    return 0;
}

enum mt_readback_state mt_readback_poll(const mt_readback *r, struct mt_err *err)
{
    int state = atomic_load(&r->state);
    if (state == MT_READBACK_BAD || state == MT_READBACK_UNREAD)
        *err = r->err;
    return (enum mt_readback_state)state;
}

void mt_readback_drop(mt_readback **readback)
{
    mt_readback *r = *readback;
    int running = MT_READBACK_RUNS;
    *readback = NULL;
    if (r && !atomic_compare_exchange_strong(&r->state, &running, DROPPED))
        destroy(&r);
}
