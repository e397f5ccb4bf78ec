// The threads that torch computes with, if it uses OpenMP, as it does everywhere but on macOS; others otherwise.

#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

// Found in what torch has loaded: a second OpenMP beside it would have threads of its own, and both would spin.
extern "C" void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags)
    __attribute__((weak));

// Call work() in at most so many threads at once, this one among them; it returns when there is nothing left to do.
template <typename Work> static void in_threads(int64_t threads, const Work &work) {
    if (threads <= 1) return work();
    if (GOMP_parallel) {
        const auto call = [](void *data) { (*static_cast<const Work *>(data))(); };
        return GOMP_parallel(call, const_cast<Work *>(&work), static_cast<unsigned>(threads), 0);
    }
    std::vector<std::thread> others;
    try {
        for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back([&work] { work(); });
    } catch (const std::system_error &) {  // no more threads are given: those that there are do the work
    }
    work();
    for (auto &other : others) other.join();
}
