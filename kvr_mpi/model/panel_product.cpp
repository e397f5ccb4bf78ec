// Products of rows with weights in panels, close to the processor's multiply-add rate (Goto and van de Geijn 2008).
//
// A panel holds WIDE outputs, feature by feature. A tile of TILE rows and WIDE outputs stays in registers while a panel
// and rows are read along their features, DEPTH of them at a time, so that this piece of the panel stays in the L1
// cache and ROWS rows in the L2 cache. All tiles of a panel prefetch the next panel, a few lines each: a processor can
// wait for only a few cache lines at once.
//
// Compiled for one processor and called through ctypes: `cpu_attention.py` states the layouts and checks them.

#include "panels.h"
#include "threads.h"

#include <atomic>

constexpr int64_t DEPTH = 384, ROWS = 192;  // ROWS is a multiple of TILE
constexpr int64_t ROOM = ROWS * DEPTH + LANES;  // for the transposed rows of a thread

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
                    alignas(64) Lanes square[LANES] = {};
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
