/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

/** Called by libFuzzer with each input. What the reader must keep up is checked with fuzz_assert(). */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define fuzz_assert(cond)                                                                          \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #cond);                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static inline void fuzz_quiet(enum mt_log_level level, const char *line)
{
    (void)level;
    (void)line;
}

/** A file in memory that holds the input; the path stays good until the next call. */
static inline const char *fuzz_file(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    mt_log_set_sink(fuzz_quiet);
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    fuzz_assert(fd >= 0 && !ftruncate(fd, 0) && pwrite(fd, data, size, 0) == (ssize_t)size);
    return path;
}

/** A folder in memory of this process's own; it stays. */
static inline const char *fuzz_folder(void)
{
    static char path[64];
    if (!path[0]) {
        snprintf(path, sizeof(path), "/dev/shm/mt-fuzz-%d", (int)getpid());
        fuzz_assert(!mkdir(path, 0700) || errno == EEXIST);
        mt_log_set_sink(fuzz_quiet);
    }
    return path;
}

/** Writes a file of that folder, and its folders; returns its path, which is good until the fourth call after it. */
static inline const char *fuzz_put(const char *name, const void *data, size_t size)
{
    static char path[4][256];
    static int next;
    char *to = path[next++ % 4];
    snprintf(to, sizeof(path[0]), "%s/%s", fuzz_folder(), name);
    for (char *slash = strchr(to + strlen(fuzz_folder()) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        fuzz_assert(!mkdir(to, 0700) || errno == EEXIST);
        *slash = '/';
    }
    FILE *f = fopen(to, "we");
    fuzz_assert(f && fwrite(data, 1, size, f) == size && !fclose(f));
    return to;
}

/** Length of the input's part up to its first NUL, or all; *rest is what follows it. */
static inline size_t fuzz_split(const uint8_t *data, size_t size, const uint8_t **rest, size_t *n_rest)
{
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t n = nul ? (size_t)(nul - data) : size;
    *rest = nul ? nul + 1 : data + size;
    *n_rest = nul ? size - n - 1 : 0;
    return n;
}
