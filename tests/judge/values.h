/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/**
 * Which value each byte of a device's memory holds: what wrote it, and which of that value's bytes it is. Values have
 * names, so that what an operation reads can be said without addresses: a log of operations in these terms is the same
 * wherever scratch lies, and differs if an operation reads what another value has overwritten.
 *
 * Thread-safety: one thread.
 */
struct mt_judge_memory;

/** Pieces of memory: piece (i, j), i < outer, j < inner, is `bytes` bytes at p + i * pitch + j * stride. */
struct mt_judge_array {
    const char *name;
    int use; /* MT_JUDGE_* */
    const char *p;
    size_t bytes, inner, stride, outer, pitch;
};
enum { MT_JUDGE_READ = 1, MT_JUDGE_WRITE = 2, MT_JUDGE_UPDATE = 3 };

struct mt_judge_memory *mt_judge_memory_create(void);
void mt_judge_memory_destroy(struct mt_judge_memory *m);
/** Forgets everything. */
void mt_judge_memory_clear(struct mt_judge_memory *m);
/** The pieces, in their order, are the bytes of a new value of that name (copied). */
void mt_judge_write(struct mt_judge_memory *m, const struct mt_judge_array *a, const char *name);
/** Nothing is known of these bytes from now on: reading them is told as "?". */
void mt_judge_forget(struct mt_judge_memory *m, const void *p, size_t bytes);
/** Whether the byte at p has been written. */
bool mt_judge_holds(const struct mt_judge_memory *m, const void *p);
/**
 * Prints what the pieces hold: "x" all of a value; "x[128+64]" 64 bytes from byte 128 on; "x[128+64/512]*24" 24 pieces
 * 512 bytes apart; "{x 12.y}#1f2e" parts of several values, with a hash of which bytes in which order; "?" for bytes
 * that nothing wrote. Returns whether there are such.
 */
bool mt_judge_describe(struct mt_judge_memory *m, const struct mt_judge_array *a, char *buf, size_t len);
