// Shrink and expand (y += (x Aᵀ) B, the scale being in B) for the adapters of a batch.
#pragma once

#include <cstdint>

#include "isa.h"

/// The rows of one adapter and the rank rows [rank_start, rank_end) that it has in every stack.
struct MuralLoraGroup {
    int64_t rank_start;
    int64_t rank_end;
    /// Its rows are rows[first .. first + count) of the step.
    int64_t first;
    int64_t count;
};

struct MuralLoraStep {
    int64_t num_groups;
    const MuralLoraGroup* groups;
    const int64_t* rows;
    /// Of the largest rank; `hidden` has so many numbers per row and slice.
    int64_t rank_step;
};

/// A layer's stacks: a [slices, rank rows, in], per slice b [rank rows, out].
struct MuralLoraStack {
    int64_t num_slices;
    int64_t num_rank_rows;
    int64_t in_features;
    const void* a;
    const void* const* b;
    const int64_t* out_features;
    /// 0 float32, 1 bfloat16, 2 float16.
    int32_t dtype;
};

/// hidden: room for [rows of all groups, slices, rank_step].
MURAL_KERNEL(mural_lora)(const MuralLoraStep* step, const MuralLoraStack* stack, float* y,
                         int64_t y_step, const float* x, int64_t x_step, float* hidden,
                         int32_t threads);
