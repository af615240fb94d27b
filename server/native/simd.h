// A vector of float32 as wide as the instruction set that this object is compiled for, and what
// the operators need of it. Everything here is local to its object: the linker must not take one
// instruction set's code for another's.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

/// How numbers lie in a tensor; the values are the Python side's.
enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kWidth = 16;
/// A micro-kernel's tile: rows times vectors, as many accumulators as leave room for operands.
constexpr int kTileRows = 6;
constexpr int kTileVecs = 4;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
/// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
/// c - a * b
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
/// Where either is NaN: b.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round_to_int(Vec a) { return _mm512_roundscale_ps(a, 8); }
/// a * 2^n for integral n of any size.
inline Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
/// The first n numbers, 0 behind them; nothing behind them is read.
inline Vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline Vec load(const BFloat16* p, int64_t n) {
    const __m256i half = _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load(const Float16* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}

/// Round to nearest, ties to even; NaN stays NaN.
inline __m256i to_bfloat16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline void store(BFloat16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(a));
}
inline void store(Float16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, 0));
}
inline void store(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first(n), a); }
inline void store(BFloat16* p, Vec a, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), to_bfloat16(a));
}
inline void store(Float16* p, Vec a, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(a, 0));
}

/// The sums of 16 vectors: number i is the sum of v[i].
inline Vec sums(const Vec v[16]) {
    Vec pairs[8];
    for (int i = 0; i < 8; ++i) {
        pairs[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                       _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    Vec fours[4];
    for (int i = 0; i < 4; ++i) {
        const __m512d low = _mm512_castps_pd(pairs[2 * i]);
        const __m512d high = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    // fours[i], lane l: partial sums of v[4i .. 4i+3] over lane l.
    Vec eights[2];
    for (int i = 0; i < 2; ++i) {
        eights[i] = add(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                        _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    }
    // eights[i]: lanes [0+1 of first, 2+3 of first, 0+1 of second, 2+3 of second].
    return add(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
               _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kTileRows = 6;
constexpr int kTileVecs = 2;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round_to_int(Vec a) { return _mm256_round_ps(a, 8); }
inline Vec power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Vec scale_by_power(Vec a, Vec n) {
    // In two halves, so that results below 2^-126 come out too.
    const Vec bounded = min(max(n, splat(-250.0f)), splat(250.0f));
    const __m256i whole = _mm256_cvtps_epi32(bounded);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
inline float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Vec load(const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <class T>
inline Vec load(const T* p, int64_t n) {
    T padded[8] = {};
    for (int64_t i = 0; i < n && i < 8; ++i) padded[i] = p[i];
    return load(padded);
}

inline __m128i to_bfloat16(Vec a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline void store(BFloat16* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(a));
}
inline void store(Float16* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, 0));
}
template <class T>
inline void store(T* p, Vec a, int64_t n) {
    T padded[8];
    store(padded, a);
    for (int64_t i = 0; i < n && i < 8; ++i) p[i] = padded[i];
}

/// The sums of 8 vectors: number i is the sum of v[i].
inline Vec sums(const Vec v[8]) {
    const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

#else
#error "no instruction set that this file knows"
#endif

/// e^x with an error of 2 units in the last place: Cephes' polynomial over [-ln 2 / 2, ln 2 / 2].
/// -inf and what underflows give 0, what overflows inf, NaN stays NaN.
inline Vec exponential(Vec x) {
    // min and max give their second operand for NaN.
    const Vec bounded = max(splat(-104.0f), min(splat(89.0f), x));
    const Vec n = round_to_int(mul(bounded, splat(1.44269504088896341f)));
    Vec r = fnma(n, splat(0.693359375f), bounded);
    r = fnma(n, splat(-2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, splat(1.0f)));
    return scale_by_power(p, n);
}

/// tanh by 1 - 2 / (e^2x + 1); absolute error 2^-23.
inline Vec hyperbolic_tangent(Vec x) {
    const Vec one = splat(1.0f);
    return sub(one, div(splat(2.0f), add(exponential(add(x, x)), one)));
}

}  // namespace
