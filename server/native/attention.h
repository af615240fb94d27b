// Causal attention over a paged pool of keys and values, decodes and prefill chunks in one call.
#pragma once

#include <cstdint>

#include "isa.h"

/// One attention layer and its pool [blocks, kv heads, block size, head dim].
struct MuralAttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    /// The last so many tokens are seen, the own included; 0: all.
    int64_t sliding_window;
    float scale;
    /// cap * tanh(score / cap); 0: none.
    float logit_softcap;
    /// The pool's: 0 float32, 1 bfloat16, 2 float16.
    int32_t dtype;
};

/// Rows [start, end) of the batch, behind `context` earlier tokens of their sequence.
struct MuralPrefillChunk {
    int64_t start;
    int64_t end;
    int64_t context;
    const int64_t* blocks;
};

/// A step's batch: the decodes first, then the chunks in the order of their rows.
struct MuralAttentionStep {
    int64_t num_rows;
    int64_t num_decodes;
    /// [num_decodes, table_step]
    const int64_t* tables;
    int64_t table_step;
    /// [num_decodes], the own token included.
    const int64_t* lengths;
    int64_t num_chunks;
    const MuralPrefillChunk* chunks;
};

/// queries: rows of num_heads * head_dim numbers, query_step apart; out [rows, the same], dense.
/// Rows of no sequence come out as zeros. threads: at most so many.
MURAL_KERNEL(mural_attention)(const MuralAttentionShape* shape, const MuralAttentionStep* step,
                              const float* queries, int64_t query_step, const void* keys,
                              const void* values, float* out, int32_t threads);
