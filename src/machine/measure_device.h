/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"
#include "device/metered.h"
#include "hw/homes.h"

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
