/* SPDX-License-Identifier: Apache-2.0 */
#include <linux/mempolicy.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "hw/hw.h"

/* Of the calling thread; -1: it cannot be asked. */
static int policy(void)
{
    int mode = -1;
    return syscall(SYS_get_mempolicy, &mode, NULL, 0UL, NULL, 0UL) ? -1 : mode;
}

static void *ask(void *mode)
{
    *(int *)mode = policy();
    return NULL;
}

/* This machine has one node as a rule: one suffices here. */
static void threads_that_follow_spread_their_memory(void **state)
{
    (void)state;
    pthread_t t;
    int of_thread = -1;
    if (policy() != MPOL_DEFAULT || !WITH_LIBNUMA || syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0UL)) /* forbidden */
        skip();
    assert_int_equal(mt_hw_interleave(1000), 0); /* too few nodes: as it was */
    assert_int_equal(policy(), MPOL_DEFAULT);
    assert_true(mt_hw_interleave(1) >= 1);
    assert_int_equal(policy(), MPOL_INTERLEAVE);
    assert_int_equal(pthread_create(&t, NULL, ask, &of_thread), 0);
    pthread_join(t, NULL);
    assert_int_equal(of_thread, MPOL_INTERLEAVE);
    assert_int_equal(mt_hw_interleave(1), 0); /* what numactl has said stays */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_that_follow_spread_their_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
