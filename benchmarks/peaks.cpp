// What a processor can do at most: fused multiply-adds in registers, and memory read from the first byte to the last.
//
// Both return a sum that comes out right only if all of the work was done: it is the count of that work.

#include "../kvr_mpi/model/lanes.h"
#include "../kvr_mpi/model/threads.h"

#include <atomic>

constexpr int CHAINS = 12;  // sums: more than the multiply-adds that are under way at once
constexpr int STREAMS = 8;
constexpr int64_t PIECE = 1 << 18;  // floats that a thread reads before it takes more; a multiple of STREAMS * LANES

static int64_t sum_of(const Lanes *each, int count) {
    double total = 0;
    for (int r = 0; r < count; ++r) total += sum(each[r]);
    return static_cast<int64_t>(total);
}

extern "C" {
// Multiply-adds that all threads have done together. `one` is 1, which the compiler does not know.
int64_t multiply_add(int64_t steps, float one, int64_t threads) {
    std::atomic<int64_t> done{0};
    in_threads(threads, [&] {
        Lanes sums[CHAINS];
        const Lanes ones = fill(one);
        for (int r = 0; r < CHAINS; ++r) sums[r] = ones * static_cast<float>(r);  // of equal sums one would be computed
        const int64_t begun = sum_of(sums, CHAINS);
        for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
            for (int r = 0; r < CHAINS; ++r) sums[r] = sums[r] * ones + ones;
        }
        done += sum_of(sums, CHAINS) - begun;
    });
    return done;
}

// Floats that all threads have read together; each of the `count`, a multiple of PIECE, is 1.
int64_t read_ones(const float *from, int64_t count, int64_t threads) {
    std::atomic<int64_t> done{0}, next{0};
    in_threads(threads, [&] {
        for (int64_t begin; (begin = next.fetch_add(PIECE)) < count;) {
            Lanes sums[STREAMS] = {};
            for (int64_t at = begin; at < begin + PIECE; at += STREAMS * LANES) {
#pragma GCC unroll 8
                for (int r = 0; r < STREAMS; ++r) sums[r] += load(from + at + r * LANES);
            }
            done += sum_of(sums, STREAMS);
        }
    });
    return done;
}
}
