/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/ops.h"
#include "scalar.cuh"

/** Parameters of MT_GLU_CLAMPED. */
struct glu_shape {
    float alpha, limit;
};

/** y = act * up. dy/dgate = slope * up, dy/dup = du; slope or du is 0 where gate or up was clamped. Without a gate,
 * it is the only input that is called the gate: up is 1. */
struct glu_terms {
    float act, up, slope, du;
};

/**
 * act(x) = x s(x). gelu's s is (1 + tanh(z)) / 2 = 1 / (1 + e^-2z) with z = k (x + 0.044715 x^3)
 * (Hendrycks and Gimpel 2016).
 */
template <typename T, int KIND> MT_DEVICE glu_terms glu_terms_of(glu_shape p, float g, float u)
{
    if constexpr (KIND == MT_GLU_SILU) {
        auto [s, rest] = logistic_of<T>(g);
        return {g * s, u, s * (1.0f + g * rest), g * s};
    } else if constexpr (KIND == MT_GLU_GELU_TANH) {
        auto [s, rest] = logistic_of<T>(2.0f * 0.7978845608f * (g + 0.044715f * g * g * g));
        float slope = s + g * (2.0f * s * rest * 0.7978845608f * (1.0f + 3.0f * 0.044715f * g * g));
        return {g * s, u, slope, g * s};
    } else if constexpr (KIND == MT_GLU_RELU2) {
        float r = g < 0.0f ? 0.0f : g; /* a NaN stays one */
        return {r * r, 1.0f, 2.0f * r, 0.0f};
    } else {
        float x = g > p.limit ? p.limit : g, v = u > p.limit ? p.limit : u;
        auto [s, rest] = logistic_of<T>(p.alpha * x);
        float act = x * s;
        v = v < -p.limit ? -p.limit : v;
        return {act, v + 1.0f, x == g ? s * (1.0f + p.alpha * x * rest) : 0.0f, v == u ? act : 0.0f};
    }
}
