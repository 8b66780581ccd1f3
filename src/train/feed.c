/* SPDX-License-Identifier: Apache-2.0 */
#include "train/feed.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    ROOM = 1 << 20, /* bytes of the pipe: some thousands of records */
    PATIENCE = 50, /* tenths of a second that the command may take at the end */
};

struct mt_feed {
    int fd; /* -1: it takes no more */
    pid_t pid;
    char *waits; /* what is left of a line of which the pipe took a part */
    size_t n_waiting;
    unsigned long long dropped;
};

static int start(struct mt_feed *f, int in, const char *command)
{
    char *const args[] = {"sh", "-c", (char *)(uintptr_t)command, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t none, usual;
    sigemptyset(&none);
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE);
    sigaddset(&usual, SIGINT);
    sigaddset(&usual, SIGTERM);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    posix_spawnattr_setpgroup(&how, 0);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &usual);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    int rc = posix_spawn(&f->pid, "/bin/sh", &files, &how, args, environ);
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
    return -rc;
}

int mt_feed_open(struct mt_feed **out, const char *command, struct mt_err *err)
{
    int fd[2];
    struct mt_feed *f = mt_calloc(1, sizeof(*f));
    if (!f)
        return mt_fail_nomem(err, "log.exec", sizeof(*f));
    int rc = pipe2(fd, O_CLOEXEC) ? -errno : 0;
    if (!rc) {
        fcntl(fd[1], F_SETPIPE_SZ, ROOM);
        fcntl(fd[1], F_SETFL, O_NONBLOCK);
        rc = start(f, fd[0], command);
        close(fd[0]);
        f->fd = fd[1];
        if (rc)
            close(fd[1]);
    }
    if (rc) {
        free(f);
        return mt_fail(err, MT_ERR_RUNTIME, rc, "log.exec = %s: cannot be started: %s", command, strerror(-rc));
    }
    *out = f;
    return 0;
}

/* The bytes that the pipe took. */
static size_t give(struct mt_feed *f, const char *text, size_t len)
{
    ssize_t n;
    while ((n = write(f->fd, text, len)) < 0 && errno == EINTR)
        ;
    if (n >= 0)
        return (size_t)n;
    if (errno != EAGAIN) {
        mt_warn("log.exec: the command takes no more records (%s); the run goes on without it", strerror(errno));
        close(f->fd);
        f->fd = -1;
    }
    return 0;
}

/* Whether nothing waits any more. */
static bool give_waiting(struct mt_feed *f)
{
    size_t n = f->fd >= 0 && f->n_waiting ? give(f, f->waits, f->n_waiting) : 0;
    if (n)
        memmove(f->waits, f->waits + n, f->n_waiting -= n);
    return !f->n_waiting;
}

void mt_feed_put(struct mt_feed *f, const char *line, size_t len)
{
    bool room = give_waiting(f);
    if (f->fd < 0)
        return;
    size_t n = room ? give(f, line, len) : 0;
    if (f->fd < 0 || n == len)
        return;
    char *rest = n ? malloc(len - n) : NULL; /* a part of a line would spoil the next one */
    if (rest) {
        free(f->waits);
        f->waits = memcpy(rest, line + n, f->n_waiting = len - n);
    } else if (!f->dropped++) {
        mt_warn("log.exec: the command reads slower than records come: some are dropped (log.jsonl = on keeps all)");
    }
}

void mt_feed_close(struct mt_feed **feed)
{
    struct mt_feed *f = *feed;
    const struct timespec tenth = {.tv_nsec = 100000000}, soon = {.tv_nsec = 2000000};
    int status = 0, i = 0;
    pid_t done = 0;
    if (!f)
        return;
    for (; i < PATIENCE && !give_waiting(f) && f->fd >= 0; i++)
        nanosleep(&tenth, NULL);
    if (f->fd >= 0)
        close(f->fd);
    for (int quick = 0; !(done = waitpid(f->pid, &status, WNOHANG)) && i < PATIENCE; i += quick++ >= 10)
        nanosleep(quick < 10 ? &soon : &tenth, NULL);
    if (!done)
        mt_warn("log.exec: the command (process %d) goes on after the end of its input", (int)f->pid);
    else if (done > 0 && status)
        mt_warn("log.exec: the command ended with %s %d", WIFSIGNALED(status) ? "signal" : "exit code",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    if (f->dropped)
        mt_warn("log.exec: %llu records were dropped", f->dropped);
    free(f->waits);
    free(f);
    *feed = NULL;
}
