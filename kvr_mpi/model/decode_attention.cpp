// Exact attention with few queries per document, for decoding: keys and values are read once, in place.
//
// A decode step is memory-bound. So all query heads of a group use a key while it is in registers, and nothing is copied
// or transposed but queries. The heads of all documents are computed in one call, which also writes the new tokens' keys
// and values. A head's keys are cut into pieces of PIECE, each with its own maximum and sum (flash decoding, Dao et al.
// 2023). The results of the pieces are merged in order, so the result does not depend on the number of threads.
//
// Documents that share rows make their part of a step compute-bound. With LEAST_ROWS queries or more, the lanes of a
// vector belong to different queries, up to WIDE of them (a panel), so that both products run as in a prefill.
//
// Keys and values are float32, bfloat16 or float16, widened in registers; sums are always float32.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the shapes and checks them.

#include "halves.h"
#include "threads.h"
#include "tiles.h"

#include <atomic>
#include <limits>
#include <memory>

constexpr int MOST_ROWS = 4;  // query heads that share a key in registers
constexpr int LEAST_ROWS = WIDE * 5 / 8;  // of a panel, which takes the time of a whole one
constexpr int BLOCK = 128, PIECE = 2 * BLOCK;  // keys
constexpr int ROOM = BLOCK + LANES;            // for the scores of a block
constexpr int AHEAD = 32;  // prefetch distance in rows
template <typename T> constexpr int64_t LINE = 64 / sizeof(T);  // numbers in a cache line

// Rows of a KV head that belong to some adjacent documents, in elements. If they grow, there are `filled` of them and
// as many as the document has tokens; the last one is the query's own token.
struct Unit {
    void *keys, *values;  // (capacity, dim)
    int64_t key_row, value_row, capacity, filled, grows, position, head, begin, end;
};

// The queries of documents follow each other. Strides are in elements; those of features are 1.
struct Step {
    const void *query, *keys, *values;         // (heads, queries, dim); of new tokens, or null
    float *out, *lse;                          // (queries, heads, dim), (queries, heads), without gaps
    const int64_t *edges, *lengths, *firsts;   // (documents + 1); (queries); (queries) or null: first position seen
    int64_t units, documents, heads, group, dim;  // KV heads
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    int64_t kind;  // of queries, keys and values
    float scale;
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

// The results of a piece of a unit's keys for some queries' heads: sums (rows, dim), largest scores, and the sums of
// weights (rows).
struct Part {
    float *sums, *most, *total;
};

// A unit as some queries see it; each of them sees as many keys as the one before, or more.
template <typename T> struct Job {
    const T *keys, *values;
    int64_t key_row, value_row;
    int64_t head, first, queries, pieces;
    const int64_t *counts;  // keys that each query sees
    const float *panels;    // of queries, each (dim, WIDE), if there are LEAST_ROWS
    std::vector<Part> parts;
};

// A block of keys and values (count, dim) as floats.
struct Block {
    const float *keys, *values;
    int64_t key_row, value_row, count;
};

// Widen rows, in the order of pairs.
template <typename T> static void widen(const T *rows, int64_t row, int64_t count, int64_t dim, float *wide) {
    for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < dim; d += WIDE) {
            Lanes pair[2];
            load_pair(rows + t * row + d, pair);
            store(wide + t * dim + d, pair[0]), store(wide + t * dim + d + LANES, pair[1]);
        }
}

// Return a block of a job's keys; `room` is for those that are not floats yet.
template <typename T>
static Block block_of(const Job<T> &job, int64_t begin, int64_t count, int64_t dim, std::vector<float> &room) {
    const T *keys = job.keys + begin * job.key_row, *values = job.values + begin * job.value_row;
    if constexpr (std::is_same_v<T, float>) return {keys, values, job.key_row, job.value_row, count};
    room.resize(2 * BLOCK * dim);
    float *wide_keys = room.data(), *wide_values = wide_keys + BLOCK * dim;
    widen(keys, job.key_row, count, dim, wide_keys), widen(values, job.value_row, count, dim, wide_values);
    return {wide_keys, wide_values, dim, dim, count};
}

