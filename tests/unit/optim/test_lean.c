/* SPDX-License-Identifier: Apache-2.0 */
/* Optimizers with few bytes of state: their oracles (scripts/reference/optimizer_fixtures.py), and one result whatever computes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/philox.h"
#include "optim/kernel.h"
#include "test.h"

enum { MAX = 5000, STATE_BYTES = (MAX + 32) * 4 };

/* A tensor and its states. */
struct tensor {
    size_t n;
    uint16_t hi[MAX], lo[MAX];
    uint8_t lo8[MAX];
    float grad[MAX];
    uint8_t state[MT_MAX_STATES][STATE_BYTES];
};

static struct tensor *make(size_t n, uint64_t seed)
{
    struct tensor *x = mt_calloc(1, sizeof(*x));
    assert_non_null(x);
    x->n = n;
    mt_philox_normal(x->grad, MAX, 0, seed, 1, 0.02f);
    for (size_t i = 0; i < MAX; i++) {
        mt_master_split((float)mt_philox_uniform(seed, 3, i) - 0.5f, &x->hi[i], &x->lo[i]);
        x->lo8[i] = (uint8_t)(x->lo[i] >> 8);
        x->grad[i] *= i / 32 % 7 == 3 ? 0 : powf(10, (float)(i / 32 % 11) - 8);
    }
    return x;
}

struct run {
    const struct mt_optimizer *o;
    enum mt_isa isa;
    enum mt_master master;
    bool vector, stochastic;
    double keys[MT_OPTIMIZER_SLOTS];
};

/* Updates elements [first, first + n) of the tensor. */
static uint64_t update(const struct run *r, struct tensor *x, size_t first, size_t n, uint64_t t)
{
    const struct mt_state_shape shape = {.n_dims = r->vector ? 1 : 2, .matrix = !r->vector, .rows = x->n, .cols = 1, .n = x->n};
    struct mt_update u = {.n = n, .master = r->master, .hi = x->hi + first, .lo = x->lo + first, .lo8 = x->lo8 + first,
                          .grad = x->grad + first, .grad_dtype = MT_F32, .keys = r->keys, .lr = 1e-3, .weight_decay = 0.1, .t = t, .clip = 1,
                          .stochastic = r->stochastic, .seed = 5, .tensor = 9, .first = first};
    for (int i = 0; i < r->o->n_states; i++) {
        const struct mt_optimizer_state *s = &r->o->state[i];
        bool held = !s->bytes || s->bytes(&shape);
        u.state[i] = held ? x->state[i] + first / s->block * s->block_bytes : NULL;
    }
    return r->o->update(r->o, &u, r->isa);
}

static struct run run_of(const char *type, enum mt_state_type states, bool momentum)
{
    const double slots[MT_OPTIMIZER_SLOTS] = {0.9, 0.99, 1e-8, momentum ? 0.9 : 0};
    struct run r = {.o = mt_optimizer_find(type, states, slots), .isa = MT_ISA_AUTO};
    assert_non_null(r.o);
    mt_optimizer_own_keys(r.o, slots, r.keys);
    return r;
}

static bool same(const struct tensor *a, const struct tensor *b)
{
    return !memcmp(a->hi, b->hi, sizeof(a->hi)) && !memcmp(a->lo, b->lo, sizeof(a->lo)) &&
           !memcmp(a->lo8, b->lo8, sizeof(a->lo8)) && !memcmp(a->state, b->state, sizeof(a->state));
}

static struct tensor *updated(const struct run *r, size_t n, size_t piece)
{
    struct tensor *x = make(n, 3);
    for (uint64_t t = 1; t <= 3; t++)
        for (size_t at = 0; at < n; at += piece)
            assert_int_equal(update(r, x, at, MT_MIN(piece, n - at), t), 0);
    return x;
}

/* Each row, for matrices and vectors, on each instruction set, and cut between grains into pieces. */
TEST(one_result_for_every_instruction_set_and_cut)
{
    static const size_t sizes[] = {1, 31, 32, 33, 511, 513, 4999};
    const struct mt_optimizer *o;
    for (size_t k = 0; (o = mt_optimizer_at(k)); k++)
        for (size_t i = 0; i < MT_ARRAY_LEN(sizes) * 12; i++) {
            struct run r = {.o = o, .isa = MT_ISA_SCALAR, .vector = i & 1, .stochastic = i & 2,
                            .master = (enum mt_master)(i / 4 % 3), .keys = {0.9, 0.99, 1e-8}};
            size_t n = sizes[i / 12];
            struct tensor *want = updated(&r, n, n);
            for (r.isa = MT_ISA_SCALAR; r.isa <= MT_ISA_AVX512; r.isa++)
                for (size_t piece = 32; piece <= 2048 && mt_isa_available(r.isa); piece *= 4) {
                    struct tensor *got = updated(&r, n, piece);
                    if (!same(want, got))
                        fail_msg("%s with states %d, masters %d: %s differs at n %zu, pieces of %zu", o->type,
                                 (int)o->state_type, (int)r.master, mt_isa_name(r.isa), n, piece);
                    free(got);
                }
            free(want);
        }
}

