/* SPDX-License-Identifier: Apache-2.0 */
#include "data/helper.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

static const char SCRIPT[] = "prepare_data.py";

static char *join3(const char *a, const char *b, const char *c)
{
    char *p = NULL;
    return asprintf(&p, "%s/%s/%s", a, b, c) < 0 ? NULL : p;
}

/* Whom the program belongs to; the user where that cannot be known. */
static uid_t program_owner(void)
{
    struct stat st;
    return stat("/proc/self/exe", &st) ? geteuid() : st.st_uid;
}

/* Who may write there besides the owner: the user's own group, or root's, is no other. */
static bool others_may_write(const struct stat *st)
{
    bool own_group = !st->st_gid || st->st_gid == getegid();
    return !S_ISLNK(st->st_mode) && ((st->st_mode & S_IWOTH) || ((st->st_mode & S_IWGRP) && !own_group));
}

/* Run as ours: belongs to root, to the user or to whoever the program belongs to, and others may not write there. */
static bool is_trusted(const char *path, uid_t program)
{
    struct stat st;
    return !lstat(path, &st) && !others_may_write(&st) &&
           (!st.st_uid || st.st_uid == geteuid() || st.st_uid == program);
}

static bool is_trusted_file(const char *path, uid_t program)
{
    char dir[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof(dir), "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    return is_trusted(path, program) && is_trusted(dir, program);
}

/*
 * Looks in the program's folder and a few of its parents: works in an installed tree and in a build tree. Further up
 * are folders that others may have made.
 */
static char *find_script(void)
{
    static const char *const folders[] = {"share/megatrain", "scripts"};
    enum { PARENTS = 4 };
    char exe[PATH_MAX];
    const char *given = getenv("MEGATRAIN_DATA_HELPER");
    if (given && *given)
        return strdup(given);
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    exe[n > 0 ? n : 0] = 0;
    uid_t program = program_owner();
    for (int level = 0; level <= PARENTS; level++) {
        char *slash = strrchr(exe, '/');
        if (!slash || slash == exe)
            break;
        *slash = 0;
        for (size_t i = 0; i < sizeof(folders) / sizeof(*folders); i++) {
            char *path = join3(exe, folders[i], SCRIPT);
            if (path && mt_path_exists(path)) {
                if (is_trusted_file(path, program))
                    return path;
                mt_warn("%s is not run: it belongs to another user, or others may write to it or its folder", path);
            }
            free(path);
        }
    }
    return NULL;
}

char *mt_helper_dir(void)
{
    char *path = find_script(), *slash = path ? strrchr(path, '/') : NULL;
    if (slash)
        *slash = 0;
    return path;
}

/* In a folder of this user's: of installed files, where setup-data makes it, or of caches, where it once did. */
static char *python_below(void (*folder)(char *path, size_t size))
{
    char dir[4096];
    folder(dir, sizeof(dir));
    return mt_path_join(dir, "python/bin/python");
}

static char *find_python(const char *script)
{
    const char *given = getenv("MEGATRAIN_PYTHON");
    if (given && *given)
        return strdup(given);
    MT_FREED char *dir = strdup(script);
    char *slash = dir ? strrchr(dir, '/') : NULL;
    if (slash)
        *slash = 0;
    char *places[] = {slash ? join3(dir, "..", ".venv-data/bin/python") : NULL, python_below(mt_data_home),
                      python_below(mt_cache_dir), mt_find_program("python3", true) ?: strdup("/usr/bin/python3")};
    char *found = NULL;
    for (size_t i = 0; i < MT_ARRAY_LEN(places); i++) {
        bool last = i + 1 == MT_ARRAY_LEN(places);
        if (!found && places[i] && (last || (mt_path_exists(places[i]) && is_trusted_file(places[i], program_owner()))))
            found = places[i];
        else
            free(places[i]);
    }
    return found;
}

char *mt_helper_python(void)
{
    MT_FREED char *script = find_script();
    return script ? find_python(script) : NULL;
}

static int no_environment(const char *script, const char *why, struct mt_err *err)
{
    MT_FREED char *dir = mt_helper_dir(), *setup = dir ? join3(dir, ".", "setup") : NULL;
    bool here = setup && mt_path_exists(setup);
    return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                   "the data helper (%s) has no Python environment (%s); make it with: %s%s", script,
                   why, here ? dir : "",
                   here ? "/setup --data" : "megatrain setup-data");
}

