// 16-bit floating-point numbers, which are computed with as floats: widening is exact, narrowing rounds to the nearest.

#pragma once

#include "lanes.h"

#include <type_traits>

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

// A bfloat16 is the upper half of a float.
static inline Lanes widened(Halves halves, BFloat16) { return (Lanes)(__builtin_convertvector(halves, Words) << 16); }
static inline void store(BFloat16 *to, Lanes lanes) {
    const Words bits = (Words)lanes, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words found = lanes == lanes ? rounded : (bits >> 16 | 64);  // a NaN stays one
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector(found, Halves);
}

#if defined(__AVX512F__)
static inline Lanes widened(Halves halves, Float16) { return (Lanes)_mm512_cvtph_ps((__m256i)halves); }
static inline void store(Float16 *to, Lanes lanes) {
    *reinterpret_cast<Halves *>(to) = (Halves)_mm512_cvtps_ph((__m512)lanes, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__)
static inline Lanes widened(Halves halves, Float16) { return (Lanes)_mm256_cvtph_ps((__m128i)halves); }
static inline void store(Float16 *to, Lanes lanes) {
    *reinterpret_cast<Halves *>(to) = (Halves)_mm256_cvtps_ph((__m256)lanes, _MM_FROUND_TO_NEAREST_INT);
}
#else
static inline Lanes widened(Halves halves, Float16) {
    const Words half = __builtin_convertvector(halves, Words), size = (half & 0x7fff) << 13;
    const Words infinite = (Words)(size >= 0x0f800000) & 0x7f800000;  // or NaN
    return (Lanes)((Words)((Lanes)size * 0x1p112f) | infinite | (half & 0x8000) << 16);
}
static inline void store(Float16 *to, Lanes lanes) {
    const Words bits = (Words)lanes, size = bits & 0x7fffffff;
    const Words whole = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    const Words small = (Words)((Lanes)size + 0.5f) - 0x3f000000;  // below 2^-14: multiples of 2^-24
    Words found = size < 0x38800000 ? small : whole > 0x7c00 ? (Words{} + 0x7c00) : whole;
    found = size > 0x7f800000 ? (Words{} + 0x7e00) : found;
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector(found | (bits >> 16 & 0x8000), Halves);
}
#endif

template <class Number> static inline Halves load_halves(const Number *from) {
    return *reinterpret_cast<const Halves *>(from);
}
static inline Lanes load(const BFloat16 *from) { return widened(load_halves(from), BFloat16{}); }
static inline Lanes load(const Float16 *from) { return widened(load_halves(from), Float16{}); }

// Widen 2 x LANES numbers, in an order that all pairs of a type have: two adjacent bfloat16 are the halves of a word.
static inline void load_pair(const BFloat16 *from, Lanes *pair) {
    const Words both = *reinterpret_cast<const Words *>(from);
    pair[0] = (Lanes)(both << 16), pair[1] = (Lanes)(both & 0xffff0000);
}
template <class Number> static inline void load_pair(const Number *from, Lanes *pair) {
    pair[0] = load(from), pair[1] = load(from + LANES);
}
// The place of a number of a pair.
template <class Number> static inline int64_t place_in_pair(int64_t part, int64_t lane) {
    return std::is_same_v<Number, BFloat16> ? 2 * lane + part : part * LANES + lane;
}

// The first `count` lanes, at most all; the others are zero.
template <class Number> static inline Lanes load_some(const Number *from, int64_t count) {
    if (count >= LANES) return load(from);
    Number some[LANES] = {};
    std::copy_n(from, std::max<int64_t>(count, 0), some);
    return load(some);
}
template <class Number> static inline void store_some(Number *to, Lanes lanes, int64_t count) {
    if (count >= LANES) return store(to, lanes);
    Number all[LANES];
    store(all, lanes);
    std::copy_n(all, std::max<int64_t>(count, 0), to);
}

// The kinds of numbers, as `cpu_attention.py` numbers them; calls work with a number of this kind.
enum Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
template <class Work> static void as_numbers(int64_t kind, const Work &work) {
    kind == FLOAT32 ? work(float{}) : kind == BFLOAT16 ? work(BFloat16{}) : work(Float16{});
}
