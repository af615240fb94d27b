#include "gemm.h"

#include "threads.h"

MURAL_KERNEL(mural_gemm)(float* values, std::int64_t count, int threads) {
    parallel(threads, [&](int thread, int team) {
        for (std::int64_t i = thread; i < count; i += team) values[i] += 1.0f;
    });
}
