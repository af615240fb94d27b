#include "lora.h"

#include <cstdlib>

#include "threads.h"
#include "tile.h"

namespace {

/// Rows that are computed together; a longer run of an adapter's rows is cut.
constexpr int64_t kBlock = 32;
/// Rank rows of a shrink's task, and columns of an expand's.
constexpr int kRanks = 4;
constexpr int64_t kColumns = 64 * 4;
/// From so many rows on, a weight is widened once for all of them.
constexpr int64_t kWorthWidening = 8;
/// Rows of a shrink's tile: with kRanks rank rows, as many sums as a vector has numbers.
constexpr int kDotRows = kWidth / kRanks;
/// Multiplications of a call below which a second thread is woken for longer than it saves.
constexpr int64_t kWorthThreads = 65536;

template <class T>
struct Call {
    const MuralLoraStep& step;
    const MuralLoraStack& stack;
    float* y;
    int64_t y_step;
    const float* x;
    int64_t x_step;
    float* hidden;

    const T* a(int64_t slice, int64_t rank_row) const {
        return static_cast<const T*>(stack.a) +
               (slice * stack.num_rank_rows + rank_row) * stack.in_features;
    }
    const T* b(int64_t slice, int64_t rank_row) const {
        return static_cast<const T*>(stack.b[slice]) + rank_row * stack.out_features[slice];
    }
    float* shrunk(int64_t place, int64_t slice) const {
        return hidden + (place * stack.num_slices + slice) * step.rank_step;
    }
};

/// Some of one adapter's rows.
struct Block {
    const MuralLoraGroup* group;
    int64_t first;
    int64_t count;
};

/// out[i * kRanks + k] = x[i] · a[k] for R rows and kRanks rank rows.
template <int R, class T>
inline void dot(const float* const* x, const T* const* a, int64_t size, float* out) {
    Vec partial[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) partial[i] = zero();
    int64_t at = 0;
    for (; at + kWidth <= size; at += kWidth) {
        Vec weight[kRanks];
        for (int k = 0; k < kRanks; ++k) weight[k] = load(a[k] + at);
        for (int i = 0; i < R; ++i) {
            const Vec value = load(x[i] + at);
            for (int k = 0; k < kRanks; ++k) {
                partial[i * kRanks + k] = fma(value, weight[k], partial[i * kRanks + k]);
            }
        }
    }
    if (at < size) {
        for (int i = 0; i < R; ++i) {
            const Vec value = load(x[i] + at, size - at);
            for (int k = 0; k < kRanks; ++k) {
                partial[i * kRanks + k] =
                    fma(value, load(a[k] + at, size - at), partial[i * kRanks + k]);
            }
        }
    }
    store(out, sums(partial));
}

template <class T>
inline void dot_rows(int64_t rows, const float* const* x, const T* const* a, int64_t size,
                     float* out) {
    if (rows == 1) {
        dot<1>(x, a, size, out);
    } else if (rows == 2 || kDotRows == 2) {
        dot<2>(x, a, size, out);
    } else {
        dot<kDotRows>(x, a, size, out);
    }
}

/// Rank rows [rank, rank + kRanks) of the block's adapter, as far as it has them.
template <class T, class W>
inline void shrink_with(const Call<T>& call, const Block& block, int64_t slice, int64_t rank,
                        int64_t ranks, const W* const* a) {
    for (int64_t i = 0; i < block.count; i += kDotRows) {
        const int64_t rows = block.count - i < kDotRows ? block.count - i : kDotRows;
        const float* x[kDotRows];
        for (int j = 0; j < kDotRows; ++j) {
            // The last row stands in for those that are not there.
            const int64_t row = call.step.rows[block.first + i + (j < rows ? j : rows - 1)];
            x[j] = call.x + row * call.x_step;
        }
        float results[kWidth];
        dot_rows(rows, x, a, call.stack.in_features, results);
        for (int64_t j = 0; j < rows; ++j) {
            float* to = call.shrunk(block.first + i + j, slice) + rank;
            for (int64_t k = 0; k < ranks; ++k) to[k] = results[j * kRanks + k];
        }
    }
}

template <class T>
inline void shrink(const Call<T>& call, const Block& block, int64_t slice, int64_t rank,
                   float* wide) {
    const int64_t rest = block.group->rank_end - block.group->rank_start - rank;
    const int64_t ranks = rest < kRanks ? rest : kRanks;
    const int64_t size = call.stack.in_features;
    const T* a[kRanks];
    for (int k = 0; k < kRanks; ++k) {
        a[k] = call.a(slice, block.group->rank_start + rank + (k < ranks ? k : ranks - 1));
    }
    if (sizeof(T) == sizeof(float) || block.count < kWorthWidening) {
        shrink_with(call, block, slice, rank, ranks, a);
        return;
    }
    const int64_t padded = round_up(size, kWidth);
    const float* widened[kRanks];
    for (int k = 0; k < kRanks; ++k) {
        if (k < ranks) widen(a[k], size, wide + k * padded);
        widened[k] = wide + (k < ranks ? k : ranks - 1) * padded;
    }
    shrink_with(call, block, slice, rank, ranks, widened);
}

/// y[i][0 .. V vectors) += hidden[i] · b for R rows; width below kWidth (with V = 1): fewer columns.
template <int R, int V, class W>
inline void expand_tile(float* const* y, const float* const* hidden, int64_t rank, const W* b,
                        int64_t b_step, int64_t width) {
    Vec total[R][V];
    const bool whole = width >= V * kWidth;
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < V; ++j) {
            total[i][j] = whole ? load(y[i] + j * kWidth) : load(y[i] + j * kWidth, width);
        }
    }
    for (int64_t k = 0; k < rank; ++k) {
        Vec weight[V];
        for (int j = 0; j < V; ++j) {
            const W* at = b + k * b_step + j * kWidth;
            weight[j] = whole ? load(at) : load(at, width);
        }
        for (int i = 0; i < R; ++i) {
            const Vec factor = splat(hidden[i][k]);
            for (int j = 0; j < V; ++j) total[i][j] = fma(factor, weight[j], total[i][j]);
        }
    }
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < V; ++j) {
            if (whole) {
                store(y[i] + j * kWidth, total[i][j]);
            } else {
                store(y[i] + j * kWidth, total[i][j], width);
            }
        }
    }
}

