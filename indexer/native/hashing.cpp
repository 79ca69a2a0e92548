// Sequence hashes of the full blocks of a prompt. The rules, and the Python twin: kv_protocol/hashing.py.
#include "hashing.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>

#include "common.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#undef KV_HAVE_XXHASH  // tokens and hashes are read and written as they lie in memory
#endif

#ifdef KV_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#if XXH_VERSION_NUMBER < 801
#undef KV_HAVE_XXHASH  // it cannot derive a seed's secret once for many blocks
#endif
#endif

namespace nb = nanobind;

namespace kv {

#ifdef KV_HAVE_XXHASH
namespace {

constexpr u64 kChainSeed = 1337;
constexpr std::size_t kTokenBytes = 4;
constexpr std::size_t kHashBytes = 8;
constexpr std::size_t kBlockSizeMax = 4096;
// Some 5 us of hashing: below, handing over the GIL and asking for it again costs more than it gives to others.
constexpr std::size_t kGilKeptTokens = 24 * 1024;

// Tokens as u32s in a contiguous buffer, or as the code points of a string. The buffer is held while it is read.
class Tokens {
public:
    explicit Tokens(nb::handle given) {
        if (PyUnicode_Check(given.ptr())) {
            data_ = static_cast<const char*>(PyUnicode_DATA(given.ptr()));
            width_ = static_cast<std::size_t>(PyUnicode_KIND(given.ptr()));
            size_ = static_cast<std::size_t>(PyUnicode_GET_LENGTH(given.ptr()));
            return;
        }
        if (PyObject_GetBuffer(given.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
            throw nb::python_error();
        }
        const std::string_view format(view_.format == nullptr ? "B" : view_.format);
        const auto bytes = static_cast<std::size_t>(view_.len);
        if ((format != "B" && format != "I" && format != "<I") || bytes % kTokenBytes != 0) {
            PyBuffer_Release(&view_);
            throw nb::value_error("tokens: contiguous u32s");
        }
        data_ = static_cast<const char*>(view_.buf);
        size_ = bytes / kTokenBytes;
    }
    Tokens(const Tokens&) = delete;
    Tokens& operator=(const Tokens&) = delete;
    ~Tokens() {
        if (view_.obj != nullptr) {
            PyBuffer_Release(&view_);
        }
    }

    std::size_t size() const { return size_; }

    // Tokens from `at` on as u32s: where they lie, or in `room`.
    const void* window(std::size_t at, std::size_t count, u32* room) const {
        const char* begin = data_ + at * width_;
        if (width_ == kTokenBytes) {
            return begin;
        }
        if (width_ == sizeof(Py_UCS2)) {
            std::copy_n(reinterpret_cast<const Py_UCS2*>(begin), count, room);
        } else {
            std::copy_n(reinterpret_cast<const Py_UCS1*>(begin), count, room);
        }
        return room;
    }

private:
    Py_buffer view_{};
    const char* data_ = nullptr;
    std::size_t width_ = kTokenBytes;
    std::size_t size_ = 0;
};

// A window begins at each `stride`-th token; with EAGLE it reaches into the next block. XXH3 would derive the seed's
// secret for each window that is longer than 240 bytes: half of the time.
void hash_chain(const Tokens& tokens, std::size_t stride, std::size_t width, std::size_t count, u64 seed, char* out) {
    alignas(64) unsigned char secret[XXH_SECRET_DEFAULT_SIZE];
    XXH3_generateSecret_fromSeed(secret, seed);
    u32 room[kBlockSizeMax + 1];
    u64 pair[2] = {};  // the hash before, the local hash
    for (std::size_t block = 0; block < count; ++block) {
        const void* window = tokens.window(block * stride, width, room);
        pair[1] = XXH3_64bits_withSecretandSeed(window, width * kTokenBytes, secret, sizeof secret, seed);
        pair[0] = block == 0 ? pair[1] : XXH3_64bits_withSeed(pair, sizeof pair, kChainSeed);
        std::memcpy(out + block * kHashBytes, &pair[0], kHashBytes);
    }
}

nb::bytes hash_blocks(nb::handle given, std::size_t block_size, u64 seed, bool is_eagle) {
    if (block_size < 1 || block_size > kBlockSizeMax) {
        throw nb::value_error("block_size: 1..4096 tokens");
    }
    const Tokens tokens(given);
    const std::size_t width = block_size + (is_eagle ? 1 : 0);
    const std::size_t count = tokens.size() < width ? 0 : (tokens.size() - width) / block_size + 1;
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kHashBytes));
    if (made == nullptr) {
        throw nb::python_error();
    }
    nb::bytes hashes = nb::steal<nb::bytes>(made);
    {
        std::optional<nb::gil_scoped_release> released;
        if (tokens.size() > kGilKeptTokens) {
            released.emplace();
        }
        hash_chain(tokens, block_size, width, count, seed, PyBytes_AS_STRING(made));
    }
    return hashes;
}

}  // namespace

void bind_hashing(nb::module_& module) {
    module.attr("HAS_XXHASH") = true;
    module.def("hash_blocks", &hash_blocks, nb::arg("tokens"), nb::arg("block_size"), nb::arg("seed"),
               nb::arg("is_eagle"));
}
#else
void bind_hashing(nb::module_& module) { module.attr("HAS_XXHASH") = false; }
#endif

}  // namespace kv
