// The native core of the index. It holds what both sides of a stream must compute alike; the tree comes on top of it.
// Every function here has a Python twin, and a test that they agree.
#include <cstdint>
#include <cstring>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace {

// splitmix64, as in kv_protocol/splitmix.py.
std::uint64_t splitmix64(std::uint64_t value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// Digest of a set of sequence hashes, given as little-endian u64s: the sum of their splitmix64, mod 2^64.
std::uint64_t set_digest(nb::bytes hashes) {
    if (hashes.size() % sizeof(std::uint64_t) != 0) {
        throw nb::value_error("hashes: the length must be a multiple of 8 bytes");
    }
    std::uint64_t digest = 0;
    for (std::size_t at = 0; at < hashes.size(); at += sizeof(std::uint64_t)) {
        std::uint64_t hash;
        std::memcpy(&hash, hashes.c_str() + at, sizeof hash);
        digest += splitmix64(hash);
    }
    return digest;
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "Native core of the prefix index.";
    module.def("set_digest", &set_digest, nb::arg("hashes"));
}
