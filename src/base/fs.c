/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fs.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

void mt_close_fd(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

void mt_close_dir(DIR **d)
{
    if (*d)
        closedir(*d);
}

void mt_close_stream(FILE **f)
{
    if (*f)
        fclose(*f);
}

static int fail_path(struct mt_err *err, const char *verb, const char *path)
{
    int e = errno ? errno : EIO;
    return mt_fail(err, MT_ERR_RUNTIME, -e, "cannot %s %s: %s", verb, path, strerror(e));
}

const char *mt_path_of(char path[MT_PATH_SIZE], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, MT_PATH_SIZE, format, args);
    va_end(args);
    return n >= 0 && n < MT_PATH_SIZE ? path : "";
}

int mt_path_printf(char *path, size_t size, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, size, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < size)
        return 0;
    path[0] = '\0';
    return -ENAMETOOLONG;
}

static void user_dir(char *path, size_t size, const char *xdg, const char *below_home)
{
    const char *home = getenv("HOME");
    if (xdg && *xdg)
        mt_path_printf(path, size, "%s/megatrain", xdg);
    else
        mt_path_printf(path, size, "%s/%s/megatrain", home ? home : ".", below_home);
}

void mt_cache_dir(char *path, size_t size)
{
    user_dir(path, size, getenv("XDG_CACHE_HOME"), ".cache");
}

void mt_data_home(char *path, size_t size)
{
    user_dir(path, size, getenv("XDG_DATA_HOME"), ".local/share");
}

enum { MAX_INTERRUPTED = 10000 }; /* in a row: then something is wrong, and nobody must wait for it for ever */

enum move { WRITE, PREAD, PWRITE };

/* Goes on after short moves and interruptions. */
static int move_all(enum move move, int fd, void *data, size_t len, uint64_t offset)
{
    char *p = data;
    int interrupted = 0;
    while (len) {
        size_t most = MT_MIN(len, (size_t)1 << 30);
        ssize_t n = move == WRITE   ? write(fd, p, most)
                    : move == PREAD ? pread(fd, p, most, (off_t)offset) : pwrite(fd, p, most, (off_t)offset);
        if (n < 0 && errno == EINTR && interrupted++ < MAX_INTERRUPTED)
            continue;
        if (n <= 0)
            return n ? -errno : move == PREAD ? -ENODATA : -EIO;
        p += n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

int mt_write_all(int fd, const void *data, size_t len)
{
    return move_all(WRITE, fd, (void *)(uintptr_t)data, len, 0);
}

int mt_pread_all(int fd, void *data, size_t len, uint64_t offset)
{
    return move_all(PREAD, fd, data, len, offset);
}

int mt_pwrite_all(int fd, const void *data, size_t len, uint64_t offset)
{
    return move_all(PWRITE, fd, (void *)(uintptr_t)data, len, offset);
}

/* The lines that git-lfs leaves in place of a file that it has not fetched. */
static bool is_lfs_pointer(int fd)
{
    static const char first[] = "version https://git-lfs.github.com/spec/";
    char text[sizeof(first) - 1];
    return !mt_pread_all(fd, text, sizeof(text), 0) && !memcmp(text, first, sizeof(text));
}

int mt_open_regular(const char *path, struct mt_err *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* else a pipe that nobody writes to is waited for */
    if (fd < 0 || fstat(fd, &st)) {
        int rc = fail_path(err, "open", path);
        if (fd >= 0)
            close(fd);
        return rc;
    }
    bool pointer = S_ISREG(st.st_mode) && is_lfs_pointer(fd);
    if (S_ISREG(st.st_mode) && !pointer)
        return fd;
    close(fd);
    if (pointer)
        return mt_fail(err, MT_ERR_INPUT, -ENODATA, "%s is only git-lfs's pointer to the file: get that, with git lfs pull in "
                       "its folder or hf download", path);
    if (S_ISDIR(st.st_mode))
        return mt_fail(err, MT_ERR_RUNTIME, -EISDIR, "cannot read %s: it is a folder", path);
    return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "cannot read %s: it is a pipe, a socket or a device, not a file", path);
}

int mt_open_to_write(const char *path, int flags, struct mt_err *err)
{
    struct stat st;
    int fd = open(path, flags | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0 && errno == ELOOP)
        return mt_fail(err, MT_ERR_RUNTIME, -ELOOP, "cannot write %s: it is a link, and may lead to another user's or program's "
                       "file: remove it", path);
    if (fd < 0)
        return fail_path(err, "open", path);
    if (!fstat(fd, &st) && S_ISREG(st.st_mode))
        return fd;
    close(fd);
    return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "cannot write %s: it is a pipe, a socket or a device, not a file", path);
}

