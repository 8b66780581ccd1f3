/* SPDX-License-Identifier: Apache-2.0 */
/* A step that several hosts share: what it cannot have yet, and what follows for its placement. */
#include <string.h>

#include "base/mem.h"
#include "optim/optimizer.h"
#include "plan/resolve.h"

/* What hosts cannot do, why, and what to set instead. */
static int check(const struct mt_plan_request *r, const struct mt_config *cfg, struct mt_err *err)
{
    const struct mt_placement *p = &r->placement;
    long long lanes = (long long)(p->hosts * MT_MAX(p->lanes, (int64_t)1));
    const struct {
        bool set;
        const char *key, *why, *mend;
    } keys[] = {
        {p->map == MT_MAP_UNITS, "device.map = units",
         "it hands the hidden states of each micro-batch from layer to layer, and hosts share micro-batches instead",
         "set device.map = auto"},
        {p->update == MT_UPDATE_BACKWARD, "memory.update = backward",
         "it updates a layer as soon as a device has its gradient, and those of hosts are added up afterwards",
         "set memory.update = auto"},
        {r->numerics.optimizer->zeroth, "optimizer.type = mezo", "its steps are of one device", "set another optimizer"},
        {p->base == MT_BASE_FILES && (cfg->adapter.merge_every || strcmp(cfg->train.blocks, "off") != 0),
         "memory.base = files with train.blocks or adapter.merge_every",
         "what they train or merge goes to files that only the first host has", "set memory.base = host"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(keys); i++)
        if (keys[i].set)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is of one host: %s; %s, or start the run without mpirun",
                           keys[i].key, keys[i].why, keys[i].mend);
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
