// The functions that gate a feed-forward block.
#pragma once

#include "simd.h"

namespace {

/// x / (1 + e^-z), x times the logistic function of z.
inline Vec times_logistic(Vec x, Vec z) {
    return div(x, add(splat(1.0f), exponential(sub(zero(), z))));
}

inline Vec silu(Vec x) { return times_logistic(x, x); }

/// 0.5 x (1 + tanh(u)) is x times the logistic function of 2 u, which is exact far out too.
inline Vec gelu(Vec x) {
    const Vec cube = mul(mul(x, x), x);
    return times_logistic(x, mul(splat(1.5957691216057308f), fma(splat(0.044715f), cube, x)));
}

}  // namespace
