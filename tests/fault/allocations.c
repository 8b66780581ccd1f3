/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the program: makes allocations fail that its own code makes from main() on, or cJSON for it. Those of
 * other libraries always succeed unless they are named, and those of constructors, which a linked CUDA runtime has.
 *
 *   ALLOCATIONS_IN=NAME,...    those of the libraries whose path has one of these in it, instead of the program's
 *   ALLOCATIONS_FAIL=N:COUNT   the Nth, from 1, and the COUNT - 1 that follow (COUNT 0: all) give NULL
 *   ALLOCATIONS_AFTER=PATH     counts those alone that come after this file has something in it
 *   ALLOCATIONS_LOG=PATH       appends for each, at the end, the address in the program that it was made from
 */
#undef _FORTIFY_SOURCE /* its asprintf() is a macro */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST = 1 << 20, RANGES = 8 };

static struct {
    uintptr_t from, to, base;
} own[RANGES];
static int n_own;
static bool begun;
static long first, count;
static int (*program_main)(int, char **, char **);
static atomic_long seen;
static uint32_t *site;
static const char *path, *after, *in;
static atomic_bool counting;

extern int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end);
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

/* Has a library's path one of the names that were asked for in it? */
static bool is_named(const char *library)
{
    char name[64];
    for (const char *p = in; *p; p += strcspn(p, ","), p += *p == ',') {
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(p, ","), p);
        if (strstr(library, name))
            return true;
    }
    return false;
}

static int note_code(struct dl_phdr_info *info, size_t size, void *arg)
{
    bool *program = arg, wanted = in ? is_named(info->dlpi_name) : *program || strstr(info->dlpi_name, "libcjson");
    (void)size;
    *program = false; /* dl_iterate_phdr() reports it first */
    for (int i = 0; wanted && i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X && n_own < RANGES) {
            own[n_own].base = info->dlpi_addr;
            own[n_own].from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            own[n_own].to = own[n_own].from + info->dlpi_phdr[i].p_memsz;
            n_own++;
        }
    return 0;
}

static void write_log(void)
{
    FILE *f = fopen(path, "w");
    long n = atomic_load(&seen);
    for (long i = 0; f && i < n && i < MOST; i++)
        fprintf(f, "%x\n", site[i]);
    if (f)
        fclose(f);
}

__attribute__((constructor)) static void begin(void)
{
    bool program = true;
    const char *fail = getenv("ALLOCATIONS_FAIL");
    path = getenv("ALLOCATIONS_LOG");
    after = getenv("ALLOCATIONS_AFTER");
    in = getenv("ALLOCATIONS_IN");
    site = path ? __libc_calloc(MOST, sizeof(*site)) : NULL;
    if (path)
        atexit(write_log);
    if (fail && sscanf(fail, "%ld:%ld", &first, &count) != 2)
        abort();
    unsetenv("ALLOCATIONS_FAIL"); /* not for what it starts */
    unsetenv("LD_PRELOAD");
    dl_iterate_phdr(note_code, &program);
}

static int begin_main(int argc, char **argv, char **envp)
{
    begun = true;
    return program_main(argc, argv, envp);
}

int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end)
{
    __typeof__(__libc_start_main) *real = (__typeof__(real))dlsym(RTLD_NEXT, "__libc_start_main");
    program_main = main;
    return real(begin_main, argc, argv, init, fini, rtld_fini, stack_end);
}

static bool has_begun(void)
{
    struct stat st;
    if (begun && !atomic_load(&counting))
        atomic_store(&counting, !after || (!stat(after, &st) && st.st_size));
    return atomic_load(&counting);
}

static bool fails(void *caller)
{
    if (!has_begun())
        return false;
    uintptr_t at = (uintptr_t)caller;
    int i = 0;
    while (i < n_own && (at < own[i].from || at >= own[i].to))
        i++;
    if (i == n_own)
        return false;
    long n = atomic_fetch_add(&seen, 1) + 1;
    if (site && n <= MOST)
        site[n - 1] = (uint32_t)(at - own[i].base);
    bool fail = first && n >= first && (!count || n < first + count);
    if (fail)
        errno = ENOMEM;
    return fail;
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t n)
{
    return fails(CALLER) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fails(CALLER) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fails(CALLER) ? NULL : __libc_realloc(p, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    void *p = fails(CALLER) ? NULL : __libc_memalign(align, n);
    if (p)
        *out = p;
    return p ? 0 : ENOMEM;
}

void *aligned_alloc(size_t align, size_t n)
{
    return fails(CALLER) ? NULL : __libc_memalign(align, n);
}

char *strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = fails(CALLER) ? NULL : __libc_malloc(n);
    return p ? memcpy(p, s, n) : NULL;
}

char *strndup(const char *s, size_t most)
{
    size_t n = strnlen(s, most);
    char *p = fails(CALLER) ? NULL : __libc_malloc(n + 1);
    if (p)
        ((char *)memcpy(p, s, n))[n] = 0;
    return p;
}

int vasprintf(char **out, const char *fmt, va_list args)
{
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, again);
    va_end(again);
    *out = n < 0 || fails(CALLER) ? NULL : __libc_malloc((size_t)n + 1);
    return *out ? vsnprintf(*out, (size_t)n + 1, fmt, args) : -1;
}

int asprintf(char **out, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = fails(CALLER) ? -1 : vasprintf(out, fmt, args);
    va_end(args);
    if (n < 0)
        *out = NULL;
    return n;
}
