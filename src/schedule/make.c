/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a program: a draft, placed on the device, then staged for drives, then shared out to hosts. */
#include "schedule/build.h"

int mt_program_build(struct mt_program *out, const struct mt_program_params *params,
                     struct mt_err *err)
{
    struct mt_draft d;
    int rc = mt_draft_write(&d, params, err);
    if (rc)
        return rc;
    rc = mt_draft_place(out, &d, err);
    mt_program_finish(&d.prog);
    if (rc)
        return rc;
    if (mt_program_uses_disk(params) || mt_program_has_ring(params))
        rc = mt_program_stage(out, params, err);
    if (!rc && mt_program_hosts(params) > 1)
        rc = mt_program_take_part(out, params, err);
    if (!rc)
        rc = mt_program_prune_waits(out, err);
    if (rc)
        mt_program_finish(out);
    return rc;
}
