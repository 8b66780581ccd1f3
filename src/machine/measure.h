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
    const char *disk_dir;    /* a folder on the drive to be measured, or NULL */
    bool brief;              /* rates alone, no grid of operations */
    bool small;              /* for tests: little of everything, the rates are meaningless */
    void (*progress)(void *ctx, const char *what); /* may be NULL */
    void *ctx;
};

/**
 * Opens a device for measuring, with `bytes` beside what its libraries take. With 0 bytes it is good only
 * for its name and limits.
 */
int mt_measure_device(mt_device **dev, const struct mt_measure_params *p, size_t bytes, struct mt_err *err);
/** Measures rates, the optimizer by threads, interference and a grid of operations; takes minutes at most. */
int mt_measure_machine(struct mt_machine *out, const struct mt_measure_params *p, struct mt_err *err);
/** Where the profile lacks a sample of some of the operations: times all of them in turn, and adds or replaces
 * their samples, so that they can be compared. */
int mt_measure_operations(struct mt_machine *m, const struct mt_measure_params *p,
                          const struct mt_metered *ops, size_t n, struct mt_err *err);
/**
 * Measures again what changes from minute to minute on a shared machine: the given operations, the
 * optimizer with p->n_threads, the link. Takes some two seconds.
 */
int mt_measure_again(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                     size_t n, struct mt_err *err);
/**
 * Operations that are run in turn, each on buffers of its own, as a step runs them: what it reads of the
 * operation before it is in the caches, the rest is as the other operations left it. On a device of their
 * own.
 */
typedef struct mt_turns mt_turns;
int mt_turns_create(mt_turns **out, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                    struct mt_err *err);
/** Accepts NULL; sets *t to NULL. */
void mt_turns_destroy(mt_turns **t);
/** Runs each once; seconds[i] is the time of the i-th. */
int mt_turns_run(mt_turns *t, double *seconds, struct mt_err *err);
/**
 * Seconds of each in many rounds: the mean over the middle half of the rounds, so that a slow or fast
 * second affects all alike.
 */
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