// Attend from up to WIDE queries, in a panel (dim, WIDE), to a block of keys. Lanes without a query have no results.
static void attend_panel(const Block &block, int64_t dim, const float *panel, int64_t rows, int64_t row,
                         const Part &part) {
    const int64_t count = block.count;
    alignas(64) float weights[BLOCK * WIDE], keep[WIDE];
    for (int64_t t = 0; t < count; t += TILE)
        multiply_some(count - t, block.keys + t * block.key_row, block.key_row, 1, panel, WIDE, weights + t * WIDE,
                      WIDE, dim, nullptr);
    Lanes tops[2], sums[2] = {}, factors[2];
    for (int half = 0; half < 2; ++half)
        factors[half] = tops[half] = load_some(part.most + row + half * LANES, rows - half * LANES);
    for (int64_t t = 0; t < count; ++t)
        for (int half = 0; half < 2; ++half) tops[half] = larger(load(weights + t * WIDE + half * LANES), tops[half]);
    for (int64_t t = 0; t < count; ++t) {
        Lanes pair[2] = {load(weights + t * WIDE) - tops[0], load(weights + t * WIDE + LANES) - tops[1]};
        powers_of_two(pair);
        for (int half = 0; half < 2; ++half) store(weights + t * WIDE + half * LANES, pair[half]), sums[half] += pair[half];
    }
    for (int half = 0; half < 2; ++half) factors[half] -= tops[half];
    powers_of_two(factors);
    for (int half = 0; half < 2; ++half) {
        const int64_t first = row + half * LANES, some = rows - half * LANES;
        store(keep + half * LANES, factors[half]);
        store_some(part.most + first, tops[half], some);
        store_some(part.total + first, load_some(part.total + first, some) * factors[half] + sums[half], some);
    }
    for (int64_t d = 0; d < dim; d += WIDE)
        for (int64_t r = 0; r < rows; r += TILE)
            multiply_some(rows - r, weights + r, 1, WIDE, block.values + d, block.value_row,
                          part.sums + (row + r) * dim + d, dim, count, keep + r);
}

// Attend from ROWS queries (rows, dim), from `row` on, to `count` keys, from `begin` on.
template <int ROWS, typename T>
static void attend(const Job<T> &job, int64_t dim, const float *query, int64_t begin, int64_t count, int64_t row,
                   const Part &part) {
    float scores[ROWS * ROOM], keep[ROWS];
    score<ROWS>(query + row * dim, job.keys + begin * job.key_row, job.key_row, count, dim, scores);
    const int64_t wide = (count + WIDE - 1) / WIDE * WIDE;
    for (int r = 0; r < ROWS; ++r)
        keep[r] = weigh(scores + r * ROOM, 0, count, wide, part.most[row + r], part.total[row + r]);
    const T *values = job.values + begin * job.value_row;
    float *sums = part.sums + row * dim;
    constexpr int PAIRS = ROWS < 4 || LANES == 16 ? 2 : 1;  // as many sums as fit in registers
    if (dim % (PAIRS * WIDE) == 0)
        gather<ROWS, PAIRS>(scores, values, job.value_row, count, dim, keep, sums);
    else
        gather<ROWS, 1>(scores, values, job.value_row, count, dim, keep, sums);
}