static void child(const char *python, const char *script, int in, int out, int errors)
{
    signal(SIGPIPE, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (dup2(in, 0) >= 0 && dup2(out, 1) >= 0 && dup2(errors, 2) >= 0)
        execlp(python, python, "-I", script, (char *)NULL); /* neither the environment nor this folder has modules for it */
    _exit(127);
}

/* An unnamed file that holds `text`, positioned at its start. */
static int memory_file(const char *name, const char *text)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && (mt_write_all(fd, text, strlen(text)) || lseek(fd, 0, SEEK_SET) < 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

static enum mt_err_kind kind_of(const char *name)
{
    if (!strcmp(name, "input"))
        return MT_ERR_INPUT;
    return strcmp(name, "usage") ? MT_ERR_RUNTIME : MT_ERR_USAGE;
}

struct talk {
    const char *script;
    void (*on_event)(void *, const cJSON *);
    void *ctx;
    char doing[4200]; /* what it said last that it does */
    int result;
};

/* Handles one line of the helper's output; returns 1 for the last line. */
static int on_line(struct talk *t, const char *line, size_t len, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int last = 0;
    if (mt_json_parse(&o, line, len, SCRIPT, MT_ERR_RUNTIME, NULL))
        return 0;
    const cJSON *event = mt_json_get(o, "event"), *message = mt_json_get(o, "message");
    const cJSON *kind = mt_json_get(o, "kind"), *what = mt_json_get(o, "what");
    const char *name = cJSON_IsString(event) ? event->valuestring : "";
    if (!strcmp(name, "done")) {
        t->result = 0;
        last = 1;
    } else if (!strcmp(name, "doing") && cJSON_IsString(what)) {
        snprintf(t->doing, sizeof(t->doing), "%s", what->valuestring);
    } else if (!strcmp(name, "error") && cJSON_IsString(message) && cJSON_IsString(kind)) {
        t->result = strcmp(kind->valuestring, "environment")
                        ? mt_fail(err, kind_of(kind->valuestring), -EINVAL, "%s", message->valuestring)
                        : no_environment(t->script, message->valuestring, err);
        last = 1;
    } else if (t->on_event) {
        t->on_event(t->ctx, o);
    }
    return last;
}

/* Libraries in other languages end the process where memory, or the processor's time, is not given. */
static bool hit_limit(int status)
{
    return WIFSIGNALED(status) && (WTERMSIG(status) == SIGABRT || WTERMSIG(status) == SIGXCPU);
}

static int died(const struct talk *t, int status, int errors, struct mt_err *err)
{
    const char *script = t->script;
    char tail[420];
    off_t size = lseek(errors, 0, SEEK_END);
    size_t n = size > (off_t)sizeof(tail) - 1 ? sizeof(tail) - 1 : (size_t)(size > 0 ? size : 0);
    if (mt_pread_all(errors, tail, n, (uint64_t)size - n))
        n = 0;
    tail[n] = 0;
    if (hit_limit(status) && *t->doing)
        return mt_fail(err, MT_ERR_INPUT, -ENOMEM, "%s takes more %s than the data helper may have: given up", t->doing,
                       WTERMSIG(status) == SIGXCPU ? "time" : "memory");
    if (WIFSIGNALED(status))
        return mt_fail(err, MT_ERR_RUNTIME, -ECHILD, "%s was killed by signal %d (%s) %s", script,
                       WTERMSIG(status), strsignal(WTERMSIG(status)), tail);
    return mt_fail(err, MT_ERR_RUNTIME, -ECHILD, "%s failed with exit code %d: ...%s", script,
                   WEXITSTATUS(status), tail);
}

static int converse(struct talk *t, pid_t pid, int out, int errors, struct mt_err *err)
{
    MT_FREED char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int status = 0, last = 0;
    FILE *f = fdopen(out, "re");
    while (f && (n = getline(&line, &cap, f)) >= 0)
        if (!last)
            last = on_line(t, line, (size_t)n, err);
    if (f)
        fclose(f);
    else
        close(out);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127 && !last)
        return no_environment(t->script, "its Python cannot be started", err);
    return last ? t->result : died(t, status, errors, err);
}

int mt_helper_run(const cJSON *job, void (*on_event)(void *, const cJSON *), void *ctx,
                  struct mt_err *err)
{
    int out[2] = {-1, -1};
    MT_FREED char *script = find_script(), *python = script ? find_python(script) : NULL;
    MT_FREED char *text = mt_json_print(job, false);
    pid_t pid = -1;
    if (!script || !mt_path_exists(script))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "the data helper is not found (%s): set MEGATRAIN_DATA_HELPER to its path",
                       script ? script : SCRIPT);
    MT_FD_CLOSED int in = text ? memory_file("job", text) : -1;
    MT_FD_CLOSED int errors = memory_file("errors", "");
    if (!python || in < 0 || errors < 0 || pipe2(out, O_CLOEXEC) || (pid = fork()) < 0) {
        int rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot start %s: %s", script, strerror(errno));
        mt_close_fd(&out[0]);
        mt_close_fd(&out[1]);
        return rc;
    }
    if (!pid)
        child(python, script, in, out[1], errors);
    close(out[1]);
    struct talk talk = {.script = script, .on_event = on_event, .ctx = ctx, .result = 1};
    return converse(&talk, pid, out[0], errors, err);
}
