// Exact attention on a processor, in tiles that stay in registers and in the first cache.
//
// FlashAttention (Dao et al. 2022; its second version 2023) for float32: a tile of ROWS queries goes over the keys in
// blocks of BLOCK, with a running maximum and sum for each query, and its scores never leave the cache. Both products
// are one micro-kernel (Goto and van de Geijn 2008) that holds ROWS x WIDE results in registers. The keys of a head are
// turned once, so that the micro-kernel reads them in rows as it does the values; all query heads of the group read
// them. Nothing above a causal diagonal is computed but what shares a tile with it.
//
// Compiled for one processor and called through ctypes: `tiled_attention.py` states the shapes and checks them.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

// The registers of a tile's results, and some to spare: 24 of 32 with AVX-512, 12 of 16 with AVX2, 24 of 32 with NEON.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int WIDE = 2 * LANES;
constexpr int BLOCK = 512;

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Lanes load(const float *from) { return *reinterpret_cast<const Lanes *>(from); }
static inline void store(float *to, Lanes lanes) { *reinterpret_cast<Lanes *>(to) = lanes; }
static inline Lanes fill(float value) { return value - Lanes{}; }
static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

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

// 2^x for x <= 0, to 2e-7 of it: the nearest integer goes to the exponent, a polynomial takes the rest. NaN stays NaN.
static inline Lanes power_of_two(Lanes x) {
    const Lanes rounds = fill(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
    x = x < -126.0f ? fill(-126.0f) : x;
    const Lanes shifted = x + rounds, rest = x - (shifted - rounds);
    Lanes power = fill(1.3276471e-3f);
    power = power * rest + 9.675541e-3f;
    power = power * rest + 5.550713e-2f;
    power = power * rest + 2.4022120e-1f;
    power = power * rest + 6.9314694e-1f;
    power = power * rest + 1.0000001f;
    return (Lanes)((Bits)power + ((Bits)shifted << 23));
}

static inline float largest(Lanes lanes) {
    float most = lanes[0];
    for (int l = 1; l < LANES; ++l) most = std::max(most, lanes[l]);
    return most;
}

static inline float sum(Lanes lanes) {
    float total = 0;
    for (int l = 0; l < LANES; ++l) total += lanes[l];
    return total;
}

// Make weights of a query's scores of a block (wide), of which it sees those from `low` to `high`. Updates the largest
// score and the sum of weights; returns what earlier weights are to be multiplied by.
static float weigh(float *scores, int64_t low, int64_t high, int64_t wide, float &most, float &total) {
    std::fill(scores, scores + low, -1e30f);  // finite, so that no difference of two is NaN
    std::fill(scores + high, scores + wide, -1e30f);
    Lanes tops[2] = {load(scores), load(scores + LANES)}, sums[2] = {};
    for (int64_t c = WIDE; c < wide; c += WIDE)
        for (int half = 0; half < 2; ++half) tops[half] = larger(load(scores + c + half * LANES), tops[half]);
    const float before = most;
    most = std::max(most, largest(larger(tops[0], tops[1])));
    for (int64_t c = 0; c < wide; c += WIDE)
        for (int half = 0; half < 2; ++half) {
            const Lanes weights = power_of_two(load(scores + c + half * LANES) - most);
            store(scores + c + half * LANES, weights);
            sums[half] += weights;
        }
    std::fill(scores, scores + low, 0.0f);
    std::fill(scores + high, scores + wide, 0.0f);
    const float rescale = std::exp2(before - most);
    total = total * rescale + sum(sums[0] + sums[1]);
    return rescale;
}

// Attend from up to ROWS queries of one head, from `first` on. Room: ROWS x (2 dim + BLOCK).
static void attend(const Shape &s, const float *query, const float *turned, const float *values, float *out, float *lse,
                   int64_t first, float *room) {
    constexpr float LOG2_E = 1.44269504f;
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
    for (int64_t from = begin; from < end; from += WIDE)
        for (int64_t d = 0; d < s.dim; ++d)
            for (int64_t t = from; t < std::min(from + WIDE, padded); ++t)
                turned[d * padded + t] = t < s.keys ? keys[t * s.key_row + d] : 0.0f;
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
    std::atomic<int64_t> piece{0}, done{0}, next{0};
    const auto work = [&](int64_t thread) {
        for (int64_t i; (i = piece++) < pieces; ++done)
            turn(s, keys, turned, i * BLOCK, std::min(i * BLOCK + BLOCK, padded));
        while (done < pieces) std::this_thread::yield();
        for (int64_t i; (i = next++) < s.group * tiles;) {
            const int64_t head = i % s.group, first = (tiles - 1 - i / s.group) * ROWS;  // the longest first
            float *own = rooms + thread * ROWS * (2 * s.dim + BLOCK), *lses = lse + head * s.queries;
            attend(s, query + head * s.query_head, turned, values, out + head * s.out_head, lses, first, own);
        }
    };
    std::vector<std::thread> others;
    try {
        for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    } catch (const std::system_error &) {  // no more threads are given: those that there are do the work
    }
    work(0);
    for (auto &other : others) other.join();
}
}
