// Exact attention on a CPU, in tiles that stay in registers and in the L1 cache.
//
// FlashAttention (Dao et al. 2022; version 2: 2023) in float32: a tile of ROWS queries processes the keys in blocks of
// BLOCK, with a running maximum and sum for each query, and its scores never leave the cache. Both products use one
// micro-kernel (Goto and van de Geijn 2008), which holds ROWS x WIDE results in registers. The keys and values of a
// head are packed once into panels of WIDE columns, which the micro-kernel reads sequentially, and which all query
// heads of the group share: unpacked rows a multiple of 4 KiB apart would evict each other from the L1 cache. TILES
// tiles use a panel while it is in the cache. Above a causal diagonal, only the rest of the tiles on it is computed.
// 16-bit queries, keys and values are widened where they are scaled or packed.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the shapes and checks them.

#include "attention.h"
#include "halves.h"
#include "threads.h"
#include "tiles.h"

#include <atomic>
#include <limits>

constexpr int ROWS = TILE;
constexpr int BLOCK = 512;
constexpr int TILES = 4;
constexpr int QUERIES = TILES * ROWS;

static int64_t room_of(int64_t dim) { return QUERIES * (2 * dim + BLOCK); }
static int64_t padded(int64_t keys) { return (keys + BLOCK - 1) / BLOCK * BLOCK; }

// Widen and scale up to QUERIES queries of one head, from `first` on; missing ones are zeros.
template <class Number> static void scale(const Shape &s, const Number *query, int64_t first, float *scaled) {
    const int64_t rows = std::min<int64_t>(QUERIES, s.queries - first);
    const float by = s.scale * LOG2_E;  // softmax weights are computed as powers of two
    std::fill_n(scaled + rows * s.dim, (QUERIES - rows) * s.dim, 0.0f);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < s.dim; d += LANES)
            store(scaled + r * s.dim + d, load(query + (first + r) * s.query_row + d) * by);
}

// Attend from these queries, which are in the room, to packed keys and values.
static void attend(const Shape &s, const float *keys, const float *values, float *out, float *lse,
                   int64_t first, float *room) {
    const int64_t rows = std::min<int64_t>(QUERIES, s.queries - first), tiles = (rows + ROWS - 1) / ROWS;
    const int64_t before = s.causal ? s.keys - s.queries + first : s.keys;  // keys before the first query's own
    float *scaled = room, *sums = scaled + QUERIES * s.dim, *scores = sums + QUERIES * s.dim;
    float most[QUERIES], total[QUERIES] = {}, rescale[QUERIES];
    std::fill_n(most, QUERIES, -std::numeric_limits<float>::max());
    std::fill_n(sums, QUERIES * s.dim, 0.0f);
    const int64_t all = s.causal ? before + rows : s.keys;
    const int64_t unseen = s.causal ? std::max<int64_t>(0, before + 1 - s.window) : 0;
    for (int64_t begin = unseen / BLOCK * BLOCK; begin < all; begin += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, all - begin);
        // The first tile with a query that sees a key; and how many of the block's keys a tile's queries see at most.
        const auto first_tile = [&](int64_t key) {
            return s.causal ? std::max<int64_t>(0, key - before) / ROWS : 0;
        };
        const auto seen = [&](int64_t tile) {
            return s.causal ? std::min(count, before + (tile + 1) * ROWS - begin) : count;
        };
        for (int64_t c = 0; c < count; c += WIDE)
            for (int64_t t = first_tile(begin + c); t < tiles; ++t)
                multiply<ROWS>(scaled + t * ROWS * s.dim, s.dim, 1, keys + (begin + c) * s.dim, WIDE,
                               scores + t * ROWS * BLOCK + c, BLOCK, s.dim, nullptr);
        for (int64_t r = first_tile(begin) * ROWS; r < tiles * ROWS; ++r) {
            const int64_t own = before + std::min(r + 1, rows) - begin;  // keys of the block up to the query's own
            const int64_t high = s.causal ? std::clamp<int64_t>(own, 0, count) : count;
            const int64_t low = s.causal ? std::clamp<int64_t>(own - s.window, 0, high) : 0;
            const int64_t wide = (seen(r / ROWS) + WIDE - 1) / WIDE * WIDE;
            rescale[r] = weigh(scores + r * BLOCK, low, high, wide, most[r], total[r]);
        }
        for (int64_t d = 0; d < s.dim; d += WIDE)
            for (int64_t t = first_tile(begin); t < tiles; ++t)
                multiply<ROWS>(scores + t * ROWS * BLOCK, BLOCK, 1, values + begin * s.dim + d * BLOCK, WIDE,
                               sums + t * ROWS * s.dim + d, s.dim, seen(t), rescale + t * ROWS);
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < s.dim; ++d) out[(first + r) * s.out_row + d] = sums[r * s.dim + d] / total[r];
        lse[first + r] = (most[r] + std::log2(total[r])) / LOG2_E;
    }
}

