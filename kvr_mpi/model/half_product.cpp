// Products of 16-bit rows and weights, which are widened in registers; sums are floats.
//
// Weights are read where the model has them, without a copy. With many rows, a piece of a panel (`panels.h`) is
// transposed and widened into the L1 cache, and multiplied by ROWS rows, whose transposed copy is as large as an L2
// cache: so widening takes little of the time, and the micro-kernel is that of float32. With few rows, weights are read
// once, along their features, and the lanes of each sum are added up at the end.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the layouts and checks them.

#include "panels.h"
#include "threads.h"

#include <atomic>
#include <cstring>

constexpr int64_t DEPTH = 384, ROWS = 384;  // ROWS is a multiple of TILE
constexpr int64_t MOST_PANELS = 64;  // per task, whose sums are kept
constexpr int64_t ROWS_ROOM = ROWS * DEPTH + LANES, PANEL_ROOM = (DEPTH + LANES) * WIDE;
constexpr int HALVES_LINE = 32;  // numbers in a cache line
constexpr int64_t FEW = 16, AT_ONCE = 8;  // rows that are few; that share weights in registers
constexpr int64_t TURN = 128;  // most outputs that a thread takes at a time

// The weights (outs, features) of a layer, the first elements of rows of `row` elements, and its bias (outs) or null.
template <class Number> struct Layer {
    const Number *weights, *bias;
    int64_t outs, features, row;
};

// Widen weights (outs, features) to a panel (depth, WIDE), whose memory ends LANES features later; missing outputs are
// zeros. Prefetch the weights of the next panel.
template <class Number>
static void widen(const Number *weights, int64_t outs, int64_t features, int64_t depth, float *panel) {
    for (int half = 0; half < 2; ++half) {
        const int64_t first = half * LANES, count = std::min<int64_t>(LANES, outs - first);
        for (int64_t f = 0; f < depth; f += LANES) {
            const Number *from = weights + first * features + f;
            alignas(64) Halves square[LANES];
            if (count == LANES && f + LANES <= depth) {
#pragma GCC unroll 16
                for (int64_t o = 0; o < LANES; ++o) {
                    square[o] = load_halves(from + o * features);
                    if (f % HALVES_LINE == 0) __builtin_prefetch(from + (o + WIDE) * features, 0, 2);
                }
            } else {
                std::memset(square, 0, sizeof square);
                for (int64_t o = 0; o < count; ++o)
                    std::memcpy(&square[o], from + o * features, std::min<int64_t>(LANES, depth - f) * sizeof *from);
            }
            turn_square<Halves, Halves>(square);
#pragma GCC unroll 16
            for (int64_t l = 0; l < LANES; ++l) store(panel + (f + l) * WIDE + first, widened(square[l], Number{}));
        }
    }
}

static int64_t room_of(int64_t outs) {
    return ROWS_ROOM + PANEL_ROOM + ROWS * WIDE * std::min(pieces(outs, WIDE), MOST_PANELS);
}

template <class Number>
static void many(const Layer<Number> &layer, const Number *rows, int64_t count, Number *out, float *room,
                 int64_t threads) {
    const auto [weights, bias, outs, features, row] = layer;
    const int64_t depths = pieces(features, DEPTH), depth = pieces(pieces(features, depths), LANES) * LANES;
    const int64_t panel_count = pieces(outs, WIDE), row_pieces = pieces(count, ROWS);
    const int64_t most = threads > 1 ? pieces(4 * threads, row_pieces) : 1;
    const int64_t group = std::min(std::max(pieces(panel_count, most), LEAST_PANELS), MOST_PANELS);
    const int64_t groups = pieces(panel_count, group);
    std::atomic<int64_t> next{0}, thread{0};
    const auto work = [&, weights = weights, bias = bias, outs = outs, features = features, row = row] {
        float *turned = room + thread++ * room_of(outs), *panel = turned + ROWS_ROOM, *sums = panel + PANEL_ROOM;
        for (int64_t piece; (piece = next++) < row_pieces * groups;) {
            const int64_t begin = piece / groups * ROWS, height = std::min(ROWS, count - begin);
            const int64_t first = piece % groups * group, last = std::min(first + group, panel_count);
            const int64_t wide = (last - first) * WIDE, tiles = pieces(height, TILE);
            for (int64_t from = 0; from < features; from += depth) {
                const int64_t taken = std::min(depth, features - from);
                for (int64_t r = 0; r < height; r += TILE)
                    turn(std::min<int64_t>(TILE, height - r), rows + (begin + r) * features + from, features, taken,
                         turned + r * taken);
                for (int64_t p = first; p < last; ++p) {
                    widen(weights + p * WIDE * row + from, outs - p * WIDE, row, taken, panel);
                    for (int64_t r = 0; r < height; r += TILE)
                        tile<TILE>(std::min<int64_t>(TILE, height - r), turned + r * taken, panel, panel, tiles, taken,
                                   {sums + r * wide + (p - first) * WIDE, wide, WIDE, from > 0, nullptr});
                }
            }
            for (int64_t r = 0; r < height; ++r)
                for (int64_t o = first * WIDE; o < std::min(last * WIDE, outs); o += LANES) {
                    Lanes found = load(sums + r * wide + o - first * WIDE);
                    if (bias) found += load_some(bias + o, outs - o);
                    store_some(out + (begin + r) * outs + o, found, outs - o);
                }
        }
    };
    in_threads(threads, work);
}

