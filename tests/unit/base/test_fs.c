/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "test.h"

static char dir[64];

static const char *at(const char *name)
{
    static char path[4][8192];
    static int k;
    char *p = path[k++ % 4];
    snprintf(p, 8192, "%s/%s", dir, name);
    return p;
}

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-fs-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

TEST(a_file_comes_back_with_a_nul)
{
    static const size_t sizes[] = {0, 1, 65535, 65536, 65537, 1000003};
    for (size_t i = 0; i < MT_ARRAY_LEN(sizes); i++) {
        size_t n = sizes[i], len = 0;
        char *data = malloc(n + 1), *text = NULL;
        for (size_t k = 0; k < n; k++)
            data[k] = (char)(k * 31 + i);
        assert_int_equal(mt_write_file(at("f"), data, n, NULL), 0);
        assert_int_equal(mt_read_file(at("f"), &text, &len, NULL), 0);
        assert_int_equal(len, n);
        assert_memory_equal(text, data, n);
        assert_int_equal(text[n], 0);
        assert_false(mt_path_exists(at("f.tmp")));
        free(text);
        free(data);
    }
}

TEST(errors_name_the_path)
{
    struct mt_err err = {0};
    char *text = NULL, *long_name = malloc(5001);
    size_t len = 0;
    assert_int_equal(mt_read_file(at("none"), &text, &len, &err), -ENOENT);
    assert_non_null(strstr(err.msg, at("none")));
    assert_int_equal(mt_read_file(dir, &text, &len, &err), -EISDIR);
    assert_int_equal(mt_write_file(at("no/such/folder"), "x", 1, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "no/such/folder"));
    memset(long_name, 'a', 5000);
    long_name[5000] = 0;
    assert_int_equal(mt_write_file(long_name, "x", 1, &err), -ENAMETOOLONG);
    assert_int_equal(mt_mkdir_p(long_name, &err), -ENAMETOOLONG);
    assert_null(text);
    free(long_name);
}

