/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded: flips one bit of what one pread() returns, as memory or a cable does. FLIP=PART:NTH: of the NTH read of more
 * than 1 KiB, from 1, of files whose path has PART in it.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long seen;

static int is_wanted(int fd, long *nth)
{
    const char *flip = getenv("FLIP"), *colon = flip ? strrchr(flip, ':') : NULL;
    char link[64], path[4096], part[256];
    if (!colon)
        return 0;
    snprintf(part, sizeof(part), "%.*s", (int)(colon - flip), flip);
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof(path) - 1);
    path[n > 0 ? n : 0] = 0;
    *nth = atol(colon + 1);
    return strstr(path, part) != NULL;
}

static ssize_t flipped(int fd, void *buf, ssize_t n)
{
    long nth;
    if (n > 1024 && is_wanted(fd, &nth) && atomic_fetch_add(&seen, 1) + 1 == nth)
        ((unsigned char *)buf)[n / 2] ^= 1;
    return n;
}

static ssize_t read_at(int fd, void *buf, size_t len, off_t at)
{
    ssize_t (*next)(int, void *, size_t, off_t);
    *(void **)&next = dlsym(RTLD_NEXT, "pread64");
    return flipped(fd, buf, next(fd, buf, len, at));
}

/* Under the names that programs with 64-bit offsets call, also those with checks of the compiler. */
ssize_t pread64(int fd, void *buf, size_t len, off_t at)
{
    return read_at(fd, buf, len, at);
}

ssize_t __pread64_chk(int fd, void *buf, size_t len, off_t at, size_t size);
ssize_t __pread64_chk(int fd, void *buf, size_t len, off_t at, size_t size)
{
    if (len > size)
        abort();
    return read_at(fd, buf, len, at);
}
