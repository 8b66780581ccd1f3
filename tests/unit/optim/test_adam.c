/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/mem.h"
#include "optim/adam.h"
#include "optim/adam_probe.h"
#include "optim/kernel.h"
#include "optim/lr.h"
#include "optim/optimizer.h"
#include "test.h"

enum { MAX = 100003 };

struct state {
    uint16_t hi[MAX], lo[MAX], grad16[MAX];
    float m[MAX], v[MAX], grad[MAX];
};

static void fill(struct state *s, uint64_t seed)
{
    mt_philox_normal(s->grad, MAX, 0, seed, 1, 0.02f);
    mt_philox_normal(s->m, MAX, 0, seed, 2, 0.01f);
    for (size_t i = 0; i < MAX; i++) {
        float w = (float)mt_philox_uniform(seed, 3, i) - 0.5f;
        mt_master_split(w, &s->hi[i], &s->lo[i]);
        s->v[i] = (float)(mt_philox_uniform(seed, 4, i) * 1e-4);
        s->grad16[i] = mt_f32_to_bf16(s->grad[i]);
    }
}

/* A copy: the numbers of a seed are drawn once. */
static struct state *make(uint64_t seed)
{
    static struct state made[10];
    static bool filled[10];
    struct state *s = malloc(sizeof(*s));
    assert_true(s && seed < 10);
    if (!filled[seed])
        fill(&made[seed], seed);
    filled[seed] = true;
    memcpy(s, &made[seed], sizeof(*s));
    return s;
}

/* One update with the kernel, of plain numbers. */
struct adam {
    size_t n;
    uint16_t *hi, *lo;
    void *m, *v;
    const void *grad;            /* grad_dtype */
    enum mt_state_type state_type;
    enum mt_dtype grad_dtype;
    double lr, beta1, beta2, eps, weight_decay;
    uint64_t t;                  /* from 1 */
    float clip;                  /* factor, 1 = none */
};

static uint64_t adam_run(const struct adam *a, enum mt_isa isa)
{
    struct mt_kernel k = {.rule = MT_RULE_ADAMW, .n = a->n, .hi = a->hi, .lo = a->lo, .state = {a->m, a->v},
                          .state_type = a->state_type, .grad = a->grad, .grad_dtype = a->grad_dtype,
                          .s = {.clip = a->clip, .keep = (float)(1 - a->lr * a->weight_decay)}};
    mt_adam_scalars(&k.s, a->lr, (struct mt_adam_rates){a->beta1, a->beta2, a->eps}, a->t);
    return mt_kernel_run(&k, isa);
}

static struct adam args(struct state *s, size_t first, size_t n, enum mt_dtype grad)
{
    return (struct adam){.n = n, .hi = s->hi + first, .lo = s->lo + first, .m = s->m + first, .v = s->v + first,
                         .grad = grad == MT_F32 ? (void *)(s->grad + first) : (void *)(s->grad16 + first),
                         .state_type = MT_STATE_F32, .grad_dtype = grad, .lr = 1e-3, .beta1 = 0.9,
                         .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .t = 3, .clip = 0.7f};
}

static float master(const struct state *s, size_t i)
{
    return mt_master_join(s->hi[i], s->lo[i]);
}

/* In units of the last place of `scale`, the largest term: two that nearly cancel leave its rounding. An
 * update of the weight's own size goes through a dozen roundings of half a unit each. */
static double ulps(float got, double want, double scale)
{
    float w = (float)scale;
    double unit = fabs((double)nextafterf(w, INFINITY) - (double)w);
    return fabs((double)got - want) / unit;
}

TEST(one_step_is_within_rounding_of_double)
{
    static const size_t sizes[] = {1, 22, 55, 64, 128, 1024, MAX};
    struct state *s = make(5), *old = malloc(sizeof(*old));
    for (size_t k = 0; k < sizeof(sizes) / sizeof(*sizes); k++)
        for (uint64_t t = 1; t <= 10; t++) {
            struct adam a = args(s, 0, sizes[k], MT_F32);
            a.t = t;
            memcpy(old, s, sizeof(*s));
            assert_int_equal(adam_run(&a, MT_ISA_AUTO), 0);
            double bc1 = 1 - pow(0.9, (double)t), bc2 = 1 - pow(0.999, (double)t);
            for (size_t i = 0; i < sizes[k]; i++) {
                double g = (double)old->grad[i] * (double)0.7f;
                double m = (double)old->m[i] + (1 - 0.9) * (g - (double)old->m[i]);
                double v = 0.999 * (double)old->v[i] + (1 - 0.999) * g * g;
                double w = (double)master(old, i) * (1 - 1e-3 * 0.1);
                double rate = 1e-3 / bc1 / (sqrt(v) / sqrt(bc2) + 1e-8);
                double scale = fmax(fabs(w), rate * (fabs((double)old->m[i]) + 0.1 * fabs(g)));
                w -= rate * m;
                scale = fmax(scale, fabs(w));
                if (!(ulps(master(s, i), w, scale) <= 5))
                    fail_msg("weight %zu at t %d: %.9g, want %.12g", i, (int)t, (double)master(s, i), w);
                assert_true(fabs((double)s->v[i] - v) <= 3e-7 * v);
                assert_true(fabs((double)s->m[i] - m) <= 2e-7 * (fabs(m) + fabs(g)));
            }
        }
    free(s);
    free(old);
}

