// Attention in bfloat16 on AMX tiles (Intel Xeons since 2023), in the manner of ``tiled_attention.cpp``.
//
// Scores are computed transposed: keys times queries, and values times weights. So keys are the first factor as they lie
// in memory, a vector holds one key's scores of several queries, which needs no sums across a vector, and the weights of
// two keys, packed into words, are the second factor of the second product. While the vector units compute a block's
// weights, the tiles compute the scores of the next block and add the values of the block before.
//
// Scores and sums are float32. Weights are rounded to bfloat16 (ties away from zero) before they multiply the values, as
// on GPUs; their sum is taken before. `cpu_attention.py` states the shapes and checks them.

#include "amx_tiles.h"

#if defined(KVR_HAS_TILES)

#include "attention.h"
#include "threads.h"

#include <atomic>

namespace {

// A block: 32 queries and 64 keys were fastest on Sapphire Rapids, 128 keys slower.
constexpr int64_t QUERIES = 2 * SIDE, KEYS = 64, HALF = KEYS / 2;
constexpr int64_t ROW = SIDE * 4, WIDE_ROW = QUERIES * 4;  // bytes
constexpr int PARTS = SIDE / LANES;                         // vectors in a row of a register
constexpr int VECTORS = 2 * PARTS;                          // for all queries of a block
// Scores of keys that a query does not see, and the largest score before there is any: finite, and weights are zero.
constexpr float HIDDEN = -2e30f, LEAST = -1e30f;

int64_t padded_dim(int64_t dim) { return (dim + DEPTH - 1) / DEPTH * DEPTH; }
int64_t padded_keys(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS; }
int64_t packed_floats(int64_t dim, int64_t keys) { return padded_dim(dim) * padded_keys(keys) / 2; }

// A thread's memory.
struct Room {
    uint32_t *queries, *weights[2];
    float *sums, *scores[2];

    explicit Room(int64_t dim, float *at) {
        const auto take = [&at](int64_t count) { return at += count, at - count; };
        for (int i = 0; i < 2; ++i) {
            scores[i] = take(KEYS * QUERIES);
            weights[i] = reinterpret_cast<uint32_t *>(take(HALF * QUERIES));
        }
        sums = take(QUERIES * dim);
        queries = reinterpret_cast<uint32_t *>(take(QUERIES * dim / 2));
    }
    static int64_t floats(int64_t dim) { return QUERIES * (2 * (KEYS + HALF) + dim + dim / 2); }
};

// 2^x for x <= 0, relative error 1e-4, which is small next to the rounding of weights; 2^0 = 1. Below -126: 2^-126. NaN
// stays NaN. See `powers_of_two` in ``lanes.h``.
inline Lanes power_of_two(Lanes x) {
    const Lanes rounds = fill(12582912.0f);
    x = larger(fill(-126.0f), x);
    const Lanes shifted = x + rounds;
    x -= shifted - rounds;
    Lanes power = fill(5.5008933e-2f);
    power = power * x + 2.4221100e-1f;
    power = power * x + 6.9328290e-1f;
    power = power * x + 1.0f;
    return (Lanes)((Bits)power + ((Bits)shifted << 23));
}

// Whether a > b in some lane.
inline bool is_larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    const Bits lanes = a > b;
    bool any = false;
    for (int l = 0; l < LANES; ++l) any |= lanes[l] != 0;
    return any;
#endif
}

// The first `count` numbers in words, at most all; the others are zero.
inline Words load_pairs(const BFloat16 *from, int64_t count) {
    Words words{};
    if (count >= 2 * LANES) return *reinterpret_cast<const Words *>(from);
    if (count > 0) __builtin_memcpy(&words, from, count * 2);
    return words;
}

// Pack up to QUERIES queries of one head, from `first` on, as (query / 16, feature / 32, 16 pairs, 16 queries); missing
// ones are zeros. A negative scale changes their sign, since the largest score is found before scaling.
void pack_queries(const Shape &s, const BFloat16 *query, int64_t first, uint32_t *packed) {
    const uint32_t keep = s.scale == 0.0f ? 0 : ~0u, flip = s.scale < 0.0f ? 0x80008000u : 0;
    for (int64_t q = 0; q < QUERIES; q += SIDE)
        for (int64_t d = 0; d < padded_dim(s.dim); d += DEPTH, packed += SQUARE)
            for (int64_t n = 0; n < SIDE; n += LANES)
                for (int64_t pair = 0; pair < SIDE; pair += LANES) {
                    alignas(64) Words square[LANES] = {};
                    for (int64_t l = 0; l < LANES; ++l) {
                        const int64_t row = first + q + n + l, from = d + 2 * pair;
                        if (row < s.queries)
                            square[l] = (load_pairs(query + row * s.query_row + from, s.dim - from) & keep) ^ flip;
                    }
                    turn_square(square);
                    for (int64_t l = 0; l < LANES; ++l)
                        *reinterpret_cast<Words *>(packed + (pair + l) * SIDE + n) = square[l];
                }
}

