#pragma once

#include <cstdint>

#include "isa.h"

// values[0..count) += 1.
MURAL_KERNEL(mural_gemm)(float* values, std::int64_t count, int threads);
