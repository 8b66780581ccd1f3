/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/** What AddressSanitizer and ThreadSanitizer are told; nothing in other builds. */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MT_EMU_SANITIZED 1
#define MT_EMU_UNCHECKED __attribute__((no_sanitize_address, no_sanitize_thread))
#else
#define MT_EMU_UNCHECKED
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define mt_asan_start_switch(save, bottom, bytes) __sanitizer_start_switch_fiber(save, bottom, bytes)
#define mt_asan_finish_switch(save, bottom, bytes) __sanitizer_finish_switch_fiber(save, bottom, bytes)
#define mt_asan_poison(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define mt_asan_unpoison(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#define mt_asan_poisoned(p, n) __asan_region_is_poisoned((void *)(uintptr_t)(p), n)
#define MT_EMU_GAP 4096
#else
#define mt_asan_start_switch(save, bottom, bytes) ((void)(save), (void)(bottom), (void)(bytes))
#define mt_asan_finish_switch(save, bottom, bytes) ((void)(save), (void)(bottom), (void)(bytes))
#define mt_asan_poison(p, n) ((void)(p), (void)(n))
#define mt_asan_unpoison(p, n) ((void)(p), (void)(n))
#define mt_asan_poisoned(p, n) ((void)(p), (void)(n), (void *)NULL)
#define MT_EMU_GAP 0
#endif

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
/* Accesses of two threads of a block race only where they are fibers of their own. */
#define MT_EMU_FIBER_A_THREAD 1
#define mt_tsan_this_fiber() __tsan_get_current_fiber()
#define mt_tsan_create_fiber() __tsan_create_fiber(0)
#define mt_tsan_destroy_fiber(f) __tsan_destroy_fiber(f)
#define mt_tsan_switch(f) __tsan_switch_to_fiber(f, __tsan_switch_to_fiber_no_sync)
#define mt_tsan_acquire(p) __tsan_acquire(p)
#define mt_tsan_release(p) __tsan_release(p)
#else
#define MT_EMU_FIBER_A_THREAD 0
#define mt_tsan_this_fiber() NULL
#define mt_tsan_create_fiber() NULL
#define mt_tsan_destroy_fiber(f) ((void)(f))
#define mt_tsan_switch(f) ((void)(f))
#define mt_tsan_acquire(p) ((void)(p))
#define mt_tsan_release(p) ((void)(p))
#endif
