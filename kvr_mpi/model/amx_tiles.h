// Eight registers of 16 rows of 64 bytes each, and their product: AMX (Intel Xeons since 2023), or loops.
//
// Both implementations of `Tiles` give the same bits, so machines without AMX can test a kernel that uses them: loops
// are compiled if KVR_TILE_LOOPS is defined. TDPBF16PS (Intel's manual, volume 2) computes an element of c += a b from a
// row of 16 pairs of bfloat16 numbers and a column of 16 pairs:
//   1. It sums the products of the pairs' first numbers, and separately those of their second numbers, with one fused
//      multiply-add for each pair, in order, beginning with zero;
//   2. it adds the second sum to the first, and then their sum to c.
// Each step rounds to the nearest float32, ties to even. Denormal inputs count as zero and denormal results become zero.
// MXCSR is neither read nor written.

#pragma once

#if defined(KVR_TILE_LOOPS) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__))
#define KVR_HAS_TILES

#include "halves.h"

#if !defined(KVR_TILE_LOOPS)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__SSE__)
#include <immintrin.h>
#endif

constexpr int64_t SIDE = 16;             // rows of a register, and words in a row
constexpr int64_t SQUARE = SIDE * SIDE;  // words in a register
constexpr int64_t DEPTH = 2 * SIDE;      // bfloat16 numbers in a row

#if defined(KVR_TILE_LOOPS)

// The loops may be vectorised in any way: each lane is an element of its own.
class Tiles {
  public:
    static bool allowed() { return true; }

    template <int T> void zero() { std::fill_n(words[T], SQUARE, 0u); }
    template <int T> void load(const void *from, int64_t row_bytes) {
        for (int64_t r = 0; r < SIDE; ++r)
            __builtin_memcpy(words[T] + r * SIDE, static_cast<const char *>(from) + r * row_bytes, SIDE * 4);
    }
    template <int T> void store(void *to, int64_t row_bytes) const {
        for (int64_t r = 0; r < SIDE; ++r)
            __builtin_memcpy(static_cast<char *>(to) + r * row_bytes, words[T] + r * SIDE, SIDE * 4);
    }

    // c += a b.
    template <int C, int A, int B> void multiply() {
#if defined(__SSE__)
        const unsigned before = _mm_getcsr();
        _mm_setcsr(0x9fc0);  // denormals are zero, all exceptions masked, nearest even
#endif
        asm volatile("" ::"r"(this) : "memory");  // no arithmetic moves across
        for (int64_t r = 0; r < SIDE; ++r)
            for (int64_t n = 0; n < SIDE; n += LANES) {
                Lanes first{}, second{};
                for (int64_t k = 0; k < SIDE; ++k) {
                    const Words a = Words{} + words[A][r * SIDE + k], b = load_words(words[B] + k * SIDE + n);
                    first += (Lanes)(a << 16) * (Lanes)(b << 16);
                    second += (Lanes)(a & 0xffff0000) * (Lanes)(b & 0xffff0000);
                }
                Words &c = *reinterpret_cast<Words *>(words[C] + r * SIDE + n);
                c = (Words)((Lanes)c + (first + second));
            }
        asm volatile("" ::"r"(this) : "memory");
#if defined(__SSE__)
        _mm_setcsr(before);
#endif
    }

  private:
    static Words load_words(const uint32_t *from) { return *reinterpret_cast<const Words *>(from); }
    alignas(64) uint32_t words[8][SQUARE];
};

#else

// A thread has the registers while this object lives. Instead of intrinsics, which in GCC are macros of literal register
// numbers whose loads do not say that they read memory, this has assembly.
class Tiles {
  public:
    // Ask Linux to save the registers of this process; older kernels and some containers refuse.
    static bool allowed() {
        constexpr long request_permission = 0x1023, tile_data = 18;
        return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }

    Tiles() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        static_assert(sizeof config == 64);
        for (int t = 0; t < 8; ++t) config.row_bytes[t] = SIDE * 4, config.rows[t] = SIDE;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;

    template <int T> void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
    template <int T> void load(const void *from, int64_t row_bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
    }
    template <int T> void store(void *to, int64_t row_bytes) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(T) : "memory");
    }

    // c += a b.
    template <int C, int A, int B> void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

#endif
#endif
