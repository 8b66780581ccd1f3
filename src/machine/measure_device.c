/* SPDX-License-Identifier: Apache-2.0 */
/* The device on which something is measured, how much memory that takes, and operations that are only run there. */
#include "device/example.h"
#include "device/meter.h"
#include "kinds/kinds.h"
#include "machine/measure_priv.h"
#include "machine/products.h"

int mt_measure_device(mt_device **dev, const struct mt_measure_params *p, size_t bytes, struct mt_err *err)
{
    const struct mt_device_kind *kind = mt_device_kind(p->device_kind);
    struct mt_device_params dp = {.kind = p->device_kind, .index = p->device_index,
                                  .budget_bytes = bytes + (kind ? kind->library_bytes : 0),
                                  .n_threads = p->n_threads, .cpus = p->cpus, .warm = true};
    int rc = mt_device_create(dev, &dp, err);
    if (!rc && (rc = mt_products_load(*dev, err)))
        mt_device_destroy(dev);
    return rc;
}

int64_t mt_measure_round_ns(const struct mt_measure_params *p)
{
    return p->small ? MT_MEASURE_ROUND_NS / 64 : MT_MEASURE_ROUND_NS;
}

struct mt_metered mt_measure_gemm(unsigned variant, enum mt_dtype t, uint64_t m, uint64_t n, uint64_t k)
{
    struct mt_metered op = {.op = MT_DEV_GEMM, .variant = variant, .dtype = t, .n_dims = 3, .dim = {m, n, k}};
    if (variant == MT_GEMM_TN)
        op.flags = MT_METER_ADDS | (t == MT_BF16 ? MT_METER_F32_OUT : 0);
    mt_metered_count(&op);
    return op;
}

/* Creates the operation's arguments on a device that only counts bytes. */
size_t mt_measure_operation_bytes(const struct mt_measure_params *mp, const struct mt_metered *op)
{
    enum { GAPS = 64 << 10 }; /* for each buffer: alignment, and the gaps of sanitizer builds */
    struct mt_example_params p = {.shape = *op, .dry = true};
    struct mt_meter_params meter = {.kind = mt_device_kind(mp->device_kind), .budget_bytes = SIZE_MAX,
                                    .n_threads = mp->n_threads};
    mt_example *x = NULL;
    size_t bytes = 0;
    if (!mt_device_create_meter(&p.dev, &meter, NULL) && !mt_example_create(&x, &p, NULL))
        bytes = mt_device_bytes_used(p.dev) + (size_t)mt_example_n_buffers(x) * GAPS;
    mt_example_destroy(&x);
    mt_device_destroy(&p.dev);
    return bytes;
}

static int run_once(mt_device *dev, const struct mt_metered *op, size_t *n_run, struct mt_err *err)
{
    MT_CLOSED_BY(mt_example_destroy) mt_example *x = NULL; /* waits */
    struct mt_err why;
    int rc = mt_example_create(&x, &(struct mt_example_params){.dev = dev, .shape = *op, .zero = true}, &why);
    if (rc == -ENOMEM)
        return 0;
    if (rc && err)
        *err = why;
    rc = rc ?: mt_example_submit(x, err);
    *n_run += !rc;
    return rc;
}

int mt_run_operations_once(mt_device *dev, const struct mt_metered *ops, size_t n, size_t *n_run, struct mt_err *err)
{
    int rc = 0;
    *n_run = 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = run_once(dev, &ops[i], n_run, err);
    return rc ?: mt_device_sync(dev, err);
}
