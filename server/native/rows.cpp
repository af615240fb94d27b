#include "rows.h"

#include <cmath>
#include <cstring>

#include "activation.h"
#include "simd.h"
#include "threads.h"

namespace {

/// Below so many numbers a second thread is woken for longer than it saves.
constexpr int64_t kWorthThreads = 32768;

int team(int64_t numbers, int threads) { return numbers < kWorthThreads ? 1 : threads; }

struct Share {
    int64_t first;
    int64_t end;
};

Share share(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

/// body(offset, length) over n numbers by vectors; length below kWidth for what is left.
template <class Body>
inline void by_vectors(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
    if (i < n) body(i, n - i);
}

template <class T>
inline Vec take(const T* p, int64_t n) {
    return n == kWidth ? load(p) : load(p, n);
}
template <class T>
inline void give(T* p, Vec v, int64_t n) {
    if (n == kWidth) {
        store(p, v);
    } else {
        store(p, v, n);
    }
}

inline void norm(const float* x, int64_t size, const float* weight, float eps, float* out) {
    Vec squares[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
        for (int j = 0; j < 4; ++j) {
            const Vec v = load(x + i + j * kWidth);
            squares[j] = fma(v, v, squares[j]);
        }
    }
    for (; i < size; i += kWidth) {
        const Vec v = take(x + i, size - i < kWidth ? size - i : kWidth);
        squares[0] = fma(v, v, squares[0]);
    }
    const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const Vec scale = splat(1.0f / std::sqrt(total / static_cast<float>(size) + eps));
    by_vectors(size, [&](int64_t at, int64_t n) {
        give(out + at, mul(mul(take(x + at, n), scale), take(weight + at, n)), n);
    });
}

template <class Activation>
void gate(const float* gate_up, int64_t rows, int64_t step, int64_t size, float* out, int threads,
          Activation&& activation) {
    parallel(team(rows * size, threads), [&](int thread, int all) {
        const Share own = share(rows, thread, all);
        for (int64_t row = own.first; row < own.end; ++row) {
            const float* from = gate_up + row * step;
            float* to = out + row * size;
            by_vectors(size, [&](int64_t at, int64_t n) {
                give(to + at, mul(activation(take(from + at, n)), take(from + size + at, n)), n);
            });
        }
    });
}

/// x * cos + roll(x, head_dim / 2) * sin for one head.
template <class T>
inline void rotate(const float* x, const float* cos, const float* sin, int64_t head_dim, T* out) {
    const int64_t half = head_dim / 2;
    by_vectors(half, [&](int64_t i, int64_t n) {
        const int64_t j = i + half;
        const Vec left = take(x + i, n), right = take(x + j, n);
        give(out + i, fma(right, take(sin + i, n), mul(left, take(cos + i, n))), n);
        give(out + j, fma(left, take(sin + j, n), mul(right, take(cos + j, n))), n);
    });
}

/// Blocks whose first token is among the slots are cleared before anything is written.
template <class T>
void clear_fresh(const MuralPool& pool, const int64_t* slots, Share own, T* keys, T* values) {
    const int64_t block_numbers = pool.kv_heads * pool.block_size * pool.head_dim;
    const size_t bytes = static_cast<size_t>(block_numbers) * sizeof(T);
    for (int64_t row = own.first; row < own.end; ++row) {
        if (slots[row] % pool.block_size != 0) continue;
        const int64_t start = slots[row] / pool.block_size * block_numbers;
        std::memset(static_cast<void*>(keys + start), 0, bytes);
        std::memset(static_cast<void*>(values + start), 0, bytes);
    }
}

inline int64_t place(const MuralPool& pool, int64_t slot, int64_t kv_head) {
    const int64_t block = slot / pool.block_size;
    return ((block * pool.kv_heads + kv_head) * pool.block_size + slot % pool.block_size) *
           pool.head_dim;
}

template <class T>
inline void copy(const float* from, int64_t size, T* to) {
    by_vectors(size, [&](int64_t at, int64_t n) { give(to + at, take(from + at, n), n); });
}

/// write(row) for all rows on the team, once every fresh block is clear.
template <class T, class Write>
void write_rows(const MuralPool& pool, const int64_t* slots, int64_t rows, T* keys, T* values,
                int threads, Write&& write) {
    parallel(team(rows * pool.kv_heads * pool.head_dim * 2, threads), [&](int thread, int all) {
        const Share own = share(rows, thread, all);
        clear_fresh(pool, slots, own, keys, values);
        if (all > 1) GOMP_barrier();
        for (int64_t row = own.first; row < own.end; ++row) write(row);
    });
}

/// call(pointers of the pool's type) for the type that the pool has.
template <class Call>
void with_type(int32_t dtype, void* keys, void* values, Call&& call) {
    switch (static_cast<DType>(dtype)) {
        case DType::float32: call(static_cast<float*>(keys), static_cast<float*>(values)); break;
        case DType::bfloat16:
            call(static_cast<BFloat16*>(keys), static_cast<BFloat16*>(values));
            break;
        case DType::float16:
            call(static_cast<Float16*>(keys), static_cast<Float16*>(values));
            break;
    }
}

}  // namespace

MURAL_KERNEL(mural_rms_norm)(const float* x, int64_t outer, int64_t outer_step, int64_t inner,
                             int64_t size, const float* weight, float eps, float* out,
                             int32_t threads) {
    parallel(team(outer * inner * size, threads), [&](int thread, int all) {
        const Share own = share(outer, thread, all);
        for (int64_t i = own.first; i < own.end; ++i) {
            for (int64_t j = 0; j < inner; ++j) {
                norm(x + i * outer_step + j * size, size, weight, eps, out + (i * inner + j) * size);
            }
        }
    });
}

MURAL_KERNEL(mural_gated)(const float* gate_up, int64_t rows, int64_t step, int64_t size,
                          int32_t activation, float* out, int32_t threads) {
    if (activation == 0) {
        gate(gate_up, rows, step, size, out, threads, [](Vec x) { return silu(x); });
    } else {
        gate(gate_up, rows, step, size, out, threads, [](Vec x) { return gelu(x); });
    }
}

MURAL_KERNEL(mural_rotary)(const float* x, int64_t rows, int64_t step, int64_t heads,
                           int64_t head_dim, const float* cos, const float* sin, float* out,
                           int32_t threads) {
    parallel(team(rows * heads * head_dim, threads), [&](int thread, int all) {
        const Share own = share(rows, thread, all);
        for (int64_t row = own.first; row < own.end; ++row) {
            for (int64_t head = 0; head < heads; ++head) {
                rotate(x + row * step + head * head_dim, cos + row * head_dim,
                       sin + row * head_dim, head_dim, out + (row * heads + head) * head_dim);
            }
        }
    });
}

MURAL_KERNEL(mural_write_kv)(const MuralPool* pool, const float* keys, int64_t key_step,
                             const float* values, int64_t value_step, const int64_t* slots,
                             int64_t rows, void* key_pool, void* value_pool, int32_t threads) {
    const int64_t dim = pool->head_dim;
    with_type(pool->dtype, key_pool, value_pool, [&](auto* to_keys, auto* to_values) {
        write_rows(*pool, slots, rows, to_keys, to_values, threads, [&](int64_t row) {
            for (int64_t head = 0; head < pool->kv_heads; ++head) {
                const int64_t at = place(*pool, slots[row], head);
                copy(keys + row * key_step + head * dim, dim, to_keys + at);
                copy(values + row * value_step + head * dim, dim, to_values + at);
            }
        });
    });
}

MURAL_KERNEL(mural_rotary_and_write_kv)(const MuralPool* pool, const float* qkv, int64_t step,
                                        int64_t heads, const float* cos, const float* sin,
                                        const int64_t* slots, int64_t rows, void* key_pool,
                                        void* value_pool, float* queries, int32_t threads) {
    const int64_t dim = pool->head_dim;
    with_type(pool->dtype, key_pool, value_pool, [&](auto* to_keys, auto* to_values) {
        write_rows(*pool, slots, rows, to_keys, to_values, threads, [&](int64_t row) {
            const float* from = qkv + row * step;
            const float* own_cos = cos + row * dim;
            const float* own_sin = sin + row * dim;
            for (int64_t head = 0; head < heads; ++head) {
                rotate(from + head * dim, own_cos, own_sin, dim,
                       queries + (row * heads + head) * dim);
            }
            for (int64_t head = 0; head < pool->kv_heads; ++head) {
                const int64_t at = place(*pool, slots[row], head);
                rotate(from + (heads + head) * dim, own_cos, own_sin, dim, to_keys + at);
                copy(from + (heads + pool->kv_heads + head) * dim, dim, to_values + at);
            }
        });
    });
}
