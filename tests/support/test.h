/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/err.h"

/**
 * A program's tests, each listed where it is written: TEST(a_sentence_that_holds) { ... }. They run in that order. main()
 * is that of test_main.c, unless a program has one of its own, which ends in `return test_run();`.
 */
#define TEST(name) TEST_WITH(name, NULL, NULL)
/** The same between two functions, for its own fixture, *state. */
#define TEST_WITH(name, set_up, tear_down)                     \
    static void name(void **state);                            \
    __attribute__((constructor)) static void list_##name(void) \
    {                                                          \
        test_list(#name, name, set_up, tear_down);             \
    }                                                          \
    static void name(__attribute__((unused)) void **state)
/** Once in a program: functions before and after all of its tests. */
#define TEST_GROUP(set_up, tear_down)                      \
    __attribute__((constructor)) static void list_all(void) \
    {                                                      \
        test_group(set_up, tear_down);                     \
    }

void test_list(const char *name, CMUnitTestFunction test, CMFixtureFunction set_up, CMFixtureFunction tear_down);
void test_group(CMFixtureFunction set_up, CMFixtureFunction tear_down);
/** Runs all; returns the number of those that failed. */
int test_run(void);

/** Seconds of waiting that are long enough on an idle machine, more by as much as this one is busy. */
double patience(double seconds);

/** Calls fn(..., &err): fails with the error's message unless it returns 0. */
#define MUST(fn, ...)                             \
    do {                                          \
        struct mt_err err_ = {0};                 \
        if (fn(__VA_ARGS__, &err_))               \
            fail_msg("%s: %s", #fn, err_.msg);    \
    } while (0)
