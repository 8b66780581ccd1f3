/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults put here on purpose, to show that the sanitizer builds find such: `seeded overrun` writes one
 * element past an allocation of the device arena; `seeded race` reads a slot on one stream while another
 * fills it, with no event between.
 */
#include <string.h>

#include "device/ops.h"
#include "kinds/kinds.h"

static int overrun(mt_device *dev)
{
    void *a = NULL, *b = NULL;
    if (mt_device_alloc(dev, 1024, "a", &a, NULL) || mt_device_alloc(dev, 1024, "b", &b, NULL))
        return 1;
    mt_op_zero(dev, &(struct mt_zero){a, 1025}, NULL);
    mt_device_sync(dev, NULL);
    return 0;
}

static int race(mt_device *dev)
{
    static float host[1 << 16];
    void *slot = NULL;
    size_t bytes = sizeof(host);
    if (mt_device_alloc(dev, bytes, "slot", &slot, NULL))
        return 1;
    for (int i = 0; i < 50; i++) { /* a thread that is late may take a lock after the other has given it back */
        mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){slot, bytes, host, bytes, bytes, 1}, NULL);
        mt_op_zero(dev, &(struct mt_zero){slot, bytes}, NULL); /* must have waited for the copy */
        mt_device_sync(dev, NULL);
    }
    return 0;
}

int main(int argc, char **argv)
{
    mt_device *dev = NULL;
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = 1 << 20, .n_threads = 2};
    if (argc != 2 || mt_device_create(&dev, &p, NULL))
        return 2;
    int rc = !strcmp(argv[1], "overrun") ? overrun(dev) : race(dev);
    mt_device_destroy(&dev);
    return rc;
}
