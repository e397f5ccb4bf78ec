// Products of rows with weights in panels, close to the processor's multiply-add rate (Goto and van de Geijn 2008).
//
// A panel holds WIDE outputs, feature by feature. A tile of TILE rows and WIDE outputs stays in registers while a panel
// and rows are read along their features, DEPTH of them at a time, so that this piece of the panel stays in the L1
// cache and ROWS rows in the L2 cache. All tiles of a panel prefetch the next panel, a few lines each: a processor can
// wait for only a few cache lines at once.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the layouts and checks them.

#include "lanes.h"
#include "threads.h"

#include <atomic>

// Sums of a tile, a row of weights and a weight take the 16 registers of AVX2, or most of the 32 of AVX-512 and NEON.
constexpr int TILE = LANES == 16 ? 12 : 6;
constexpr int64_t DEPTH = 384, ROWS = 192;  // ROWS is a multiple of TILE
constexpr int64_t ROOM = ROWS * DEPTH + LANES;  // for the transposed rows of a thread
constexpr int64_t LEAST_PANELS = 8;  // per task: with fewer, copying its rows would not pay off
constexpr int LINE = 16;  // floats

static inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Transpose rows (count, depth) to (depth, count). Whole vectors are stored; each overwrites the excess of the last.
static void turn(int64_t count, const float *rows, int64_t features, int64_t depth, float *turned) {
    int64_t f = 0;
    for (; f + LANES <= depth; f += LANES) {
        Lanes square[LANES] = {};
        for (int64_t r = 0; r < count; ++r) square[r] = load(rows + r * features + f);
        turn_square(square);
        for (int64_t l = 0; l < LANES; ++l) store(turned + (f + l) * count, square[l]);
    }
    for (; f < depth; ++f)
        for (int64_t r = 0; r < count; ++r) turned[f * count + r] = rows[r * features + f];
}

// Where a tile stores its results: rows of `row` floats, with `outs` of them left from `out` on. Results are added to
// what is there (`adds`), else to the bias, if there is one.
struct Target {
    float *out;
    int64_t row, outs;
    bool adds;
    const float *bias;
};

// Multiply rows (depth, COUNT) by a panel (depth, WIDE); prefetch from `next`, WIDE floats every `tiles` steps.
template <int COUNT>
static void multiply(const float *rows, const float *panel, const float *next, int64_t tiles, int64_t depth,
                     const Target &target) {
    for (int r = 0; r < COUNT; ++r)
        for (int l = 0; l < WIDE; l += LINE) __builtin_prefetch(target.out + r * target.row + l, 1);
    Lanes sums[COUNT][2] = {};
    for (int64_t f = 0; f < depth; next += WIDE) {
        for (int l = 0; l < WIDE; l += LINE) __builtin_prefetch(next + l, 0, 2);
        for (const int64_t end = std::min(f + tiles, depth); f < end; ++f) {
            const Lanes low = load(panel + f * WIDE), high = load(panel + f * WIDE + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; ++r) {
                const Lanes one = fill(rows[f * COUNT + r]);
                sums[r][0] += one * low, sums[r][1] += one * high;
            }
        }
    }
    for (int r = 0; r < COUNT; ++r) {
        float *to = target.out + r * target.row;
        const float *from = target.adds ? to : target.bias;
        if (target.outs >= WIDE) {
            if (from) sums[r][0] += load(from), sums[r][1] += load(from + LANES);
            store(to, sums[r][0]), store(to + LANES, sums[r][1]);
        } else {
            for (int o = 0; o < target.outs; ++o) to[o] = sums[r][o / LANES][o % LANES] + (from ? from[o] : 0.0f);
        }
    }
}

// The same for any number of rows up to COUNT.
template <int COUNT>
static void tile(int64_t count, const float *rows, const float *panel, const float *next, int64_t tiles,
                 int64_t depth, const Target &target) {
    if (count == COUNT) return multiply<COUNT>(rows, panel, next, tiles, depth, target);
    if constexpr (COUNT > 1) tile<COUNT - 1>(count, rows, panel, next, tiles, depth, target);
}

extern "C" {
int64_t kvr_panel_outs() { return WIDE; }
int64_t kvr_panel_room(int64_t threads) { return threads * ROOM; }

// Copy weights (outs, features) to panels (outs / WIDE rounded up, features, WIDE), padded with zeros.
void kvr_lay_panels(const float *weights, int64_t outs, int64_t features, float *panels, int64_t threads) {
    std::atomic<int64_t> next{0};
    in_threads(threads, [&] {
        for (int64_t p; (p = next++) < pieces(outs, WIDE);)
            for (int half = 0; half < 2; ++half) {
                const int64_t first = p * WIDE + half * LANES, count = std::min<int64_t>(LANES, outs - first);
                float *to = panels + p * features * WIDE + half * LANES;
                for (int64_t f = 0; f < features; f += LANES) {
                    const int64_t depth = std::min<int64_t>(LANES, features - f);
                    Lanes square[LANES] = {};
                    for (int64_t o = 0; o < count; ++o) {
                        const float *from = weights + (first + o) * features + f;
                        if (depth == LANES) square[o] = load(from);
                        else for (int64_t l = 0; l < depth; ++l) square[o][l] = from[l];
                    }
                    turn_square(square);
                    for (int64_t l = 0; l < depth; ++l) store(to + (f + l) * WIDE, square[l]);
                }
            }
    });
}

// rows (count, features) and out (count, outs) are contiguous; bias (outs) may be null; room as by `kvr_panel_room`.
void kvr_product_of_panels(const float *panels, const float *bias, int64_t outs, int64_t features, const float *rows,
                           int64_t count, float *out, float *room, int64_t threads) {
    const int64_t depths = pieces(features, DEPTH), depth = pieces(features, depths), panel_count = pieces(outs, WIDE);
    if (!count) return;
    const int64_t row_pieces = pieces(count, ROWS);
    const int64_t most = threads > 1 ? pieces(4 * threads, row_pieces) : 1;
    const int64_t group = std::max(pieces(panel_count, most), LEAST_PANELS), groups = pieces(panel_count, group);
    std::atomic<int64_t> next{0}, thread{0};
    in_threads(threads, [&] {
        float *turned = room + thread++ * ROOM;
        for (int64_t piece; (piece = next++) < row_pieces * groups;) {
            const int64_t begin = piece / groups * ROWS, end = std::min(begin + ROWS, count);
            const int64_t first = piece % groups * group, last = std::min(first + group, panel_count);
            for (int64_t from = 0; from < features; from += depth) {
                const int64_t taken = std::min(depth, features - from);
                for (int64_t r = begin; r < end; r += TILE)
                    turn(std::min<int64_t>(TILE, end - r), rows + r * features + from, features, taken,
                         turned + (r - begin) * taken);
                const int64_t tiles = pieces(end - begin, TILE), fetched = pieces(taken, tiles);
                for (int64_t p = first; p < last; ++p) {
                    const float *panel = panels + (p * features + from) * WIDE;
                    const float *ahead = p + 1 < last ? panel + features * WIDE : panel;
                    for (int64_t r = begin; r < end; r += TILE, ahead += fetched * WIDE)
                        tile<TILE>(std::min<int64_t>(TILE, end - r), turned + (r - begin) * taken, panel, ahead, tiles,
                                   taken, {out + r * outs + p * WIDE, outs, outs - p * WIDE, from > 0,
                                           bias ? bias + p * WIDE : nullptr});
                }
            }
        }
    });
}
}
