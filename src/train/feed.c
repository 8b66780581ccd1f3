/* SPDX-License-Identifier: Apache-2.0 */
#include "train/feed.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/thread.h"

enum {
    ROOM = 1 << 20, /* bytes of the pipe: some thousands of records */
    PATIENCE = 50, /* tenths of a second that the command may take at the end, */
    GRACE = 15,    /* and after SIGTERM */
};

struct mt_feed {
    int fd; /* -1: it takes no more */
    pid_t pid; /* of the shell that watches over the command, and of their process group */
    char *waits; /* what is left of a line of which the pipe took a part */
    size_t n_waiting;
    unsigned long long dropped;
    int said; /* what the command prints */
    pthread_t tells;
    atomic_bool quit;
};

/* Runs the command; ends it, and what it has started, if this process dies, of which SIGTERM tells: at any time, so the
 * trap is there before the command. */
static const char SHELL[] = "exec 3<&0 </dev/null; trap 'trap \"\" TERM; kill -TERM 0; sleep 1; kill -KILL 0' TERM; "
                            "sh -c \"$0\" <&3 3<&- & exec 3<&-; wait $!";

/* Passes on what the command prints: it never has our own streams, which it could keep open for longer than the run. */
static void *tell(void *feed)
{
    struct mt_feed *f = feed;
    char text[4096];
    for (;;) {
        struct pollfd p = {.fd = f->said, .events = POLLIN};
        bool last = atomic_load(&f->quit);
        if (poll(&p, 1, 100) > 0) {
            ssize_t n = read(f->said, text, sizeof(text));
            if (n > 0)
                mt_write_all(STDERR_FILENO, text, (size_t)n);
            else if (!n || errno != EINTR)
                return NULL;
        } else if (last) {
            return NULL;
        }
    }
}

/* The child; async-signal-safe. */
static void run(const char *command, int in, int out, pid_t parent)
{
    static const int usual[] = {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
    sigset_t none;
    sigemptyset(&none);
    for (size_t i = 0; i < MT_ARRAY_LEN(usual); i++)
        signal(usual[i], SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() == parent && dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
        dup2(out, STDERR_FILENO) >= 0)
        execl("/bin/sh", "sh", "-c", SHELL, command, (char *)NULL);
    _exit(127);
}

static int start(struct mt_feed *f, int in, int out, const char *command, struct mt_err *err)
{
    pid_t parent = getpid();
    f->pid = fork();
    if (!f->pid)
        run(command, in, out, parent);
    if (f->pid < 0)
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "log.exec = %s: cannot be started: %s", command, strerror(errno));
    setpgid(f->pid, f->pid); /* whoever of the two is first */
    int rc = mt_thread_start(&f->tells, "mt-feed", tell, f, err);
    if (rc) {
        kill(-f->pid, SIGKILL);
        waitpid(f->pid, NULL, 0);
    }
    return rc;
}

int mt_feed_open(struct mt_feed **out, const char *command, struct mt_err *err)
{
    int in[2] = {-1, -1}, said[2] = {-1, -1};
    MT_FREED struct mt_feed *f = NULL;
    int rc = MT_NEW(&f, 1, "log.exec", err);
    if (!rc && (pipe2(in, O_CLOEXEC) || pipe2(said, O_CLOEXEC)))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "log.exec: %s", strerror(errno));
    if (!rc) {
        fcntl(in[1], F_SETPIPE_SZ, ROOM);
        fcntl(in[1], F_SETFL, O_NONBLOCK);
        f->fd = in[1];
        f->said = said[0];
        rc = start(f, in[0], said[1], command, err);
    }
    mt_close_fd(&in[0]);
    mt_close_fd(&said[1]);
    if (rc) {
        mt_close_fd(&in[1]);
        mt_close_fd(&said[0]);
        return rc;
    }
    *out = MT_GIVE(f);
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

/* Waits for the command, as long as there is patience left; it stays a zombie, so that the number of its group is not
 * given to others. */
static bool wait_for_end(const struct mt_feed *f, int *patience)
{
    const struct timespec tenth = {.tv_nsec = 100000000}, soon = {.tv_nsec = 2000000};
    siginfo_t info = {.si_pid = 0};
    for (int quick = 0; !waitid(P_PID, (id_t)f->pid, &info, WEXITED | WNOHANG | WNOWAIT) && !info.si_pid; quick++) {
        if (*patience <= 0)
            return false;
        nanosleep(quick < 10 ? &soon : &tenth, NULL);
        *patience -= quick >= 10;
    }
    return true;
}

void mt_feed_close(struct mt_feed **feed)
{
    struct mt_feed *f = *feed;
    const struct timespec tenth = {.tv_nsec = 100000000};
    int status = 0, patience = PATIENCE, last = GRACE;
    if (!f)
        return;
    for (; patience && !give_waiting(f) && f->fd >= 0; patience--)
        nanosleep(&tenth, NULL);
    mt_close_fd(&f->fd);
    bool ended = wait_for_end(f, &patience);
    kill(-f->pid, SIGTERM); /* also what it has left running */
    if (!ended) {
        mt_warn("log.exec: the command did not end with its input, and was ended after %d s", PATIENCE / 10);
        wait_for_end(f, &last);
    }
    kill(-f->pid, SIGKILL);
    waitpid(f->pid, &status, 0);
    if (ended && status)
        mt_warn("log.exec: the command ended with %s %d", WIFSIGNALED(status) ? "signal" : "exit code",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    if (f->dropped)
        mt_warn("log.exec: %llu records were dropped", f->dropped);
    atomic_store(&f->quit, true);
    pthread_join(f->tells, NULL);
    close(f->said);
    free(f->waits);
    free(f);
    *feed = NULL;
}
