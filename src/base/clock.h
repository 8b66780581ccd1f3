/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_CLOCK_H
#define MT_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/** Monotonic time in nanoseconds. */
static inline int64_t mt_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/** The same with the time in which the machine was suspended: for limits that others set, such as those of a queue. */
static inline int64_t mt_boot_ns(void)
{
    struct timespec ts;
    if (clock_gettime(CLOCK_BOOTTIME, &ts))
        return mt_now_ns();
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

#endif
