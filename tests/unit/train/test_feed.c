/* SPDX-License-Identifier: Apache-2.0 */
/* A command that reads too slowly gets fewer lines, each whole, and holds nobody up. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/fs.h"
#include "train/feed.h"

enum { LINES = 2000, LEN = 6001 }; /* longer than what a pipe takes as one */

static void lines_are_whole_or_dropped(void **state)
{
    char dir[] = "/tmp/mt-feed-XXXXXX", command[128], path[64], line[LEN + 1], *text = NULL;
    size_t len = 0, n = 0;
    struct mt_feed *f = NULL;
    (void)state;
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

static void a_command_that_ended_gets_no_more(void **state)
{
    struct mt_feed *f = NULL;
    char line[LEN];
    (void)state;
    memset(line, '\n', sizeof(line));
    assert_int_equal(mt_feed_open(&f, "exit 0", NULL), 0);
    for (int i = 0; i < LINES; i++)
        mt_feed_put(f, line, LEN);
    mt_feed_close(&f);
    assert_null(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lines_are_whole_or_dropped),
                                       cmocka_unit_test(a_command_that_ended_gets_no_more)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
