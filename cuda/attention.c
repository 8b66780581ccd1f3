/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses between fused attention, tiles and kernels of our own. */
#include "attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "flash.h"
#include "fused.h"

int mt_cuda_attention_create(struct mt_cuda_device *d, struct mt_err *err)
{
    const char *want = getenv("MEGATRAIN_ATTENTION");
    char why[256] = "";
    if (want && strcmp(want, "tiled") && strcmp(want, "fused") && strcmp(want, "own"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "MEGATRAIN_ATTENTION=%.40s: must be tiled, fused or own", want);
    d->flash = want && !strcmp(want, "own");
    if (d->flash || (want && !strcmp(want, "tiled")) || !mt_cuda_fused_create(d, why, sizeof(why)))
        return 0;
    if (want)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "MEGATRAIN_ATTENTION=fused: %s", why);
    if (mt_cuda_fused_built())
        mt_warn("using tiled attention, which is slower than the cuDNN attention of this build: %s", why);
    else
        mt_info("using tiled attention, which is slower than fused attention: %s", why);
    return 0;
}

void mt_cuda_attention_destroy(struct mt_cuda_device *d)
{
    mt_cuda_fused_destroy(d);
}

void mt_cuda_attention_describe(const struct mt_cuda_device *d, char *buf, size_t len)
{
    if (d->fused)
        mt_cuda_fused_describe(d, buf, len);
    else
        snprintf(buf, len, d->flash ? "own" : "tiled");
}

int mt_cuda_op_attention(mt_device *dev, const struct mt_attention *a, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    bool done = false;
    int rc = mt_cuda_enter(d, err);
    if (!rc && d->flash && mt_cuda_flash_suits(a))
        return mt_cuda_check(d, mt_cuda_flash(a, d->streams[MT_STREAM_COMPUTE]), err, "attention of %zu rows", a->n);
    if (!rc)
        rc = mt_cuda_fused_attention(d, a, &done, err);
    return rc || done ? rc : mt_cuda_tiled_attention(d, a, err);
}

int mt_cuda_op_attention_bwd(mt_device *dev, const struct mt_attention_bwd *b, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    bool done = false;
    int rc = mt_cuda_enter(d, err);
    if (!rc && d->flash && mt_cuda_flash_suits_bwd(b))
        return mt_cuda_check(d, mt_cuda_flash_bwd(b, d->streams[MT_STREAM_COMPUTE]), err, "attention_bwd of %zu rows",
                             b->fwd.n);
    if (!rc)
        rc = mt_cuda_fused_attention_bwd(d, b, &done, err);
    return rc || done ? rc : mt_cuda_tiled_attention_bwd(d, b, err);
}