// Pack a block of keys as (key / 16, feature / 32, 16 keys, 32 features), and of values as (key / 32, feature / 16, 16
// features, 32 keys), padded with zeros: a tile is 1 KiB in sequence.
void pack(const Shape &s, const BFloat16 *keys, const BFloat16 *values, uint32_t *packed_keys, uint32_t *packed_values,
          int64_t begin) {
    const int64_t dim = padded_dim(s.dim);
    for (int64_t key = begin; key < begin + KEYS; ++key)
        for (int64_t d = 0; d < dim; d += DEPTH)
            for (int64_t pair = 0; pair < SIDE; pair += LANES) {
                const int64_t from = d + 2 * pair;
                uint32_t *to = packed_keys + key / SIDE * SIDE * dim / 2 + d / DEPTH * SQUARE + key % SIDE * SIDE + pair;
                *reinterpret_cast<Words *>(to) =
                    key < s.keys ? load_pairs(keys + key * s.key_row + from, s.dim - from) : Words{};
            }
    for (int64_t from = begin; from < begin + KEYS; from += DEPTH)
        for (int64_t d = 0; d < dim; d += LANES)
            for (int64_t pair = 0; pair < SIDE; pair += LANES) {
                alignas(64) Words square[LANES] = {};
                for (int64_t l = 0; l < LANES; ++l)
                    for (int64_t odd = 0; odd < 2; ++odd) {
                        const int64_t key = from + 2 * (pair + l) + odd;
                        if (key >= s.keys) continue;
                        const Words number = (Words)load_some(values + key * s.value_row + d, s.dim - d);
                        square[l] |= odd ? number : number >> 16;
                    }
                turn_square(square);
                uint32_t *to = packed_values + from / DEPTH * dim * SIDE + d * SIDE + pair;
                for (int64_t l = 0; l < LANES; ++l) *reinterpret_cast<Words *>(to + l * SIDE) = square[l];
            }
}

// Scores (32 keys, QUERIES) of half a block, in registers 0 to 3.
inline void multiply_keys(Tiles &tiles, const uint32_t *keys, const uint32_t *queries, int64_t steps) {
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    for (int64_t step = 0; step < steps; ++step, keys += SQUARE, queries += SQUARE) {
        tiles.load<4>(keys, ROW), tiles.load<6>(queries, ROW), tiles.multiply<0, 4, 6>();
        tiles.load<5>(keys + steps * SQUARE, ROW), tiles.multiply<2, 5, 6>();
        tiles.load<7>(queries + steps * SQUARE, ROW), tiles.multiply<1, 4, 7>(), tiles.multiply<3, 5, 7>();
    }
}

// Add to sums (32 features, QUERIES), in registers 0 to 3, the values of a block times its weights.
inline void multiply_values(Tiles &tiles, const uint32_t *values, const uint32_t *weights, const float *sums,
                            int64_t dim) {
    tiles.load<0>(sums, WIDE_ROW), tiles.load<1>(sums + SIDE, WIDE_ROW);
    tiles.load<2>(sums + SIDE * QUERIES, WIDE_ROW), tiles.load<3>(sums + SIDE * QUERIES + SIDE, WIDE_ROW);
    for (int64_t half = 0; half < KEYS / DEPTH; ++half, values += dim * SIDE, weights += SQUARE) {
        tiles.load<4>(values, ROW), tiles.load<6>(weights, ROW), tiles.multiply<0, 4, 6>();
        tiles.load<5>(values + SQUARE, ROW), tiles.multiply<2, 5, 6>();
        tiles.load<7>(weights + KEYS / DEPTH * SQUARE, ROW), tiles.multiply<1, 4, 7>(), tiles.multiply<3, 5, 7>();
    }
}

// Store registers 0 to 3 as (32, QUERIES).
inline void store_tiles(const Tiles &tiles, float *to) {
    tiles.store<0>(to, WIDE_ROW), tiles.store<2>(to + SIDE * QUERIES, WIDE_ROW);
    tiles.store<1>(to + SIDE, WIDE_ROW), tiles.store<3>(to + SIDE * QUERIES + SIDE, WIDE_ROW);
}