static size_t n_names(const char *folder)
{
    DIR *d = opendir(folder);
    size_t n = 0;
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

/* In a folder of its own: to a full disk's limit, and over a folder. */
TEST(a_failed_write_leaves_the_old_file)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    struct rlimit was, small = {2, RLIM_INFINITY};
    assert_int_equal(mt_mkdir_p(at("w/folder"), NULL), 0);
    assert_int_equal(mt_write_file(at("w/keep"), "old", 3, NULL), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, SIG_IGN);
    small.rlim_max = was.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc = mt_write_file(at("w/keep"), "new", 3, NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(rc, -EFBIG);
    assert_int_equal(mt_read_file(at("w/keep"), &text, &len, NULL), 0);
    assert_string_equal(text, "old");
    assert_int_equal(mt_write_file(at("w/folder"), "new", 3, NULL), -EISDIR);
    assert_int_equal(n_names(at("w")), 2);
}

/* A name that is taken, as another writer's temporary file would, is not in the way. */
TEST(two_writers_have_names_of_their_own)
{
    assert_int_equal(mkdir(at("mine.tmp"), 0777), 0);
    assert_int_equal(mt_write_file(at("mine"), "x", 1, NULL), 0);
}

TEST(programs_are_found_as_a_shell_finds_them)
{
    char whole[4300], *was = strdup(getenv("PATH"));
    assert_int_equal(mt_write_file(at("tool"), "", 0, NULL), 0);
    snprintf(whole, sizeof(whole), "%s", at("tool"));
    char *slash = strrchr(whole, '/');
    *slash = '\0';
    setenv("PATH", MT_PATH("/nowhere::%s", whole), 1);
    assert_null(mt_find_program("tool", false)); /* it cannot be run */
    assert_int_equal(chmod(at("tool"), 0700), 0);
    MT_FREED char *found = mt_find_program("tool", true);
    assert_string_equal(found, at("tool"));
    assert_null(mt_find_program("none", false));
    char *here = getcwd(NULL, 0);
    assert_int_equal(chdir(whole), 0);
    setenv("PATH", "/nowhere:", 1); /* an empty name is the working folder */
    MT_FREED char *below = mt_find_program("tool", false);
    assert_non_null(below);
    assert_null(mt_find_program("tool", true));
    assert_int_equal(chdir(here), 0);
    setenv("PATH", was, 1);
    free(here);
    free(was);
    unlink(at("tool"));
}

TEST(folders_are_made_and_removed_whole)
{
    struct mt_err err = {0};
    assert_int_equal(mt_mkdir_p(at("a/b/c"), NULL), 0);
    assert_int_equal(mt_mkdir_p(at("a/b/c/"), NULL), 0);
    assert_true(mt_is_dir(at("a/b/c")));
    assert_int_equal(mt_write_file(at("a/b/c/f"), "x", 1, NULL), 0);
    assert_int_equal(mt_mkdir_p(at("a/b/c/f"), &err), -ENOTDIR);
    assert_int_equal(mt_mkdir_p(at("a/b/c/f/g"), &err), -ENOTDIR);
    assert_int_equal(mt_write_file(at("outside"), "x", 1, NULL), 0);
    assert_int_equal(mkdir(at("elsewhere"), 0777), 0);
    assert_int_equal(mt_write_file(at("elsewhere/f"), "x", 1, NULL), 0);
    assert_int_equal(symlink("../../outside", at("a/b/link")), 0);
    assert_int_equal(symlink("../../elsewhere", at("a/b/dir_link")), 0);
    for (int i = 0; i < 300; i++) {
        char name[32];
        snprintf(name, sizeof(name), "a/b/many%d", i);
        assert_int_equal(mt_write_file(at(name), "", 0, NULL), 0);
    }
    assert_int_equal(mt_remove_tree(at("a"), NULL), 0);
    assert_false(mt_path_exists(at("a")));
    assert_true(mt_path_exists(at("outside"))); /* links are not followed */
    assert_true(mt_path_exists(at("elsewhere/f")));
    assert_int_equal(mt_remove_tree(at("a"), NULL), 0); /* gone already */
}

TEST(paths_are_joined)
{
    static const char *const cases[][3] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"", "b", "b"}, {"a", "/b", "/b"}, {"/", "b", "/b"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        char *p = mt_path_join(cases[i][0], cases[i][1]);
        assert_string_equal(p, cases[i][2]);
        free(p);
    }
}

TEST(short_reads_are_told)
{
    char buf[8];
    assert_int_equal(mt_write_file(at("s"), "12345678", 8, NULL), 0);
    int fd = open(at("s"), O_RDONLY | O_CLOEXEC);
    assert_int_equal(mt_pread_all(fd, buf, 4, 4), 0);
    assert_memory_equal(buf, "5678", 4);
    assert_int_equal(mt_pread_all(fd, buf, 5, 4), -ENODATA);
    assert_int_equal(mt_write_all(fd, "x", 1), -EBADF);
    close(fd);
}

TEST(one_file_has_one_canonical_path)
{
    char *real = NULL, *other = NULL, *missing = NULL;
    assert_int_equal(mt_write_file(at("plain"), "x", 1, NULL), 0);
    assert_int_equal(symlink("plain", at("link")), 0);
    real = mt_path_canonical(at("plain"));
    other = mt_path_canonical(at("link"));
    assert_string_equal(real, other);
    free(other);
    other = mt_path_canonical(at("no-such-file"));
    missing = mt_path_canonical("/no-such-folder/file");
    assert_non_null(strstr(other, "/no-such-file"));
    assert_string_equal(missing, "/no-such-folder/file");
    free(real);
    free(other);
    free(missing);
}

TEST(a_path_that_does_not_fit_names_no_file)
{
    char path[16];
    assert_int_equal(mt_path_printf(path, sizeof(path), "%s/%s", "0123456789", "abcd"), 0);
    assert_string_equal(path, "0123456789/abcd");
    assert_int_equal(mt_path_printf(path, sizeof(path), "%s/%s", "0123456789", "abcde"), -ENAMETOOLONG);
    assert_string_equal(path, "");
}

TEST_GROUP(set_up, tear_down)
