// What a model computes between its products, each in one pass over a row: norms, gates and rotary embeddings. Every
// result is rounded where torch rounds it, and sums have torch's order, so that results have the same bits.

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <atomic>
#include <type_traits>

#include "halves.h"
#include "threads.h"

constexpr int BOTH = 2 * LANES;
constexpr int64_t PIECE = 1 << 15;  // numbers that a thread takes at a time
constexpr int64_t STEP = 16;        // numbers that torch adds before it adds their sum to the next level's
constexpr int LEVELS = 4;
constexpr int64_t LOOKED_UP = 512;

// Store what `load_pair` loaded, in the same order.
template <class Number> static inline void store_pair(Number *to, const Lanes *two) {
    store(to, two[0]), store(to + LANES, two[1]);
}
// A NaN stays one, since it comes from 16 bits.
static inline Words rounded_bits(Lanes lanes) { return (Words)lanes + 0x7fff + ((Words)lanes >> 16 & 1); }
static inline void store_pair(BFloat16 *to, const Lanes *two) {
    *reinterpret_cast<Words *>(to) = rounded_bits(two[0]) >> 16 | (rounded_bits(two[1]) & 0xffff0000);
}
// Numbers of any type in the order of `Order`.
template <class Order, class Number> static inline void load_pair_as(const Number *from, Lanes *two) {
    if (std::is_same_v<Order, BFloat16> == std::is_same_v<Number, BFloat16>) return load_pair(from, two);
    for (int l = 0; l < BOTH; ++l) two[l % 2][l / 2] = load_some(from + l, 1)[0];
}

static inline Lanes rounded(Lanes lanes, float) { return lanes; }
static inline Lanes rounded(Lanes lanes, BFloat16) { return (Lanes)(rounded_bits(lanes) & 0xffff0000); }
static inline Lanes rounded(Lanes lanes, Float16) {
    Float16 some[LANES];
    store(some, lanes);
    return load(some);
}

// Call work(first, last) for pieces of `count` rows.
template <class Work> static void by_pieces(int64_t count, int64_t row, int64_t threads, const Work &work) {
    const int64_t rows = std::max<int64_t>(1, PIECE / row), pieces = (count + rows - 1) / rows;
    std::atomic<int64_t> next{0};
    in_threads(std::min(threads, pieces), [&] {
        for (int64_t piece; (piece = next++) < pieces;) work(piece * rows, std::min(count, piece * rows + rows));
    });
}

// Call work(at, load, store) for `count` numbers, two vectors at a time, of which the last may be incomplete.
template <class Order, class Work> static inline void by_twos(int64_t count, const Work &work) {
    int64_t at = 0;
    for (; at + BOTH <= count; at += BOTH)
        work(at, [](const auto *from, Lanes *two) { load_pair_as<Order>(from, two); },
             [](auto *to, const Lanes *two) { store_pair(to, two); });
    const int64_t rest = count - at;
    if (!rest) return;
    const auto load_rest = [=](const auto *from, Lanes *two) {
        std::remove_cv_t<std::remove_reference_t<decltype(*from)>> some[BOTH] = {};
        std::copy_n(from, rest, some);
        load_pair_as<Order>(some, two);
    };
    const auto store_rest = [=](auto *to, const Lanes *two) {
        std::remove_reference_t<decltype(*to)> some[BOTH];
        store_pair(some, two);
        std::copy_n(some, rest, to);
    };
    work(at, load_rest, store_rest);
}

// As torch's sum in vectors of WIDTH numbers: four of them at a time, in steps, and the rest at the end.
template <int WIDTH, class Number> static float sum_of_squares(const Number *row, int64_t features) {
    constexpr int GROUP = 4 * WIDTH, VECTORS = GROUP / LANES;
    const int64_t groups = features / GROUP;
    Lanes levels[LEVELS][VECTORS] = {};
    for (int64_t group = 0; group < groups;) {
        Lanes sums[VECTORS] = {};
        const int64_t end = std::min(group + STEP, groups);
        const bool is_whole = end == group + STEP;
        for (; group < end; ++group)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v += 2) {
                Lanes two[2];
                load_pair(row + group * GROUP + v * LANES, two);
                sums[v] += two[0] * two[0], sums[v + 1] += two[1] * two[1];
            }
        for (int v = 0; v < VECTORS; ++v) levels[0][v] = sums[v];
        for (int64_t level = 1, unit = STEP * STEP; is_whole && level < LEVELS; ++level, unit *= STEP) {
            for (int v = 0; v < VECTORS; ++v) levels[level][v] += levels[level - 1][v], levels[level - 1][v] = Lanes{};
            if (group % unit) break;
        }
    }
    float sums[GROUP], total = 0;
    for (int v = 0; v < VECTORS; ++v) {
        for (int level = 1; level < LEVELS; ++level) levels[0][v] += levels[level][v];
        for (int l = 0; l < LANES; ++l) sums[v / 2 * BOTH + place_in_pair<Number>(v % 2, l)] = levels[0][v][l];
    }
    const auto square = [&](int64_t at) { return load_some(row + at, 1)[0] * load_some(row + at, 1)[0]; };
    const int64_t last = features - features % WIDTH;
    for (int64_t at = groups * GROUP; at < last; ++at) sums[at % WIDTH] += square(at);
    for (int at = WIDTH; at < GROUP; ++at) sums[at % WIDTH] += sums[at];
    for (int64_t at = last; at < features; ++at) total += square(at);
    for (int at = 0; at < WIDTH; ++at) total += sums[at];
    return total;
}

