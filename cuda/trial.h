/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_TRIAL_H
#define MT_CUDA_TRIAL_H

#include "base/strbuf.h"
#include "cuda_priv.h"

/**
 * A fused engine is a library that is known to have defects on some GPUs for some shapes. Each kind of call is compared
 * with our own tiles at its first use, on the step's own inputs; where they differ, calls of that kind are
 * done without it, this one and all later ones. So the result of a call depends on its arguments and on the verdict
 * on its kind, and with the verdicts a later run has the same bits. One thread at a time, the one that submits to the
 * stream.
 */
enum mt_trial_way { MT_TRIAL_FIXED, MT_TRIAL_RAGGED, MT_TRIAL_COPIES };
struct mt_trial_kind {
    bool backward, window;
    enum mt_trial_way way;
    int head_dim;
};
enum mt_trial_verdict { MT_TRIAL_OPEN, MT_TRIAL_FUSED, MT_TRIAL_TILES };

enum { MT_TRIAL_MAX = 128 };
struct mt_trials {
    char engine[64]; /* and GPU, that the verdicts are of */
    struct {
        struct mt_trial_kind kind;
        enum mt_trial_verdict verdict;
    } of[MT_TRIAL_MAX];
    int n;
};
/** The verdict on a kind, to be changed in place; NULL: there are too many, this one is not tried. */
enum mt_trial_verdict *mt_trials_find(struct mt_trials *t, const struct mt_trial_kind *k);
/** "cuDNN 9.19.0, sm_90: forward fixed 128 fused; backward ragged window 128 tiles". Nothing where none was tried. */
void mt_trials_print(const struct mt_trials *t, struct mt_str *out);
/** Takes verdicts in that form; false where they are of another engine or GPU, or cannot be read. */
bool mt_trials_read(struct mt_trials *t, const char *text);

/** What a call writes: rows of `width` elements, ld apart. */
struct mt_trial_tensor {
    const char *name;
    void *p;
    enum mt_dtype dtype;
    size_t rows, width, ld;
    double floor; /* a norm below which differences are not held against it, where it is larger than the tensor's own */
    bool relative; /* to the norm of all tensors of the call together: the floor is a share of that */
};
enum { MT_TRIAL_TENSORS = 3 };
struct mt_trial {
    struct mt_trial_tensor tensor[MT_TRIAL_TENSORS];
    int n;
    char *kept[MT_TRIAL_TENSORS]; /* on the host, packed */
};
/** Waits for the stream and copies what the engine has written. -ENOMEM; device errors. */
int mt_trial_keep(struct mt_cuda_device *d, struct mt_trial *t, struct mt_err *err);
/**
 * Compares that with what stands there now. FUSED: the same within rounding; TILES: not, with the reason in `why`;
 * OPEN: the inputs tell nothing, being zero or not finite.
 */
int mt_trial_judge(struct mt_cuda_device *d, struct mt_trial *t, enum mt_trial_verdict *verdict, char *why,
                   size_t why_len, struct mt_err *err);
/** Puts back what was kept. */
int mt_trial_restore(struct mt_cuda_device *d, const struct mt_trial *t, struct mt_err *err);
void mt_trial_finish(struct mt_trial *t);

#endif
