/* SPDX-License-Identifier: Apache-2.0 */
#include "kinds/kinds.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "cuda/cuda_kind.h"

static const struct mt_device_kind *const kinds[] = {&mt_cpu_kind, &mt_cuda_kind};

const struct mt_device_kind *mt_device_kind(const char *name)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(kinds); i++)
        if (!strcmp(kinds[i]->name, name))
            return kinds[i];
    return NULL;
}

void mt_device_probe(struct mt_device_info *out, const char *name, int index)
{
    const struct mt_device_kind *kind = mt_device_kind(name);
    *out = (struct mt_device_info){.present = false};
    if (kind)
        kind->probe(out, index);
    else
        snprintf(out->text, sizeof(out->text), "there is no device kind \"%.100s\"", name);
}

const char *mt_device_choose(const char *kind, int index, struct mt_device_info *gpu)
{
    *gpu = (struct mt_device_info){0};
    if (strcmp(kind, mt_cpu_kind.name))
        mt_device_probe(gpu, mt_cuda_kind.name, index);
    if (strcmp(kind, "auto"))
        return kind;
    if (gpu->shown)
        mt_warn("the cpu device is taken: %s", gpu->text);
    return gpu->present ? mt_cuda_kind.name : mt_cpu_kind.name;
}

int mt_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err)
{
    const struct mt_device_kind *kind = mt_device_kind(p->kind);
    if (p->n_threads < 1 || p->link_gbps < 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "device: cannot have %d threads and a link of %g GB/s",
                       p->n_threads, p->link_gbps);
    return kind ? kind->create(out, p, err)
                : mt_fail(err, MT_ERR_USAGE, -EINVAL, "there is no device kind \"%s\" (cpu, cuda)", p->kind);
}
