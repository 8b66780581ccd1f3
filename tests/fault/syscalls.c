/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a command and looks at the system calls that its process makes (seccomp's user notification, so that no call is
 * missed, whoever makes it): lets chosen ones fail, or writes down what is done to files and in which order.
 *
 *   syscalls [-c] [-f CALL:ERROR:NTH:COUNT] [-p PART] [-a PART] [-l LOG] COMMAND...
 *
 *   -f  the NTH call, from 1, and the COUNT - 1 that follow (COUNT 0: all) fail with ERROR and are not made
 *   -p  calls on files whose path has PART in it alone; calls on no file are as if it were not given
 *   -a  from when a file was opened whose path has PART in it
 *   -l  a line for each call: its name, its paths, and "fails" where it does, separated by tabs; "create" is an open
 *       that makes the file; the last is "count" and how often -f's CALL came
 *   -c  calls of the processes that it starts, too
 *
 * Ends as the command ends; by a signal, with 128 and its number. 77: the system does not allow this.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NONE = -1, NO_SECCOMP = 77, MAX_PATH = 4096 };

/* Which arguments are a file: its descriptor, or a path with or without the folder's descriptor before it. */
static const struct call {
    const char *name;
    int nr, fd, path, to;
    bool at; /* the argument before a path is the folder that it begins from */
} calls[] = {
    {"open", SYS_openat, NONE, 1, NONE, true},
    {"write", SYS_write, 0, NONE, NONE, false},
    {"pwrite", SYS_pwrite64, 0, NONE, NONE, false},
    {"truncate", SYS_ftruncate, 0, NONE, NONE, false},
    {"fsync", SYS_fsync, 0, NONE, NONE, false},
    {"fsync", SYS_fdatasync, 0, NONE, NONE, false},
    {"rename", SYS_renameat2, NONE, 1, 3, true},
    {"rename", SYS_renameat, NONE, 1, 3, true},
    {"mkdir", SYS_mkdirat, NONE, 1, NONE, true},
    {"remove", SYS_unlinkat, NONE, 1, NONE, true},
    {"link", SYS_symlinkat, NONE, 2, NONE, true},
    {"flock", SYS_flock, 0, NONE, NONE, false},
    {"mmap", SYS_mmap, NONE, NONE, NONE, false},
    {"fallocate", SYS_fallocate, 0, NONE, NONE, false},
    {"statx", SYS_statx, NONE, 1, NONE, true},
    {"statfs", SYS_statfs, NONE, 0, NONE, false},
    {"io_uring_enter", SYS_io_uring_enter, NONE, NONE, NONE, false},
#ifdef SYS_open /* architectures that have the older ones too */
    {"open", SYS_open, NONE, 0, NONE, false},
    {"rename", SYS_rename, NONE, 0, 1, false},
    {"mkdir", SYS_mkdir, NONE, 0, NONE, false},
    {"remove", SYS_unlink, NONE, 0, NONE, false},
    {"remove", SYS_rmdir, NONE, 0, NONE, false},
    {"link", SYS_symlink, NONE, 1, NONE, false},
#endif
};
enum { N_CALLS = sizeof(calls) / sizeof(calls[0]) };

static const struct {
    const char *name;
    int code;
} errors[] = {{"EIO", EIO}, {"ESTALE", ESTALE}, {"EINTR", EINTR}, {"ENOSPC", ENOSPC}, {"EINVAL", EINVAL},
            {"ENOSYS", ENOSYS}, {"EROFS", EROFS}};

static struct {
    char call[32];
    int error;
    long nth, count, seen;
    const char *part, *after;
    bool begun, children;
    FILE *log;
} o;

static int fail(const char *what)
{
    fprintf(stderr, "syscalls: %s: %s\n", what, strerror(errno));
    return NO_SECCOMP;
}

/* --- the command's side ----------------------------------------------------------------------------------------- */

/* A filter that hands the calls of the table to whoever holds the descriptor that is returned. */
static int install(void)
{
    struct sock_filter code[2 * N_CALLS + 2];
    unsigned short n = 0;
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < N_CALLS; i++) {
        bool wanted = o.log || !strcmp(calls[i].name, o.call) || !strcmp(calls[i].name, "open");
        if (!wanted)
            continue;
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i].nr, 0, 1);
        code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog prog = {n, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &prog);
}

static int send_fd(int to, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    return sendmsg(to, &m, 0) == 1 ? 0 : -1;
}

static int receive_fd(int from)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    int fd = -1;
    if (recvmsg(from, &m, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&m))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(fd));
    return fd;
}

static void run_command(int to, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = install();
    if (fd < 0 || send_fd(to, fd))
        _exit(fail("seccomp"));
    execvp(argv[0], argv); /* its own opening waits until the other side looks */
    _exit(127);
}

/* --- the other side --------------------------------------------------------------------------------------------- */

static void read_link(char out[MAX_PATH], int pid, int fd)
{
    char link[64];
    if (fd == AT_FDCWD)
        snprintf(link, sizeof(link), "/proc/%d/cwd", pid);
    else
        snprintf(link, sizeof(link), "/proc/%d/fd/%d", pid, fd);
    ssize_t n = readlink(link, out, MAX_PATH - 1);
    out[n < 0 ? 0 : n] = 0;
}

