/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "device/arena.h"

enum { MT_CPU_ALIGNMENT = MT_ARENA_ALIGNMENT };

/** An arena (device/arena.h) in one mapping of its own. Thread-safety: one thread. */
struct mt_cpu_arena;

int mt_cpu_arena_create(struct mt_cpu_arena **out, size_t budget, struct mt_err *err);
void mt_cpu_arena_destroy(struct mt_cpu_arena **a);
int mt_cpu_arena_alloc(struct mt_cpu_arena *a, size_t bytes, const char *tag, void **out,
                       struct mt_err *err);
void mt_cpu_arena_free(struct mt_cpu_arena *a, void *ptr);
size_t mt_cpu_arena_used(const struct mt_cpu_arena *a);
