/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/**
 * Numbers as people write them, in configurations, sweeps and options. mt_parse_...() parses the whole text: it returns
 * true and sets *out, or returns false and leaves *out alone. Infinities, NaN, hexadecimal numbers and leading white
 * space are refused.
 *
 * Thread-safety: any thread.
 */

enum { MT_CHOICE_NAME = 32 };
/** Name i of "auto|keep|offload", in buf. */
const char *mt_choice_name(char buf[MT_CHOICE_NAME], const char *choices, int i);
/** The number of a name; -1: it is none of them, or choices is NULL. */
int mt_choice_find(const char *choices, const char *name);
/** The same with upper and lower case alike. */
int mt_choice_find_any_case(const char *choices, const char *name);

/** "1e-5" */
bool mt_parse_real(const char *text, double *out);
/** "65536", "64Ki", "64 Ki", "-1": an integer, |value| <= 2^62, with units k, M, G (powers of 1000), Ki, Mi, Gi. */
bool mt_parse_count(const char *text, int64_t *out);
/** "20GiB", "5 GB", "512B": a unit is required (B, kB, KB, MB, GB, TB, KiB, MiB, GiB, TiB); below 2^62. */
bool mt_parse_bytes(const char *text, uint64_t *out);
/** "25GB/s" in bytes per second: a unit of bytes and "/s". */
bool mt_parse_rate(const char *text, double *out);
/** "3%" as 0.03 */
bool mt_parse_percent(const char *text, double *out);
/** "90s", "30m", "11h30m", "250ms", "2d", "0" in seconds. */
bool mt_parse_duration(const char *text, double *out);
