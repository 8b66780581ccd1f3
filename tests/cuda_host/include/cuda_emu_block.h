/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuda_runtime_api.h"

/**
 * What cuda_emu_device.h and cuda_emu_launch.h ask of the runtime. The first part is called by the threads
 * of a block (fibers) while a kernel runs, the second by host code that launches one.
 */
#ifdef __cplusplus
extern "C" {
#endif

struct mt_emu_dim {
    unsigned x, y, z;
};

/* Set before a fiber goes on; all fibers of a block share an OS thread. */
extern __thread struct mt_emu_dim mt_emu_thread_idx, mt_emu_block_idx, mt_emu_block_dim,
    mt_emu_grid_dim;

enum mt_emu_collective_op {
    MT_EMU_SYNCWARP,
    MT_EMU_BALLOT,
    MT_EMU_SHFL,
    MT_EMU_SHFL_UP,
    MT_EMU_SHFL_DOWN,
    MT_EMU_SHFL_XOR,
    MT_EMU_CALL,
};

/** __syncthreads: every thread of the block, at the same line; else the process ends with a report. */
void mt_emu_barrier(const char *file, int line);
/**
 * A collective of the lanes in `mask`: all of them must arrive with the same mask, operation and line.
 * Reading from a lane that is not in the mask is an error too (CUDA: undefined).
 */
uint64_t mt_emu_collective(enum mt_emu_collective_op op, unsigned mask, uint64_t value, int arg,
                           int width, const char *file, int line);
/**
 * What a lane brings to mt_emu_warp_call, as the first member of a struct of its own. When the last lane of the
 * mask has arrived, `all` is called once, before any of them goes on; lanes outside the mask are NULL.
 */
struct mt_emu_lane {
    void (*all)(struct mt_emu_lane *const lanes[32], unsigned mask);
};
/** A collective as above, of which `all` is the operation; it must be the same in all lanes. */
void mt_emu_warp_call(unsigned mask, struct mt_emu_lane *mine, const char *file, int line);
/**
 * Of the OS thread: counts the blocks that began and the barriers that completed. What two threads of a block
 * do at the same count no barrier orders. block_epoch: its value when the block began.
 */
extern __thread uint64_t mt_emu_epoch, mt_emu_block_epoch;
/** The block's dynamic shared memory: 16-byte aligned, filled with NaN patterns when a block begins. */
void *mt_emu_dynamic_shared(void);

/** A launch: run(args) is called once a thread; `args` is owned from here on and released by free_args. */
struct mt_emu_launch {
    const char *name;
    const void *kernel;
    struct mt_emu_dim grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    void (*run)(const void *args);
    void (*free_args)(void *args);
    void *args;
};
cudaError_t mt_emu_launch(const struct mt_emu_launch *l);
/** The live allocation of device memory that holds p; false where there is none. */
int mt_emu_allocation_of(const void *p, uintptr_t *base, size_t *bytes);
/** Says on stderr what the kernel did that a GPU would fault or go wild on; does not return. */
void mt_emu_die(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
/** Whether a kernel may be given this pointer (device memory or NULL); reports when not. */
int mt_emu_check_pointer(const char *kernel, int arg, const void *p);
/** The same for an argument that is a struct: no word of it may point to host memory known as such. */
int mt_emu_check_struct(const char *kernel, int arg, const void *p, size_t bytes);
/** What the launch of a kernel with a bad argument returns, now and ever after. */
cudaError_t mt_emu_fail_launch(void);

#ifdef __cplusplus
}
#endif