/* --- oracles -------------------------------------------------------------------------------------------------- */

enum { N = 320, STEPS = 20, BLOCKS = N / 32 };

struct oracle {
    int32_t n, steps;
    float w[N], grad[STEPS][N];
    float adam_w[N];
    int8_t m[N];
    uint8_t v[N];
    float m_scale[BLOCKS], v_scale[BLOCKS];
    float lion_w[N], lion_m[N], sgd_w[N], sgd_m[N];
    uint32_t master24[N], master16[N];
};

static void read_oracle(struct oracle *x)
{
    FILE *f = fopen(FIXTURES "/lean.bin", "rb");
    assert_non_null(f);
    assert_int_equal(fread(x, 1, sizeof(*x), f), sizeof(*x));
    assert_int_equal(fgetc(f), EOF);
    fclose(f);
    assert_true(x->n == N && x->steps == STEPS);
}

static struct tensor *train(const struct run *r, const struct oracle *x)
{
    struct tensor *t = make(N, 1);
    for (size_t i = 0; i < N; i++) {
        mt_master_split(x->w[i], &t->hi[i], &t->lo[i]);
        if (r->master == MT_MASTER_24BIT)
            mt_master_split24(mt_f32_bits(x->w[i]), &t->hi[i], &t->lo8[i]);
    }
    for (uint64_t step = 1; step <= STEPS; step++) {
        memcpy(t->grad, x->grad[step - 1], sizeof(x->grad[0]));
        assert_int_equal(update(r, t, 0, N, step), 0);
    }
    return t;
}

static void expect_weights(const struct tensor *t, const float *want)
{
    for (size_t i = 0; i < N; i++) {
        float w = mt_master_join(t->hi[i], t->lo[i]);
        if (!(fabsf(w - want[i]) <= 1e-6f))
            fail_msg("weight %zu: %.9g, want %.9g", i, (double)w, (double)want[i]);
    }
}

TEST(states_in_8_bits_are_companded_as_their_oracle_does)
{
    MT_FREED struct oracle *x = mt_calloc(1, sizeof(*x));
    struct run r = run_of("adamw", MT_STATE_8BIT, false);
    size_t other = 0;
    read_oracle(x);
    MT_FREED struct tensor *t = train(&r, x);
    expect_weights(t, x->adam_w);
    for (size_t i = 0; i < N; i++) {
        const uint8_t *m = t->state[0] + i / 32 * 34, *v = t->state[1] + i / 32 * 34;
        uint16_t scale[2];
        memcpy(&scale[0], m + 32, 2);
        memcpy(&scale[1], v + 32, 2);
        other += (int8_t)m[i % 32] != x->m[i];
        other += v[i % 32] != x->v[i];
        assert_true(fabsf(mt_bf16_to_f32(scale[0]) / x->m_scale[i / 32] - 1) < 0.004f);
        assert_true(x->v_scale[i / 32] > 0 ? fabsf(mt_bf16_to_f32(scale[1]) / x->v_scale[i / 32] - 1) < 0.004f
                                           : !scale[1]);
    }
    assert_true(other <= 1); /* a tie that falls to the other side */
}

TEST(lion_and_sgd_are_those_of_their_oracles)
{
    MT_FREED struct oracle *x = mt_calloc(1, sizeof(*x));
    read_oracle(x);
    for (int sgd = 0; sgd < 2; sgd++) {
        struct run r = run_of(sgd ? "sgd" : "lion", MT_STATE_F32, true);
        struct tensor *t = train(&r, x);
        const float *m = sgd ? x->sgd_m : x->lion_m;
        expect_weights(t, sgd ? x->sgd_w : x->lion_w);
        for (size_t i = 0; i < N; i++) {
            float got;
            memcpy(&got, t->state[0] + 4 * i, 4);
            assert_true(fabsf(got - m[i]) <= 1e-6f * fabsf(m[i]));
        }
        free(t);
    }
}

TEST(masters_of_few_bits_are_those_of_their_oracles)
{
    MT_FREED struct oracle *x = mt_calloc(1, sizeof(*x));
    read_oracle(x);
    for (enum mt_master master = MT_MASTER_24BIT; master <= MT_MASTER_BF16; master++) {
        struct run r = run_of("adamw", MT_STATE_F32, false);
        r.master = master;
        struct tensor *t = train(&r, x);
        for (size_t i = 0; i < N; i++) {
            bool wide = master == MT_MASTER_24BIT;
            uint32_t got =
                mt_f32_bits(mt_master_join(t->hi[i], wide ? (uint16_t)(t->lo8[i] << 8) : 0));
            assert_int_equal(got, wide ? x->master24[i] : x->master16[i]);
        }
        free(t);
    }
}

