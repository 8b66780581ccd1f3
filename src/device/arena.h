/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"

enum { MT_ARENA_ALIGNMENT = 256 };

/**
 * The book-keeping of a bounded arena over memory that a backend owns and that the arena never touches: first
 * fit; free neighbours are merged. Aligned sizes count towards the budget. Under AddressSanitizer there are gaps
 * between allocations, for which the span is larger, and everything but allocations is poisoned.
 * Thread-safety: one thread.
 */
struct mt_arena;

/** Bytes of memory that an arena of that budget needs. */
size_t mt_arena_span(size_t budget);
/** `base`: mt_arena_span(budget) bytes, aligned to MT_ARENA_ALIGNMENT, borrowed. */
int mt_arena_create(struct mt_arena **out, void *base, size_t budget, struct mt_err *err);
/** Accepts NULL. The memory stays with its owner. */
void mt_arena_destroy(struct mt_arena **a);
/** -ENOMEM (MT_ERR_NO_FIT) beyond the budget, with a table of what holds the memory by tag. */
int mt_arena_alloc(struct mt_arena *a, size_t bytes, const char *tag, void **out,
                   struct mt_err *err);
void mt_arena_free(struct mt_arena *a, void *ptr);
size_t mt_arena_used(const struct mt_arena *a);