template <int V, class T, class W>
inline void expand_rows(const Call<T>& call, const Block& block, int64_t slice, int64_t column,
                        const W* b, int64_t b_step, int64_t width) {
    const int64_t rank = block.group->rank_end - block.group->rank_start;
    float* y[kTileRows];
    const float* hidden[kTileRows];
    for (int64_t i = 0; i < block.count;) {
        const int64_t rest = block.count - i;
        const int64_t rows = rest < kTileRows ? rest : kTileRows;
        for (int64_t j = 0; j < rows; ++j) {
            y[j] = call.y + call.step.rows[block.first + i + j] * call.y_step + column;
            hidden[j] = call.shrunk(block.first + i + j, slice);
        }
        if (rows == kTileRows) {
            expand_tile<kTileRows, V>(y, hidden, rank, b, b_step, width);
            i += kTileRows;
        } else if (rows >= 4) {
            expand_tile<4, V>(y, hidden, rank, b, b_step, width);
            i += 4;
        } else if (rows >= 2) {
            expand_tile<2, V>(y, hidden, rank, b, b_step, width);
            i += 2;
        } else {
            expand_tile<1, V>(y, hidden, rank, b, b_step, width);
            i += 1;
        }
    }
}

/// Columns [start, start + kColumns) of a slice, as far as it has them; `column` is where the
/// slice begins in y.
template <class T>
inline void expand(const Call<T>& call, const Block& block, int64_t slice, int64_t column,
                   int64_t start, float* wide) {
    constexpr int64_t tile = kTileVecs * kWidth;
    const int64_t rank = block.group->rank_end - block.group->rank_start;
    const int64_t out = call.stack.out_features[slice];
    const int64_t end = out < start + kColumns ? out : start + kColumns;
    const T* b = call.b(slice, block.group->rank_start);
    const bool widening = sizeof(T) < sizeof(float) && block.count >= kWorthWidening;
    for (int64_t at = start; at < end;) {
        if (end - at < tile) {
            const int64_t width = end - at < kWidth ? end - at : kWidth;
            expand_rows<1>(call, block, slice, column + at, b + at, out, width);
            at += width;
            continue;
        }
        if (widening) {
            for (int64_t k = 0; k < rank; ++k) widen(b + k * out + at, tile, wide + k * tile);
            expand_rows<kTileVecs>(call, block, slice, column + at, static_cast<const float*>(wide),
                                   tile, tile);
        } else {
            expand_rows<kTileVecs>(call, block, slice, column + at, b + at, out, tile);
        }
        at += tile;
    }
}

