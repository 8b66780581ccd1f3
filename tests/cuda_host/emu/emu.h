/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_emu_block.h"
#include "cuda_runtime_api.h"
#include "sanitizers.h"

/**
 * The insides of the host emulation (README.md). Lowest first: report (settings, error state), memory
 * (the device region, pinned host memory), fiber, block (one block of a kernel), grid (all blocks of
 * one), stream (queues, events), copy, device (what cudaGet... answer), cublaslt.
 */

/* --- settings and errors (report.c) --------------------------------------------------------- */

enum { MT_EMU_MAX_DEVICES = 8 };

struct mt_emu_settings {
    uint64_t seed;        /* MT_EMU_SEED, default 1; 0: threads and blocks run in order */
    unsigned jitter_us;   /* MT_EMU_JITTER_US: longest random delay before a command of a stream */
    unsigned hold_up_us;  /* MT_EMU_HOLD_UP_US: for how long some submissions keep their threads */
    int devices;          /* MT_EMU_DEVICES: how many there are, default 1, at most MT_EMU_MAX_DEVICES */
    unsigned connections; /* CUDA_DEVICE_MAX_CONNECTIONS at the first call: queues of a device, default 8 */
    unsigned workers;     /* MT_EMU_WORKERS: OS threads that run blocks of one kernel, default 2 */
    size_t memory_bytes;  /* MT_EMU_MEMORY: memory of each device, default 2 GiB */
    size_t pin_bytes;     /* MT_EMU_PIN_LIMIT: host memory that may be registered; MT_EMU_NO_PIN: none */
    size_t buffer_bytes;  /* MT_EMU_NO_PIN=2: of locked memory that may be allocated */
    size_t kernel_bytes;  /* MT_EMU_KERNEL: device memory of a kernel from its first launch on, default 64 KiB */
    size_t plan_bytes;    /* MT_EMU_PLAN: of a plan of fused attention, default 1 MiB */
    bool no_device;       /* MT_EMU_NO_DEVICE: as on a machine without a GPU */
    const char *name;     /* MT_EMU_NAME: of the product, default "host emulation"; "A;B": B is that of later devices */
    int capability;       /* MT_EMU_CAPABILITY: compute capability times 10, default 90 */
};
const struct mt_emu_settings *mt_emu_settings(void);

/** The calling thread's current device, as cudaSetDevice() left it. */
int mt_emu_device(void);
/** The device that a stream is of. */
int mt_emu_device_of_stream(cudaStream_t s);

/** Says on stderr what the program under test did wrong. */
void mt_emu_complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/** Remembers e as this thread's last error; returns the process's sticky error when there is one. */
cudaError_t mt_emu_result(cudaError_t e);
/** From now on every call fails with e. */
cudaError_t mt_emu_make_sticky(cudaError_t e);
/** Calls from a cudaLaunchHostFunc function are not permitted: brackets one. */
void mt_emu_enter_host_function(void);
void mt_emu_leave_host_function(void);

/** A stream of random numbers, splitmix64. */
MT_EMU_UNCHECKED static inline uint64_t mt_emu_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* --- memory (memory.c, pinned.c) ------------------------------------------------------------ */

/** What a driver or library takes of the current device's memory for itself, such as the code of a
 * kernel; false: it is not there. */
bool mt_emu_driver_take(size_t bytes);
void mt_emu_driver_give(size_t bytes);

/** Lets the calling OS thread touch a device's memory, and no other's (where the CPU has protection
 * keys). */
void mt_emu_device_access(int device);
enum { MT_EMU_NO_ACCESS = -1 };
bool mt_emu_is_device(const void *p);
/** Whether [p, p + bytes) lies in one live allocation of that device; if not, complains in the name
 * of `what`. */
bool mt_emu_check_device(const char *what, int device, const void *p, size_t bytes);
/** A few words about an address: "device memory", "pinned host memory", "host memory". */
const char *mt_emu_describe(const void *p);

enum mt_emu_pin { MT_EMU_PAGEABLE, MT_EMU_PINNED, MT_EMU_PARTLY_PINNED };
/** As a device sees it: memory that is registered for another one alone is not. Pinned is what lies in one range: the
 * driver refuses copies of what was registered by several calls. */
enum mt_emu_pin mt_emu_pin_state(int device, const void *p, size_t bytes);
/** Whether cudaHostGetDevicePointer() was asked about the locked range that holds p, and that range. */
bool mt_emu_mapped(const void *p, uintptr_t *base, size_t *bytes);
/** Copies that copy engines were given so far. */
size_t mt_emu_copies(void);
/** Attempts so far to register what was registered. */
size_t mt_emu_registered_twice(void);

/* --- fibers (fiber.c) ----------------------------------------------------------------------- */

/** One flow of control with a stack of its own; belongs to one OS thread. */
struct mt_emu_fiber {
    void *sp;
    char *stack; /* lowest usable byte */
    size_t stack_bytes;
    void (*main)(void *);
    void *arg, *asan_stack, *tsan, *context;
};
/** The first switch to it calls main(arg), which must not return. */
void mt_emu_fiber_init(struct mt_emu_fiber *f, void (*main)(void *), void *arg);
/** Not of the fiber that runs. */
void mt_emu_fiber_finish(struct mt_emu_fiber *f);
/** The calling OS thread's own flow, as something to switch back to. */
void mt_emu_fiber_adopt(struct mt_emu_fiber *f);
/** `from` is the flow that runs; returns when somebody switches back to it. */
void mt_emu_fiber_switch(struct mt_emu_fiber *from, struct mt_emu_fiber *to);

/* --- kernels (block.c, grid.c) -------------------------------------------------------------- */

enum { MT_EMU_WARP = 32, MT_EMU_MAX_THREADS = 1024 };

/** Kernels that were launched so far. */
size_t mt_emu_launches(void);
/** Runs block `index` of a launch on the calling OS thread. */
void mt_emu_run_block(const struct mt_emu_launch *l, uint64_t index, uint64_t seed);
/** Runs all blocks of a launch on a device, with the help of other OS threads; returns when they
 * have ended. */
void mt_emu_run_grid(const struct mt_emu_launch *l, int device, uint64_t seed);
/** Of launches from now on only the last `n` blocks run; 0: all. For tests of sizes whose whole would take days. Work that
 * was submitted before must have ended. */
void mt_emu_run_last_blocks(uint64_t n);

/* --- streams (stream.c) --------------------------------------------------------------------- */

/** What a command does, on the stream's own thread; `args` were copied. */
typedef void (*mt_emu_command)(void *args);
/** Enqueues; `done` (or NULL) releases what args own. Waits while the stream holds 1024 commands. */
cudaError_t mt_emu_submit(cudaStream_t s, mt_emu_command run, mt_emu_command done, const void *args,
                          size_t bytes);
/** Streams that were made when each queue of their device had one: a real one of these waits for another. */
size_t mt_emu_streams_that_share(void);
/** Waits until all that was submitted to the stream so far has ended. */
void mt_emu_drain(cudaStream_t s);
void mt_emu_drain_all(void);

/* --- libraries (fused.c, cublaslt.c) -------------------------------------------------------- */

/** Plans that were asked of all its engines so far, those that they refused included. */
size_t mt_emu_fused_plans(void);
/** Products that cuBLASLt was given so far. */
size_t mt_emu_products(void);
