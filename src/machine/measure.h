/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MACHINE_MEASURE_H
#define MT_MACHINE_MEASURE_H

#include "machine/machine.h"

/**
 * Measures this machine for its profile. Everything is timed under sustained load, with random data: zeros
 * are cheaper to move and to multiply. A figure is the median of several rounds, as a run's is of its steps.
 */
struct mt_measure_params {
    const char *device_kind; /* "cpu" or "cuda" */
    int device_index;
    int n_threads;
    const int *cpus;         /* [n_threads] or NULL */
    const char *disk_dir;    /* folder on the drive to measure, or NULL */
    bool brief;              /* rates alone, no grid of operations */
    bool small;              /* tests: little of everything; the rates mean nothing */
    void (*progress)(void *ctx, const char *what); /* may be NULL */
    void *ctx;
};

/**
 * A device with room for `bytes` beside what its libraries take: that of a measurement, or with 0 bytes one
 * that tells its name.
 */
int mt_measure_device(mt_device **dev, const struct mt_measure_params *p, size_t bytes, struct mt_err *err);
/** Everything: rates, the optimizer by threads, interference, a grid of operations; minutes at most. */
int mt_measure_machine(struct mt_machine *out, const struct mt_measure_params *p, struct mt_err *err);
/** Where the profile lacks a sample of some of the operations: times all of them in turn, and adds or replaces
 * their samples, so that they can be compared. */
int mt_measure_operations(struct mt_machine *m, const struct mt_measure_params *p,
                          const struct mt_metered *ops, size_t n, struct mt_err *err);
/**
 * What changes from minute to minute on a machine that others use, too: the operations (all of them), the
 * optimizer with p->n_threads, the link. Some two seconds.
 */
int mt_measure_again(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                     size_t n, struct mt_err *err);
/**
 * Operations that are run in turn, each on buffers of its own, as a step runs them: what one reads of the one before
 * it is in the caches, the rest is where the others left it. On a device of their own.
 */
typedef struct mt_turns mt_turns;
int mt_turns_create(mt_turns **out, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                    struct mt_err *err);
/** Accepts NULL; sets *t to NULL. */
void mt_turns_destroy(mt_turns **t);
/** Each once; seconds[i] of the i-th. */
int mt_turns_run(mt_turns *t, double *seconds, struct mt_err *err);
/** Seconds of each in many rounds: means over the middle half of them, so that a slower or faster second counts for
 * all alike. */
int mt_measure_in_turn(double *seconds, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                       struct mt_err *err);
/**
 * Seconds of one operation, run again and again by itself, its buffers taken from the device's arena: the median of
 * rounds of round_ns or of one submission, whichever is longer.
 */
enum { MT_MEASURE_ROUND_NS = 8000000 };
int mt_measure_operation(double *seconds, mt_device *dev, const struct mt_metered *op, int64_t round_ns,
                         struct mt_err *err);
/** Device memory that timing the operation takes, of a device of p's kind and threads. */
size_t mt_measure_operation_bytes(const struct mt_measure_params *p, const struct mt_metered *op);

#endif
