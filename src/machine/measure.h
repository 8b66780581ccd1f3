/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "machine/machine.h"
#include "machine/measure_device.h"

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
