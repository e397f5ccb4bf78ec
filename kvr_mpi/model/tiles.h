// The micro-kernel of attention (Goto and van de Geijn 2008): a tile of up to TILE rows and WIDE columns of a product
// stays in registers.

#pragma once

#include "lanes.h"

// c (COUNT, WIDE) = a (COUNT, depth) b (depth, WIDE), plus the old c times each row's `keep` if that is given.
template <int COUNT>
static inline void multiply(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row, float *c,
                            int64_t c_row, int64_t depth, const float *keep) {
    Lanes left[COUNT], right[COUNT];
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        left[r] = keep ? load(c + r * c_row) * keep[r] : Lanes{};
        right[r] = keep ? load(c + r * c_row + LANES) * keep[r] : Lanes{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        const Lanes b_left = load(b + k * b_row), b_right = load(b + k * b_row + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
            left[r] += a[r * a_row + k * a_step] * b_left;
            right[r] += a[r * a_row + k * a_step] * b_right;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        store(c + r * c_row, left[r]);
        store(c + r * c_row + LANES, right[r]);
    }
}

// The same for any number of rows up to COUNT.
template <int COUNT = TILE>
static inline void multiply_some(int64_t count, const float *a, int64_t a_row, int64_t a_step, const float *b,
                                 int64_t b_row, float *c, int64_t c_row, int64_t depth, const float *keep) {
    if (count >= COUNT) return multiply<COUNT>(a, a_row, a_step, b, b_row, c, c_row, depth, keep);
    if constexpr (COUNT > 1) multiply_some<COUNT - 1>(count, a, a_row, a_step, b, b_row, c, c_row, depth, keep);
}
