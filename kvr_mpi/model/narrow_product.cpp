// Products of a few rows with weights that are stored losslessly in fewer bits; and the conversion of weights to fewer
// bits.
//
// A decode step multiplies one row of each document by all weights, and is memory-bound: the fewer bytes, the faster. A
// tile of sums, as many as a vector has lanes, stays in registers while rows and weights are read along their features;
// the lanes of each sum are added up at the end. Weights are widened in registers: 16-bit weights are the upper halves
// of floats, 8-bit weights multiples of a scale, 4-bit weights steps from the minimum of their block.
//
// Compiled for one processor and called through ctypes: `narrow_product.py` states the layouts and checks them.

#include "lanes.h"
#include "threads.h"

#include <atomic>
#include <cstring>

constexpr int BLOCK = 32;  // weights that share a scale, or a step and a minimum
constexpr int64_t TURN = 64;  // outputs, or blocks, that a thread takes at a time

// Weights (outs, features) as upper halves of floats.
struct Halves {
    const uint16_t *halves;
    int64_t features;
    typedef uint16_t Narrow __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    typedef uint32_t Wide __attribute__((vector_size(LANES * 4)));

    Lanes read(int64_t out, int64_t feature) const {
        const auto narrow = *reinterpret_cast<const Narrow *>(halves + out * features + feature);
        return (Lanes)(__builtin_convertvector(narrow, Wide) << 16);
    }
    void prefetch(int64_t out, int64_t feature) const { __builtin_prefetch(halves + out * features + feature); }
};

// Weights (outs, features) as steps: the lower 4 bits of a byte are from the first half of the block, the upper 4 bits
// from the second. Scales (outs, features / BLOCK, 2): the step, and the minimum. A step has so few significant bits
// that its multiples are exact.
struct Steps {
    const uint8_t *steps;
    const float *scales;
    int64_t features;
    typedef uint8_t Narrow __attribute__((vector_size(LANES), aligned(1), may_alias));

    Lanes read(int64_t out, int64_t feature) const {
        const int64_t block = (out * features + feature) / BLOCK, within = feature % BLOCK;
        const auto both = *reinterpret_cast<const Narrow *>(steps + block * (BLOCK / 2) + within % (BLOCK / 2));
        const Narrow each = within < BLOCK / 2 ? both & 15 : both >> 4;
        return __builtin_convertvector(__builtin_convertvector(each, Bits), Lanes) * scales[2 * block] + scales[2 * block + 1];
    }
    void prefetch(int64_t out, int64_t feature) const {
        const int64_t block = (out * features + feature) / BLOCK;
        __builtin_prefetch(steps + block * (BLOCK / 2));
        __builtin_prefetch(scales + 2 * block);
    }
};

// Weights (outs, features) as signed bytes, with a scale of few significant bits per block (outs, features / BLOCK).
struct Bytes {
    const uint8_t *bytes;
    const float *scales;
    int64_t features;
    typedef uint8_t Narrow __attribute__((vector_size(LANES), aligned(1), may_alias));

    Lanes read(int64_t out, int64_t feature) const {
        const int64_t at = out * features + feature;
        // Unsigned with an offset of 128, which compilers widen in one instruction.
        const Narrow each = *reinterpret_cast<const Narrow *>(bytes + at) ^ 128;
        return (__builtin_convertvector(__builtin_convertvector(each, Bits), Lanes) - 128.0f) * scales[at / BLOCK];
    }
    void prefetch(int64_t out, int64_t feature) const {
        const int64_t at = out * features + feature;
        __builtin_prefetch(bytes + at);
        __builtin_prefetch(scales + at / BLOCK);
    }
};

// Products (OUTS, ROWS) of rows and weights from output `out` on.
template <int ROWS, class Weights>
static inline Lanes multiply(const Weights &weights, const float *const *rows, int64_t out) {
    constexpr int OUTS = LANES / ROWS;
    Lanes sums[LANES] = {};
    for (int64_t begin = 0; begin < weights.features; begin += BLOCK) {
#pragma GCC unroll 16
        for (int o = 0; o < OUTS; ++o) weights.prefetch(out + o + OUTS, begin);
#pragma GCC unroll 4
        for (int64_t part = 0; part < BLOCK; part += LANES) {
            Lanes row[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) row[r] = load(rows[r] + begin + part);
#pragma GCC unroll 16
            for (int o = 0; o < OUTS; ++o) {
                const Lanes read = weights.read(out + o, begin + part);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sums[o * ROWS + r] += row[r] * read;
            }
        }
    }
    return sums_of(sums);
}

// Multiply up to ROWS rows by all weights; for missing rows, the last one is read again and its result discarded.
template <int ROWS, class Weights>
static void few(const Weights &weights, int64_t outs, const float *rows, int64_t count, float *out, int64_t threads) {
    constexpr int OUTS = LANES / ROWS;
    const float *each[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) each[r] = rows + std::min(r, count - 1) * weights.features;
    std::atomic<int64_t> next{0};
    in_threads(threads, [&] {
        for (int64_t begin; (begin = (next += TURN) - TURN) < outs;)
            for (int64_t o = begin; o < std::min(begin + TURN, outs); o += OUTS) {
                const int64_t first = std::min(o, outs - OUTS);
                const Lanes products = multiply<ROWS>(weights, each, first);
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t i = 0; i < OUTS; ++i) out[r * outs + first + i] = products[i * ROWS + r];
            }
    });
}

