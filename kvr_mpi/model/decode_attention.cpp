// Exact attention of one query a head, as decoding needs it: keys and values are read once, as they lie.
//
// A step of decoding waits for memory, so what counts is that every query head of a group reads a key while it is at
// hand, and that nothing is copied or turned. A head's keys are cut into pieces of PIECE; each has its own maximum and
// sum (flash decoding, Dao et al. 2023), and what comes of the pieces is merged in their order, so that the result does
// not depend on the number of threads.
//
// Keys and values are float32 or bfloat16, which is the upper half of a float32; sums are float32 in any case.
//
// Compiled for one processor and called through ctypes: `tiled_attention.py` states the shapes and checks them.

#include "lanes.h"
#include "threads.h"

#include <atomic>
#include <limits>

constexpr int MOST_ROWS = 4;  // query heads that share a key in registers
constexpr int BLOCK = 128, PIECE = 1024;  // keys
constexpr int AHEAD = 16;                // rows that are asked of memory before they are read

// Strides are in elements; those of features are 1.
struct OneQuery {
    int64_t kv_heads, group, keys, dim;
    int64_t query_head, key_head, key_row, value_head, value_row, out_head;
    float scale;
    int32_t half;  // queries, keys and values are bfloat16
};

typedef uint16_t Half;
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static inline Lanes load(const Half *from) {
    return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves *>(from), Bits) << 16);
}
static inline float number(float value) { return value; }
static inline float number(Half value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float whole;
    __builtin_memcpy(&whole, &bits, sizeof whole);
    return whole;
}

// Scores (ROWS, BLOCK) of some queries (ROWS, dim) and a block of keys.
template <int ROWS, typename T>
static void score(const float *query, const T *keys, int64_t row, int64_t count, int64_t dim, float *scores) {
    constexpr int AT_ONCE = LANES / ROWS;  // keys, so that all sums of a tile are one vector in the end
    for (int64_t t = 0; t < count; t += AT_ONCE) {
        const T *key[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) key[k] = keys + std::min(t + k, count - 1) * row;
        for (int k = 0; k < AT_ONCE; ++k)
            for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch(key[k] + AHEAD * row + d);
        Lanes sums[LANES] = {};
        for (int64_t d = 0; d < dim; d += LANES)
#pragma GCC unroll 16
            for (int k = 0; k < AT_ONCE; ++k) {
                const Lanes features = load(key[k] + d);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) sums[r * AT_ONCE + k] += load(query + r * dim + d) * features;
            }
        float found[LANES];
        store(found, sums_of(sums));
        const int some = static_cast<int>(std::min<int64_t>(AT_ONCE, count - t));
        for (int r = 0; r < ROWS; ++r) std::copy_n(found + r * AT_ONCE, some, scores + r * BLOCK + t);
    }
}

// Add a block's values, by their weights (ROWS, BLOCK), to sums (ROWS, dim) times `keep` of each row.
template <int ROWS, int VECTORS, typename T>
static void gather(const float *weights, const T *values, int64_t row, int64_t count, int64_t dim, const float *keep,
                   float *sums) {
    for (int64_t d = 0; d < dim; d += VECTORS * LANES) {
        Lanes own[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) own[r][v] = load(sums + r * dim + d + v * LANES) * keep[r];
        for (int64_t t = 0; t < count; ++t) {
            for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(values + (t + AHEAD) * row + d + v * LANES);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const Lanes features = load(values + t * row + d + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) own[r][v] += weights[r * BLOCK + t] * features;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) store(sums + r * dim + d + v * LANES, own[r][v]);
    }
}

// What comes of a piece of a head's keys for the queries of its group: sums (group, dim), largest scores, totals.
struct Part {
    float *sums, *most, *total;
};

// Attend from ROWS queries of a group, from `first` on, to a block of keys.
template <int ROWS, typename T>
static void attend(const OneQuery &s, const float *query, const T *keys, const T *values, int64_t count, int64_t first,
                   const Part &part) {
    float scores[ROWS * BLOCK], keep[ROWS];
    score<ROWS>(query + first * s.dim, keys, s.key_row, count, s.dim, scores);
    const int64_t wide = (count + WIDE - 1) / WIDE * WIDE;
    for (int r = 0; r < ROWS; ++r)
        keep[r] = weigh(scores + r * BLOCK, 0, count, wide, part.most[first + r], part.total[first + r]);
    float *sums = part.sums + first * s.dim;
    if (LANES == 16 && s.dim % (4 * LANES) == 0)
        gather<ROWS, 4>(scores, values, s.value_row, count, s.dim, keep, sums);
    else
        gather<ROWS, 2>(scores, values, s.value_row, count, s.dim, keep, sums);
}

