/* SPDX-License-Identifier: Apache-2.0 */
#include "data/loader.h"

#include <pthread.h>

#include "base/lock.h"
#include "base/mem.h"
#include "base/thread.h"

enum { NOTHING = -1 };

struct mt_loader {
    mt_sampler *sampler;
    uint64_t end_step;
    struct mt_step_data data[2]; /* one is lent to the caller, one is filled ahead */
    pthread_t thread;
    bool started;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ahead;         /* index of the buffer that the thread fills */
    int64_t wanted;    /* step to make; NOTHING: none */
    int64_t made;      /* step that is ready; NOTHING: none */
    int rc;            /* result of making it */
    struct mt_err err;
    bool quit;
};

static void *loader_main(void *arg)
{
    mt_loader *l = arg;
    MT_LOCKED(&l->lock);
    while (!l->quit) {
        if (l->wanted == NOTHING || l->wanted == l->made) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        int64_t step = l->wanted;
        struct mt_step_data *data = &l->data[l->ahead];
        struct mt_err err = {0};
        pthread_mutex_unlock(&l->lock);
        int rc = mt_sampler_fill(l->sampler, (uint64_t)step, data, &err);
        pthread_mutex_lock(&l->lock);
        l->made = step;
        l->rc = rc;
        l->err = err;
        pthread_cond_broadcast(&l->changed);
    }
    return NULL;
}

int mt_loader_create(mt_loader **out, mt_sampler *s, uint64_t first_step, uint64_t end_step,
                     struct mt_err *err)
{
    mt_loader *l = mt_calloc(1, sizeof(*l));
    if (!l)
        return mt_fail_nomem(err, "the data loader", sizeof(*l));
    *l = (mt_loader){.sampler = s, .end_step = end_step, .made = NOTHING,
                     .wanted = first_step < end_step ? (int64_t)first_step : NOTHING};
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    int rc = mt_step_data_init(&l->data[0], s, err)
          ?: mt_step_data_init(&l->data[1], s, err)
          ?: mt_thread_start(&l->thread, "mt-data", loader_main, l, err);
    l->started = !rc;
    if (rc)
        mt_loader_destroy(&l);
    else
        *out = l;
    return rc;
}

void mt_loader_destroy(mt_loader **loader)
{
    mt_loader *l = *loader;
    if (!l)
        return;
    if (l->started) {
        mt_raise(&l->lock, &l->changed, &l->quit);
        pthread_join(l->thread, NULL);
    }
    mt_step_data_finish(&l->data[0]);
    mt_step_data_finish(&l->data[1]);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l);
    *loader = NULL;
}

int mt_loader_get(mt_loader *l, uint64_t step, const struct mt_step_data **out, struct mt_err *err)
{
    MT_LOCKED(&l->lock);
    if (l->wanted != (int64_t)step) {
        while (l->wanted != NOTHING && l->made != l->wanted) /* waits for another step in the making, and drops it */
            pthread_cond_wait(&l->changed, &l->lock);
        l->wanted = (int64_t)step;
        pthread_cond_broadcast(&l->changed);
    }
    while (l->made != (int64_t)step)
        pthread_cond_wait(&l->changed, &l->lock);
    int rc = l->rc;
    *out = &l->data[l->ahead];
    if (rc && err)
        *err = l->err;
    l->ahead = 1 - l->ahead;
    l->made = NOTHING;
    l->wanted = step + 1 < l->end_step ? (int64_t)step + 1 : NOTHING;
    pthread_cond_broadcast(&l->changed);
    return rc;
}