// Convert scores (32 keys, 16 of QUERIES) to weights, in words of two keys' (16, 16), and add them to the totals.
inline void weigh(const float *scores, uint32_t *weights, float by, const Lanes *minus, Lanes *totals) {
    for (int part = 0; part < PARTS; ++part) {
        Lanes even{}, odd{};
#pragma GCC unroll 16
        for (int64_t r = 0; r < SIDE; ++r) {
            const float *from = scores + 2 * r * QUERIES + part * LANES;
            const Lanes one = power_of_two(load(from) * by + minus[part]);
            const Lanes other = power_of_two(load(from + QUERIES) * by + minus[part]);
            even += one, odd += other;
            const Words low = ((Words)one + 0x8000) >> 16, high = ((Words)other + 0x8000) & 0xffff0000;
            *reinterpret_cast<Words *>(weights + r * SIDE + part * LANES) = low | high;
        }
        totals[part] += even + odd;
    }
}

// Hide scores (KEYS, QUERIES) of the keys from `begin` on that queries do not see: before `low`, or from `high` on.
void hide(float *scores, int64_t begin, const int32_t *low, const int32_t *high) {
    for (int64_t key = 0; key < KEYS; ++key)
        for (int64_t q = 0; q < QUERIES; q += LANES) {
            float *at = scores + key * QUERIES + q;
            const Bits own = Bits{} + static_cast<int32_t>(begin + key);
            const Bits seen = (own >= *reinterpret_cast<const Bits *>(low + q)) &
                              (own < *reinterpret_cast<const Bits *>(high + q));
            store(at, seen ? load(at) : fill(HIDDEN));
        }
}

// Attend from the queries in the room, of one head from `first` on, to packed keys and values.
void attend(const Shape &s, Tiles &tiles, const uint32_t *keys, const uint32_t *values, float *out, float *lse,
            int64_t first, const Room &room) {
    const int64_t rows = std::min(QUERIES, s.queries - first), dim = padded_dim(s.dim), chunks = dim / DEPTH;
    const int64_t before = s.causal ? s.keys - s.queries + first : s.keys;  // keys before the first query's own
    const int64_t all = s.causal ? before + rows : s.keys;
    const float by = s.scale == 0.0f ? 1.0f : std::fabs(s.scale) * LOG2_E;  // weights are powers of two
    alignas(64) int32_t low[QUERIES], high[QUERIES];
    for (int64_t r = 0; r < QUERIES; ++r) {
        const int64_t own = before + std::min(r + 1, rows);  // keys up to the query's own
        high[r] = static_cast<int32_t>(s.causal ? own : s.keys);
        low[r] = static_cast<int32_t>(s.causal ? std::max<int64_t>(0, own - s.window) : 0);
    }
    Lanes most[VECTORS], minus[VECTORS], rescale[VECTORS], totals[VECTORS] = {};
    for (auto &each : most) each = fill(LEAST);
    std::fill_n(room.sums, QUERIES * dim, 0.0f);

    const auto issue_scores = [&](int64_t block, int64_t half) {
        multiply_keys(tiles, keys + (block * KEYS + half * HALF) * dim / 2, room.queries, chunks);
    };
    const auto issue_values = [&](int64_t block, int64_t chunk) {
        multiply_values(tiles, values + block * KEYS * dim / 2 + chunk * 2 * SQUARE, room.weights[block & 1],
                        room.sums + chunk * DEPTH * QUERIES, dim);
    };
    const auto store_sums = [&](int64_t chunk) { store_tiles(tiles, room.sums + chunk * DEPTH * QUERIES); };

    const int64_t begin = low[0] / KEYS, end = (all + KEYS - 1) / KEYS;
    for (int64_t half = 0; half < 2; ++half)
        issue_scores(begin, half), store_tiles(tiles, room.scores[begin & 1] + half * HALF * QUERIES);
    for (int64_t block = begin; block < end; ++block) {
        float *scores = room.scores[block & 1], *next = room.scores[(block + 1) & 1];
        uint32_t *weights = room.weights[block & 1];
        const int64_t from = block * KEYS;
        if (from < low[QUERIES - 1] || from + KEYS > high[0]) hide(scores, from, low, high);
        bool grew = false;
        for (int v = 0; v < VECTORS; ++v) {
            Lanes tops[4] = {most[v], most[v], most[v], most[v]};
#pragma GCC unroll 4
            for (int64_t key = 0; key < KEYS; key += 4)
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; ++i)
                    tops[i] = larger(tops[i], load(scores + (key + i) * QUERIES + v * LANES));
            const Lanes top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
            grew |= is_larger(top, most[v]);
            rescale[v] = power_of_two((most[v] - top) * by);
            totals[v] *= rescale[v];
            most[v] = top;
            minus[v] = top * -by;
        }
        for (int64_t half = 0, chunk = 0; half < 2; ++half) {
            const auto weigh_half = [&](int64_t tile) {
                weigh(scores + half * HALF * QUERIES + tile * SIDE, weights + (tile * 2 + half) * SQUARE, by,
                      minus + tile * PARTS, totals + tile * PARTS);
            };
            if (block + 1 < end) issue_scores(block + 1, half);
            weigh_half(0);
            if (block + 1 < end) store_tiles(tiles, next + half * HALF * QUERIES);
            const int64_t until = block == begin ? 0 : (half + 1) * chunks / 2;
            if (chunk == until) weigh_half(1);
            for (; chunk < until; ++chunk) {
                issue_values(block - 1, chunk);
                if (chunk + 1 == until) weigh_half(1);
                store_sums(chunk);
            }
        }
        if (grew && block > begin)
            for (int64_t d = 0; d < dim; ++d)
                for (int v = 0; v < VECTORS; ++v) {
                    float *at = room.sums + d * QUERIES + v * LANES;
                    store(at, load(at) * rescale[v]);
                }
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) issue_values(end - 1, chunk), store_sums(chunk);

    for (int v = 0; v < VECTORS; ++v) {
        const int64_t row = first + v * LANES, count = std::clamp<int64_t>(rows - v * LANES, 0, LANES);
        for (int64_t d = 0; d < s.dim; d += LANES) {
            alignas(64) Lanes square[LANES];
            for (int64_t l = 0; l < LANES; ++l) square[l] = load(room.sums + (d + l) * QUERIES + v * LANES) / totals[v];
            turn_square(square);
            for (int64_t l = 0; l < count; ++l) store_some(out + (row + l) * s.out_row + d, square[l], s.dim - d);
        }
        for (int64_t l = 0; l < count; ++l) lse[row + l] = (most[v][l] * by + std::log2(totals[v][l])) / LOG2_E;
    }
}

