// Exact attention with one query per head, for decoding: keys and values are read once, in place.
//
// A decode step is memory-bound. So all query heads of a group use a key while it is in registers, and nothing is
// copied or transposed. The heads of all documents are computed in one call. A head's keys are cut into pieces of
// PIECE, each with its own maximum and sum (flash decoding, Dao et al. 2023). The results of the pieces are merged in
// order, so the result does not depend on the number of threads.
//
// Keys and values are float32, bfloat16 or float16, widened in registers; sums are always float32.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the shapes and checks them.

#include "halves.h"
#include "threads.h"

#include <atomic>
#include <limits>

constexpr int MOST_ROWS = 4;  // query heads that share a key in registers
constexpr int BLOCK = 128, PIECE = 2 * BLOCK;  // keys
constexpr int ROOM = BLOCK + LANES;            // for the scores of a block
constexpr int AHEAD = 32;  // prefetch distance in rows
template <typename T> constexpr int64_t LINE = 64 / sizeof(T);  // numbers in a cache line

// One query of each head of a group, which share a KV head of a document. Strides are in elements; of features 1.
struct Unit {
    const void *query, *keys, *values;  // (group, dim), (count, dim), (count, dim)
    float *out, *lse;                   // (group, dim) without gaps, (group,)
    int64_t count, key_row, value_row;
};

struct Step {
    int64_t units, group, dim, query_head;
    float scale;
    int64_t kind;  // of queries, keys and values
};

// The sums of the lanes of ROWS x KEYS vectors, to scores (ROWS, ROOM).
template <int ROWS, int KEYS> static inline void store_sums(Lanes *sums, float *scores) {
    if constexpr (ROWS * KEYS <= LANES) {
        float found[LANES];
        store(found, sums_of(sums));
        for (int r = 0; r < ROWS; ++r) std::copy_n(found + r * KEYS, KEYS, scores + r * ROOM);
    } else {
        static_assert(KEYS == 4);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const auto four = sums_of_four(sums + r * KEYS);
            __builtin_memcpy(scores + r * ROOM, &four, sizeof four);
        }
    }
}

// Scores (ROWS, ROOM) of some queries (ROWS, dim) and a block of keys; excess keys get some score.
template <int ROWS, typename T>
static void score(const float *query, const T *keys, int64_t row, int64_t count, int64_t dim, float *scores) {
    constexpr int KEYS = ROWS == 3 && LANES == 8 ? 4 : LANES / ROWS;  // per tile, whose sums stay in registers
    for (int64_t t = 0; t < count; t += KEYS) {
        const T *key[KEYS];
        for (int k = 0; k < KEYS; ++k) key[k] = keys + std::min(t + k, count - 1) * row;
        for (int k = 0; k < KEYS; ++k)
            for (int64_t d = 0; d < dim; d += LINE<T>) __builtin_prefetch(key[k] + AHEAD * row + d);
        Lanes sums[std::max(LANES, ROWS * KEYS)] = {};
        for (int64_t d = 0; d < dim; d += WIDE)
#pragma GCC unroll 16
            for (int k = 0; k < KEYS; ++k) {
                Lanes pair[2];
                load_pair(key[k] + d, pair);
#pragma GCC unroll 2
                for (int part = 0; part < 2; ++part)
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r)
                        sums[r * KEYS + k] += load(query + r * dim + d + part * LANES) * pair[part];
            }
        store_sums<ROWS, KEYS>(sums, scores + t);
    }
}

// Multiply sums (ROWS, dim) by each row's `keep`, and add a block's values, weighted by (ROWS, ROOM).
template <int ROWS, int PAIRS, typename T>
static void gather(const float *weights, const T *values, int64_t row, int64_t count, int64_t dim, const float *keep,
                   float *sums) {
    constexpr int VECTORS = 2 * PAIRS;
    for (int64_t d = 0; d < dim; d += PAIRS * WIDE) {
        Lanes own[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) own[r][v] = load(sums + r * dim + d + v * LANES) * keep[r];
        for (int64_t t = 0; t < count; ++t) {
            for (int64_t l = 0; l < PAIRS * WIDE; l += LINE<T>) __builtin_prefetch(values + (t + AHEAD) * row + d + l);
#pragma GCC unroll 2
            for (int p = 0; p < PAIRS; ++p) {
                Lanes pair[2];
                load_pair(values + t * row + d + p * WIDE, pair);
#pragma GCC unroll 2
                for (int part = 0; part < 2; ++part)
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) own[r][2 * p + part] += weights[r * ROOM + t] * pair[part];
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) store(sums + r * dim + d + v * LANES, own[r][v]);
    }
}

// The results of a piece of a head's keys for the queries of its group: sums (group, dim), largest scores, and the
// sums of weights (group).
struct Part {
    float *sums, *most, *total;
};

// Attend from ROWS queries (group, dim), from `first` on, to a block of a unit's keys, from `begin` on.
template <int ROWS, typename T>
static void attend(const Step &s, const Unit &unit, const float *query, int64_t begin, int64_t count, int64_t first,
                   const Part &part) {
    const T *keys = static_cast<const T *>(unit.keys) + begin * unit.key_row;
    const T *values = static_cast<const T *>(unit.values) + begin * unit.value_row;
    float scores[ROWS * ROOM], keep[ROWS];
    score<ROWS>(query + first * s.dim, keys, unit.key_row, count, s.dim, scores);
    const int64_t wide = (count + WIDE - 1) / WIDE * WIDE;
    for (int r = 0; r < ROWS; ++r)
        keep[r] = weigh(scores + r * ROOM, 0, count, wide, part.most[first + r], part.total[first + r]);
    float *sums = part.sums + first * s.dim;
    constexpr int PAIRS = ROWS < 4 || LANES == 16 ? 2 : 1;  // as many sums as fit in registers
    if (s.dim % (PAIRS * WIDE) == 0)
        gather<ROWS, PAIRS>(scores, values, unit.value_row, count, s.dim, keep, sums);
    else
        gather<ROWS, 1>(scores, values, unit.value_row, count, s.dim, keep, sums);
}