// Pack a block of keys (keys, dim) as (keys / WIDE, dim, WIDE), and of values as (dim / WIDE, keys, WIDE), padded with
// zeros.
template <class Number>
static void pack(const Shape &s, const Number *keys, const Number *values, float *packed_keys, float *packed_values,
                 int64_t begin) {
    for (int64_t from = begin; from < begin + BLOCK; from += LANES)
        for (int64_t d = 0; d < s.dim; d += LANES) {
            alignas(64) Lanes square[LANES];
            float *value = packed_values + begin * s.dim + d / WIDE * WIDE * BLOCK + (from - begin) * WIDE + d % WIDE;
            for (int64_t t = 0; t < LANES; ++t) {
                const bool is_key = from + t < s.keys;
                square[t] = is_key ? load(keys + (from + t) * s.key_row + d) : Lanes{};
                store(value + t * WIDE, is_key ? load(values + (from + t) * s.value_row + d) : Lanes{});
            }
            turn_square(square);
            float *key = packed_keys + from / WIDE * WIDE * s.dim + d * WIDE + from % WIDE;
            for (int64_t l = 0; l < LANES; ++l) store(key + l * WIDE, square[l]);
        }
}

template <class Number>
static void attend_all(const Shape &s, const Number *query, const Number *keys, const Number *values, float *out,
                       float *lse, float *room, int64_t threads) {
    const int64_t blocks = padded(s.keys) / BLOCK, parts = (s.queries + QUERIES - 1) / QUERIES;
    float *packed_keys = room, *packed_values = packed_keys + s.dim * padded(s.keys);
    float *rooms = packed_values + s.dim * padded(s.keys);
    std::atomic<int64_t> thread{0}, block{0}, done{0}, next{0};
    in_threads(threads, [&] {
        float *own = rooms + thread++ * room_of(s.dim);
        for (int64_t i; (i = block++) < blocks; ++done)
            pack(s, keys, values, packed_keys, packed_values, i * BLOCK);
        while (done < blocks) std::this_thread::yield();
        for (int64_t i; (i = next++) < s.group * parts;) {
            const int64_t head = i % s.group, first = (parts - 1 - i / s.group) * QUERIES;  // the longest first
            scale(s, query + head * s.query_head, first, own);
            attend(s, packed_keys, packed_values, out + head * s.out_head, lse + head * s.queries, first, own);
        }
    });
}

extern "C" {
int64_t kvr_attention_multiple() { return WIDE; }
int64_t kvr_attention_room(int64_t dim, int64_t keys, int64_t threads) {
    return 2 * dim * padded(keys) + threads * room_of(dim);
}

// Queries, keys and values have numbers of one kind.
void kvr_attention(const Shape *shape, const void *query, const void *keys, const void *values, float *out, float *lse,
                   float *room, int64_t threads) {
    as_numbers(shape->kind, [&](auto number) {
        using Number = decltype(number);
        attend_all(*shape, static_cast<const Number *>(query), static_cast<const Number *>(keys),
                   static_cast<const Number *>(values), out, lse, room, threads);
    });
}
}