void attend_all(const Shape &s, const BFloat16 *query, const BFloat16 *keys, const BFloat16 *values, float *out,
                float *lse, float *room, int64_t threads) {
    const int64_t blocks = padded_keys(s.keys) / KEYS, parts = (s.queries + QUERIES - 1) / QUERIES;
    const int64_t dim = padded_dim(s.dim), packed = packed_floats(s.dim, s.keys);
    uint32_t *packed_keys = reinterpret_cast<uint32_t *>(room), *packed_values = packed_keys + packed;
    float *rooms = room + 2 * packed;
    std::atomic<int64_t> thread{0}, block{0}, done{0}, next{0};
    in_threads(threads, [&] {
        const Room own(dim, rooms + thread++ * Room::floats(dim));
        for (int64_t i; (i = block++) < blocks; ++done) pack(s, keys, values, packed_keys, packed_values, i * KEYS);
        while (done < blocks) std::this_thread::yield();
        Tiles tiles;
        for (int64_t i; (i = next++) < s.group * parts;) {
            const int64_t head = i % s.group, first = (parts - 1 - i / s.group) * QUERIES;  // the longest first
            pack_queries(s, query + head * s.query_head, first, own.queries);
            attend(s, tiles, packed_keys, packed_values, out + head * s.out_head, lse + head * s.queries, first, own);
        }
    });
}

}  // namespace

extern "C" {
int64_t kvr_amx_attention_room(int64_t dim, int64_t keys, int64_t threads) {
    return 2 * packed_floats(dim, keys) + threads * Room::floats(padded_dim(dim));
}

// Queries, keys and values are bfloat16, of any dimension.
void kvr_amx_attention(const Shape *shape, const void *query, const void *keys, const void *values, float *out,
                       float *lse, float *room, int64_t threads) {
    attend_all(*shape, static_cast<const BFloat16 *>(query), static_cast<const BFloat16 *>(keys),
               static_cast<const BFloat16 *>(values), out, lse, room, threads);
}

// Whether this process may use tiles, which also asks for them.
int64_t kvr_amx_allowed() { return Tiles::allowed(); }
}

#endif
