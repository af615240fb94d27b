// Linear layers over weights in half precision: y = x Wᵀ (+ bias) (+ residual).
#pragma once

#include <cstdint>

#include "isa.h"

namespace mural {

// Outputs in a panel. Weights lie as [panel][in, padded to IN_BLOCK][PANEL] halves, zero-padded.
constexpr int PANEL = 32;
constexpr int IN_BLOCK = 64;

}  // namespace mural

// What stays the same from call to call; linear.py has its twin.
struct MuralLinear {
    const std::uint16_t* weight;
    // [out] powers of two: the weight is the packed one times its output's scale.
    const float* out_scale;
    // [out] or null.
    const float* bias;
    std::int64_t in;
    std::int64_t out;
    // Activations below 2^limit_exponent cannot overflow half precision over an IN_BLOCK.
    std::int64_t limit_exponent;
};

// x [rows, in] with `x_stride` floats from row to row; residual [rows, out] likewise, or null;
// y [rows, out] dense. `work`: mural_gemm_work bytes, aligned to 64, which hold nothing before
// and after. Any rows >= 0.
MURAL_KERNEL(mural_gemm)(const MuralLinear* linear, const float* x, std::int64_t x_stride,
                         const float* residual, std::int64_t residual_stride, float* y,
                         void* work, std::int64_t rows, int threads);

// y [rows, out / 2] = act(gate) * up, where out is all gates, then all that they open: the widest
// of a layer's results never goes through memory. out must be a multiple of 2 * PANEL; activation
// 0 is SiLU, 1 GELU by tanh.
MURAL_KERNEL(mural_gated_gemm)(const MuralLinear* linear, const float* x, std::int64_t x_stride,
                               std::int32_t activation, float* y, void* work, std::int64_t rows,
                               int threads);