// Attend from the queries (rows, dim) of a job to a piece of its keys.
template <typename T>
static void attend_piece(const Job<T> &job, int64_t group, int64_t dim, const float *query, int64_t piece,
                         std::vector<float> &room) {
    const Part &part = job.parts[piece];
    const int64_t rows = job.queries * group;
    std::fill_n(part.sums, rows * dim, 0.0f);
    std::fill_n(part.most, rows, -std::numeric_limits<float>::max());
    std::fill_n(part.total, rows, 0.0f);
    for (int64_t begin = piece * PIECE; begin < (piece + 1) * PIECE; begin += BLOCK) {
        const auto seen = [&](int64_t row) { return std::min<int64_t>(BLOCK, job.counts[row / group] - begin); };
        for (int64_t row = 0, end; row < rows; row = end) {  // together if they see the same keys
            const int64_t count = seen(row);
            for (end = row + group; end < rows && seen(end) == count;) end += group;
            if (count <= 0) continue;
            int64_t at = row;
            if (job.panels && row % WIDE == 0 && end - row >= LEAST_ROWS) {
                const Block block = block_of(job, begin, count, dim, room);
                for (; end - at >= LEAST_ROWS; at = std::min(at + WIDE, end))
                    attend_panel(block, dim, job.panels + at * dim, std::min<int64_t>(WIDE, end - at), at, part);
            }
            for (int64_t turns = (end - at + MOST_ROWS - 1) / MOST_ROWS, many; turns > 0; --turns, at += many) {
                many = (end - at + turns - 1) / turns;
                (many == 4   ? attend<4, T>
                 : many == 3 ? attend<3, T>
                 : many == 2 ? attend<2, T>
                             : attend<1, T>)(job, dim, query, begin, count, at, part);
            }
        }
    }
}

// Merge the parts of a query head. Sums are pairs of numbers; the output is not.
template <typename T>
static void merge(const std::vector<std::pair<const Part *, int64_t>> &parts, int64_t dim, float *out, float *lse) {
    float most = -std::numeric_limits<float>::infinity(), total = 0;
    for (const auto &[part, row] : parts) most = std::max(most, part->most[row]);
    for (const auto &[part, row] : parts) {
        const float weight = part->most[row] = std::exp2(part->most[row] - most);
        total += weight * part->total[row];
    }
    for (int64_t d = 0; d < dim; d += WIDE) {
        Lanes sums[2] = {};
        for (const auto &[part, row] : parts)
            for (int half = 0; half < 2; ++half)
                sums[half] += load(part->sums + row * dim + d + half * LANES) * part->most[row];
        for (int half = 0; half < 2; ++half)
            for (int l = 0; l < LANES; ++l)
                out[d + place_in_pair<T>(half, l)] = parts.empty() ? 0 : sums[half][l] / total;
    }
    *lse = parts.empty() ? most : (most + std::log2(total)) / LOG2_E;
}