static void read_path(char out[MAX_PATH], int pid, int dir, uint64_t address)
{
    char mem[64], name[MAX_PATH] = "", base[MAX_PATH];
    snprintf(mem, sizeof(mem), "/proc/%d/mem", pid);
    int fd = open(mem, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, name, sizeof(name) - 1, (off_t)address);
    if (fd >= 0)
        close(fd);
    name[n < 0 ? 0 : n] = 0;
    if (name[0] == '/') {
        memcpy(out, name, MAX_PATH);
        return;
    }
    read_link(base, pid, dir);
    snprintf(out, MAX_PATH, "%.2000s%s%.2000s", base, name[0] ? "/" : "", name);
}

static bool is_dir(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

/* What the call is on; "" where it is on no file. */
static void find_paths(const struct call *c, const struct seccomp_notif *q, char path[MAX_PATH], char to[MAX_PATH])
{
    const __u64 *a = q->data.args;
    int pid = (int)q->pid;
    path[0] = to[0] = 0;
    if (c->fd != NONE)
        read_link(path, pid, (int)a[c->fd]);
    if (c->path != NONE)
        read_path(path, pid, c->at ? (int)a[c->path - 1] : AT_FDCWD, a[c->path]);
    if (c->to != NONE)
        read_path(to, pid, c->at ? (int)a[c->to - 1] : AT_FDCWD, a[c->to]);
}

static bool has(const char *path, const char *part)
{
    return !part || strstr(path, part);
}

/* 0: it is made as it is; else it fails with this. */
static int judge(const struct call *c, const struct seccomp_notif *q)
{
    char path[MAX_PATH], to[MAX_PATH];
    const char *name = c->name;
    bool on_file = c->fd != NONE || c->path != NONE;
    find_paths(c, q, path, to);
    if (!strcmp(name, "open") && !o.begun)
        o.begun = has(path, o.after);
    if (!o.begun || (on_file && !has(path, o.part) && !(to[0] && has(to, o.part))))
        return 0;
    if (!strcmp(name, "fsync") && is_dir(path))
        name = "fsync-dir";
    bool there = !access(path, F_OK), made = !strcmp(name, "mkdir");
    bool hit = !strcmp(name, o.call) && ++o.seen >= o.nth && o.nth && (!o.count || o.seen < o.nth + o.count);
    if (o.log) {
        uint64_t flags = !strcmp(name, "open") ? q->data.args[c->path + 1] : 0;
        fprintf(o.log, "%s\t%s\t%s\t%s\n", flags & O_CREAT && !there ? "create" : name, path, to,
                hit || (made && there) ? "fails" : "");
    }
    return hit ? o.error : 0;
}

static bool is_thread_of(int tid, int pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/task/%d", pid, tid);
    return !access(path, F_OK);
}

static void answer_all(int listener, int pid)
{
    struct seccomp_notif q;
    struct pollfd p = {.fd = listener, .events = POLLIN};
    while (poll(&p, 1, -1) >= 0 || errno == EINTR) {
        if (!(p.revents & POLLIN))
            break; /* nobody is left that the filter holds for */
        memset(&q, 0, sizeof(q));
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &q))
            continue; /* it was killed meanwhile */
        struct seccomp_notif_resp r = {.id = q.id};
        for (int i = 0; i < N_CALLS && (o.children || is_thread_of((int)q.pid, pid)); i++)
            if (calls[i].nr == q.data.nr)
                r.error = -judge(&calls[i], &q);
        r.flags = r.error ? 0 : SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &r);
    }
}

static bool parse_fault(const char *text)
{
    char error[32];
    if (sscanf(text, "%31[^:]:%31[^:]:%ld:%ld", o.call, error, &o.nth, &o.count) != 4)
        return false;
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (!strcmp(error, errors[i].name))
            o.error = errors[i].code;
    return o.error;
}

static bool parse(int argc, char **argv)
{
    bool good = true;
    for (int c; (c = getopt(argc, argv, "+cf:p:a:l:")) != -1;) {
        if (c == 'c')
            o.children = true;
        else if (c == 'f')
            good &= parse_fault(optarg);
        else if (c == 'p')
            o.part = optarg;
        else if (c == 'a')
            o.after = optarg;
        else if (c == 'l')
            good &= (o.log = fopen(optarg, "we")) != NULL;
        else
            good = false;
    }
    return good && optind < argc;
}

int main(int argc, char **argv)
{
    int pair[2], status;
    if (!parse(argc, argv)) {
        fprintf(stderr, "usage: syscalls [-c] [-f CALL:ERROR:NTH:COUNT] [-p PART] [-a PART] [-l LOG] COMMAND...\n");
        return 2;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return fail("socketpair");
    pid_t pid = fork();
    if (pid < 0)
        return fail("fork");
    if (!pid)
        run_command(pair[1], argv + optind);
    close(pair[1]);
    int listener = receive_fd(pair[0]);
    if (listener >= 0)
        answer_all(listener, pid);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (o.log && (fprintf(o.log, "count\t%ld\n", o.seen) < 0 || fclose(o.log)))
        return fail("the log");
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