static bool same(const struct state *a, const struct state *b)
{
    return !memcmp(a->hi, b->hi, sizeof(a->hi)) && !memcmp(a->lo, b->lo, sizeof(a->lo)) &&
           !memcmp(a->m, b->m, sizeof(a->m)) && !memcmp(a->v, b->v, sizeof(a->v));
}

TEST(every_instruction_set_gives_the_same_bits)
{
    for (size_t first = 0; first < 3; first++)
        for (size_t n = 0; n <= 130; n += n < 40 ? 1 : 13)
            for (int g = 0; g < 2; g++) {
                struct state *want = make(7), *got = make(7);
                for (struct state *s = want;; s = got) { /* edges of the format among them */
                    s->grad[5] = 1e-42f;
                    s->v[6] = 1e-44f;
                    s->grad[7] = 3e18f;
                    s->grad[8] = -0.0f;
                    s->m[9] = 1e-45f;
                    mt_master_split(1e-41f, &s->hi[10], &s->lo[10]);
                    if (s == got)
                        break;
                }
                struct adam a = args(want, first, n, g ? MT_F32 : MT_BF16);
                adam_run(&a, MT_ISA_SCALAR);
                for (enum mt_isa isa = MT_ISA_AVX2; isa <= MT_ISA_AVX512; isa++) {
                    if (!mt_isa_available(isa))
                        continue;
                    free(got);
                    got = make(7);
                    got->grad[5] = 1e-42f;
                    got->v[6] = 1e-44f;
                    got->grad[7] = 3e18f;
                    got->grad[8] = -0.0f;
                    got->m[9] = 1e-45f;
                    mt_master_split(1e-41f, &got->hi[10], &got->lo[10]);
                    a = args(got, first, n, g ? MT_F32 : MT_BF16);
                    adam_run(&a, isa);
                    if (!same(want, got))
                        fail_msg("%s differs at n %zu, first %zu", mt_isa_name(isa), n, first);
                }
                free(want);
                free(got);
            }
}

struct moments16 {
    struct state s;
    uint16_t m[MAX], v[MAX];
};

static struct moments16 *make16(uint64_t seed)
{
    struct moments16 *x = malloc(sizeof(*x));
    MT_FREED struct state *s = make(seed);
    assert_non_null(x);
    x->s = *s;
    for (size_t i = 0; i < MAX; i++) {
        x->m[i] = mt_f32_to_bf16(s->m[i]);
        x->v[i] = mt_f32_to_bf16(s->v[i]);
    }
    return x;
}

static struct mt_update update16(struct moments16 *x, const double *keys, size_t n)
{
    return (struct mt_update){.n = n, .hi = x->s.hi, .lo = x->s.lo, .state = {x->m, x->v}, .grad = x->s.grad16,
                              .grad_dtype = MT_BF16, .keys = keys, .lr = 1e-3, .weight_decay = 0.1, .t = 3,
                              .clip = 0.7f};
}