template <typename T>
static void attend_piece(const OneQuery &s, const float *query, const T *keys, const T *values, int64_t count,
                         const Part &part) {
    std::fill_n(part.sums, s.group * s.dim, 0.0f);
    std::fill_n(part.most, s.group, -std::numeric_limits<float>::max());
    std::fill_n(part.total, s.group, 0.0f);
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const T *some_keys = keys + begin * s.key_row, *some_values = values + begin * s.value_row;
        const int64_t some = std::min<int64_t>(BLOCK, count - begin);
        for (int64_t first = 0; first < s.group; first += MOST_ROWS) {
            const int64_t rows = std::min<int64_t>(MOST_ROWS, s.group - first);
            (rows == 4   ? attend<4, T>
             : rows == 3 ? attend<3, T>
             : rows == 2 ? attend<2, T>
                         : attend<1, T>)(s, query, some_keys, some_values, some, first, part);
        }
    }
}

static void merge(const OneQuery &s, int64_t pieces, int64_t group_head, const Part *parts, float *out, float *lse) {
    float most = parts[0].most[group_head], total = 0;
    for (int64_t p = 1; p < pieces; ++p) most = std::max(most, parts[p].most[group_head]);
    std::fill_n(out, s.dim, 0.0f);
    for (int64_t p = 0; p < pieces; ++p) {
        const float weight = std::exp2(parts[p].most[group_head] - most), *sums = parts[p].sums + group_head * s.dim;
        total += weight * parts[p].total[group_head];
        for (int64_t d = 0; d < s.dim; ++d) out[d] += weight * sums[d];
    }
    for (int64_t d = 0; d < s.dim; ++d) out[d] /= total;
    *lse = (most + std::log2(total)) / LOG2_E;
}

static int64_t pieces_of(int64_t keys) { return (keys + PIECE - 1) / PIECE; }

template <typename T>
static void attend_all(const OneQuery &s, const T *query, const T *keys, const T *values, float *out, float *lse,
                       float *room, int64_t threads) {
    const int64_t pieces = pieces_of(s.keys), heads = s.kv_heads * s.group;
    float *scaled = room, *free = scaled + heads * s.dim;  // weights are powers of two
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < s.dim; ++d)
            scaled[h * s.dim + d] = number(query[h * s.query_head + d]) * (s.scale * LOG2_E);
    std::vector<Part> parts(s.kv_heads * pieces);
    for (auto &part : parts) {
        part = {free, free + s.group * s.dim, free + s.group * (s.dim + 1)};
        free += s.group * (s.dim + 2);
    }
    const int64_t all = static_cast<int64_t>(parts.size());
    // A thread is worth waking for some hundred thousand numbers.
    const int64_t work = 1 + s.kv_heads * s.keys * s.dim / (1 << 17);
    std::atomic<int64_t> next{0};
    in_threads(std::min({threads, work, all}), [&] {
        for (int64_t i; (i = next++) < all;) {
            const int64_t head = i / pieces, begin = i % pieces * PIECE;
            attend_piece(s, scaled + head * s.group * s.dim, keys + head * s.key_head + begin * s.key_row,
                         values + head * s.value_head + begin * s.value_row, std::min<int64_t>(PIECE, s.keys - begin),
                         parts[i]);
        }
    });
    for (int64_t h = 0; h < heads; ++h)
        merge(s, pieces, h % s.group, &parts[h / s.group * pieces], out + h * s.out_head, lse + h);
}

extern "C" {
int64_t kvr_decode_room(int64_t kv_heads, int64_t group, int64_t keys, int64_t dim) {
    return kv_heads * group * (dim + pieces_of(keys) * (dim + 2));
}

void kvr_decode_attention(const OneQuery *shape, const void *query, const void *keys, const void *values, float *out,
                          float *lse, float *room, int64_t threads) {
    const auto with = [&](auto *one) {
        using T = decltype(one);
        attend_all(*shape, static_cast<T>(query), static_cast<T>(keys), static_cast<T>(values), out, lse, room, threads);
    };
    shape->half ? with(static_cast<const Half *>(nullptr)) : with(static_cast<const float *>(nullptr));
}
}
