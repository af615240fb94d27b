// A product of small float32 matrices whose right side lies in rows of whole vectors.
#pragma once

#include "simd.h"

namespace {

/// R rows times V vectors of C (+)= A B; A's element (i, k) is a[i * row_step + k * k_step].
template <int R, int V>
inline void tile(const float* a, int64_t row_step, int64_t k_step, const float* b, int64_t b_step,
                 float* c, int64_t c_step, int64_t depth, bool accumulate) {
    Vec sum[R][V];
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < V; ++j) {
            sum[i][j] = accumulate ? load(c + i * c_step + j * kWidth) : zero();
        }
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec right[V];
        for (int j = 0; j < V; ++j) right[j] = load(b + k * b_step + j * kWidth);
        for (int i = 0; i < R; ++i) {
            const Vec left = splat(a[i * row_step + k * k_step]);
            for (int j = 0; j < V; ++j) sum[i][j] = fma(left, right[j], sum[i][j]);
        }
    }
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < V; ++j) store(c + i * c_step + j * kWidth, sum[i][j]);
    }
}

template <int R, int V>
inline void tile_rows(int64_t rows, const float* a, int64_t row_step, int64_t k_step,
                      const float* b, int64_t b_step, float* c, int64_t c_step, int64_t depth,
                      bool accumulate) {
    int64_t i = 0;
    for (; i + R <= rows; i += R) {
        tile<R, V>(a + i * row_step, row_step, k_step, b, b_step, c + i * c_step, c_step, depth,
                   accumulate);
    }
    if constexpr (R > 1) {
        if (i < rows) {
            tile_rows<R / 2, V>(rows - i, a + i * row_step, row_step, k_step, b, b_step,
                                c + i * c_step, c_step, depth, accumulate);
        }
    }
}

/// C [rows, vecs * kWidth] (+)= A [rows, depth] · B [depth, vecs * kWidth].
inline void multiply(int64_t rows, int64_t vecs, int64_t depth, const float* a, int64_t row_step,
                     int64_t k_step, const float* b, int64_t b_step, float* c, int64_t c_step,
                     bool accumulate) {
    constexpr int wide = kTileVecs;
    int64_t j = 0;
    for (; j + wide <= vecs; j += wide) {
        tile_rows<kTileRows, wide>(rows, a, row_step, k_step, b + j * kWidth, b_step,
                                   c + j * kWidth, c_step, depth, accumulate);
    }
    for (; j + 2 <= vecs; j += 2) {
        tile_rows<kTileRows, 2>(rows, a, row_step, k_step, b + j * kWidth, b_step, c + j * kWidth,
                                c_step, depth, accumulate);
    }
    for (; j < vecs; ++j) {
        tile_rows<kTileRows, 1>(rows, a, row_step, k_step, b + j * kWidth, b_step, c + j * kWidth,
                                c_step, depth, accumulate);
    }
}

/// Widen n numbers into whole vectors of float32, with zeros behind the last.
template <class T>
inline void widen(const T* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(to + i, load(from + i));
    if (i < n) store(to + i, load(from + i, n - i));
}

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace
