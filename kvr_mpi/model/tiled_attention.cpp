// Exact attention on a processor, in tiles that stay in registers and in the first cache.
//
// FlashAttention (Dao et al. 2022; its second version 2023) for float32: a tile of ROWS queries goes over the keys in
// blocks of BLOCK, with a running maximum and sum for each query, and its scores never leave the cache. Both products
// are one micro-kernel (Goto and van de Geijn 2008) that holds ROWS x WIDE results in registers. The keys of a head are
// turned once, so that the micro-kernel reads them in rows as it does the values; all query heads of the group read
// them. Nothing above a causal diagonal is computed but what shares a tile with it.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the shapes and checks them.

#include "lanes.h"
#include "threads.h"

#include <atomic>
#include <limits>

// The registers of a tile's results, and some to spare: 24 of 32 with AVX-512, 12 of 16 with AVX2, 24 of 32 with NEON.
constexpr int ROWS = LANES == 16 ? 12 : 6;
constexpr int BLOCK = 512;

// One KV head and its group of query heads. Strides are in elements; those of features are 1.
struct Shape {
    int64_t group, queries, keys, dim;
    int64_t query_head, query_row, key_row, value_row, out_head, out_row;
    float scale;
    int32_t causal;  // query i sees the keys up to keys - queries + i
    int64_t window;  // and of those, if causal, only the last so many
};

// c (ROWS, WIDE) = a (ROWS, depth) b (depth, WIDE), to which c times `keep` of its row is added if that is given.
static inline void multiply(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                            int64_t depth, const float *keep) {
    Lanes left[ROWS], right[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        left[r] = keep ? load(c + r * c_row) * keep[r] : Lanes{};
        right[r] = keep ? load(c + r * c_row + LANES) * keep[r] : Lanes{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        const Lanes b_left = load(b + k * b_row), b_right = load(b + k * b_row + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            left[r] += a[r * a_row + k] * b_left;
            right[r] += a[r * a_row + k] * b_right;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        store(c + r * c_row, left[r]);
        store(c + r * c_row + LANES, right[r]);
    }
}

// Attend from up to ROWS queries of one head, from `first` on. Room: ROWS x (2 dim + BLOCK).
static void attend(const Shape &s, const float *query, const float *turned, const float *values, float *out, float *lse,
                   int64_t first, float *room) {
    const int64_t rows = std::min<int64_t>(ROWS, s.queries - first), padded = (s.keys + WIDE - 1) / WIDE * WIDE;
    const int64_t before = s.causal ? s.keys - s.queries + first : s.keys;  // keys that come before the tile's
    float *tile = room, *sums = tile + ROWS * s.dim, *scores = sums + ROWS * s.dim;
    float most[ROWS], total[ROWS] = {}, rescale[ROWS];
    std::fill_n(most, ROWS, -std::numeric_limits<float>::max());
    std::fill_n(tile, 2 * ROWS * s.dim, 0.0f);
    const float scale = s.scale * LOG2_E;  // weights are powers of two
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < s.dim; ++d) tile[r * s.dim + d] = query[(first + r) * s.query_row + d] * scale;
    const int64_t all = s.causal ? before + rows : s.keys;
    const int64_t unseen = s.causal ? std::max<int64_t>(0, before + 1 - s.window) : 0;
    for (int64_t begin = unseen / WIDE * WIDE; begin < all; begin += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, all - begin), wide = (count + WIDE - 1) / WIDE * WIDE;
        for (int64_t c = 0; c < wide; c += WIDE)
            multiply(tile, s.dim, turned + begin + c, padded, scores + c, BLOCK, s.dim, nullptr);
        for (int64_t r = 0; r < ROWS; ++r) {
            const int64_t own = before + std::min(r + 1, rows) - begin;  // keys of the block up to the query's own
            const int64_t high = s.causal ? std::clamp<int64_t>(own, 0, count) : count;
            const int64_t low = s.causal ? std::clamp<int64_t>(own - s.window, 0, high) : 0;
            rescale[r] = weigh(scores + r * BLOCK, low, high, wide, most[r], total[r]);
        }
        for (int64_t d = 0; d < s.dim; d += WIDE)
            multiply(scores, BLOCK, values + begin * s.value_row + d, s.value_row, sums + d, s.dim, count, rescale);
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < s.dim; ++d) out[(first + r) * s.out_row + d] = sums[r * s.dim + d] / total[r];
        lse[first + r] = (most[r] + std::log2(total[r])) / LOG2_E;
    }
}

// Lay keys (keys, dim) out as (dim, padded to WIDE), with zeros behind.
static void turn(const Shape &s, const float *keys, float *turned, int64_t begin, int64_t end) {
    const int64_t padded = (s.keys + WIDE - 1) / WIDE * WIDE;
    for (int64_t from = begin; from < end; from += LANES)
        for (int64_t d = 0; d < s.dim; d += LANES) {
            Lanes square[LANES];
            for (int64_t t = 0; t < LANES; ++t)
                square[t] = from + t < s.keys ? load(keys + (from + t) * s.key_row + d) : Lanes{};
            turn_square(square);
            for (int64_t l = 0; l < LANES; ++l) store(turned + (d + l) * padded + from, square[l]);
        }
}

extern "C" {
int64_t kvr_attention_multiple() { return WIDE; }
int64_t kvr_attention_room(int64_t dim, int64_t keys, int64_t threads) {
    return dim * ((keys + WIDE - 1) / WIDE * WIDE) + threads * ROWS * (2 * dim + BLOCK);
}

void kvr_attention(const Shape *shape, const float *query, const float *keys, const float *values, float *out,
                   float *lse, float *room, int64_t threads) {
    const Shape s = *shape;
    const int64_t padded = (s.keys + WIDE - 1) / WIDE * WIDE, tiles = (s.queries + ROWS - 1) / ROWS;
    const int64_t pieces = (padded + BLOCK - 1) / BLOCK;
    float *turned = room, *rooms = room + s.dim * padded;
    std::atomic<int64_t> thread{0}, piece{0}, done{0}, next{0};
    in_threads(threads, [&] {
        float *own = rooms + thread++ * ROWS * (2 * s.dim + BLOCK);
        for (int64_t i; (i = piece++) < pieces; ++done)
            turn(s, keys, turned, i * BLOCK, std::min(i * BLOCK + BLOCK, padded));
        while (done < pieces) std::this_thread::yield();
        for (int64_t i; (i = next++) < s.group * tiles;) {
            const int64_t head = i % s.group, first = (tiles - 1 - i / s.group) * ROWS;  // the longest first
            attend(s, query + head * s.query_head, turned, values, out + head * s.out_head, lse + head * s.queries,
                   first, own);
        }
    });
}
}
