// Vector types, and the arithmetic that our kernels share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int WIDE = 2 * LANES;  // head_dim must be a multiple of this
// Rows of a tile of TILE x WIDE results, which stay in registers and leave some of them free: they take 24 of 32 with
// AVX-512, 12 of 16 with AVX2, 24 of 32 with NEON.
constexpr int TILE = LANES == 16 ? 12 : 6;
constexpr float LOG2_E = 1.44269504f;

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Lanes load(const float *from) { return *reinterpret_cast<const Lanes *>(from); }
static inline void store(float *to, Lanes lanes) { *reinterpret_cast<Lanes *>(to) = lanes; }
static inline Lanes fill(float value) { return value - Lanes{}; }

// b, if one of them is NaN. Compilers do not always find the instruction for that.
static inline Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, relative error 2e-7: the nearest integer becomes the exponent, a polynomial computes the rest. NaN
// stays NaN. Two vectors at once, since each operation depends on the one before.
static inline void powers_of_two(Lanes *x) {
    const Lanes rounds = fill(12582912.0f);  // 1.5 * 2^23: adding a number to it rounds to an integer
    Lanes shifted[2], powers[2];
    for (int i = 0; i < 2; ++i) x[i] = larger(fill(-126.0f), x[i]), shifted[i] = x[i] + rounds;
    for (int i = 0; i < 2; ++i) x[i] -= shifted[i] - rounds, powers[i] = fill(1.3276471e-3f);
#pragma GCC unroll 8
    for (const float term : {9.675541e-3f, 5.550713e-2f, 2.4022120e-1f, 6.9314694e-1f, 1.0000001f})
        for (int i = 0; i < 2; ++i) powers[i] = powers[i] * x[i] + term;
    for (int i = 0; i < 2; ++i) x[i] = (Lanes)((Bits)powers[i] + ((Bits)shifted[i] << 23));
}

static inline float largest(Lanes lanes) {
    float most = lanes[0];
    for (int l = 1; l < LANES; ++l) most = std::max(most, lanes[l]);
    return most;
}

typedef float Four __attribute__((vector_size(16)));

// By halves, as vector instructions do.
static inline float sum(Lanes lanes) {
    typedef float Eight __attribute__((vector_size(32)));
    Eight eight;
    if constexpr (LANES == 16) {
        Eight halves[2];
        __builtin_memcpy(halves, &lanes, sizeof halves);
        eight = halves[0] + halves[1];
    } else {
        __builtin_memcpy(&eight, &lanes, sizeof eight);
    }
    Four fours[2];
    __builtin_memcpy(fours, &eight, sizeof fours);
    const Four four = fours[0] + fours[1];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// Sum each of four vectors. With AVX2, the halves of a vector are added first, since exchanging them between vectors
// takes eight operations on Zen.
static inline Four sums_of_four(const Lanes *each) {
#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
    typedef int32_t Places __attribute__((vector_size(16)));
    Four fours[4], pairs[2];
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
        Four halves[2];
        __builtin_memcpy(halves, &each[l], sizeof halves);
        fours[l] = halves[0] + halves[1];
    }
#pragma GCC unroll 2
    for (int l = 0; l < 2; ++l) {
        const Four one = fours[l], other = fours[l + 2];
        pairs[l] = __builtin_shuffle(one, other, Places{0, 1, 4, 5}) +
                   __builtin_shuffle(one, other, Places{2, 3, 6, 7});
    }
    const Four both = __builtin_shuffle(pairs[0], pairs[1], Places{0, 2, 4, 6}) +
                      __builtin_shuffle(pairs[0], pairs[1], Places{1, 3, 5, 7});
    return __builtin_shuffle(both, Places{0, 2, 1, 3});
#else
    return Four{sum(each[0]), sum(each[1]), sum(each[2]), sum(each[3])};
#endif
}

// Sum each of LANES vectors; the sum of the first is in the first lane. Each pass combines pairs of vectors.
static inline Lanes sums_of(Lanes *each) {
#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
    const Four sums[2] = {sums_of_four(each), sums_of_four(each + 4)};
    Lanes all;
    __builtin_memcpy(&all, sums, sizeof all);
    return all;
#elif defined(__GNUC__) && !defined(__clang__)
    Bits lane;
    for (int l = 0; l < LANES; ++l) lane[l] = l;
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        const Bits second = (lane & half) != 0, own = (second & LANES) + lane, other = (second & LANES) + (lane ^ half);
#pragma GCC unroll 8
        for (int l = 0; l < half; ++l)
            each[l] = __builtin_shuffle(each[l], each[l + half], own) +
                      __builtin_shuffle(each[l], each[l + half], other);
    }
    return each[0];
#else
    Lanes sums;
    for (int l = 0; l < LANES; ++l) sums[l] = sum(each[l]);
    return sums;
#endif
}

// Transpose LANES vectors: lane l of vector r becomes lane r of vector l. Each interleaving of the first half of the
// vectors with the second shifts the lane index by one bit. They must be aligned to 64 bytes: the template does not see
// that their type may not be.
template <class Vector, class Index = Bits> static inline void turn_square(Vector *each) {
#if defined(__GNUC__) && !defined(__clang__)
    Index low, high;
    for (int l = 0; l < LANES; ++l) low[l] = l / 2 + l % 2 * LANES;
    high = low + LANES / 2;
#pragma GCC unroll 4
    for (int bit = 1; bit < LANES; bit *= 2) {
        Vector mixed[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES / 2; ++l) {
            mixed[2 * l] = __builtin_shuffle(each[l], each[l + LANES / 2], low);
            mixed[2 * l + 1] = __builtin_shuffle(each[l], each[l + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) each[l] = mixed[l];
    }
#else
    for (int r = 1; r < LANES; ++r)
        for (int l = 0; l < r; ++l) {
            const auto lane = each[r][l];
            each[r][l] = each[l][r];
            each[l][r] = lane;
        }
#endif
}

// Convert a query's scores of a block (wide), of which it sees those from `low` to `high`, to weights. Updates the
// largest score and the sum of weights; returns the factor for earlier weights. Scores are logarithms to base 2.
static inline float weigh(float *scores, int64_t low, int64_t high, int64_t wide, float &most, float &total) {
    std::fill(scores, scores + low, -1e30f);  // finite, so that differences are never NaN
    std::fill(scores + high, scores + wide, -1e30f);
    Lanes tops[2] = {load(scores), load(scores + LANES)}, sums[2] = {};
    for (int64_t c = WIDE; c < wide; c += WIDE)
        for (int half = 0; half < 2; ++half) tops[half] = larger(load(scores + c + half * LANES), tops[half]);
    const float before = most;
    most = std::max(most, largest(larger(tops[0], tops[1])));
    const float top = most;
    for (int64_t c = 0; c < wide; c += WIDE) {
        Lanes weights[2] = {load(scores + c) - top, load(scores + c + LANES) - top};
        powers_of_two(weights);
        for (int half = 0; half < 2; ++half) {
            store(scores + c + half * LANES, weights[half]);
            sums[half] += weights[half];
        }
    }
    std::fill(scores, scores + low, 0.0f);
    std::fill(scores + high, scores + wide, 0.0f);
    const float rescale = std::exp2(before - most);
    total = total * rescale + sum(sums[0] + sums[1]);
    return rescale;
}
