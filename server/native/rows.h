// Operators that take rows one by one: norm, rotation, gate, and the writing of keys and values.
// Activations are float32. Steps are in numbers, from row to row.
#pragma once

#include <cstdint>

#include "isa.h"

/// x: outer * inner vectors of `size` numbers, those of one outer row side by side. out is dense.
/// x / sqrt(mean(x²) + eps) * weight
MURAL_KERNEL(mural_rms_norm)(const float* x, int64_t outer, int64_t outer_step, int64_t inner,
                             int64_t size, const float* weight, float eps, float* out,
                             int32_t threads);

/// gate_up [rows, 2 * size] → act(gate) * up [rows, size]; activation 0: SiLU, 1: GELU by tanh.
MURAL_KERNEL(mural_gated)(const float* gate_up, int64_t rows, int64_t step, int64_t size,
                          int32_t activation, float* out, int32_t threads);

/// x [rows, heads, head_dim] by cos and sin [rows, head_dim] as in Ops.rotary; out is dense.
MURAL_KERNEL(mural_rotary)(const float* x, int64_t rows, int64_t step, int64_t heads,
                           int64_t head_dim, const float* cos, const float* sin, float* out,
                           int32_t threads);

/// One layer's pool [blocks, kv heads, block size, head dim].
struct MuralPool {
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    /// 0 float32, 1 bfloat16, 2 float16.
    int32_t dtype;
};

/// keys, values [rows, kv_heads, head_dim] to their slots, as in Ops.write_kv.
MURAL_KERNEL(mural_write_kv)(const MuralPool* pool, const float* keys, int64_t key_step,
                             const float* values, int64_t value_step, const int64_t* slots,
                             int64_t rows, void* key_pool, void* value_pool, int32_t threads);

/// Both in one: qkv [rows, heads + 2 * kv_heads, head_dim] → rotated queries [rows, heads,
/// head_dim], dense; rotated keys and the values go to the pool.
MURAL_KERNEL(mural_rotary_and_write_kv)(const MuralPool* pool, const float* qkv, int64_t step,
                                        int64_t heads, const float* cos, const float* sin,
                                        const int64_t* slots, int64_t rows, void* key_pool,
                                        void* value_pool, float* queries, int32_t threads);