template <class Weights>
static void all(const Weights &weights, int64_t outs, const float *rows, int64_t count, float *out, int64_t threads) {
    for (int64_t left = count; left > 0;) {
        const int64_t taken = std::min<int64_t>(left, 8);
        if (taken == 1) few<1>(weights, outs, rows, taken, out, threads);
        else if (taken == 2) few<2>(weights, outs, rows, taken, out, threads);
        else if (taken <= 4) few<4>(weights, outs, rows, taken, out, threads);
        else few<8>(weights, outs, rows, taken, out, threads);
        rows += taken * weights.features, out += taken * outs, left -= taken;
    }
}

// The nearest half-precision number: 11 significant bits, the last at least 2^-24. x is not negative.
static inline float round_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0x7f800000;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    const float rounds = std::max(power, 0x1p-14f) * 0x1.8p13f;  // adding a number to it keeps these bits
    return (x + rounds) - rounds;
}

static inline Lanes round_to_integer(Lanes x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23

static inline bool is_same(const float *weights, const float *widened) {
    return !std::memcmp(weights, widened, BLOCK * sizeof(float));
}

// Narrow a block, widen it again, and return whether the bits are the same. These are the formats of `llama.cpp`: steps
// of 1/15 of a block's range (Q4_1), and multiples of 1/127 of the largest magnitude (Q8_0), both rounded to half
// precision.
static bool narrow_to_steps(const float *weights, uint8_t *steps, float *scales) {
    Lanes low = load(weights), high = low;
    for (int i = LANES; i < BLOCK; i += LANES) {
        const Lanes each = load(weights + i);
        low = each < low ? each : low, high = larger(high, each);
    }
    const float least = -largest(-low), step = round_to_half((largest(high) - least) / 15);
    float widened[BLOCK], number[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        Lanes each = (load(weights + i) - least) / step;
        each = each > 0.0f ? each : Lanes{};  // even if the step is zero
        each = round_to_integer(each < 15.0f ? each : fill(15));
        store(number + i, each);
        store(widened + i, each * step + least);
    }
    for (int i = 0; i < BLOCK / 2; ++i) steps[i] = int(number[i]) | int(number[i + BLOCK / 2]) << 4;
    scales[0] = step, scales[1] = least;
    return is_same(weights, widened);
}

static bool narrow_to_bytes(const float *weights, uint8_t *bytes, float *scales) {
    Lanes most{};
    for (int i = 0; i < BLOCK; i += LANES) {
        const Lanes each = load(weights + i);
        most = larger(most, larger(each, -each));
    }
    const float scale = round_to_half(largest(most) / 127);
    float widened[BLOCK], number[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        Lanes each = scale > 0 ? load(weights + i) / scale : Lanes{};
        each = each > -127.0f ? each : fill(-127);
        each = round_to_integer(each < 127.0f ? each : fill(127));
        store(number + i, each);
        store(widened + i, each * scale);
    }
    for (int i = 0; i < BLOCK; ++i) bytes[i] = int(number[i]);
    scales[0] = scale;
    return is_same(weights, widened);
}

static bool narrow_to_halves(const float *weights, uint16_t *halves) {
    uint32_t bits[BLOCK], lost = 0;
    std::memcpy(bits, weights, sizeof bits);
    for (int i = 0; i < BLOCK; ++i) halves[i] = bits[i] >> 16, lost |= bits[i] & 0xffff;
    return !lost;
}

template <class Narrow> static int64_t narrow(int64_t blocks, int64_t threads, const Narrow &narrow_block) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> same{true};
    in_threads(threads, [&] {
        for (int64_t begin; same && (begin = (next += TURN) - TURN) < blocks;)
            for (int64_t block = begin; block < std::min(begin + TURN, blocks); ++block)
                if (!narrow_block(block)) same = false;
    });
    return same;
}

extern "C" {
// rows (count, features) and out (count, outs) are contiguous; outs is at least 16, features a multiple of 32.
void kvr_product_of_halves(const uint16_t *halves, const float *, int64_t outs, int64_t features, const float *rows,
                           int64_t count, float *out, int64_t threads) {
    all(Halves{halves, features}, outs, rows, count, out, threads);
}
void kvr_product_of_bytes(const uint8_t *bytes, const float *scales, int64_t outs, int64_t features, const float *rows,
                          int64_t count, float *out, int64_t threads) {
    all(Bytes{bytes, scales, features}, outs, rows, count, out, threads);
}
void kvr_product_of_steps(const uint8_t *steps, const float *scales, int64_t outs, int64_t features, const float *rows,
                          int64_t count, float *out, int64_t threads) {
    all(Steps{steps, scales, features}, outs, rows, count, out, threads);
}

// Narrow weights (blocks, 32); return 1 if that is lossless, otherwise 0, and the output is invalid.
int64_t kvr_narrow_to_halves(const float *weights, int64_t blocks, uint16_t *halves, float *, int64_t threads) {
    return narrow(blocks, threads, [=](int64_t b) { return narrow_to_halves(weights + b * BLOCK, halves + b * BLOCK); });
}
int64_t kvr_narrow_to_bytes(const float *weights, int64_t blocks, uint8_t *bytes, float *scales, int64_t threads) {
    return narrow(blocks, threads,
                  [=](int64_t b) { return narrow_to_bytes(weights + b * BLOCK, bytes + b * BLOCK, scales + b); });
}
int64_t kvr_narrow_to_steps(const float *weights, int64_t blocks, uint8_t *steps, float *scales, int64_t threads) {
    return narrow(blocks, threads, [=](int64_t b) {
        return narrow_to_steps(weights + b * BLOCK, steps + b * (BLOCK / 2), scales + 2 * b);
    });
}
}
