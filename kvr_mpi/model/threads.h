// torch's own threads if it uses OpenMP, as it does everywhere but on macOS; otherwise new threads.

#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

// From the OpenMP library that torch has loaded: a second one would have its own threads, and both would spin.
extern "C" void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags)
    __attribute__((weak));

// Call work() in at most this many threads at once, including this one; work() returns when nothing is left to do.
template <typename Work> static void in_threads(int64_t threads, const Work &work) {
    if (threads <= 1) return work();
    if (GOMP_parallel) {
        const auto call = [](void *data) { (*static_cast<const Work *>(data))(); };
        return GOMP_parallel(call, const_cast<Work *>(&work), static_cast<unsigned>(threads), 0);
    }
    std::vector<std::thread> others;
    try {
        for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back([&work] { work(); });
    } catch (const std::system_error &) {  // no more threads can be created: the existing ones do the work
    }
    work();
    for (auto &other : others) other.join();
}
