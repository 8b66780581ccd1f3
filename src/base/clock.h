/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <time.h>

/** Monotonic time in nanoseconds. */
static inline int64_t mt_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/** Since a time of mt_now_ns(). */
static inline double mt_seconds_since(int64_t ns)
{
    return (double)(mt_now_ns() - ns) * 1e-9;
}

/** mt_now_ns() with the time in which the machine was suspended: for limits that others set, as a queue's. */
static inline int64_t mt_boot_ns(void)
{
    struct timespec ts;
    if (clock_gettime(CLOCK_BOOTTIME, &ts))
        return mt_now_ns();
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}
