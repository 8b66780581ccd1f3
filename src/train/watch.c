/* SPDX-License-Identifier: Apache-2.0 */
#include "train/watch.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/thread.h"

/* Between two looks; until a request that nobody has answered interrupts; before a status that nobody asked for, and
 * between two of them. */
static const int64_t SECOND_NS = 1000000000, LOOK_NS = 100000000, PATIENCE_NS = 1000000000,
                     FIRST_NS = 20 * INT64_C(1000000000), NEXT_NS = 30 * INT64_C(1000000000);

struct folder {
    char dir[4096];
    int fd;           /* follows the folder if it is renamed; -1: none */
    double limit;
    int64_t since_ns; /* since when a request waits for its answer; 0: none */
};

struct mt_watch {
    struct mt_train_control *control;
    struct mt_watch_events events;
    int64_t start_ns;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool quit;            /* under lock, as folders and the engine's interruption */
    struct folder *of;
    int64_t phase_ns, next_ns; /* of the phase that is told of, and when it is told of next */
};

static void open_folder(struct folder *f, const char *dir)
{
    int fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    mt_close_fd(&f->fd);
    f->fd = fd;
    mt_path_printf(f->dir, sizeof(f->dir), "%s", dir);
}

/* Whether the folder has the file; removes it. */
static bool take_file(const struct folder *f, const char *name)
{
    return (f->fd >= 0 && !unlinkat(f->fd, name, 0)) || !unlink(MT_PATH("%s/%s", f->dir, name));
}

static void interrupt(struct mt_watch *w)
{
    mt_engine *e = atomic_load(&w->control->engine);
    if (e)
        mt_engine_interrupt(e);
}

static void ask_to_stop(struct mt_watch *w, size_t i, int why)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&w->control->asked[i].stop, &none, why))
        return;
    if (why != MT_STOP_TIME) /* which leaves a last save the time it has */
        atomic_fetch_add(&w->control->signals, 1);
    w->of[i].since_ns = mt_now_ns() - (why == MT_STOP_TIME ? PATIENCE_NS : 0);
}

static void ask_to_save(struct mt_watch *w, size_t i)
{
    struct mt_train_asked *a = &w->control->asked[i];
    if (!atomic_load(&a->unsaved)) {
        mt_info("%s: nothing to save: no step has been made since the run began or was last saved", w->of[i].dir);
        return;
    }
    atomic_store(&a->save, true);
    w->of[i].since_ns = mt_now_ns();
}

/* A request that waits too long interrupts what is under way, once. */
static void press(struct mt_watch *w, struct folder *f, const struct mt_train_asked *a)
{
    bool stops = atomic_load(&a->stop), saves = atomic_load(&a->save) && !w->control->hosts;
    if (!f->since_ns || mt_now_ns() - f->since_ns < PATIENCE_NS)
        return;
    f->since_ns = 0;
    if (stops || saves)
        interrupt(w);
}

static void look_at_folder(struct mt_watch *w, size_t i)
{
    struct folder *f = &w->of[i];
    struct mt_train_asked *a = &w->control->asked[i];
    double spent = (double)(mt_boot_ns() - w->start_ns + atomic_load(&a->reserve_ns)) * 1e-9;
    if (take_file(f, MT_REQUEST_STOP))
        ask_to_stop(w, i, SIGTERM);
    if (f->limit > 0 && spent >= f->limit)
        ask_to_stop(w, i, MT_STOP_TIME);
    if (take_file(f, MT_REQUEST_SAVE))
        ask_to_save(w, i);
    press(w, f, a);
}

/* Before training all learners end together, at once: there is nothing to save. */
static void end_early(struct mt_watch *w)
{
    const struct mt_train_control *c = w->control;
    int why = 0;
    for (size_t i = 0; i < c->n; i++)
        if (!(why = atomic_load(&c->asked[i].stop)))
            return;
    if (!atomic_load(&c->begun))
        w->events.early(w->events.ctx, why);
}

static void tell_status(struct mt_watch *w)
{
    struct mt_train_control *c = w->control;
    const char *phase = atomic_load(&c->phase);
    int64_t began = atomic_load(&c->phase_ns), now = mt_now_ns();
    if (began != w->phase_ns) {
        w->phase_ns = began;
        w->next_ns = began + FIRST_NS;
    }
    bool asked = phase && atomic_exchange(&c->status, false);
    if (phase && (asked || now >= w->next_ns))
        w->events.status(w->events.ctx, c, (double)(now - began) / (double)SECOND_NS, asked);
    if (now >= w->next_ns)
        w->next_ns = now + NEXT_NS;
}

static void *watch_main(void *watch)
{
    mt_watch *w = watch;
    MT_LOCKED(&w->lock);
    while (!w->quit) {
        bool save = atomic_exchange(&w->control->save, false);
        for (size_t i = 0; i < w->control->n; i++) {
            if (save)
                ask_to_save(w, i);
            look_at_folder(w, i);
        }
        end_early(w);
        tell_status(w);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_NS;
        until.tv_sec += until.tv_nsec / SECOND_NS;
        until.tv_nsec %= SECOND_NS;
        pthread_cond_timedwait(&w->changed, &w->lock, &until);
    }
    return NULL;
}

static void destroy(mt_watch *w)
{
    for (size_t i = 0; w->of && i < w->control->n; i++)
        mt_close_fd(&w->of[i].fd);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w->of);
    free(w);
}

int mt_watch_start(mt_watch **out, struct mt_train_control *control, const struct mt_watched *of, int64_t start_ns,
                   const struct mt_watch_events *events, struct mt_err *err)
{
    pthread_condattr_t attr;
    mt_watch *w;
    int rc = MT_NEW(&w, 1, "the watch", err);
    if (rc)
        return rc;
    *w = (mt_watch){.control = control, .events = *events, .start_ns = start_ns};
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attr);
    pthread_condattr_destroy(&attr);
    rc = MT_NEW(&w->of, control->n, "the watch", err);
    for (size_t i = 0; i < control->n && !rc; i++) {
        w->of[i] = (struct folder){.fd = -1, .limit = of[i].limit};
        open_folder(&w->of[i], of[i].dir);
    }
    rc = rc ?: mt_thread_start(&w->thread, "mt-watch", watch_main, w, err);
    if (rc)
        destroy(w);
    else
        *out = w;
    return rc;
}

void mt_watch_moved(mt_watch *w, size_t learner, const char *dir)
{
    if (!w)
        return;
    MT_LOCKED(&w->lock);
    open_folder(&w->of[learner], dir);
}

void mt_watch_engine(mt_watch *w, struct mt_train_control *control, mt_engine *e)
{
    if (w)
        pthread_mutex_lock(&w->lock);
    atomic_store(&control->engine, e);
    if (w)
        pthread_mutex_unlock(&w->lock);
}

void mt_watch_stop(mt_watch **watch)
{
    mt_watch *w = *watch;
    if (!w)
        return;
    mt_raise(&w->lock, &w->changed, &w->quit);
    pthread_join(w->thread, NULL);
    destroy(w);
    *watch = NULL;
}