static int read_whole(int fd, const char *path, char **text, size_t *len, struct mt_err *err)
{
    MT_FREED char *p = NULL;
    size_t n = 0, cap = 0;
    for (ssize_t got = 1; got;) {
        if (n > MT_READ_MOST)
            return mt_fail(err, MT_ERR_RUNTIME, -EFBIG, "cannot read %s: it has more than %zu bytes", path, MT_READ_MOST);
        if (!mt_grow(&p, &cap, n + 65536 + 1, 1))
            return mt_fail_nomem(err, path, n);
        got = read(fd, p + n, cap - n - 1);
        if (got < 0 && errno != EINTR)
            return fail_path(err, "read", path);
        n += (size_t)MT_MAX(got, (ssize_t)0);
    }
    p[n] = 0;
    *text = p;
    *len = n;
    p = NULL;
    return 0;
}

int mt_read_file(const char *path, char **text, size_t *len, struct mt_err *err)
{
    MT_FD_CLOSED int fd = mt_open_regular(path, err);
    return fd < 0 ? fd : read_whole(fd, path, text, len, err);
}

int mt_read_stream(const char *path, char **text, size_t *len, struct mt_err *err)
{
    MT_FD_CLOSED int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? fail_path(err, "open", path) : read_whole(fd, path, text, len, err);
}

int mt_lock_file(int fd, bool wait)
{
    int rc;
    do
        rc = flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB)) ? -errno : 0;
    while (rc == -EINTR);
    return rc;
}

int mt_sync_dir(const char *path)
{
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    MT_FD_CLOSED int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) ? -errno : 0;
    if (fd >= 0 && (rc == -EINVAL || rc == -ENOTSUP || rc == -EOPNOTSUPP)) {
        if (!atomic_flag_test_and_set(&warned))
            mt_warn("%s: this file system cannot sync folders: a new file may be lost if the power fails", path);
        return 0;
    }
    return rc;
}

int mt_sync_parent(const char *path)
{
    char dir[4096];
    if (snprintf(dir, sizeof(dir), "%s", path) >= (int)sizeof(dir))
        return -ENAMETOOLONG;
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        dir[--n] = 0;
    char *slash = strrchr(dir, '/');
    if (slash == dir)
        slash++;
    if (slash)
        *slash = 0;
    int rc = mt_sync_dir(slash ? dir : ".");
    return rc == -EACCES ? 0 : rc; /* a folder that may be written but not read */
}

int mt_write_file(const char *path, const void *data, size_t len, struct mt_err *err)
{
    char tmp[4096];
    mode_t mask = umask(0);
    umask(mask);
    if (snprintf(tmp, sizeof(tmp), "%s.XXXXXX.tmp", path) >= (int)sizeof(tmp))
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", path);
    int fd = mkostemps(tmp, 4, O_CLOEXEC); /* a unique name: two processes may write the same file */
    if (fd < 0)
        return fail_path(err, "create", tmp);
    int rc = mt_write_all(fd, data, len);
    if (fchmod(fd, 0666 & ~mask))
        mt_debug("%s: %s", tmp, strerror(errno));
    if (!rc && fsync(fd))
        rc = -errno;
    if (close(fd) && !rc)
        rc = -errno;
    if (!rc && rename(tmp, path))
        rc = -errno;
    if (rc)
        unlink(tmp);
    rc = rc ?: mt_sync_parent(path);
    if (rc) {
        errno = -rc;
        return fail_path(err, "write", path);
    }
    return 0;
}

