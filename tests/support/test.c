/* SPDX-License-Identifier: Apache-2.0 */
#include "test.h"

#include <stdlib.h>
#include <unistd.h>

enum { MOST = 128 };

static struct CMUnitTest tests[MOST];
static size_t n_tests;
static CMFixtureFunction before, after;

void test_list(const char *name, CMUnitTestFunction test, CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    if (n_tests == MOST)
        abort();
    tests[n_tests++] = (struct CMUnitTest){name, test, set_up, tear_down, NULL};
}

void test_group(CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    before = set_up;
    after = tear_down;
}

int test_run(void)
{
    return _cmocka_run_group_tests("tests", tests, n_tests, before, after);
}

double patience(double seconds)
{
    double load, cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
    return getloadavg(&load, 1) == 1 && load > cores ? seconds * load / cores : seconds;
}