/// visit(block) for all rows of all groups.
template <class Visit>
inline void each_block(const MuralLoraStep& step, Visit&& visit) {
    for (int64_t g = 0; g < step.num_groups; ++g) {
        const MuralLoraGroup& group = step.groups[g];
        for (int64_t i = 0; i < group.count; i += kBlock) {
            visit(Block{&group, group.first + i, group.count - i < kBlock ? group.count - i : kBlock});
        }
    }
}

/// Hands the tasks of a loop out to the threads that walk it, each of them to one.
class Turns {
public:
    explicit Turns(int64_t* next) : next_(next), mine_(take()) {}
    bool mine() {
        if (at_++ != mine_) return false;
        mine_ = take();
        return true;
    }

private:
    int64_t take() { return __atomic_fetch_add(next_, 1, __ATOMIC_RELAXED); }
    int64_t* next_;
    int64_t at_ = 0;
    int64_t mine_;
};

template <class T>
void add_lora(const Call<T>& call, int threads) {
    const MuralLoraStep& step = call.step;
    const MuralLoraStack& stack = call.stack;
    int64_t work = 0;
    int64_t out = 0;
    for (int64_t s = 0; s < stack.num_slices; ++s) out += stack.out_features[s];
    for (int64_t g = 0; g < step.num_groups; ++g) {
        work += step.groups[g].count * (step.groups[g].rank_end - step.groups[g].rank_start);
    }
    work *= stack.num_slices * stack.in_features + out;
    int64_t shrinks = 0;
    int64_t expands = 0;
    parallel(work < kWorthThreads ? 1 : threads, [&](int, int all) {
        const int64_t in = kRanks * round_up(stack.in_features, kWidth);
        const int64_t columns = round_up(step.rank_step, kRanks) * kTileVecs * kWidth;
        const size_t bytes = static_cast<size_t>(in > columns ? in : columns) * sizeof(float);
        auto* wide = static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (wide == nullptr) std::abort();
        Turns shrinking(&shrinks);
        each_block(step, [&](const Block& block) {
            const int64_t rank = block.group->rank_end - block.group->rank_start;
            for (int64_t slice = 0; slice < stack.num_slices; ++slice) {
                for (int64_t k = 0; k < rank; k += kRanks) {
                    if (shrinking.mine()) shrink(call, block, slice, k, wide);
                }
            }
        });
        if (all > 1) GOMP_barrier();
        Turns expanding(&expands);
        each_block(step, [&](const Block& block) {
            int64_t column = 0;
            for (int64_t slice = 0; slice < stack.num_slices; ++slice) {
                for (int64_t at = 0; at < stack.out_features[slice]; at += kColumns) {
                    if (expanding.mine()) expand(call, block, slice, column, at, wide);
                }
                column += stack.out_features[slice];
            }
        });
        std::free(wide);
    });
}

}  // namespace

MURAL_KERNEL(mural_lora)(const MuralLoraStep* step, const MuralLoraStack* stack, float* y,
                         int64_t y_step, const float* x, int64_t x_step, float* hidden,
                         int32_t threads) {
    switch (static_cast<DType>(stack->dtype)) {
        case DType::float32:
            add_lora(Call<float>{*step, *stack, y, y_step, x, x_step, hidden}, threads);
            break;
        case DType::bfloat16:
            add_lora(Call<BFloat16>{*step, *stack, y, y_step, x, x_step, hidden}, threads);
            break;
        case DType::float16:
            add_lora(Call<Float16>{*step, *stack, y, y_step, x, x_step, hidden}, threads);
            break;
    }
}