// Returns 0; or 1 + the index of a unit with fewer than one row or more than its capacity, and nothing is done.
template <typename T> static int64_t attend_all(const Step &s, const Unit *units, int64_t threads) {
    const int64_t queries = s.edges[s.documents], rows = s.heads * queries * s.group;
    std::vector<Job<T>> jobs;
    std::vector<int64_t> counts;
    int64_t many = 0;
    for (const Unit *u = units; u < units + s.units; ++u) many += s.edges[u->end] - s.edges[u->begin];
    counts.reserve(many), jobs.reserve(s.firsts ? many : s.units);
    for (const Unit *u = units; u < units + s.units; ++u)
        for (int64_t first = s.edges[u->begin], last; first < s.edges[u->end]; first = last) {
            last = s.firsts ? first + 1 : s.edges[u->end];  // with windows, pieces begin where a query's keys do
            const int64_t *own = counts.data() + counts.size();
            int64_t skipped = 0;
            for (int64_t q = first; q < last; ++q) {
                const int64_t count = u->filled + (u->grows ? s.lengths[q] : 0);
                if (count < 1 || count > u->capacity) return 1 + (u - units);
                if (s.firsts) skipped = std::clamp<int64_t>(s.firsts[q] - u->position, 0, count);
                counts.push_back(count - skipped);
            }
            jobs.push_back({static_cast<const T *>(u->keys) + skipped * u->key_row,
                            static_cast<const T *>(u->values) + skipped * u->value_row, u->key_row, u->value_row,
                            u->head, first, last - first, (counts.back() + PIECE - 1) / PIECE, own, nullptr, {}});
        }
    for (const Unit *u = units; s.keys && u < units + s.units; ++u)
        for (int64_t q = s.edges[u->begin]; u->grows && q < s.edges[u->end]; ++q) {
            const int64_t row = u->filled + s.lengths[q] - 1;
            const T *key = static_cast<const T *>(s.keys) + u->head * s.key_head + q * s.key_row;
            const T *value = static_cast<const T *>(s.values) + u->head * s.value_head + q * s.value_row;
            std::copy_n(key, s.dim, static_cast<T *>(u->keys) + row * u->key_row);
            std::copy_n(value, s.dim, static_cast<T *>(u->values) + row * u->value_row);
        }

    std::vector<std::pair<const Job<T> *, int64_t>> tasks;  // and its piece
    int64_t needed = rows * s.dim, numbers = 0;
    const auto panels_of = [&](const auto &job) {
        const int64_t of_job = job.queries * s.group;
        return of_job < LEAST_ROWS ? 0 : (of_job + WIDE - 1) / WIDE;
    };
    for (const auto &job : jobs)
        needed += job.pieces * job.queries * s.group * (s.dim + 2) + panels_of(job) * WIDE * s.dim;
    const std::unique_ptr<float[]> room(new float[needed]);
    float *scaled = room.get(), *free = scaled + rows * s.dim;
    for (int64_t row = 0; row < rows; ++row) {  // (KV heads, queries, group)
        const int64_t head = row / s.group / queries * s.group + row % s.group, q = row / s.group % queries;
        const T *query = static_cast<const T *>(s.query) + head * s.query_head + q * s.query_row;
        for (int64_t d = 0; d < s.dim; d += WIDE) {  // softmax weights are computed as powers of two
            Lanes pair[2];
            load_pair(query + d, pair);
            for (int half = 0; half < 2; ++half)
                store(scaled + row * s.dim + d + half * LANES, pair[half] * (s.scale * LOG2_E));
        }
    }
    for (auto &job : jobs) {
        const int64_t of_job = job.queries * s.group;
        job.parts.reserve(job.pieces);
        for (int64_t piece = 0; piece < job.pieces; ++piece, free += of_job * (s.dim + 2)) {
            job.parts.push_back({free, free + of_job * s.dim, free + of_job * (s.dim + 1)});
            tasks.push_back({&job, piece});
        }
        numbers += job.pieces * PIECE * of_job * s.dim;
        const int64_t panels = panels_of(job);
        const float *query = scaled + (job.head * queries + job.first) * s.group * s.dim;
        if (panels) job.panels = free;
        for (int64_t row = 0; row < panels * WIDE; ++row)
            for (int64_t d = 0; d < s.dim; ++d)
                free[(row / WIDE * s.dim + d) * WIDE + row % WIDE] = row < of_job ? query[row * s.dim + d] : 0.0f;
        free += panels * WIDE * s.dim;
    }
    std::atomic<size_t> next{0};
    // One thread per 2^17 numbers: fewer would not repay waking it.
    in_threads(std::min<int64_t>({threads, 1 + numbers / s.group / (1 << 17), int64_t(tasks.size())}), [&] {
        std::vector<float> room;
        for (size_t i; (i = next++) < tasks.size();) {
            const auto [job, piece] = tasks[i];
            const float *query = scaled + (job->head * queries + job->first) * s.group * s.dim;
            attend_piece<T>(*job, s.group, s.dim, query, piece, room);
        }
    });
    std::vector<std::vector<const Job<T> *>> of_query(queries * s.heads);
    for (const auto &job : jobs)
        for (int64_t q = job.first; q < job.first + job.queries; ++q) of_query[q * s.heads + job.head].push_back(&job);
    std::vector<std::pair<const Part *, int64_t>> parts;  // and the row in it
    for (int64_t row = 0; row < rows; ++row) {
        parts.clear();
        const int64_t q = row / s.group / s.heads;
        for (const auto *job : of_query[row / s.group])
            for (int64_t piece = 0; piece * PIECE < job->counts[q - job->first]; ++piece)
                parts.push_back({&job->parts[piece], (q - job->first) * s.group + row % s.group});
        merge<T>(parts, s.dim, s.out + row * s.dim, s.lse + row);
    }
    return 0;
}

extern "C" {
int64_t kvr_decode_attention(const Step *step, const Unit *units, int64_t threads) {
    int64_t found = 0;
    as_numbers(step->kind, [&](auto number) { found = attend_all<decltype(number)>(*step, units, threads); });
    return found;
}
}
