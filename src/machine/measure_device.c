/* SPDX-License-Identifier: Apache-2.0 */
/* The device on which something is measured, and what is short enough for it. */
#include "machine/measure_device.h"

#include "kinds/kinds.h"
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
