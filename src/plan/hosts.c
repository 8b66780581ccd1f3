/* SPDX-License-Identifier: Apache-2.0 */
/* A step that several hosts share: what it cannot have yet, and what follows for its placement. */
#include <errno.h>
#include <string.h>

#include "base/mem.h"
#include "plan/resolve.h"

static int check(const struct mt_plan_request *r, const struct mt_config *cfg, struct mt_err *err)
{
    const struct mt_placement *p = &r->placement;
    long long lanes = (long long)(p->hosts * MT_MAX(p->lanes, (int64_t)1));
    const char *what = p->map == MT_MAP_UNITS                 ? "device.map = units"
                       : p->update == MT_UPDATE_BACKWARD      ? "memory.update = backward"
                       : p->activations == MT_ACT_DISK        ? "memory.activations = disk"
                       : strcmp(cfg->train.blocks, "off")     ? "train.blocks"
                       : cfg->adapter.merge_every             ? "adapter.merge_every"
                       : r->numerics.router_aux_loss > 0      ? "train.router_aux_loss"
                                                              : NULL;
    if (what)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is of one host yet: start the run without mpirun, or leave that out", what);
    if (r->numerics.groups < lanes)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%lld hosts share the groups of a step's micro-batches: set train.groups to a power "
                       "of two, at least %lld (it is %lld); it changes bits, and is kept when the run goes on with other hosts",
                       (long long)p->hosts, lanes, (long long)r->numerics.groups);
    return 0;
}

int mt_plan_on_hosts(struct mt_plan_request *r, const struct mt_config *cfg, int host, struct mt_err *err)
{
    struct mt_placement *p = &r->placement;
    int rc = check(r, cfg, err);
    p->host = host;
    p->map = MT_MAP_DATA;
    p->update = MT_UPDATE_FORWARD;
    p->base = p->base == MT_BASE_AUTO ? MT_BASE_HOST : p->base;
    return rc;
}
