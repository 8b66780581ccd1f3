/* SPDX-License-Identifier: Apache-2.0 */
/* A command that reads too slowly gets fewer lines, each whole, and holds nobody up. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "test.h"
#include "train/feed.h"

enum { LINES = 2000, LEN = 6001 }; /* longer than what a pipe takes as one */

TEST(lines_are_whole_or_dropped)
{
    char dir[] = "/tmp/mt-feed-XXXXXX", command[128], path[64], line[LEN + 1], *text = NULL;
    size_t len = 0, n = 0;
    struct mt_feed *f = NULL;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/got", dir);
    snprintf(command, sizeof(command), "sleep 1; cat > %s", path);
    signal(SIGPIPE, SIG_IGN);
    assert_int_equal(mt_feed_open(&f, command, NULL), 0);
    int64_t began = mt_now_ns();
    for (int i = 0; i < LINES; i++) {
        memset(line, 'a' + i % 26, LEN);
        line[LEN - 1] = '\n';
        mt_feed_put(f, line, LEN);
    }
    assert_true(mt_now_ns() - began < 900000000); /* it did not wait for the command */
    mt_feed_close(&f);
    assert_null(f);
    assert_int_equal(mt_read_file(path, &text, &len, NULL), 0);
    for (char *at = text; at < text + len; at += LEN, n++) {
        assert_true(at + LEN <= text + len && at[LEN - 1] == '\n');
        for (int k = 1; k + 1 < LEN; k++)
            assert_int_equal(at[k], at[0]);
    }
    assert_in_range(n, 1, LINES - 1);
    free(text);
    assert_int_equal(mt_remove_tree(dir, NULL), 0);
}

TEST(a_command_that_ended_gets_no_more)
{
    struct mt_feed *f = NULL;
    char line[LEN];
    memset(line, '\n', sizeof(line));
    assert_int_equal(mt_feed_open(&f, "exit 0", NULL), 0);
    for (int i = 0; i < LINES; i++)
        mt_feed_put(f, line, LEN);
    mt_feed_close(&f);
    assert_null(f);
}

/* The process that wrote its number to the file is gone; a zombie is, too. */
static bool is_gone(const char *path)
{
    char name[64], *text = NULL, *stat = NULL;
    size_t len;
    bool gone = true;
    for (int i = 0; i < 200 && mt_read_file(path, &text, &len, NULL); i++)
        usleep(10000);
    assert_non_null(text);
    for (int i = 0; i < 500; i++, usleep(10000)) {
        snprintf(name, sizeof(name), "/proc/%d/stat", atoi(text));
        gone = mt_read_file(name, &stat, &len, NULL) || strstr(stat, ") Z ");
        free(stat);
        stat = NULL;
        if (gone)
            break;
    }
    free(text);
    return gone;
}

/* A command that does not read, one that leaves something running, one that holds on to SIGTERM. */
TEST(nothing_outlives_the_run)
{
    static const char *const commands[] = {"echo $$ > %s.new; mv %s.new %s; exec sleep 100",
                                           "sleep 20 & echo $! > %s.new; mv %s.new %s",
                                           "trap '' TERM; echo $$ > %s.new; mv %s.new %s; while :; do sleep 1; done"};
    enum { N = 3 };
    char path[N][2][32];
    for (int i = 0; i < N; i++)
        for (int dies = 0; dies < 2; dies++) {
            char command[300];
            struct mt_feed *f = NULL;
            strcpy(path[i][dies], "/tmp/mt-feed-XXXXXX");
            close(mkstemp(path[i][dies]));
            unlink(path[i][dies]);
            const char *at = path[i][dies];
            snprintf(command, sizeof(command), commands[i], at, at, at);
            if (fork())
                continue;
            int rc = mt_feed_open(&f, command, NULL);
            for (int k = 0; k < 500 && access(at, F_OK); k++)
                usleep(10000);
            if (!rc && !dies)
                mt_feed_close(&f);
            _exit(0);
        }
    for (int n = 0; n < 2 * N; n++)
        wait(NULL);
    for (int i = 0; i < N; i++)
        for (int dies = 0; dies < 2; dies++) {
            if (!dies || i != 1) /* what a command left that has ended is known to nobody then */
                assert_true(is_gone(path[i][dies]));
            unlink(path[i][dies]);
        }
}

/* Its streams are pipes: who waits for the end of ours does not wait for it. */
TEST(streams_are_its_own)
{
    int ends[2], own = dup(STDERR_FILENO);
    char text[256] = "";
    struct mt_feed *f = NULL;
    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    assert_int_equal(mt_feed_open(&f, "echo out; echo error >&2; setsid sleep 5 & cat > /dev/null", NULL), 0);
    mt_feed_close(&f);
    dup2(own, STDERR_FILENO);
    close(own);
    int64_t began = mt_now_ns();
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], text + n, sizeof(text) - 1 - n)) > 0;)
        n += (size_t)got;
    assert_true(mt_now_ns() - began < 2000000000);
    assert_non_null(strstr(text, "out\nerror\n"));
    close(ends[0]);
}
