/* SPDX-License-Identifier: Apache-2.0 */
/* Measures a drive with the I/O that training uses. */
#include "base/mem.h"
#include "hw/hw.h"
#include "machine/measure_priv.h"
#include "store/disk.h"

int mt_measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_disk_rates r;
    struct mt_disk_probe probe = {.dir = p->disk_dir, .bytes = (uint64_t)(p->small ? 16 : 512) << 20, .both = true};
    uint64_t free_bytes = 0;
    int rc = mt_disk_measure(&r, &probe, err);
    if (rc)
        return rc;
    /* `together` is the sum of both directions */
    const struct {
        enum mt_rate_id id;
        double value;
    } rates[] = {{MT_RATE_DRIVES, 1},
                 {MT_RATE_READ, r.read},
                 {MT_RATE_WRITE, r.write},
                 {MT_RATE_READ_BOTH, r.together * 0.5},
                 {MT_RATE_WRITE_BOTH, r.together * 0.5}};
    for (size_t i = 0; i < MT_ARRAY_LEN(rates); i++)
        mt_machine_measured(m, rates[i].id, rates[i].value);
    if (!mt_hw_disk_free(p->disk_dir, &free_bytes, NULL))
        mt_machine_measured(m, MT_RATE_DISK_GIB, (double)free_bytes / (double)(1 << 30));
    return 0;
}
