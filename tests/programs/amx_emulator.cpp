// Executes AMX instructions on processors without them: the signal of an unknown instruction calls a handler that does
// what Intel's manual (volume 2) says of the instruction. Linux on x86-64; one thread.
//
// In plain loops of scalars, on purpose: this is what the loops in ``amx_tiles.h`` are compared with.

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

namespace {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} config;
uint8_t tiles[8][16][64];
struct sigaction before;
int64_t executed;

// Flushes denormal numbers to zero, as TDPBF16PS does with those that it reads and those that it computes.
float flushed(float number) { return std::fpclassify(number) == FP_SUBNORMAL ? std::copysign(0.0f, number) : number; }

float number_at(const uint8_t *from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return flushed(number);
}

void multiply(int c, int a, int b) {
    for (int m = 0; m < config.rows[c]; ++m)
        for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
            float sums[2] = {};
            for (int k = 0; k < config.rows[b]; ++k)
                for (int odd = 0; odd < 2; ++odd)
                    sums[odd] = flushed(std::fma(number_at(tiles[a][m] + 4 * k + 2 * odd),
                                                 number_at(tiles[b][k] + 4 * n + 2 * odd), sums[odd]));
            float element;
            std::memcpy(&element, tiles[c][m] + 4 * n, 4);
            element = flushed(flushed(element) + flushed(sums[0] + sums[1]));
            std::memcpy(tiles[c][m] + 4 * n, &element, 4);
        }
}

// General registers in the order of their numbers.
constexpr int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// The operands behind an opcode: registers, or an address and the distance of rows. `at` moves behind them.
struct Operands {
    int reg, rm, vvvv;
    bool in_memory;
    uint8_t *address;
    int64_t row;

    Operands(const uint8_t *&at, const uint8_t *vex, const greg_t *registers) {
        const int mod = *at >> 6;
        reg = *at >> 3 & 7, rm = *at & 7, vvvv = ~vex[2] >> 3 & 15, in_memory = mod != 3, row = 0;
        ++at;
        if (!in_memory) return;
        int64_t base = 0;
        bool is_relative = false, has_base = true;
        int own = rm;
        if (rm == 4) {
            const int index = (*at >> 3 & 7) | (vex[1] & 0x40 ? 0 : 8);
            if (index != 4) row = registers[REGISTERS[index]] << (*at >> 6);
            own = *at++ & 7;
            has_base = !(own == 5 && mod == 0);
        } else if (rm == 5 && mod == 0) {
            is_relative = true;
        }
        if (has_base && !is_relative) base = registers[REGISTERS[own | (vex[1] & 0x20 ? 0 : 8)]];
        int32_t offset = 0;
        if (mod == 1) offset = static_cast<int8_t>(*at++);
        if (mod == 2 || is_relative || !has_base) std::memcpy(&offset, at, 4), at += 4;
        if (is_relative) base = reinterpret_cast<int64_t>(at);
        address = reinterpret_cast<uint8_t *>(base + offset);
    }
};

bool execute(const uint8_t *&at, const greg_t *registers) {
    const uint8_t *vex = at;
    if (vex[0] != 0xc4 || (vex[1] & 0x1f) != 2 || (vex[2] & 0x84)) return false;  // map 0F38, W0, L0
    const int prefix = vex[2] & 3, opcode = vex[3];
    enum { NONE, P66, PF3, PF2 };
    at += 4;
    const Operands on(at, vex, registers);
    if (opcode == 0x49 && prefix == NONE && on.in_memory) {  // ldtilecfg
        std::memcpy(&config, on.address, sizeof config);
        std::memset(tiles, 0, sizeof tiles);
        return config.palette == 1;
    }
    if (opcode == 0x49 && prefix == NONE) {  // tilerelease
        std::memset(&config, 0, sizeof config);
        return true;
    }
    if (config.palette != 1) return false;
    if (opcode == 0x49 && prefix == PF2) {  // tilezero
        std::memset(tiles[on.reg], 0, sizeof tiles[on.reg]);
        return true;
    }
    if (opcode == 0x4b && (prefix == PF2 || prefix == PF3) && on.in_memory) {  // tileloadd, tilestored
        for (int r = 0; r < config.rows[on.reg]; ++r) {
            uint8_t *memory = on.address + r * on.row, *tile = tiles[on.reg][r];
            const size_t bytes = config.row_bytes[on.reg];
            prefix == PF2 ? std::memcpy(tile, memory, bytes) : std::memcpy(memory, tile, bytes);
        }
        return true;
    }
    if (opcode == 0x5c && prefix == PF3 && !on.in_memory) {  // tdpbf16ps
        if (on.reg == on.rm || on.reg == on.vvvv || on.rm == on.vvvv) return false;
        multiply(on.reg, on.rm, on.vvvv);
        return true;
    }
    return false;
}

void handle(int, siginfo_t *, void *context) {
    greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    const uint8_t *at = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
    if (execute(at, registers)) {
        registers[REG_RIP] = reinterpret_cast<greg_t>(at);
        ++executed;
    } else {
        sigaction(SIGILL, &before, nullptr);  // and the instruction fails again
    }
}

}  // namespace

extern "C" {
void emulator_begin() {
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &before);
}

// Returns the number of instructions that were executed here.
int64_t emulator_end() {
    sigaction(SIGILL, &before, nullptr);
    return executed;
}
}
