/* SPDX-License-Identifier: Apache-2.0 */
#include "attempt.h"

#include <errno.h>
#include <math.h>

#include "attention.h"
#include "base/log.h"
#include "workspace.h"

/* The tensors to compare. Gradients that are tiny beside the others are dominated by rounding, hence the floor. */
static struct mt_trial results_of(const struct mt_cuda_call *c)
{
    const struct mt_attention *a = c->a;
    const struct mt_attention_bwd *b = c->b;
    if (!b)
        return (struct mt_trial){
            .tensor = {{"o", a->o, a->dtype, a->n, 0, false},
                       {"the log-sum-exp", mt_heads(a->lse, a->n, 1, a->n), MT_F32, a->q.n,
                        sqrt((double)(a->q.n * a->n)), false}},
            .n = 2};
    return (struct mt_trial){.tensor = {{"dv", b->dv, a->dtype, a->n, 0.05, true},
                                        {"dk", b->dk, a->dtype, a->n, 0.05, true},
                                        {"dq", b->dq, a->dtype, a->n, 0.05, true}},
                             .n = 3};
}

static bool tiles_have_room(const struct mt_attention *a)
{
    size_t most = mt_cuda_tiled_len(a), past = a->past;
    for (size_t i = 0; i < a->n_docs; i++, past = 0)
        if ((size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) + past > most)
            return false;
    return true;
}

int mt_cuda_tiles(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err)
{
    if (!tiles_have_room(c->a))
        return mt_fail(err, MT_ERR_DEVICE, -ENOTSUP, "GPU %d: attention of a document of more than %d tokens, which kernels of our own "
                       "do not take: set MEGATRAIN_ATTENTION=tiled, with which there is room for it in tiles", d->index, MT_CUDA_TILED_LEN);
    return c->b ? mt_cuda_tiled_attention_bwd(d, c->b, err) : mt_cuda_tiled_attention(d, c->a, err);
}

/* Compares the result of the call, which is there, with that of tiles. */
static enum mt_cuda_outcome compare(struct mt_cuda_device *d, const struct mt_cuda_call *c,
                                    const struct mt_trial_kind *k, enum mt_trial_verdict *verdict, struct mt_err *err)
{
    enum mt_trial_verdict found = MT_TRIAL_OPEN;
    struct mt_trial t = results_of(c);
    char why[128] = "";
    int rc = mt_trial_keep(d, &t, err)
                 ?: mt_cuda_tiles(d, c, err)
                 ?: mt_trial_judge(d, &t, &found, why, sizeof(why), err);
    if (!rc)
        *verdict = found;
    bool wrong = !rc && found == MT_TRIAL_TILES;
    bool own = k->way == MT_TRIAL_OWN;
    if (wrong)
        mt_warn("%s: attention%s with heads of %d%s%s is wrong: %s. Such calls are done in another way from now on, which is slower; %s",
                own ? "our own" : d->trials->engine, k->backward ? "'s backward" : "", k->dim, k->window ? ", a window" : "",
                k->way == MT_TRIAL_ROUNDED ? ", empty sequences" : "", why,
                own ? "please report it" : "another version of the library may be correct");
    else if (!rc)
        rc = mt_trial_restore(d, &t, err);
    mt_trial_finish(&t);
    return rc ? MT_CUDA_FAILED : wrong ? MT_CUDA_REFUSED : MT_CUDA_DONE;
}

/* Lengths differ from step to step: a power of two stands for those up to it. */
static int upto(size_t len)
{
    int p = 1;
    while ((size_t)p < len)
        p *= 2;
    return p;
}

enum mt_cuda_outcome mt_cuda_attempt(struct mt_cuda_device *d, const struct mt_cuda_call *c, enum mt_trial_way way,
                                     mt_cuda_way go, struct mt_err *err)
{
    const struct mt_attention *a = c->a;
    struct mt_trial_kind k = {.backward = c->b, .window = a->window && a->window < a->max_len, .way = way,
                              .dim = (int)a->q.dim, .dim_v = (int)a->v.dim, .n_q = (int)a->q.n, .n_kv = (int)a->k.n,
                              .len = upto(a->max_len)};
    enum mt_trial_turn turn = mt_trials_begin(d->trials, &k, &d->verdict);
    if (turn == MT_TRIAL_REFUSE)
        return MT_CUDA_REFUSED;
    bool unknown = turn == MT_TRIAL_COMPARE && !tiles_have_room(a);
    if (unknown) /* a shorter one will tell */
        mt_trials_end(d->trials, &k, MT_TRIAL_OPEN, false);
    if (unknown || turn != MT_TRIAL_COMPARE)
        return go(d, c, way, err);
    struct mt_attention_bwd once;
    struct mt_cuda_call call = *c;
    bool adds = c->b && c->b->dk_sum.p;
    if (adds) { /* what adds to sums is compared without them: it can then be made twice */
        once = *c->b;
        once.dk_sum.p = once.dv_sum.p = NULL;
        call.b = &once;
    }
    enum mt_trial_verdict found = MT_TRIAL_OPEN;
    enum mt_cuda_outcome rc = go(d, &call, way, err);
    bool done = rc == MT_CUDA_DONE;
    if (done)
        rc = compare(d, &call, &k, &found, err);
    mt_trials_end(d->trials, &k, found, done);
    return adds && rc == MT_CUDA_DONE ? go(d, c, way, err) : rc;
}