struct Norm {
    int64_t features, width;  // of vectors in which torch adds: 8 or 16
    const float *scale;       // features
    float eps;
    int32_t rounds;  // normalised numbers are rounded before they are scaled
};

template <bool ROUNDS, class Number> static void normalise(const Norm &n, const Number *rows, int64_t count, Number *out) {
    std::vector<float> scale((n.features + BOTH - 1) / BOTH * BOTH);  // in the order of the numbers
    by_twos<Number>(n.features, [&](int64_t at, auto load, auto) {
        Lanes two[2];
        load(n.scale + at, two);
        store_pair(&scale[at], two);
    });
    for (; count--; rows += n.features, out += n.features) {
        const float sum = (n.width == 8 ? sum_of_squares<8, Number> : sum_of_squares<16, Number>)(rows, n.features);
        const float factor = 1.0f / std::sqrt(sum / static_cast<float>(n.features) + n.eps);
        by_twos<Number>(n.features, [&](int64_t at, auto load, auto store) {
            Lanes two[2], scales[2];
            load(rows + at, two);
            load_pair(&scale[at], scales);
            for (int v = 0; v < 2; ++v) {
                two[v] *= factor;
                two[v] = (ROUNDS ? rounded(two[v], Number{}) : two[v]) * scales[v];
            }
            store(out + at, two);
        });
    }
}

// Rows (tokens, heads, dim), of which the first `rotated` numbers of a head are rotated by angles (tokens, rotated).
// With wide angles, cosines and sines are float32, and torch rounds at the end only.
struct Rotary {
    int64_t tokens, heads, dim, rotated, row_token, row_head, angle_token, wide_angles;
};

template <class Number, class Angle>
static void rotate(const Rotary &r, int64_t token, const Number *rows, const Angle *cosines, const Angle *sines,
                   Number *out) {
    const int64_t half = r.rotated / 2;
    cosines += token * r.angle_token, sines += token * r.angle_token;
    for (int64_t head = 0; head < r.heads; ++head) {
        const Number *row = rows + token * r.row_token + head * r.row_head;
        Number *to = out + (token * r.heads + head) * r.dim;
        by_twos<Number>(half, [&](int64_t at, auto load, auto store) {
            Lanes one[2], other[2], cosine[2], sine[2], sums[2];
            load(row + at, one), load(row + half + at, other);
            load(cosines + at, cosine), load(sines + at, sine);
            for (int v = 0; v < 2; ++v)
                sums[v] = rounded(one[v] * cosine[v], Angle{}) - rounded(other[v] * sine[v], Angle{});
            store(to + at, sums);
            load(cosines + half + at, cosine), load(sines + half + at, sine);
            for (int v = 0; v < 2; ++v)
                sums[v] = rounded(other[v] * cosine[v], Angle{}) + rounded(one[v] * sine[v], Angle{});
            store(to + half + at, sums);
        });
        std::copy(row + r.rotated, row + r.dim, to + r.rotated);
    }
}

extern "C" {
// rows and out (count, features)
void kvr_norm(int64_t kind, const Norm *n, const void *rows, int64_t count, void *out, int64_t threads) {
    as_numbers(kind, [&](auto number) {
        using Number = decltype(number);
        by_pieces(count, n->features, threads, [&](int64_t first, int64_t last) {
            const int64_t at = first * n->features;
            (n->rounds ? normalise<true, Number> : normalise<false, Number>)(
                *n, static_cast<const Number *>(rows) + at, last - first, static_cast<Number *>(out) + at);
        });
    });
}

// gates, ups and out (count): results[gate] * up, for numbers of 16 bits
void kvr_gate(int64_t kind, const uint16_t *results, const uint16_t *gates, const void *ups, int64_t count, void *out,
              int64_t threads) {
    as_numbers(kind, [&](auto number) {
        using Number = decltype(number);
        by_pieces(count, 1, threads, [&](int64_t first, int64_t last) {
            for (; first < last; first += LOOKED_UP) {
                uint16_t found[LOOKED_UP];
                const int64_t some = std::min(LOOKED_UP, last - first);
                for (int64_t at = 0; at < some; ++at) found[at] = results[gates[first + at]];
                by_twos<Number>(some, [&](int64_t at, auto load, auto store) {
                    Lanes gate[2], up[2];
                    load(reinterpret_cast<const Number *>(found) + at, gate);
                    load(static_cast<const Number *>(ups) + first + at, up);
                    gate[0] *= up[0], gate[1] *= up[1];
                    store(static_cast<Number *>(out) + first + at, gate);
                });
            }
        });
    });
}

// out (tokens, heads, dim)
void kvr_rotate(int64_t kind, const Rotary *r, const void *rows, const void *cosines, const void *sines, void *out,
                int64_t threads) {
    as_numbers(kind, [&](auto number) {
        const auto all = [&](auto angle) {
            using Number = decltype(number);
            using Angle = decltype(angle);
            by_pieces(r->tokens, r->heads * r->dim, threads, [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; ++token)
                    rotate(*r, token, static_cast<const Number *>(rows), static_cast<const Angle *>(cosines),
                           static_cast<const Angle *>(sines), static_cast<Number *>(out));
            });
        };
        r->wide_angles ? all(float{}) : all(number);
    });
}
}