int mt_mkdir_p(const char *path, struct mt_err *err)
{
    char p[4096];
    if (snprintf(p, sizeof(p), "%s", path) >= (int)sizeof(p))
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", path);
    for (char *s = p + 1;; s++) {
        if (*s && *s != '/')
            continue;
        char c = *s;
        *s = 0;
        int failed = mkdir(p, 0777) ? errno : -mt_sync_parent(p);
        failed = failed == EEXIST ? 0 : failed;
        if (failed) {
            errno = failed;
            return fail_path(err, "create folder", p);
        }
        if (!c)
            break;
        *s = c;
    }
    if (!mt_is_dir(path)) {
        errno = ENOTDIR;
        return fail_path(err, "create folder", path);
    }
    return 0;
}

int mt_make_parent(const char *path, struct mt_err *err)
{
    const char *slash = strrchr(path, '/');
    return slash ? mt_mkdir_p(MT_PATH("%.*s", (int)(slash - path), path), err) : 0;
}

static int remove_at(int dir, const char *name)
{
    if (!unlinkat(dir, name, 0) || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -errno;
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        int e = errno;
        if (fd >= 0)
            close(fd);
        return -e;
    }
    int rc = 0;
    for (struct dirent *e; !rc && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            rc = remove_at(dirfd(d), e->d_name);
    closedir(d);
    if (!rc && unlinkat(dir, name, AT_REMOVEDIR))
        rc = -errno;
    return rc;
}

int mt_rename(const char *from, const char *to, struct mt_err *err)
{
    int rc = rename(from, to) ? -errno : mt_sync_parent(to);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot rename %s to %s: %s", from, to, strerror(-rc)) : 0;
}

int mt_remove_tree(const char *path, struct mt_err *err)
{
    int rc = remove_at(AT_FDCWD, path);
    if (rc) {
        errno = -rc;
        return fail_path(err, "remove", path);
    }
    return 0;
}

bool mt_path_exists(const char *path)
{
    return !access(path, F_OK);
}

char *mt_find_program(const char *name, bool whole)
{
    const char *path = getenv("PATH");
    MT_FREED char *folders = strdup(path ? path : "/usr/local/bin:/usr/bin:/bin");
    char *rest = folders, *dir, *found = NULL;
    while (!found && (dir = strsep(&rest, ":"))) {
        MT_FREED char *p = *dir == '/' || !whole ? mt_path_join(*dir ? dir : ".", name) : NULL;
        found = p && !access(p, X_OK) ? MT_GIVE(p) : NULL;
    }
    return found;
}

bool mt_is_dir(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

bool mt_is_same_file(const char *a, const char *b)
{
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool mt_path_has_extension(const char *path, const char *end)
{
    size_t n = strlen(path), m = strlen(end);
    return n >= m && !strcasecmp(path + n - m, end);
}

char *mt_path_join(const char *dir, const char *name)
{
    char *p = NULL;
    if (name[0] == '/' || !dir[0])
        return strdup(name);
    if (asprintf(&p, "%s%s%s", dir, dir[strlen(dir) - 1] == '/' ? "" : "/", name) < 0)
        return NULL;
    return p;
}

char *mt_path_canonical(const char *path)
{
    char *whole = realpath(path, NULL);
    if (whole)
        return whole;
    const char *slash = strrchr(path, '/');
    MT_FREED char *dir = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    MT_FREED char *real = dir ? realpath(dir, NULL) : NULL;
    if (real) {
        whole = mt_path_join(real, slash ? slash + 1 : path);
    } else if (*path == '/') {
        whole = strdup(path);
    } else {
        MT_FREED char *cwd = getcwd(NULL, 0);
        whole = cwd ? mt_path_join(cwd, path) : NULL;
    }
    return whole;
}
