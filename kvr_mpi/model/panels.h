// What products with weights in panels share: their micro-kernel (Goto and van de Geijn 2008).
//
// A panel holds WIDE outputs, feature by feature. A tile of TILE rows and WIDE outputs stays in registers while a panel
// and transposed rows are read along their features.

#pragma once

#include "halves.h"

constexpr int64_t LEAST_PANELS = 8;  // per task: with fewer, copying its rows would not pay off
constexpr int LINE = 16;  // floats

static inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Transpose rows (count, depth) to (depth, count). Whole vectors are stored; each overwrites the excess of the last.
template <class Number>
static void turn(int64_t count, const Number *rows, int64_t features, int64_t depth, float *turned) {
    int64_t f = 0;
    for (; f + LANES <= depth; f += LANES) {
        alignas(64) Lanes square[LANES] = {};
        for (int64_t r = 0; r < count; ++r) square[r] = load(rows + r * features + f);
        turn_square(square);
        for (int64_t l = 0; l < LANES; ++l) store(turned + (f + l) * count, square[l]);
    }
    for (int64_t r = 0; f < depth && r < count; ++r) {
        const Lanes rest = load_some(rows + r * features + f, depth - f);
        for (int64_t l = 0; l < depth - f; ++l) turned[(f + l) * count + r] = rest[l];
    }
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
