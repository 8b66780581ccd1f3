/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the program: makes files slow, so that a phase that reads or writes them takes long.
 *
 *   SLOW_READ=PART:MS   each read of a file whose path has PART in it takes MS milliseconds more
 *   SLOW_SYNC=PART:MS   each fsync of one
 *   SLOW_AFTER=PATH     from when this file is there; else from the start
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void wait_if(const char *which, int fd)
{
    char link[64], path[4096];
    const char *how = getenv(which), *ms = how ? strrchr(how, ':') : NULL, *after = getenv("SLOW_AFTER");
    if (after && access(after, F_OK))
        return;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = ms ? readlink(link, path, sizeof(path) - 1) : 0;
    path[n > 0 ? n : 0] = 0;
    if (n <= 0 || !memmem(path, (size_t)n, how, (size_t)(ms - how)))
        return;
    long t = atol(ms + 1);
    struct timespec left = {t / 1000, t % 1000 * 1000000};
    while (nanosleep(&left, &left))
        ;
}

static void *next(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    if (!p)
        abort();
    return p;
}

ssize_t pread64(int fd, void *p, size_t n, off64_t at);
ssize_t pread64(int fd, void *p, size_t n, off64_t at)
{
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real)
        *(void **)&real = next("pread64");
    wait_if("SLOW_READ", fd);
    return real(fd, p, n, at);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real)
        *(void **)&real = next("fsync");
    wait_if("SLOW_SYNC", fd);
    return real(fd);
}
