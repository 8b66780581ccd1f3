/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_CPU_ARENA_H
#define MT_DEVICE_CPU_ARENA_H

#include <stddef.h>

#include "base/err.h"

enum { MT_CPU_ALIGNMENT = 256 };

/**
 * A bounded arena: one mapping, first fit, freed neighbours merge. The budget counts the aligned sizes.
 * Under AddressSanitizer allocations stand apart and all else is poisoned; the mapping is larger for that.
 * Thread-safety: one thread.
 */
struct mt_cpu_arena;

int mt_cpu_arena_create(struct mt_cpu_arena **out, size_t budget, struct mt_err *err);
void mt_cpu_arena_destroy(struct mt_cpu_arena **a);
int mt_cpu_arena_alloc(struct mt_cpu_arena *a, size_t bytes, const char *tag, void **out,
                       struct mt_err *err);
void mt_cpu_arena_free(struct mt_cpu_arena *a, void *ptr);
size_t mt_cpu_arena_used(const struct mt_cpu_arena *a);
size_t mt_cpu_arena_peak(const struct mt_cpu_arena *a);

#endif