template <typename T>
static void attend_piece(const Step &s, const Unit &unit, const float *query, int64_t piece, const Part &part) {
    std::fill_n(part.sums, s.group * s.dim, 0.0f);
    std::fill_n(part.most, s.group, -std::numeric_limits<float>::max());
    std::fill_n(part.total, s.group, 0.0f);
    const int64_t end = std::min(unit.count, (piece + 1) * PIECE);
    for (int64_t begin = piece * PIECE; begin < end; begin += BLOCK)
        for (int64_t turns = (s.group + MOST_ROWS - 1) / MOST_ROWS, first = 0, rows; turns > 0; --turns, first += rows) {
            rows = (s.group - first + turns - 1) / turns;
            (rows == 4   ? attend<4, T>
             : rows == 3 ? attend<3, T>
             : rows == 2 ? attend<2, T>
                         : attend<1, T>)(s, unit, query, begin, std::min<int64_t>(BLOCK, end - begin), first, part);
        }
}

// Merge the pieces of a head's keys, which may be in several units. Sums are pairs of numbers; the output is not.
template <typename T> static void merge(const Step &s, const Unit &unit, const Part *parts, int64_t pieces) {
    for (int64_t g = 0; g < s.group; ++g) {
        float most = parts[0].most[g], total = 0, *out = unit.out + g * s.dim;
        for (int64_t p = 1; p < pieces; ++p) most = std::max(most, parts[p].most[g]);
        for (int64_t p = 0; p < pieces; ++p) {
            const float weight = parts[p].most[g] = std::exp2(parts[p].most[g] - most);
            total += weight * parts[p].total[g];
        }
        for (int64_t d = 0; d < s.dim; d += WIDE) {
            Lanes sums[2] = {};
            for (int64_t p = 0; p < pieces; ++p)
                for (int part = 0; part < 2; ++part)
                    sums[part] += load(parts[p].sums + g * s.dim + d + part * LANES) * parts[p].most[g];
            for (int part = 0; part < 2; ++part)
                for (int l = 0; l < LANES; ++l) out[d + place_in_pair<T>(part, l)] = sums[part][l] / total;
        }
        unit.lse[g] = (most + std::log2(total)) / LOG2_E;
    }
}

template <typename T> static void attend_all(const Step &s, const Unit *units, float *room, int64_t threads) {
    std::vector<std::pair<int64_t, int64_t>> tasks;  // unit, piece; adjacent heads take turns
    std::vector<Part> parts;
    std::vector<int64_t> firsts{0};  // index of each unit's first part
    int64_t numbers = 0;
    float *queries = room, *free = queries + s.units * s.group * s.dim;
    for (int64_t u = 0; u < s.units; ++u) {
        const T *query = static_cast<const T *>(units[u].query);
        for (int64_t g = 0; g < s.group; ++g)  // softmax weights are computed as powers of two
            for (int64_t d = 0; d < s.dim; d += WIDE) {
                Lanes pair[2];
                load_pair(query + g * s.query_head + d, pair);
                for (int part = 0; part < 2; ++part)
                    store(queries + (u * s.group + g) * s.dim + d + part * LANES, pair[part] * (s.scale * LOG2_E));
            }
        for (int64_t piece = 0; piece * PIECE < units[u].count; ++piece, free += s.group * (s.dim + 2))
            parts.push_back({free, free + s.group * s.dim, free + s.group * (s.dim + 1)});
        firsts.push_back(parts.size());
        numbers += units[u].count * s.dim;
    }
    const int64_t all = parts.size();
    for (int64_t u = 0, end; u < s.units; u = end) {
        const auto keys_of = [&](int64_t v) { return static_cast<const T *>(units[v].keys); };
        for (end = u + 1; end < s.units && firsts[end + 1] - firsts[end] == firsts[u + 1] - firsts[u]; ++end)
            if (keys_of(end) < keys_of(u) || keys_of(end) >= keys_of(u) + units[u].key_row) break;
        for (int64_t piece = 0; piece < firsts[u + 1] - firsts[u]; ++piece)
            for (int64_t v = u; v < end; ++v) tasks.push_back({v, piece});
    }
    std::atomic<int64_t> next{0};
    // One thread per 2^17 numbers: fewer would not repay waking it.
    in_threads(std::min({threads, 1 + numbers / (1 << 17), all}), [&] {
        for (int64_t i; (i = next++) < all;) {
            const auto [u, piece] = tasks[i];
            attend_piece<T>(s, units[u], queries + u * s.group * s.dim, piece, parts[firsts[u] + piece]);
        }
    });
    for (int64_t u = 0, end; u < s.units; u = end) {  // units with the same output belong to one head
        for (end = u + 1; end < s.units && units[end].out == units[u].out;) ++end;
        merge<T>(s, units[u], &parts[firsts[u]], firsts[end] - firsts[u]);
    }
}

extern "C" {
int64_t kvr_decode_piece() { return PIECE; }

// Room: (units + all their pieces) x group x (dim + 2).
void kvr_decode_attention(const Step *step, const Unit *units, float *room, int64_t threads) {
    as_numbers(step->kind, [&](auto number) { attend_all<decltype(number)>(*step, units, room, threads); });
}
}