// Products (OUTS, COUNT) of interleaved rows and the weights of some outputs, of which those `ahead` are prefetched.
template <int COUNT, int OUTS, class Number>
static inline Lanes multiply_few(const float *rows, const Number *const *weights, int64_t ahead, int64_t features) {
    Lanes sums[LANES] = {};
    for (int64_t f = 0; f < features; f += HALVES_LINE) {
#pragma GCC unroll 16
        for (int o = 0; o < OUTS; ++o) __builtin_prefetch(weights[o] + ahead + f);
#pragma GCC unroll 2
        for (int64_t p = f; p < f + HALVES_LINE; p += 2 * LANES, rows += COUNT * 2 * LANES) {
            Lanes pairs[OUTS][2];
            if constexpr (OUTS <= COUNT) {  // a row is read once for all outputs, else weights once for all rows
#pragma GCC unroll 16
                for (int o = 0; o < OUTS; ++o) load_pair(weights[o] + p, pairs[o]);
#pragma GCC unroll 2
                for (int part = 0; part < 2; ++part)
#pragma GCC unroll 16
                    for (int r = 0; r < COUNT; ++r) {
                        const Lanes own = load(rows + (2 * r + part) * LANES);
#pragma GCC unroll 16
                        for (int o = 0; o < OUTS; ++o) sums[o * COUNT + r] += own * pairs[o][part];
                    }
            } else {
#pragma GCC unroll 16
                for (int o = 0; o < OUTS; ++o) {
                    load_pair(weights[o] + p, pairs[o]);
#pragma GCC unroll 16
                    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
                        for (int part = 0; part < 2; ++part)
                            sums[o * COUNT + r] += load(rows + (2 * r + part) * LANES) * pairs[o][part];
                }
            }
        }
    }
    return sums_of(sums);
}

// Outputs from `begin` to `end`, at most TURN, of COUNT interleaved rows. Weights are read as several streams, each of
// adjacent outputs: the longer a stream, the better processors prefetch it. Streams overlap if the outputs do not
// divide evenly.
template <int COUNT, class Number>
static void some(const Layer<Number> &layer, const float *rows, int64_t begin, int64_t end, Number *out) {
    constexpr int OUTS = LANES / COUNT;
    const int64_t each = pieces(end - begin, OUTS);
    const Number *weights[OUTS];
    float found[COUNT][TURN + LANES], *to[OUTS];
    for (int o = 0; o < OUTS; ++o) {
        const int64_t first = std::min(o * each, end - begin - each);
        weights[o] = layer.weights + (begin + first) * layer.row, to[o] = found[0] + first;
    }
    for (int64_t i = 0; i < each; ++i) {
        const Lanes products = multiply_few<COUNT, OUTS>(rows, weights, layer.row, layer.features);
#pragma GCC unroll 16
        for (int o = 0; o < OUTS; ++o) {
            weights[o] += layer.row;
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; ++r) to[o][r * (TURN + LANES) + i] = products[o * COUNT + r];
        }
    }
    for (int64_t r = 0; r < COUNT; ++r)
        for (int64_t o = begin; o < end; o += LANES) {
            Lanes sums = load(found[r] + o - begin);
            if (layer.bias) sums += load_some(layer.bias + o, end - o);
            store_some(out + r * layer.outs + o, sums, end - o);
        }
}

// Call work(constant) with a number from 1 to MOST.
template <int MOST, class Work> static void with_count(int64_t count, const Work &work) {
    if (count == MOST) return work(std::integral_constant<int, MOST>{});
    if constexpr (MOST > 1) with_count<MOST - 1>(count, work);
}

template <class Number>
static void few(const Layer<Number> &layer, const Number *rows, int64_t count, Number *out, float *room,
                int64_t threads) {
    const int64_t features = layer.features;
    for (int64_t r = 0; r < count; r += AT_ONCE) {  // interleave the rows of a tile, 2 x LANES features of each in turn
        float *to = room + r * features;
        for (int64_t f = 0; f < features; f += 2 * LANES)
            for (int64_t i = r; i < std::min(r + AT_ONCE, count); ++i, to += 2 * LANES) {
                Lanes pair[2];
                load_pair(rows + i * features + f, pair);
                store(to, pair[0]), store(to + LANES, pair[1]);
            }
    }
    const int64_t turn = std::clamp<int64_t>(pieces(layer.outs, threads), LANES, TURN);
    std::atomic<int64_t> next{0};
    in_threads(threads, [&] {
        for (int64_t begin; (begin = (next += turn) - turn) < layer.outs;)
            for (int64_t r = 0; r < count; r += AT_ONCE)  // after the first time, weights are in the L2 cache
                with_count<AT_ONCE>(std::min(AT_ONCE, count - r), [&](auto taken) {
                    some<taken>(layer, room + r * features, begin, std::min(begin + turn, layer.outs),
                                out + r * layer.outs);
                });
    });
}

static bool are_few(int64_t features, int64_t count) {
    return count <= FEW && features % HALVES_LINE == 0;
}

template <class Number>
static void multiply_all(const Layer<Number> &layer, const Number *rows, int64_t count, Number *out, float *room,
                         int64_t threads) {
    if (count) (are_few(layer.features, count) ? few<Number> : many<Number>)(layer, rows, count, out, room, threads);
}

extern "C" {
int64_t kvr_halves_room(int64_t outs, int64_t features, int64_t count, int64_t threads) {
    return are_few(features, count) ? count * features : threads * room_of(outs);
}

// rows (count, features) and out (count, outs) are contiguous; room as by `kvr_halves_room`.
void kvr_product_of_bfloat16(const Layer<BFloat16> *layer, const BFloat16 *rows, int64_t count, BFloat16 *out,
                             float *room, int64_t threads) {
    multiply_all(*layer, rows, count, out, room, threads);
}
void kvr_product_of_float16(const Layer<Float16> *layer, const Float16 *rows, int64_t count, Float16 *out, float *room,
                            int64_t threads) {
    multiply_all(*layer, rows, count, out, room, threads);
}
}
