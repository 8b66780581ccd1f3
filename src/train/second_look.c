/* SPDX-License-Identifier: Apache-2.0 */
#include "train/second_look.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/thread.h"
#include "weights/weights.h"

struct mt_second_look {
    const struct mt_layout *layout;
    char *dir;
    uint64_t *sum;
    int64_t began_ns;
    pthread_t thread;
    atomic_bool stop, over;
    int rc;
    struct mt_err err;
};

/* Accepts NULL. */
static void destroy(mt_second_look **s)
{
    if (*s) {
        free((*s)->dir);
        free((*s)->sum);
    }
    free(*s);
}

static void *look(void *second_look)
{
    mt_second_look *s = second_look;
    mt_thread_gives_way();
    s->rc = mt_weights_read_again(s->layout, s->dir, s->sum, s->began_ns, &s->stop, &s->err);
    if (s->rc && s->rc != -EBADMSG && s->rc != -ECANCELED) {
        mt_info("the model's weights were not read a second time: %s", s->err.msg);
        s->rc = 0;
    }
    atomic_store(&s->over, true);
    return NULL;
}

int mt_second_look_start(mt_second_look **out, const struct mt_layout *l, const char *dir, const uint64_t *sum,
                         int64_t began_ns, struct mt_err *err)
{
    MT_CLOSED_BY(destroy) mt_second_look *s = NULL;
    int rc = MT_NEW(&s, 1, "sums of the model's weights", err)
          ?: MT_NEW(&s->sum, l->n_tensors, "sums of the model's weights", err);
    if (rc)
        return rc;
    s->layout = l;
    s->began_ns = began_ns;
    memcpy(s->sum, sum, l->n_tensors * sizeof(*sum));
    s->dir = strdup(dir);
    rc = s->dir ? mt_thread_start(&s->thread, "mt-second-look", look, s, err) : mt_fail_nomem(err, dir, strlen(dir));
    if (!rc)
        *out = MT_GIVE(s);
    return rc;
}

bool mt_second_look_over(const mt_second_look *s)
{
    return atomic_load(&s->over);
}

int mt_second_look_end(mt_second_look **second_look, struct mt_err *err)
{
    MT_CLOSED_BY(destroy) mt_second_look *s = MT_GIVE(*second_look);
    if (!s)
        return 0;
    pthread_join(s->thread, NULL);
    if (s->rc && err)
        *err = s->err;
    return s->rc;
}

void mt_second_look_drop(mt_second_look **s)
{
    if (*s)
        atomic_store(&(*s)->stop, true);
    mt_second_look_end(s, NULL);
}
