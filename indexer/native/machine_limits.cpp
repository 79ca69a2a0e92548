#include "machine_limits.hpp"

#include <cstring>
#include <ctime>
#include <stdexcept>
#include <vector>

#include "buffer.hpp"

namespace kv {

namespace {

constexpr u64 kAhead = 16;

double cpu_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// So that a compiler cannot leave out what led to it.
void keep(u64 value) { asm volatile("" : : "r"(value) : "memory"); }

u64 words_in(u64 table_bytes, u64 operations) {
    if (table_bytes < 1024 || operations == 0) {
        throw std::invalid_argument("table_bytes: allowed 1024 or more; operations: 1 or more");
    }
    return table_bytes / sizeof(u64);
}

}  // namespace

double random_rmw_ns(u64 table_bytes, u64 operations, u64 seed) {
    const u64 words = words_in(table_bytes, operations);
    Buffer<u64> table;
    table.reserve(words);
    for (u64 at = 0; at < words; ++at) {
        table[at] = at;
    }
    u64 places[2 * kAhead];
    const auto place = [&](u64 draw) { return static_cast<u64>(static_cast<unsigned __int128>(splitmix64(draw)) * words >> 64); };
    for (u64 at = 0; at < kAhead; ++at) {
        places[at] = place(seed + at);
    }
    const double begin = cpu_ns();
    for (u64 at = 0; at < operations; ++at) {
        const u64 ahead = place(seed + at + kAhead);
        __builtin_prefetch(&table[ahead], 1);
        places[(at + kAhead) % (2 * kAhead)] = ahead;
        table[places[at % (2 * kAhead)]] += at;
    }
    const double spent = cpu_ns() - begin;
    keep(table[0]);
    return spent / static_cast<double>(operations);
}

double pointer_chase_ns(u64 table_bytes, u64 operations, u64 seed) {
    const u64 words = words_in(table_bytes, operations);
    Buffer<u64> table;
    table.reserve(words);
    for (u64 at = 0; at < words; ++at) {
        table[at] = at;
    }
    for (u64 at = words - 1; at > 0; --at) {  // one circle through all of it (Sattolo)
        std::swap(table[at], table[splitmix64(seed + at) % at]);
    }
    u64 at = 0;
    const double begin = cpu_ns();
    for (u64 step = 0; step < operations; ++step) {
        at = table[at];
    }
    const double spent = cpu_ns() - begin;
    keep(at);
    return spent / static_cast<double>(operations);
}

double compare_ns(u64 bytes, u64 rounds) {
    if (rounds == 0) {
        throw std::invalid_argument("rounds: allowed 1 or more");
    }
    std::vector<char> left(bytes, 7), right(bytes, 7);
    int (*volatile compare)(const void*, const void*, std::size_t) = std::memcmp;
    u64 same = 0;
    const double begin = cpu_ns();
    for (u64 round = 0; round < rounds; ++round) {
        same += compare(left.data(), right.data(), bytes) == 0;
    }
    const double spent = cpu_ns() - begin;
    keep(same);
    return spent / static_cast<double>(rounds);
}

}  // namespace kv
