/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>

#include "base/strbuf.h"
#include "cuda_priv.h"

/**
 * A fused engine is a library that may have defects on some GPUs for some shapes. At its first use, each kind of call
 * is compared with our own tiles, on the inputs of the step; if they differ, tiles do this call and all later ones of
 * the kind. The result of a call thus depends on its arguments and on the verdict on its kind, and a later run with the
 * same verdicts has the same bits. Devices that share a step share the table, too: what the first of them found at a
 * kind's first call holds for all, as it would if there were one. The threads that submit to their streams may call
 * mt_trials_begin(), mt_trials_end(), mt_trials_settle() and mt_trials_is() at once; all else is called between steps.
 */
/* ROUNDED: ragged, with empty sequences that make their number a power of two; cuDNN before 9.25 has defects there. */
enum mt_trial_way { MT_TRIAL_FIXED, MT_TRIAL_RAGGED, MT_TRIAL_COPIES, MT_TRIAL_ROUNDED, MT_TRIAL_OWN };
struct mt_trial_kind {
    bool backward, window;
    enum mt_trial_way way;
    int dim, dim_v; /* of a head of queries, of values */
    int n_q, n_kv;  /* heads */
    int len;        /* of the longest document, rounded up to a power of two */
};
enum mt_trial_verdict { MT_TRIAL_OPEN, MT_TRIAL_FUSED, MT_TRIAL_TILES };

enum { MT_TRIAL_MAX = 1024 };
struct mt_trials {
    char engine[128]; /* the libraries and GPU of the verdicts, on which bits depend */
    pthread_mutex_t lock;
    pthread_cond_t ended; /* a comparison */
    int users;            /* devices */
    struct {
        struct mt_trial_kind kind;
        enum mt_trial_verdict verdict;
        bool again; /* to be compared once more */
        bool compares; /* some device compares it now */
        enum mt_trial_verdict before; /* of the first n_withdrawn */
    } of[MT_TRIAL_MAX];
    int n, n_withdrawn;
};
/** One device's, or NULL without memory; another device takes part by mt_trials_join(). */
struct mt_trials *mt_trials_create(void);
struct mt_trials *mt_trials_join(struct mt_trials *t);
/** The last device that leaves frees it. Accepts NULL. */
void mt_trials_leave(struct mt_trials **t);

/** The verdict on a kind, which the caller may change; NULL: there are too many kinds, and this one is not tried. */
enum mt_trial_verdict *mt_trials_find(struct mt_trials *t, const struct mt_trial_kind *k);
/**
 * What to do with a call. COMPARE: mt_trials_end() must follow; other devices' calls of the kind wait for that. A
 * stream waits only for work that has been submitted, so nothing that a comparison waits for is behind a call that
 * waits. *v: as of mt_trials_find().
 */
enum mt_trial_turn { MT_TRIAL_REFUSE, MT_TRIAL_TAKE, MT_TRIAL_COMPARE };
enum mt_trial_turn mt_trials_begin(struct mt_trials *t, const struct mt_trial_kind *k, enum mt_trial_verdict **v);
/** OPEN: the verdict stays. compared: it is not in doubt any more. */
void mt_trials_end(struct mt_trials *t, const struct mt_trial_kind *k, enum mt_trial_verdict found, bool compared);
/** Changes a verdict, or asks for it; NULL: none. */
void mt_trials_settle(struct mt_trials *t, enum mt_trial_verdict *v, enum mt_trial_verdict to);
bool mt_trials_is(struct mt_trials *t, const enum mt_trial_verdict *v, enum mt_trial_verdict what);
/** Every kind is in doubt until it is compared: a library may be right for the data of the first step alone. */
void mt_trials_doubt(struct mt_trials *t);
/** Every shape that was tried is done by tiles from now on, whatever the way; returns how many kinds were not before.
 * Then, if tiles are no better, all as it was. */
size_t mt_trials_withdraw(struct mt_trials *t);
void mt_trials_reinstate(struct mt_trials *t);
/** Prints "cuDNN 9.19.0, sm_90: forward fixed 128 of 32/8 to 4096 fused; backward ragged window 192/128 of 16/16 to 512
 * tiles", or the engine alone if nothing was tried. */
void mt_trials_print(const struct mt_trials *t, struct mt_str *out);
/** Reads verdicts in that form; false if they are of another engine or GPU, or invalid. */
bool mt_trials_read(struct mt_trials *t, const char *text);

/** A result of a call: heads of some rows. */
struct mt_trial_tensor {
    const char *name;
    struct mt_heads of;
    enum mt_dtype dtype;
    size_t rows;
    double floor; /* differences are compared with the tensor's norm, or with this if it is larger */
    bool relative; /* the floor is a share of the norm of all tensors of the call together */
};
enum { MT_TRIAL_TENSORS = 3 };
struct mt_trial {
    struct mt_trial_tensor tensor[MT_TRIAL_TENSORS];
    int n;
    char *kept[MT_TRIAL_TENSORS]; /* on the host, packed */
};
/** Waits for the stream and copies the engine's results to the host. -ENOMEM; device errors. */
int mt_trial_keep(struct mt_cuda_device *d, struct mt_trial *t, struct mt_err *err);
/**
 * Compares the copies with the present contents. FUSED: equal within rounding; TILES: not, for the reason in `why`;
 * OPEN: undecided, since the inputs are zero or not finite.
 */
int mt_trial_judge(struct mt_cuda_device *d, struct mt_trial *t, enum mt_trial_verdict *verdict, char *why,
                   size_t why_len, struct mt_err *err);
/** Restores the copies. */
int mt_trial_restore(struct mt_cuda_device *d, const struct mt_trial *t, struct mt_err *err);
void mt_trial_finish(struct mt_trial *t);