/* A moment is read, updated in f32, used, and rounded once; and that on every instruction set. */
TEST(moments_in_bf16_are_rounded_once)
{
    const double keys[] = {0.9, 0.99, 1e-8};
    const struct mt_optimizer *o = mt_optimizer_find("adamw", MT_STATE_BF16, NULL);
    assert_non_null(o);
    assert_int_equal(o->state[0].block_bytes, 2);
    assert_true(mt_optimizer_bytes(o, MT_MASTER_F32, MT_BF16) == 18 &&
                mt_optimizer_bytes(&mt_adamw, MT_MASTER_F32, MT_BF16) == 26);
    MT_FREED struct moments16 *want = make16(7);
    for (size_t i = 0; i < MAX; i++) { /* what f32 moments of the same values become, rounded */
        want->s.m[i] = mt_bf16_to_f32(want->m[i]);
        want->s.v[i] = mt_bf16_to_f32(want->v[i]);
    }
    struct mt_update f32 = update16(want, keys, MAX);
    f32.state[0] = want->s.m;
    f32.state[1] = want->s.v;
    assert_int_equal(mt_adamw.update(&mt_adamw, &f32, MT_ISA_SCALAR), 0);
    for (enum mt_isa isa = MT_ISA_SCALAR; isa <= MT_ISA_AVX512; isa++) {
        if (!mt_isa_available(isa))
            continue;
        struct moments16 *got = make16(7);
        struct mt_update u = update16(got, keys, MAX);
        assert_int_equal(o->update(o, &u, isa), 0);
        assert_memory_equal(got->s.hi, want->s.hi, sizeof(want->s.hi));
        assert_memory_equal(got->s.lo, want->s.lo, sizeof(want->s.lo));
        for (size_t i = 0; i < MAX; i++)
            if (got->m[i] != mt_f32_to_bf16(want->s.m[i]) || got->v[i] != mt_f32_to_bf16(want->s.v[i]))
                fail_msg("%s: moments of element %zu", mt_isa_name(isa), i);
        free(got);
    }
}

TEST(nothing_outside_the_run_is_touched)
{
    struct state *want = make(4), *got = make(4);
    struct adam a = args(got, 100, 777, MT_F32);
    adam_run(&a, MT_ISA_AUTO);
    for (size_t i = 0; i < MAX; i++)
        if (i < 100 || i >= 877)
            assert_true(got->hi[i] == want->hi[i] && got->lo[i] == want->lo[i] &&
                        got->m[i] == want->m[i] && got->v[i] == want->v[i]);
    free(want);
    free(got);
}

TEST(results_that_are_not_finite_are_counted)
{
    MT_FREED struct state *s = make(6);
    s->grad[11] = NAN;
    s->grad[500] = INFINITY;
    mt_master_split(3.0e38f, &s->hi[700], &s->lo[700]);
    struct adam a = args(s, 0, 1000, MT_F32);
    assert_int_equal(adam_run(&a, MT_ISA_AUTO), 2);
}

TEST(updates_below_bf16_survive)
{
    MT_FREED struct state *s = make(8);
    mt_master_split(1.0f, &s->hi[0], &s->lo[0]);
    s->m[0] = s->v[0] = 0;
    struct adam a = args(s, 0, 1, MT_F32);
    a.lr = 1e-6;
    a.weight_decay = 0;
    a.t = 1;
    for (int i = 0; i < 100; i++)
        adam_run(&a, MT_ISA_AUTO);
    assert_true(fabs((double)master(s, 0) - 1.0) > 2e-5);
}

TEST(each_optimizer_cuts_between_its_blocks)
{
    const struct mt_optimizer *o;
    size_t n = 0;
    for (; (o = mt_optimizer_at(n)); n++) {
        assert_true(o->grain == MT_GRAIN_TENSOR || (o->grain && MT_PIECE_ALIGN % o->grain == 0));
        for (int i = 0; i < o->n_states; i++) {
            assert_true(o->state[i].name && o->state[i].use && o->state[i].block);
            assert_true(o->grain % o->state[i].block == 0 && (!o->state[i].apart || o->state[i].bytes));
        }
        assert_true(!o->n_states || mt_optimizer_find(o->type, o->state_type, (double[MT_OPTIMIZER_SLOTS]){1}) == o ||
                    o->if_zero);
    }
    assert_true(n >= 10 && mt_optimizer_n_slots() <= MT_OPTIMIZER_SLOTS);
    assert_null(mt_optimizer_find("no", MT_STATE_F32, NULL));
}

static size_t lo_bytes(const struct mt_adam_probe *a)
{
    return mt_plane_desc_bytes(mt_plane_desc_of(a->planes, MT_PLANE_LO), a->n);
}

/* Planes of a probed update are those of a run; every update can be timed, under a name of its own. */
TEST(each_form_of_updates_is_timed)
{
    enum { N = 4096, MOST = 64 };
    struct mt_adam_probe_params p = {.n = N, .n_threads = 1};
    char names[MOST][MT_OPTIMIZER_NAME];
    size_t n = 0, by_chance = 0;
    for (; mt_update_form_at(n, &p.form); n++) {
        struct mt_adam_probe a;
        assert_true(n < MOST);
        mt_update_form_name(&p.form, names[n]);
        for (size_t k = 0; k < n; k++)
            assert_string_not_equal(names[k], names[n]);
        assert_int_equal(mt_adam_probe_init(&a, &p, NULL), 0);
        assert_int_equal(lo_bytes(&a), N * mt_master_lo_bytes(p.form.master));
        mt_adam_probe_run(&a);
        assert_true(((uint16_t *)mt_plane(a.planes, 0, MT_PLANE_HI))[N - 1]); /* it has moved from 0 */
        mt_adam_probe_finish(&a);
        by_chance += p.form.stochastic;
    }
    assert_true(n >= 45 && by_chance >= 9);
    assert_string_equal(names[0], "adamw/f32"); /* the one that all machines have measured */
}

