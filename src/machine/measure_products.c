/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the fastest algorithms of products. */
#include "base/mem.h"
#include "base/strbuf.h"
#include "device/products.h"
#include "kinds/kinds.h"
#include "machine/measure_priv.h"
#include "machine/products.h"

/* Runs the products among the operations on a device that times algorithms. */
static int time_products(mt_device *dev, const struct mt_metered *ops, size_t n, size_t *n_new, struct mt_err *err)
{
    MT_STR_FREED struct mt_str text = {0};
    size_t n_run = 0, n_before = mt_device_products(dev, NULL);
    int rc = 0;
    mt_device_tune(dev, true);
    for (size_t i = 0; i < n && !rc; i++)
        if (ops[i].op == MT_DEV_GEMM)
            rc = mt_run_operations_once(dev, &ops[i], 1, &n_run, err);
    mt_device_tune(dev, false);
    size_t n_all = mt_device_products(dev, &text);
    if (!rc && text.failed)
        rc = mt_fail_nomem(err, "the choices of algorithms", text.len);
    if (!rc)
        *n_new = n_all - n_before;
    if (!rc && *n_new)
        rc = mt_products_save(dev, text.p, err);
    return rc;
}

int mt_products_measure(const struct mt_measure_params *p, const struct mt_metered *ops, size_t n, size_t *n_new,
                        struct mt_err *err)
{
    const struct mt_device_kind *kind = mt_device_kind(p->device_kind);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    size_t bytes = 0;
    *n_new = 0;
    if (kind && kind->shares_host_memory)
        return 0;
    for (size_t i = 0; i < n; i++)
        if (ops[i].op == MT_DEV_GEMM)
            bytes = MT_MAX(bytes, mt_measure_operation_bytes(p, &ops[i]));
    int rc = bytes ? mt_measure_device(&dev, p, bytes, err) : 0;
    return rc || !bytes ? rc : time_products(dev, ops, n, n_new, err);
}
