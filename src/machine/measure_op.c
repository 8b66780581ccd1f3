/* SPDX-License-Identifier: Apache-2.0 */
/* How much device memory timing an operation takes. */
#include "device/example.h"
#include "device/meter.h"
#include "machine/measure_priv.h"

/* Creates the operation's arguments on a device that only counts bytes. */
size_t mt_measure_operation_bytes(const struct mt_measure_params *mp, const struct mt_metered *op)
{
    enum { GAPS = 64 << 10 }; /* for each buffer: alignment, and the gaps of sanitizer builds */
    struct mt_example_params p = {.shape = *op, .dry = true};
    struct mt_meter_params meter = {.kind = mp->device_kind, .budget_bytes = SIZE_MAX, .n_threads = mp->n_threads};
    mt_example *x = NULL;
    size_t bytes = 0;
    if (!mt_device_create_meter(&p.dev, &meter, NULL) && !mt_example_create(&x, &p, NULL))
        bytes = mt_device_bytes_used(p.dev) + (size_t)mt_example_n_buffers(x) * GAPS;
    mt_example_destroy(&x);
    mt_device_destroy(&p.dev);
    return bytes;
}
