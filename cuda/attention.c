/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses between kernels of our own, fused attention and tiles. */
#include "attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "blas.h"
#include "kernels.h"
#include "workspace.h"

static bool asked_for(const char *what)
{
    const char *want = getenv("MEGATRAIN_ATTENTION");
    return want && !strcmp(want, what);
}

/* A missing engine is said only where it would come first. */
static int open_fused(struct mt_cuda_device *d, struct mt_err *err)
{
    char why[256] = "";
    if (asked_for("tiled") || asked_for("own") || !mt_cuda_fused_create(d, why, sizeof(why)))
        return 0;
    if (asked_for("fused"))
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "MEGATRAIN_ATTENTION=fused: %s", why);
    if (mt_cuda_own_first(d->sm))
        return 0;
    if (mt_cuda_fused_built())
        mt_warn("using our own attention, which is slower on this GPU than the cuDNN attention of this build: %s", why);
    else
        mt_info("using our own attention, which is slower on this GPU than fused attention: %s", why);
    return 0;
}

int mt_cuda_attention_create(struct mt_cuda_device *d, int multiprocessors, struct mt_err *err)
{
    const char *want = getenv("MEGATRAIN_ATTENTION");
    char attention[40], blas[40];
    if (want && !asked_for("tiled") && !asked_for("fused") && !asked_for("own"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "MEGATRAIN_ATTENTION=%.40s: must be tiled, fused or own", want);
    d->trials = mt_trials_create();
    if (!d->trials)
        return mt_fail_nomem(err, "what is found about attention", sizeof(*d->trials));
    d->flash = !asked_for("tiled") && !asked_for("fused");
    int rc = open_fused(d, err);
    if (d->fused) /* also where our own come first: it does what they do not take */
        mt_cuda_fused_describe(d, attention, sizeof(attention));
    else
        mt_cuda_attention_describe(d, attention, sizeof(attention));
    mt_cuda_blas_describe(blas, sizeof(blas));
    snprintf(d->trials->engine, sizeof(d->trials->engine), "%s, %s, sm_%d, %d multiprocessors", attention, blas, d->sm,
             multiprocessors);
    return rc;
}

void mt_cuda_attention_destroy(struct mt_cuda_device *d)
{
    mt_cuda_fused_destroy(d);
    mt_trials_leave(&d->trials);
}

void mt_cuda_attention_describe(const struct mt_cuda_device *d, char *buf, size_t len)
{
    if (d->fused && !(d->flash && mt_cuda_own_first(d->sm)))
        mt_cuda_fused_describe(d, buf, len);
    else
        snprintf(buf, len, d->flash ? "own" : "tiled");
}

void mt_cuda_attention_doubt(mt_device *dev)
{
    if (!mt_cuda(dev)->follows)
        mt_trials_doubt(mt_cuda(dev)->trials);
}

bool mt_cuda_attention_share(mt_device *dev, mt_device *first)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    if (strcmp(d->trials->engine, mt_cuda(first)->trials->engine))
        return false;
    mt_trials_leave(&d->trials);
    d->trials = mt_trials_join(mt_cuda(first)->trials);
    d->follows = true;
    return true;
}

size_t mt_cuda_attention_distrust(mt_device *dev, bool on)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    if (d->follows)
        return 0;
    if (on)
        return mt_trials_withdraw(d->trials);
    mt_trials_reinstate(d->trials);
    return 0;
}

static enum mt_cuda_outcome run_flash(struct mt_cuda_device *d, const struct mt_cuda_call *c, enum mt_trial_way,
                                      struct mt_err *err)
{
    cudaStream_t stream = d->streams[MT_STREAM_COMPUTE];
    cudaError_t rc = c->b ? mt_cuda_flash_bwd(c->b, stream) : mt_cuda_flash(c->a, stream);
    return mt_cuda_check(d, rc, err, "attention%s of %zu rows", c->b ? "_bwd" : "", c->a->n) ? MT_CUDA_FAILED : MT_CUDA_DONE;
}

static enum mt_cuda_outcome by_own(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err)
{
    if (!d->flash || !(c->b ? mt_cuda_flash_suits_bwd(c->b) : mt_cuda_flash_suits(c->a)))
        return MT_CUDA_REFUSED;
    return asked_for("own") ? run_flash(d, c, MT_TRIAL_OWN, err) : mt_cuda_attempt(d, c, MT_TRIAL_OWN, run_flash, err);
}

static int attend(mt_device *dev, const struct mt_cuda_call *c, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    bool goes_on = c->a->past || (c->b && c->b->dk_sum.p); /* which fused engines do not know */
    bool never_fused = goes_on || (mt_cuda_own_first(d->sm) && mt_cuda_flash_takes(c->a));
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return rc;
    enum mt_cuda_outcome done = never_fused ? MT_CUDA_REFUSED : mt_cuda_fused_attend(d, c, err);
    if (done == MT_CUDA_REFUSED)
        done = by_own(d, c, err);
    if (done != MT_CUDA_REFUSED)
        return done == MT_CUDA_DONE ? 0 : -EIO;
    return mt_cuda_tiles(d, c, err);
}

int mt_cuda_op_attention(mt_device *dev, const struct mt_attention *a, struct mt_err *err)
{
    return attend(dev, &(struct mt_cuda_call){a, NULL}, err);
}

int mt_cuda_op_attention_bwd(mt_device *dev, const struct mt_attention_bwd *b, struct mt_err *err)
{
    return attend(dev, &(struct mt_cuda_call){&b->fwd, b}, err);
}
