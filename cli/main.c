/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "device/device.h"
#include "kinds/kinds.h"
#include "log_lines.h"

static const struct cli_command *find_command(const char *name)
{
    for (const struct cli_command *c = cli_commands; c->name; c++)
        if (!strcmp(c->name, name))
            return c;
    return NULL;
}

static int unknown_command(const char *name)
{
    const char *best = NULL;
    int least = 3;
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        int d = mt_edit_distance(c->name, name);
        if (d < least) {
            least = d;
            best = c->name;
        }
    }
    fprintf(stderr, "megatrain: unknown command \"%s\"%s%s%s; see megatrain help\n", name,
            best ? " (did you mean \"" : "", best ? best : "", best ? "\"?)" : "");
    return EXIT_USAGE;
}

static int unknown_option(const char *arg)
{
    fprintf(stderr, "megatrain: unknown option \"%s\"; see megatrain help\n", arg);
    return EXIT_USAGE;
}

/* Whether `arg` is an option that may precede the command: "--quiet", "-qv", "--color=never". */
static bool known_global(const char *arg)
{
    const struct cli_option *o;
    if (!strncmp(arg, "--", 2)) {
        for (o = cli_global_options; o->name; o++)
            if (!strncmp(arg + 2, o->name, strlen(o->name)) && strchr("=", arg[2 + strlen(o->name)]))
                return true;
        return false;
    }
    for (const char *c = arg + 1; *c; c++) {
        for (o = cli_global_options; o->name && o->letter != *c; o++)
            ;
        if (!o->name)
            return false;
    }
    return arg[1] != 0;
}

static int show_version(int verbose)
{
    printf("megatrain %s\n", MT_VERSION);
    if (verbose) {
        MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
        struct mt_device_params p = {.kind = "cpu", .budget_bytes = 1 << 20, .n_threads = 1};
        if (!mt_device_create(&dev, &p, NULL))
            printf("devices: %s\n", mt_device_limits(dev)->name);
    }
    return 0;
}

/* Opens closed standard streams, so that no other file gets their numbers and receives messages. */
static void hold_streams(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd)
            _exit(EXIT_RUNTIME);
}

enum { LEAST_STACK = 512 << 10, USUAL_STACK = 8 << 20 }; /* nested JSON takes the most: 1000 levels deep */

/*
 * A stack that is too small ends a run by SIGSEGV, anywhere. A low limit is raised as far as this process may; the
 * stacks of threads, whose size was taken from it when the process began, are then as large.
 */
static int check_stack(void)
{
    struct rlimit r;
    pthread_attr_t attr;
    if (getrlimit(RLIMIT_STACK, &r) || r.rlim_cur >= LEAST_STACK)
        return 0;
    r.rlim_cur = r.rlim_max < USUAL_STACK ? r.rlim_max : USUAL_STACK;
    if (r.rlim_cur < LEAST_STACK || setrlimit(RLIMIT_STACK, &r)) {
        fprintf(stderr, "megatrain: the stack is limited to %llu KiB, %d KiB are needed: raise it with ulimit -s %d\n",
                (unsigned long long)r.rlim_cur >> 10, LEAST_STACK >> 10, USUAL_STACK >> 10);
        return EXIT_NO_FIT;
    }
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, (size_t)r.rlim_cur);
    pthread_setattr_default_np(&attr);
    pthread_attr_destroy(&attr);
    return 0;
}

/* A model may have hundreds of files, open several times each; the usual limit, 1024, is for programs with select(). */
static void raise_file_limit(void)
{
    enum { ENOUGH = 65536 };
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) || r.rlim_cur >= ENOUGH)
        return;
    r.rlim_cur = r.rlim_max < ENOUGH ? r.rlim_max : ENOUGH;
    setrlimit(RLIMIT_NOFILE, &r);
}

static bool trains(const struct cli_command *cmd)
{
    return !strcmp(cmd->name, "run") || !strcmp(cmd->name, "bench");
}

/* When the reader of a pipe goes away, a command that prints its result ends, but training does not. */
static void set_up(const struct cli *cli, const struct cli_command *cmd)
{
    signal(SIGPIPE, trains(cmd) ? SIG_IGN : SIG_DFL);
    signal(SIGXFSZ, SIG_IGN);
    setlocale(LC_NUMERIC, "C");
    mt_log_set_level(cli->quiet          ? MT_LOG_ERROR
                     : cli->verbose > 1 ? MT_LOG_DEBUG
                                        : MT_LOG_INFO);
    cli_log_lines(cli);
}

/* `-v --version`, in any order, before a command. */
static bool asks_version(int argc, char **argv, int *verbose)
{
    bool version = false;
    for (int i = 1; i < argc; i++) {
        version |= !strcmp(argv[i], "--version") || !strcmp(argv[i], "-V");
        *verbose += !strcmp(argv[i], "-v") || !strcmp(argv[i], "--verbose");
    }
    return version;
}

int main(int argc, char **argv)
{
    struct cli cli = {0};
    struct cli_args args = {0};
    int at = 1, verbose = 0;
    cli.start_ns = mt_boot_ns();
    hold_streams();
    cli_guard_terminals();
    int stack = check_stack();
    if (stack)
        return stack;
    raise_file_limit();
    if (asks_version(argc, argv, &verbose))
        return show_version(verbose);
    while (at < argc && argv[at][0] == '-' && strcmp(argv[at], "--help") && strcmp(argv[at], "-h")) {
        if (!known_global(argv[at]))
            return unknown_option(argv[at]);
        at += 1 + cli_takes_next(cli_global_options, argv[at]);
    }
    at = at < argc ? at : argc;
    if (at == argc || !strcmp(argv[at], "--help") || !strcmp(argv[at], "-h")) {
        cli_help_all();
        return at == argc ? EXIT_USAGE : 0;
    }
    const struct cli_command *cmd = find_command(argv[at]);
    if (!cmd)
        return unknown_command(argv[at]);
    memmove(&argv[at], &argv[at + 1], (size_t)(argc - at) * sizeof(*argv));
    struct mt_err err = {0};
    int rc = cli_parse(&cli, cmd, argc - 1, argv, &args);
    if (rc >= 0) {
        cli_args_finish(&args);
        return rc;
    }
    set_up(&cli, cmd);
    rc = cmd->run(&cli, &args, &err);
    if (rc < 0)
        rc = cli_fail(&err);
    cli_args_finish(&args);
    if ((fflush(stdout) || ferror(stdout)) && !rc && !trains(cmd)) {
        fprintf(stderr, "megatrain: cannot write to standard output\n");
        rc = EXIT_RUNTIME;
    }
    return rc;
}
