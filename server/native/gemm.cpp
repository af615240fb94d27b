#include "gemm.h"

#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "activation.h"
#include "simd.h"
#include "threads.h"

namespace {

using mural::IN_BLOCK;
using mural::PANEL;

// So many inputs of a panel stay near while all rows pass over them.
constexpr int CACHED_BLOCKS = 9;

#if defined(__AVX512FP16__)

// Products and short sums in half precision at twice float32's rate. A chain of CHAIN products is
// summed in a register, the chains of an IN_BLOCK are added up, and that is widened to float32:
// rounding errors grow with the chain, not with the whole sum.
using Activation = _Float16;
constexpr int CHAIN = 16;
// Every row's sum has a register; beyond these, weights are read from a cache once more.
constexpr int MAX_TILE_ROWS = 28;

inline __m512h fma_broadcast(__m512h weight, const _Float16& x, __m512h sum) {
    // The compilers broadcast into a register first, on a port that the products need.
    __asm__("vfmadd231ph %2%{1to32%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(x));
    return sum;
}

// Halves from a weight in use to those that are fetched into the second-level cache meanwhile,
// and to those that are fetched from there into the first. The hardware alone stops at each page.
constexpr int FAR = 4096, NEAR = 256;

// sums [R][PANEL] = x [blocks][R][IN_BLOCK] times a panel.
template <int R>
void multiply_tile(const _Float16* x, const std::uint16_t* w, int blocks, float* sums) {
    alignas(64) _Float16 chains[R * PANEL];
    for (int block = 0; block < blocks; ++block) {
        for (int begin = 0; begin < IN_BLOCK; begin += CHAIN) {
            __m512h acc[R];
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ph();
#pragma GCC unroll 2
            for (int k = 0; k < CHAIN; ++k) {
                const std::uint16_t* at = w + k * PANEL;
                const __m512h weight = _mm512_loadu_ph(at);
                _mm_prefetch(at + FAR, _MM_HINT_T1);
                _mm_prefetch(at + NEAR, _MM_HINT_T0);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r)
                    acc[r] = fma_broadcast(weight, x[r * IN_BLOCK + k], acc[r]);
            }
            x += CHAIN;
            w += CHAIN * PANEL;
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) {
                __m512h sum = acc[r];
                if (begin > 0) sum = _mm512_add_ph(sum, _mm512_load_ph(chains + r * PANEL));
                if (begin + CHAIN < IN_BLOCK) {
                    _mm512_store_ph(chains + r * PANEL, sum);
                    continue;
                }
                const __m512i bits = _mm512_castph_si512(sum);
                __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
                __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
                float* total = sums + r * PANEL;
                if (block > 0) {
                    low = _mm512_add_ps(low, _mm512_load_ps(total));
                    high = _mm512_add_ps(high, _mm512_load_ps(total + 16));
                }
                _mm512_store_ps(total, low);
                _mm512_store_ps(total + 16, high);
            }
        }
        x += (R - 1) * IN_BLOCK;
    }
}

// Brings the row below 2^limit_exponent, converts it, and gives the factor that undoes the first.
float pack_row(const float* x, std::int64_t in, std::int64_t limit_exponent, _Float16* to,
               std::int64_t block_stride) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < in; k += 16) {
        const __mmask16 mask = in - k >= 16 ? 0xffff : (1u << (in - k)) - 1;
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x + k));
        largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude));
    }
    // 0 for zeros, 255 for Inf and NaN; those stay what they are under any scale.
    const int biased = _mm512_reduce_max_epi32(largest) >> 23;
    int exponent = biased == 255 ? 0 : static_cast<int>(limit_exponent) - 1 - (biased - 127);
    exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
    const auto power = [](int e) {
        const std::int32_t bits = (e + 127) << 23;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    };
    const __m512 scale = _mm512_set1_ps(power(exponent));
    for (std::int64_t k = 0; k < in; k += IN_BLOCK, to += block_stride) {
#pragma GCC unroll 4
        for (int i = 0; i < IN_BLOCK; i += 16) {
            const std::int64_t left = in - k - i;
            const __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
            const __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k + i), scale);
            _mm256_storeu_ph(to + i, _mm512_cvtxps_ph(values));
        }
    }
    return power(-exponent);
}

#else

// Weights are widened in registers; products and sums are float32.
using Activation = float;
constexpr int TILE_VECS = 2;
constexpr int MAX_TILE_ROWS = kWidth == 16 ? 12 : 6;