/* Of fine-tuning: each update is a thirtieth of the distance to the next bf16 number. */
TEST(masters_of_bf16_keep_small_updates)
{
    enum { UPDATES = 400 };
    struct run r = run_of("sgd", MT_STATE_F32, false);
    MT_FREED struct tensor *x = make(4096, 1);
    size_t lost = 0;
    double sum = 0, want = 0;
    r.master = MT_MASTER_BF16;
    for (size_t i = 0; i < 4096; i++) {
        float w = 0.04f + 0.02f * (float)i / 4096, moved; /* numbers of bf16 are 2.4e-4 apart */
        x->hi[i] = mt_f32_to_bf16(w);
        x->grad[i] = -0.0125f;
        moved = mt_bf16_to_f32(x->hi[i]) * (float)(1 - 1e-4) + 1e-3f * 0.0125f;
        lost += mt_f32_to_bf16(moved) == x->hi[i];
        sum -= (double)mt_bf16_to_f32(x->hi[i]);
        double exact = (double)mt_bf16_to_f32(x->hi[i]);
        want -= exact;
        for (int t = 0; t < UPDATES; t++)
            exact = exact * (1 - 1e-4) + 1e-3 * 0.0125;
        want += exact;
    }
    for (uint64_t t = 1; t <= UPDATES; t++)
        assert_int_equal(update(&r, x, 0, 4096, t), 0);
    for (size_t i = 0; i < 4096; i++)
        sum += (double)mt_bf16_to_f32(x->hi[i]);
    assert_int_equal(lost, 4096); /* rounded to the nearest, no weight would ever move */
    if (!(fabs(sum / want - 1) < 0.01))
        fail_msg("the weights moved by %.6g in the mean, %.6g would be exact", sum / 4096,
                 want / 4096);
}

/* What rounds to infinity is counted, and nothing finite becomes infinite by chance. */
TEST(masters_stay_finite)
{
    static const uint32_t largest[] = {0x7f7f7f7f, 0x7f7f7f80, 0x7f7f7fff, 0x7f7f8000};
    struct run r = run_of("sgd", MT_STATE_F32, false);
    for (enum mt_master master = MT_MASTER_24BIT; master <= MT_MASTER_BF16; master++)
        for (size_t i = 0; i < 4; i++)
            for (uint32_t sign = 0; sign < 2; sign++) {
                uint32_t u = largest[i] | sign << 31;
                struct tensor x = {.n = 32};
                float w = mt_f32_from_bits(u);
                struct mt_update up = {.n = 1, .master = master, .hi = x.hi, .lo8 = x.lo8, .grad = &w,
                                       .grad_dtype = MT_F32, .keys = r.keys, .lr = -1, .t = 1, .clip = 1};
                bool bad = master == MT_MASTER_24BIT ? i > 0 : i > 2; /* from 0 by a step of w */
                assert_int_equal(r.o->update(r.o, &up, MT_ISA_AUTO), bad);
                assert_true(((x.hi[0] & 0x7fff) >= 0x7f80) == bad);
            }
}

TEST(sgd_without_momentum_keeps_nothing)
{
    struct run none = run_of("sgd", MT_STATE_8BIT, false), kept = run_of("sgd", MT_STATE_BF16, true);
    assert_int_equal(none.o->n_states, 0);
    assert_int_equal(kept.o->n_states, 1);
    assert_true(mt_optimizer_bytes(none.o, MT_MASTER_F32, MT_BF16) == 10 &&
                mt_optimizer_bytes(kept.o, MT_MASTER_F32, MT_BF16) == 14);
    assert_true(mt_optimizer_state_bytes(run_of("adamw", MT_STATE_8BIT, false).o) == 2 * 34.0 / 32);
    MT_FREED struct tensor *x = make(64, 1);
    float w = mt_master_join(x->hi[5], x->lo[5]);
    assert_int_equal(update(&none, x, 0, 64, 1), 0);
    float want = w * (float)(1 - 1e-4) - 1e-3f * x->grad[5];
    assert_true(mt_master_join(x->hi[5], x->lo[5]) == want);
}

/* A quarter of the way between two numbers of bf16: a quarter of the elements is rounded up. */
TEST(rounding_by_chance_keeps_the_mean)
{
    struct run r = run_of("sgd", MT_STATE_BF16, true);
    struct tensor *x = make(4096, 1), *again = make(4096, 1);
    size_t up = 0, other = 0;
    r.stochastic = true;
    for (size_t i = 0; i < 4096; i++)
        x->grad[i] = again->grad[i] = 1 + 0x1p-9f;
    update(&r, x, 0, 4096, 1);
    update(&r, again, 0, 4096, 2); /* another update has other numbers */
    for (size_t i = 0; i < 4096; i++) {
        uint16_t m[2];
        memcpy(&m[0], x->state[0] + 2 * i, 2);
        memcpy(&m[1], again->state[0] + 2 * i, 2);
        assert_true(m[0] == 0x3f80 || m[0] == 0x3f81);
        up += m[0] == 0x3f81;
        other += m[0] != m[1];
    }
    assert_in_range(up, 1024 - 111, 1024 + 111); /* four standard deviations */
    assert_in_range(other, 1536 - 124, 1536 + 124);
    free(x);
    free(again);
}
