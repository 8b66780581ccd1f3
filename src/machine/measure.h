/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"
#include "device/metered.h"
#include "hw/homes.h"
#include "machine/machine.h"

/**
 * What measurements of this machine are given. Everything is timed under sustained load, with random data: zeros
 * are cheaper to move and to multiply. A figure is the median of several rounds, as a run's speed is that of its steps.
 */
struct mt_measure_params {
    const char *device_kind; /* "cpu" or "cuda" */
    int device_index;
    int n_threads;
    const int *cpus;         /* [n_threads] or NULL */
    const struct mt_numa *numa; /* homes of memory; NULL: the system places it */
    const char *disk_dir;    /* a folder on the drive to be measured, or NULL */
    bool brief;              /* only rates, no grid of operations */
    bool small;              /* for tests: tiny measurements, the rates are meaningless */
    double *cores_share;     /* receives what part of its cores' time the process got; may be NULL */
    double least_share;      /* with less, looked at before measuring and after each part, it ends with -EBUSY */
    void (*progress)(void *ctx, const char *what); /* may be NULL */
    void *ctx;
};
/**
 * Opens a device for measuring, with `bytes` of memory beyond what its libraries take. With 0 bytes it can only
 * report its name and limits.
 */
int mt_measure_device(mt_device **dev, const struct mt_measure_params *p, size_t bytes, struct mt_err *err);
enum { MT_MEASURE_ROUND_NS = 8000000 };
/** A product as the counting device describes it; variant: MT_GEMM_*. MT_GEMM_TN adds to an f32 weight gradient. */
struct mt_metered mt_measure_gemm(unsigned variant, enum mt_dtype t, uint64_t m, uint64_t n, uint64_t k);
/** The length of a round. */
int64_t mt_measure_round_ns(const struct mt_measure_params *p);

/** Measures rates, the optimizer by threads, interference and a grid of operations; takes minutes at most. */
int mt_measure_machine(struct mt_machine *out, const struct mt_measure_params *p, struct mt_err *err);
/** If the profile lacks a sample of any of the operations, times all of them in turn and adds or replaces their
 * samples, so that they can be compared. */
int mt_measure_operations(struct mt_machine *m, const struct mt_measure_params *p,
                          const struct mt_metered *ops, size_t n, struct mt_err *err);
/**
 * Measures again what changes from minute to minute on a shared machine: the given operations, the
 * optimizer with p->n_threads, the link. Takes about two seconds.
 */
int mt_measure_again(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                     size_t n, struct mt_err *err);
/**
 * Operations that run in turn on a device opened for them, each on buffers of its own. Caches are then as in a step:
 * they hold results of the operation before, and little else that the next one reads.
 */
typedef struct mt_turns mt_turns;
int mt_turns_create(mt_turns **out, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                    struct mt_err *err);
/** Accepts NULL; sets *t to NULL. */
void mt_turns_destroy(mt_turns **t);
/** Runs each once; seconds[i] is the time of the i-th. */
int mt_turns_run(mt_turns *t, double *seconds, struct mt_err *err);
/**
 * Means over the middle half of the rounds by their total times, so that a slow or fast round affects all operations
 * alike. A step is a sum of times, so that medians would be too low: what delays an operation is in the sum.
 * `rounds`: [n_rounds][n], at most MT_MOST_ROUNDS; seconds[i] is for the i-th operation.
 */
enum { MT_MOST_ROUNDS = 64 };
void mt_turns_mean(double *seconds, const double *rounds, size_t n, int n_rounds);
/** Runs the operations in turn for many rounds; seconds: mt_turns_mean(). */
int mt_measure_in_turn(double *seconds, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                       struct mt_err *err);
/**
 * Seconds of one operation, repeated by itself on buffers from the device's arena: the median over rounds that last
 * round_ns or one submission, whichever is longer.
 */
int mt_measure_operation(double *seconds, mt_device *dev, const struct mt_metered *op, int64_t round_ns,
                         struct mt_err *err);
/** Runs each operation once, on zeros, untimed, without those for which the arena is too small. *n_run: how many. */
int mt_run_operations_once(mt_device *dev, const struct mt_metered *ops, size_t n, size_t *n_run, struct mt_err *err);
/** Device memory needed to time the operation on a device of p's kind and threads. */
size_t mt_measure_operation_bytes(const struct mt_measure_params *p, const struct mt_metered *op);