template <int R>
void multiply_tile(const float* x, const std::uint16_t* w, int blocks, float* sums) {
    for (int column = 0; column < PANEL; column += TILE_VECS * kWidth) {
        Vec acc[R][TILE_VECS];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECS; ++v) acc[r][v] = zero();
        const float* block_x = x;
        const std::uint16_t* at = w + column;
        for (int block = 0; block < blocks; ++block, block_x += R * IN_BLOCK) {
            for (int k = 0; k < IN_BLOCK; ++k, at += PANEL) {
                Vec weight[TILE_VECS];
#pragma GCC unroll 2
                for (int v = 0; v < TILE_VECS; ++v) weight[v] = load(reinterpret_cast<const Float16*>(at) + v * kWidth);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Vec value = splat(block_x[r * IN_BLOCK + k]);
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_VECS; ++v)
                        acc[r][v] = fma(value, weight[v], acc[r][v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECS; ++v)
                store(sums + r * PANEL + column + v * kWidth, acc[r][v]);
    }
}

float pack_row(const float* x, std::int64_t in, std::int64_t, float* to,
               std::int64_t block_stride) {
    for (std::int64_t k = 0; k < in; k += IN_BLOCK, to += block_stride) {
        const std::int64_t count = in - k < IN_BLOCK ? in - k : IN_BLOCK;
        std::memcpy(to, x + k, count * sizeof(float));
        std::memset(to + count, 0, (IN_BLOCK - count) * sizeof(float));
    }
    return 1.0f;
}

#endif

using Tile = void (*)(const Activation*, const std::uint16_t*, int, float*);

template <int... R>
Tile tile_of(std::int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr Tile tiles[] = {multiply_tile<R + 1>...};
    return tiles[rows - 1];
}

Tile tile_of(std::int64_t rows) {
    return tile_of(rows, std::make_integer_sequence<int, MAX_TILE_ROWS>());
}

// One product, as all threads of a team see it.
struct Product {
    const MuralLinear& linear;
    const float* x;
    std::int64_t x_stride;
    const float* residual;
    std::int64_t residual_stride;
    float* y;
    float* row_scale;    // [rows]
    Activation* packed;  // by tile, block, row in the tile: IN_BLOCK each
    std::int64_t rows;

    std::int64_t blocks() const { return (linear.in + IN_BLOCK - 1) / IN_BLOCK; }
    std::int64_t tiles() const { return (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS; }
    // Rows are spread evenly: 16 are two tiles of 8, not 14 and 2.
    std::int64_t tile_begin(std::int64_t tile) const { return tile * rows / tiles(); }

    void pack(int thread, int team) const {
        std::int64_t row = 0;
        for (std::int64_t tile = 0; tile < tiles(); ++tile) {
            const std::int64_t begin = tile_begin(tile), end = tile_begin(tile + 1);
            Activation* at = packed + begin * blocks() * IN_BLOCK;
            for (; row < end; ++row) {
                if (row % team != thread) continue;
                row_scale[row] =
                    pack_row(x + row * x_stride, linear.in, linear.limit_exponent,
                             at + (row - begin) * IN_BLOCK, (end - begin) * IN_BLOCK);
            }
        }
    }

    void multiply(std::int64_t panel) const {
        alignas(64) float sums[MAX_TILE_ROWS * PANEL];
        const std::int64_t step = tiles() == 1 ? blocks() : CACHED_BLOCKS;
        for (std::int64_t block = 0; block < blocks(); block += step) {
            const std::int64_t left = blocks() - block;
            const int count = static_cast<int>(left < step ? left : step);
            const std::uint16_t* weight =
                linear.weight + (panel * blocks() + block) * IN_BLOCK * PANEL;
            for (std::int64_t tile = 0; tile < tiles(); ++tile) {
                const std::int64_t begin = tile_begin(tile), end = tile_begin(tile + 1);
                // By the time the sums are there, so is where they go.
                for (std::int64_t row = begin; row < end; ++row)
                    for (int i = 0; i < PANEL; i += 16)
                        __builtin_prefetch(y + row * linear.out + panel * PANEL + i, 1);
                const Activation* at =
                    packed + (begin * blocks() + (end - begin) * block) * IN_BLOCK;
                tile_of(end - begin)(at, weight, count, sums);
                for (std::int64_t row = begin; row < end; ++row)
                    add_sums(row, panel * PANEL, block == 0, sums + (row - begin) * PANEL);
            }
        }
    }

    // Half of the panels are gates, half what they open: y [rows, out / 2] = act(gate) * up.
    template <class Gate>
    void multiply_gated(std::int64_t panel, Gate&& gate) const {
        alignas(64) float gates[MAX_TILE_ROWS * PANEL];
        alignas(64) float ups[MAX_TILE_ROWS * PANEL];
        const std::int64_t size = linear.out / 2, depth = blocks() * IN_BLOCK * PANEL;
        const std::uint16_t* weight = linear.weight + panel * depth;
        const std::uint16_t* up_weight = weight + size / PANEL * depth;
        const int count = static_cast<int>(blocks());
        for (std::int64_t tile = 0; tile < tiles(); ++tile) {
            const std::int64_t begin = tile_begin(tile), end = tile_begin(tile + 1);
            for (std::int64_t row = begin; row < end; ++row)
                for (int i = 0; i < PANEL; i += 16)
                    __builtin_prefetch(y + row * size + panel * PANEL + i, 1);
            const Activation* at = packed + begin * blocks() * IN_BLOCK;
            tile_of(end - begin)(at, weight, count, gates);
            tile_of(end - begin)(at, up_weight, count, ups);
            for (std::int64_t row = begin; row < end; ++row) {
                const std::int64_t from = (row - begin) * PANEL;
                for (int i = 0; i < PANEL; i += kWidth) {
                    const std::int64_t column = panel * PANEL + i;
                    const Vec opened = gate(scaled(row, column, gates + from + i));
                    const Vec up = scaled(row, size + column, ups + from + i);
                    store(y + row * size + column, mul(opened, up));
                }
            }
        }
    }

    Vec scaled(std::int64_t row, std::int64_t column, const float* sums) const {
        const Vec base = linear.bias ? load(linear.bias + column) : zero();
        const Vec scale = mul(load(linear.out_scale + column), splat(row_scale[row]));
        return fma(load(sums), scale, base);
    }

    // y (+)= sums, scaled back; the first time onto bias and residual.
    void add_sums(std::int64_t row, std::int64_t column, bool first, const float* sums) const {
        const std::int64_t wanted = linear.out - column;
        const int width = static_cast<int>(wanted < PANEL ? wanted : PANEL);
        float* to = y + row * linear.out + column;
        const float* scales = linear.out_scale + column;
        const float* offsets = first && linear.bias ? linear.bias + column : nullptr;
        const float* others =
            first && residual ? residual + row * residual_stride + column : nullptr;
        int i = 0;
        for (; i + kWidth <= width; i += kWidth) {
            Vec base = first ? zero() : load(to + i);
            if (offsets) base = load(offsets + i);
            if (others) base = add(base, load(others + i));
            const Vec scale = mul(load(scales + i), splat(row_scale[row]));
            store(to + i, fma(load(sums + i), scale, base));
        }
        for (; i < width; ++i) {
            float base = first ? 0.0f : to[i];
            if (offsets) base = offsets[i];
            if (others) base += others[i];
            to[i] = base + sums[i] * (scales[i] * row_scale[row]);
        }
    }
};

Product product_of(const MuralLinear& linear, const float* x, std::int64_t x_stride,
                   const float* residual, std::int64_t residual_stride, float* y, void* work,
                   std::int64_t rows) {
    auto* row_scale = static_cast<float*>(work);
    // After the scales, on the next cache line.
    auto* packed = reinterpret_cast<Activation*>(row_scale + (rows + 15) / 16 * 16);
    return {linear, x, x_stride, residual, residual_stride, y, row_scale, packed, rows};
}

// Packs the activations, then calls each(panel) for all panels, both on the team.
template <class Each>
void run(const Product& product, std::int64_t panels, int threads, Each&& each) {
    std::atomic<std::int64_t> next{0};
    parallel(threads, [&](int thread, int team) {
        product.pack(thread, team);
        if (team > 1) GOMP_barrier();
        // Cores are shared with other processes, so panels are taken as a thread comes to them:
        // first many in a row, which streams best, at the end one by one, so that all come to an
        // end together.
        std::int64_t begin = next.load(std::memory_order_relaxed), end;
        for (;;) {
            do {
                if (begin >= panels) return;
                const std::int64_t share = (panels - begin) / (2 * team);
                end = team == 1 ? panels : begin + (share < 1 ? 1 : share);
            } while (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
            for (; begin < end; ++begin) each(begin);
            begin = next.load(std::memory_order_relaxed);
        }
    });
}

}  // namespace

MURAL_KERNEL(mural_gemm)(const MuralLinear* linear, const float* x, std::int64_t x_stride,
                         const float* residual, std::int64_t residual_stride, float* y,
                         void* work, std::int64_t rows, int threads) {
    if (rows <= 0 || linear->out <= 0) return;
    const Product product = product_of(*linear, x, x_stride, residual, residual_stride, y, work, rows);
    run(product, (linear->out + PANEL - 1) / PANEL, threads,
        [&](std::int64_t panel) { product.multiply(panel); });
}

MURAL_KERNEL(mural_gated_gemm)(const MuralLinear* linear, const float* x, std::int64_t x_stride,
                               std::int32_t activation, float* y, void* work, std::int64_t rows,
                               int threads) {
    if (rows <= 0 || linear->out <= 0) return;
    const Product product = product_of(*linear, x, x_stride, nullptr, 0, y, work, rows);
    const std::int64_t panels = linear->out / (2 * PANEL);
    if (activation == 0) {
        run(product, panels, threads, [&](std::int64_t panel) {
            product.multiply_gated(panel, [](Vec gate) { return silu(gate); });
        });
    } else {
        run(product, panels, threads, [&](std::int64_t panel) {
            product.multiply_gated(panel, [](Vec gate) { return gelu(gate); });
        });
    }
}
