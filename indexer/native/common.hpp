// What every part of the native tree uses: types and constants, the mixing function, limits and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kv {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kNone = 0xFFFF'FFFF;
constexpr u32 kTiers = 4;
constexpr u32 kAllTiers = (1u << kTiers) - 1;  // a bit for each
constexpr u32 kRankMax = 4095;
constexpr u32 kRankWords = (kRankMax + 1) / 64;  // words with a bit for each rank

inline std::string text(u64 number) { return std::to_string(number); }

// splitmix64, as in kv_protocol/splitmix.py.
inline u64 splitmix64(u64 value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// Reads a value from bytes, which need not be aligned for it.
template <class T>
T read(const void* data) {
    T value;
    std::memcpy(&value, data, sizeof value);
    return value;
}
template <class T>
void append(std::string& bytes, T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

struct Limits {
    u64 memory_bytes_max = 0;  // 0: no limit
    u64 seed = 0;              // of the map from hashes to blocks, so that clients cannot choose hashes that collide
};

// A rank and one of its tiers: a member of a set of holders.
struct Holder {
    u32 rank;
    u32 tier;
    u32 code() const { return rank << 2 | tier; }
};

// Thrown for bytes that cannot be read; the caller's tree is then unchanged.
struct Malformed : std::runtime_error {
    Malformed(u64 at, const std::string& why) : std::runtime_error(why), offset(at), reason(why) {}
    u64 offset;
    std::string reason;
};

struct UnknownRank : std::runtime_error {
    explicit UnknownRank(u32 number) : std::runtime_error("unknown rank"), rank(number) {}
    u32 rank;
};

struct IndexFull : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The memory that all parts of one tree take, and its limit. `fits_much` also leaves room for what a change of holders may
// need: a digest, a set, two runs.
struct Budget {
    static constexpr u64 kLittle = 8192;

    u64 limit;
    u64 used = 0;
    bool fits(u64 bytes) const { return limit == 0 || bytes == 0 || (bytes <= limit && used <= limit - bytes); }
    bool fits_much(u64 bytes) const { return fits(bytes + kLittle); }
};

}  // namespace kv