/* auto becomes the optimizer's own default; a key that it does not have must stay auto. */
TEST(keys_that_are_auto_become_defaults)
{
    double slots[MT_OPTIMIZER_SLOTS], own[MT_OPTIMIZER_SLOTS];
    for (size_t i = 0; i < MT_OPTIMIZER_SLOTS; i++)
        slots[i] = MT_AUTO;
    slots[mt_optimizer_slot_of("beta2")] = 0.95;
    assert_int_equal(mt_optimizer_resolve_keys(&mt_adamw, slots, NULL), 0);
    mt_optimizer_own_keys(&mt_adamw, slots, own);
    assert_true(own[0] == 0.9 && own[1] == 0.95 && own[2] == 1e-8);
    struct mt_optimizer none = {.type = "none"};
    struct mt_err err = {0};
    assert_int_equal(mt_optimizer_resolve_keys(&none, slots, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "optimizer.beta1 is set, but optimizer.type = none has no such key"));
}

/* A key that several optimizers have is read by the bounds of the first: the others' are the same, and hold their defaults. */
TEST(defaults_are_within_the_bounds_that_optimizers_share)
{
    const struct mt_optimizer *o;
    for (size_t i = 0; (o = mt_optimizer_at(i)); i++)
        for (int k = 0; k < o->n_keys; k++) {
            const struct mt_optimizer_key *own = &o->keys[k];
            const struct mt_key *shared = &mt_optimizer_slot(mt_optimizer_slot_of(own->key.name))->key;
            bool same = own->key.type == shared->type && own->key.min == shared->min && own->key.max == shared->max;
            bool whole = shared->type == MT_KEY_REAL || own->def == floor(own->def);
            if (!same || !whole || own->def < shared->min || own->def > shared->max)
                fail_msg("optimizer.%s of %s: %g, %g to %g, not %g to %g", own->key.name, o->type, own->def, own->key.min,
                         own->key.max, shared->min, shared->max);
        }
}

TEST(clip_factor_is_norm_over_limit)
{
    assert_true(mt_clip_factor(0.5, 1.0) == 1.0f);
    assert_true(mt_clip_factor(4.0, 1.0) == (float)(1.0 / (4.0 + 1e-6)));
    assert_true(mt_clip_factor(1e9, 0) == 1.0f);
}

static double lr_at(enum mt_lr_schedule schedule, double peak, uint64_t k, uint64_t warmup, uint64_t total, double min_ratio)
{
    return mt_lr_at(&(struct mt_lr){schedule, peak, min_ratio, warmup, total / 10, total}, k);
}

TEST(schedules_match_transformers)
{
    /* get_{linear,cosine}_schedule_with_warmup(4, 20) and constant, at updates 0, 2, 4, 12, 19 */
    static const uint64_t at[] = {0, 2, 4, 12, 19};
    static const double linear[] = {0, 0.5, 1, 0.5, 0.0625};
    static const double cosine[] = {0, 0.5, 1, 0.5, 0.009607359798384785};
    for (int i = 0; i < 5; i++) {
        assert_true(fabs(lr_at(MT_LR_LINEAR, 2, at[i], 4, 20, 0) - 2 * linear[i]) < 1e-15);
        assert_true(fabs(lr_at(MT_LR_COSINE, 2, at[i], 4, 20, 0) - 2 * cosine[i]) < 1e-15);
        assert_true(lr_at(MT_LR_CONSTANT, 2, at[i], 4, 20, 0) == (at[i] < 4 ? 2 * at[i] / 4.0 : 2));
    }
    assert_true(lr_at(MT_LR_WSD, 1, 17, 4, 20, 0.1) == 1);
    assert_true(fabs(lr_at(MT_LR_WSD, 1, 19, 4, 20, 0.1) - 0.55) < 1e-15);
    assert_true(fabs(lr_at(MT_LR_COSINE, 1, 20, 0, 20, 0.1) - 0.1) < 1e-15);
    assert_true(lr_at(MT_LR_LINEAR, 1, 0, 0, 10, 0) == 1);
    /* get_wsd_schedule(warmup 4, stable 8, decay 8): half way down in its middle */
    struct mt_lr wsd = {MT_LR_WSD, 2, 0, 4, 8, 20};
    assert_true(mt_lr_at(&wsd, 12) == 2 && fabs(mt_lr_at(&wsd, 16) - 1) < 1e-15);
}
