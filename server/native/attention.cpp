#include "attention.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "threads.h"
#include "tile.h"

namespace {

constexpr float kHidden = -INFINITY;

/// Decodes take their keys in runs of so many: their scores stay in the first-level cache.
constexpr int64_t kDecodeKeys = 256;
/// Prefill: queries of a task, and keys per product. What lies above the diagonal is computed in
/// vain, so both are small.
constexpr int64_t kQueries = 32;
constexpr int64_t kKeys = 32;
/// Heads that share a pass over the values at decode.
constexpr int kHeads = 4;

/// Float32 memory of one thread.
class Scratch {
public:
    explicit Scratch(int64_t count)
        : memory_(static_cast<float*>(
              std::aligned_alloc(64, static_cast<size_t>(round_up(count, 16)) * sizeof(float)))) {
        if (memory_ == nullptr) std::abort();
    }
    ~Scratch() { std::free(memory_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    float* take(int64_t count) {
        float* taken = memory_ + used_;
        used_ += round_up(count, 16);
        return taken;
    }

private:
    float* memory_;
    int64_t used_ = 0;
};

/// One layer's pool; a page is the keys (or values) of one block and one kv head.
template <class T>
struct Pool {
    const T* keys;
    const T* values;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;

    int64_t page(const int64_t* blocks, int64_t token, int64_t kv_head) const {
        const int64_t block = blocks[token / block_size];
        return ((block * kv_heads + kv_head) * block_size + token % block_size) * head_dim;
    }
    /// Tokens from this one on that lie in the same page, up to the end.
    int64_t run(int64_t token, int64_t end) const {
        const int64_t rest = block_size - token % block_size;
        return rest < end - token ? rest : end - token;
    }
};

inline void prefetch(const void* start, int64_t bytes) {
    const char* at = static_cast<const char*>(start);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

inline Vec cap(Vec scores, float softcap) {
    const Vec limit = splat(softcap);
    return mul(limit, hyperbolic_tangent(div(scores, limit)));
}

/// One decode row and kv head: the query heads of the group over all visible keys.
template <class T>
class Decode {
public:
    Decode(const MuralAttentionShape& shape, const Pool<T>& pool)
        : shape_(shape),
          pool_(pool),
          group_(shape.num_heads / shape.num_kv_heads),
          padded_(round_up(shape.head_dim, kWidth)),
          scratch_(2 * group_ * padded_ + 64 + group_ * kDecodeKeys + kWidth * padded_ +
                   2 * group_ + 64),
          queries_(scratch_.take(group_ * padded_)),
          sums_(scratch_.take(group_ * padded_)),
          weights_(scratch_.take(group_ * kDecodeKeys)),
          keys_(scratch_.take(kWidth * padded_)),
          peaks_(scratch_.take(group_)),
          totals_(scratch_.take(group_)) {}

    /// query, out: [group, head_dim].
    void run(const float* query, const int64_t* blocks, int64_t length, int64_t kv_head,
             float* out) {
        const int64_t dim = shape_.head_dim;
        for (int64_t h = 0; h < group_; ++h) {
            widen(query + h * dim, dim, queries_ + h * padded_);
            for (int64_t i = 0; i < padded_; i += kWidth) {
                float* at = queries_ + h * padded_ + i;
                store(at, mul(load(at), splat(shape_.scale)));
            }
            peaks_[h] = kHidden;
            totals_[h] = 0.0f;
        }
        std::memset(sums_, 0, static_cast<size_t>(group_ * padded_) * sizeof(float));
        const int64_t first =
            shape_.sliding_window > 0 && length > shape_.sliding_window ? length - shape_.sliding_window : 0;
        for (int64_t start = first; start < length; start += kDecodeKeys) {
            const int64_t end = start + kDecodeKeys < length ? start + kDecodeKeys : length;
            score(blocks, start, end, kv_head);
            for (int64_t h = 0; h < group_; ++h) soften(h, end - start);
            for (int64_t h = 0; h < group_; h += kHeads) {
                mix_heads(blocks, start, end, kv_head, h, group_ - h < kHeads ? group_ - h : kHeads);
            }
        }
        for (int64_t h = 0; h < group_; ++h) {
            const Vec share = splat(1.0f / totals_[h]);
            int64_t i = 0;
            for (; i + kWidth <= dim; i += kWidth) {
                store(out + h * dim + i, mul(load(sums_ + h * padded_ + i), share));
            }
            if (i < dim) store(out + h * dim + i, mul(load(sums_ + h * padded_ + i), share), dim - i);
        }
    }

private:
    /// weights_[h][t - start] = query of head h · key t.
    void score(const int64_t* blocks, int64_t start, int64_t end, int64_t kv_head) {
        const int64_t dim = shape_.head_dim;
        for (int64_t t = start; t < end;) {
            int64_t count = pool_.run(t, end);
            const T* page = pool_.keys + pool_.page(blocks, t, kv_head);
            if (t + count < end) {
                prefetch(pool_.keys + pool_.page(blocks, t + count, kv_head),
                         pool_.block_size * dim * static_cast<int64_t>(sizeof(T)));
            }
            if (count > kWidth) count = kWidth;
            for (int64_t k = 0; k < count; ++k) widen(page + k * dim, dim, keys_ + k * padded_);
            for (int64_t h = 0; h < group_; ++h) {
                const Vec scores = dot(queries_ + h * padded_, count);
                store(weights_ + h * kDecodeKeys + (t - start), scores, count);
            }
            t += count;
        }
    }

    /// Number k is query · keys_[k]; behind `count` they mean nothing.
    Vec dot(const float* query, int64_t count) const {
        Vec partial[kWidth];
        for (int k = 0; k < kWidth; ++k) partial[k] = zero();
        if (count == kWidth) {
            for (int64_t i = 0; i < padded_; i += kWidth) {
                const Vec q = load(query + i);
#pragma GCC unroll 16
                for (int k = 0; k < kWidth; ++k) {
                    partial[k] = fma(q, load(keys_ + k * padded_ + i), partial[k]);
                }
            }
        } else {
            for (int64_t k = 0; k < count; ++k) {
                for (int64_t i = 0; i < padded_; i += kWidth) {
                    partial[k] = fma(load(query + i), load(keys_ + k * padded_ + i), partial[k]);
                }
            }
        }
        return ::sums(partial);
    }

    /// Scores of one head to weights, relative to the largest so far; rescales what went before.
    void soften(int64_t h, int64_t count) {
        float* scores = weights_ + h * kDecodeKeys;
        // Whole vectors: what is behind the last weighs nothing.
        for (int64_t k = count; k < round_up(count, kWidth); ++k) scores[k] = kHidden;
        Vec peak = splat(kHidden);
        for (int64_t k = 0; k < count; k += kWidth) {
            Vec x = load(scores + k);
            if (shape_.logit_softcap > 0.0f) {
                // A cap would bring -inf back among the visible.
                x = cap(x, shape_.logit_softcap);
                store(scores + k, x);
                if (k + kWidth > count) {
                    for (int64_t i = count; i < k + kWidth; ++i) scores[i] = kHidden;
                    x = load(scores + k);
                }
            }
            peak = max(peak, x);
        }
        const float before = peaks_[h];
        const float now = std::fmax(before, largest(peak));
        const Vec shift = splat(now);
        Vec total = zero();
        for (int64_t k = 0; k < count; k += kWidth) {
            const Vec weight = exponential(sub(load(scores + k), shift));
            store(scores + k, weight);
            total = add(total, weight);
        }
        peaks_[h] = now;
        if (before == kHidden) {
            totals_[h] = sum(total);
            return;
        }
        const float rescale = std::exp(before - now);
        totals_[h] = totals_[h] * rescale + sum(total);
        if (rescale != 1.0f) {
            float* at = sums_ + h * padded_;
            for (int64_t i = 0; i < padded_; i += kWidth) store(at + i, mul(load(at + i), splat(rescale)));
        }
    }

    void mix_heads(const int64_t* blocks, int64_t start, int64_t end, int64_t kv_head, int64_t h,
                   int64_t heads) {
        switch (heads) {
            case 1: mix<1>(blocks, start, end, kv_head, h); break;
            case 2: mix<2>(blocks, start, end, kv_head, h); break;
            case 3: mix<3>(blocks, start, end, kv_head, h); break;
            default: mix<kHeads>(blocks, start, end, kv_head, h); break;
        }
    }

    /// sums_[h] += weights · values for H heads.
    template <int H>
    void mix(const int64_t* blocks, int64_t start, int64_t end, int64_t kv_head, int64_t h) {
        const int64_t dim = shape_.head_dim;
        int64_t i = 0;
        for (; i + kTileVecs * kWidth <= dim; i += kTileVecs * kWidth) {
            mix_columns<H, kTileVecs>(blocks, start, end, kv_head, h, i, kWidth);
        }
        for (; i < dim; i += kWidth) {
            mix_columns<H, 1>(blocks, start, end, kv_head, h, i, dim - i);
        }
    }

    template <int H, int V>
    void mix_columns(const int64_t* blocks, int64_t start, int64_t end, int64_t kv_head, int64_t h,
                     int64_t column, int64_t width) {
        const int64_t dim = shape_.head_dim;
        Vec total[H][V];
        for (int g = 0; g < H; ++g) {
            for (int j = 0; j < V; ++j) total[g][j] = load(sums_ + (h + g) * padded_ + column + j * kWidth);
        }
        const float* weights = weights_ + h * kDecodeKeys;
        for (int64_t t = start; t < end;) {
            const int64_t count = pool_.run(t, end);
            const T* page = pool_.values + pool_.page(blocks, t, kv_head) + column;
            if (t + count < end) {
                prefetch(pool_.values + pool_.page(blocks, t + count, kv_head),
                         pool_.block_size * dim * static_cast<int64_t>(sizeof(T)));
            }
            for (int64_t k = 0; k < count; ++k) {
                Vec value[V];
                for (int j = 0; j < V; ++j) {
                    const T* at = page + k * dim + j * kWidth;
                    value[j] = width >= kWidth ? load(at) : load(at, width);
                }
                for (int g = 0; g < H; ++g) {
                    const Vec weight = splat(weights[g * kDecodeKeys + (t - start) + k]);
                    for (int j = 0; j < V; ++j) total[g][j] = fma(weight, value[j], total[g][j]);
                }
            }
            t += count;
        }
        for (int g = 0; g < H; ++g) {
            for (int j = 0; j < V; ++j) store(sums_ + (h + g) * padded_ + column + j * kWidth, total[g][j]);
        }
    }

    const MuralAttentionShape& shape_;
    const Pool<T>& pool_;
    int64_t group_;
    int64_t padded_;
    Scratch scratch_;
    float* queries_;
    float* sums_;
    float* weights_;
    float* keys_;
    float* peaks_;
    float* totals_;
};

/// A tile of a chunk's queries and one kv head. Everything lies transposed, a column per query and
/// head, so that the softmax runs along columns without a sum across a vector:
/// S = K Qᵀ [keys, columns], O += Vᵀ P [head_dim, columns] (the online softmax of Milakov and
/// Gimelshein, arXiv 1805.02867).
template <class T>
class Prefill {
public:
    Prefill(const MuralAttentionShape& shape, const Pool<T>& pool)
        : shape_(shape),
          pool_(pool),
          group_(shape.num_heads / shape.num_kv_heads),
          padded_(round_up(shape.head_dim, kWidth)),
          width_(round_up(kQueries * group_, kWidth)),
          scratch_((2 * padded_ + kKeys + 4) * width_ + 2 * kKeys * padded_ + 16 * 8),
          queries_(scratch_.take(padded_ * width_)),
          sums_(scratch_.take(padded_ * width_)),
          scores_(scratch_.take(kKeys * width_)),
          positions_(scratch_.take(width_)),
          peaks_(scratch_.take(width_)),
          totals_(scratch_.take(width_)),
          keys_(scratch_.take(kKeys * padded_)),
          values_(scratch_.take(kKeys * padded_)) {}

    /// query, out: the tile's first row, at this kv head's first query head.
    void run(const float* query, int64_t query_step, int64_t count, int64_t position,
             const int64_t* blocks, int64_t kv_head, float* out, int64_t out_step) {
        const int64_t dim = shape_.head_dim;
        columns_ = count * group_;
        vecs_ = (columns_ + kWidth - 1) / kWidth;
        take_queries(query, query_step, count, position);
        const int64_t window = shape_.sliding_window;
        const int64_t first = window > 0 && position + 1 > window ? position + 1 - window : 0;
        const int64_t end = position + count;
        for (int64_t start = first; start < end; start += kKeys) {
            const int64_t keys = end - start < kKeys ? end - start : kKeys;
            gather(blocks, start, keys, kv_head);
            multiply(keys, vecs_, dim, keys_, padded_, 1, queries_, width_, scores_, width_, false);
            const bool masked = start + keys - 1 > position || (window > 0 && end - window > start);
            soften(start, keys, masked);
            multiply(dim, vecs_, keys, values_, 1, padded_, scores_, width_, sums_, width_, true);
        }
        give(count, out, out_step);
    }

private:
    void take_queries(const float* query, int64_t query_step, int64_t count, int64_t position) {
        const int64_t dim = shape_.head_dim;
        const int64_t width = vecs_ * kWidth;
        for (int64_t d = 0; d < dim; ++d) {
            std::memset(queries_ + d * width_, 0, static_cast<size_t>(width) * sizeof(float));
            std::memset(sums_ + d * width_, 0, static_cast<size_t>(width) * sizeof(float));
        }
        for (int64_t q = 0; q < count; ++q) {
            for (int64_t h = 0; h < group_; ++h) {
                const float* from = query + q * query_step + h * dim;
                float* to = queries_ + q * group_ + h;
                for (int64_t d = 0; d < dim; ++d) to[d * width_] = from[d] * shape_.scale;
            }
        }
        for (int64_t c = 0; c < width; ++c) {
            // Columns of no query see what the last one sees.
            const int64_t q = c < columns_ ? c / group_ : count - 1;
            positions_[c] = static_cast<float>(position + q);
            peaks_[c] = kHidden;
            totals_[c] = 0.0f;
        }
    }

    void gather(const int64_t* blocks, int64_t start, int64_t keys, int64_t kv_head) {
        const int64_t dim = shape_.head_dim;
        for (int64_t k = 0; k < keys;) {
            const int64_t count = pool_.run(start + k, start + keys);
            const int64_t page = pool_.page(blocks, start + k, kv_head);
            for (int64_t i = 0; i < count; ++i) {
                widen(pool_.keys + page + i * dim, dim, keys_ + (k + i) * padded_);
                widen(pool_.values + page + i * dim, dim, values_ + (k + i) * padded_);
            }
            k += count;
        }
    }

    /// Scores to weights in place, column by column; rescales the sums where a peak rose.
    void soften(int64_t start, int64_t keys, bool masked) {
        for (int64_t v = 0; v < vecs_; ++v) {
            float* column = scores_ + v * kWidth;
            const Vec before = load(peaks_ + v * kWidth);
            Vec peak = before;
            if (shape_.logit_softcap > 0.0f) {
                for (int64_t k = 0; k < keys; ++k) {
                    store(column + k * width_, cap(load(column + k * width_), shape_.logit_softcap));
                }
            }
            if (masked) mask(column, positions_ + v * kWidth, start, keys);
            for (int64_t k = 0; k < keys; ++k) peak = max(peak, load(column + k * width_));
            store(peaks_ + v * kWidth, peak);
            // A column that has seen no key yet: -inf - -inf would be NaN.
            const Vec shift = max(splat(-3.0e38f), peak);
            Vec total = zero();
            for (int64_t k = 0; k < keys; ++k) {
                const Vec weight = exponential(sub(load(column + k * width_), shift));
                store(column + k * width_, weight);
                total = add(total, weight);
            }
            const Vec rescale = exponential(sub(max(splat(-3.0e38f), before), shift));
            float* totals = totals_ + v * kWidth;
            store(totals, fma(load(totals), rescale, total));
            for (int64_t d = 0; d < shape_.head_dim; ++d) {
                float* at = sums_ + d * width_ + v * kWidth;
                store(at, mul(load(at), rescale));
            }
        }
    }

    void mask(float* column, const float* positions, int64_t start, int64_t keys) const {
        const int64_t window = shape_.sliding_window;
        for (int64_t k = 0; k < keys; ++k) {
            const float key = static_cast<float>(start + k);
            const float oldest = window > 0 ? key + static_cast<float>(window) : INFINITY;
            float* at = column + k * width_;
            for (int i = 0; i < kWidth; ++i) {
                const bool visible = positions[i] >= key && positions[i] < oldest;
                at[i] = visible ? at[i] : kHidden;
            }
        }
    }

    void give(int64_t count, float* out, int64_t out_step) {
        const int64_t dim = shape_.head_dim;
        for (int64_t q = 0; q < count; ++q) {
            for (int64_t h = 0; h < group_; ++h) {
                const int64_t column = q * group_ + h;
                const float share = 1.0f / totals_[column];
                float* to = out + q * out_step + h * dim;
                for (int64_t d = 0; d < dim; ++d) to[d] = sums_[d * width_ + column] * share;
            }
        }
    }

    const MuralAttentionShape& shape_;
    const Pool<T>& pool_;
    int64_t group_;
    int64_t padded_;
    int64_t width_;
    int64_t columns_ = 0;
    int64_t vecs_ = 0;
    Scratch scratch_;
    float* queries_;
    float* sums_;
    float* scores_;
    float* positions_;
    float* peaks_;
    float* totals_;
    float* keys_;
    float* values_;
};

/// Rows that belong to nobody come out as zeros: what follows them must stay finite.
void clear_padding(const MuralAttentionStep& step, int64_t width, float* out) {
    int64_t covered = step.num_decodes;
    for (int64_t c = 0; c < step.num_chunks; ++c) {
        const MuralPrefillChunk& chunk = step.chunks[c];
        for (int64_t row = covered; row < chunk.start; ++row) {
            std::memset(out + row * width, 0, static_cast<size_t>(width) * sizeof(float));
        }
        if (chunk.end > covered) covered = chunk.end;
    }
    if (covered < step.num_rows) {
        std::memset(out + covered * width, 0,
                    static_cast<size_t>((step.num_rows - covered) * width) * sizeof(float));
    }
}

int64_t num_tiles(const MuralPrefillChunk& chunk) {
    return (chunk.end - chunk.start + kQueries - 1) / kQueries;
}

template <class T>
void attend(const MuralAttentionShape& shape, const MuralAttentionStep& step, const float* queries,
            int64_t query_step, const void* keys, const void* values, float* out, int threads) {
    const Pool<T> pool{static_cast<const T*>(keys), static_cast<const T*>(values),
                       shape.num_kv_heads, shape.block_size, shape.head_dim};
    const int64_t group_width = shape.num_heads / shape.num_kv_heads * shape.head_dim;
    const int64_t width = shape.num_heads * shape.head_dim;
    clear_padding(step, width, out);
    const int64_t decodes = step.num_decodes * shape.num_kv_heads;
    int64_t tiles = 0;
    for (int64_t c = 0; c < step.num_chunks; ++c) {
        tiles += num_tiles(step.chunks[c]);
    }
    const int64_t tasks = decodes + tiles * shape.num_kv_heads;
    int64_t next = 0;
    const auto take = [&next] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
    parallel(tasks > 1 ? threads : 1, [&](int, int) {
        int64_t task = take();
        if (task < tasks - decodes) {
            Prefill<T> prefill(shape, pool);
            for (; task < tasks - decodes; task = take()) {
                // The last tiles of a chunk see the most keys: they come first.
                int64_t tile = tiles - 1 - task / shape.num_kv_heads;
                const int64_t kv_head = task % shape.num_kv_heads;
                const MuralPrefillChunk* chunk = step.chunks;
                for (;; ++chunk) {
                    const int64_t own = num_tiles(*chunk);
                    if (tile < own) break;
                    tile -= own;
                }
                const int64_t row = chunk->start + tile * kQueries;
                const int64_t count = chunk->end - row < kQueries ? chunk->end - row : kQueries;
                prefill.run(queries + row * query_step + kv_head * group_width, query_step, count,
                            chunk->context + tile * kQueries, chunk->blocks, kv_head,
                            out + row * width + kv_head * group_width, width);
            }
        }
        if (task >= tasks) return;
        Decode<T> decode(shape, pool);
        for (; task < tasks; task = take()) {
            const int64_t index = task - (tasks - decodes);
            const int64_t row = index / shape.num_kv_heads;
            const int64_t kv_head = index % shape.num_kv_heads;
            decode.run(queries + row * query_step + kv_head * group_width,
                       step.tables + row * step.table_step, step.lengths[row], kv_head,
                       out + row * width + kv_head * group_width);
        }
    });
}

}  // namespace

MURAL_KERNEL(mural_attention)(const MuralAttentionShape* shape, const MuralAttentionStep* step,
                              const float* queries, int64_t query_step, const void* keys,
                              const void* values, float* out, int32_t threads) {
    switch (static_cast<DType>(shape->dtype)) {
        case DType::float32:
            attend<float>(*shape, *step, queries, query_step, keys, values, out, threads);
            break;
        case DType::bfloat16:
            attend<BFloat16>(*shape, *step, queries, query_step, keys, values, out, threads);
            break;
        case DType::float16:
            attend<Float16>(*shape, *step, queries, query_step, keys, values, out, threads);
            break;
    }
}
