// Sequence hashes of the full blocks of a prompt. The rules, and the Python twin: kv_protocol/hashing.py.
#include "hashing.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <vector>

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

// Tokens as u32s in bytes, or as the code points of a string: neither changes while other threads run.
struct Piece {
    const char* data;
    std::size_t size;
    std::size_t width;  // bytes of a token
};

// Reads pieces one after the other.
class Reader {
public:
    explicit Reader(const std::vector<Piece>& pieces) : piece_(pieces.data()) {}

    void read(u32* out, std::size_t count) {
        while (count != 0) {
            const std::size_t some = std::min(count, piece_->size - at_);
            const char* begin = piece_->data + at_ * piece_->width;
            if (piece_->width == sizeof(Py_UCS1)) {
                std::copy_n(reinterpret_cast<const Py_UCS1*>(begin), some, out);
            } else if (piece_->width == sizeof(Py_UCS2)) {
                std::copy_n(reinterpret_cast<const Py_UCS2*>(begin), some, out);
            } else {
                std::memcpy(out, begin, some * kTokenBytes);
            }
            out += some;
            count -= some;
            at_ += some;
            if (at_ == piece_->size) {
                ++piece_;
                at_ = 0;
            }
        }
    }

private:
    const Piece* piece_;
    std::size_t at_ = 0;
};

Piece piece_in(PyObject* given) {
    if (PyUnicode_Check(given)) {
        return {static_cast<const char*>(PyUnicode_DATA(given)), static_cast<std::size_t>(PyUnicode_GET_LENGTH(given)),
                static_cast<std::size_t>(PyUnicode_KIND(given))};
    }
    if (!PyBytes_Check(given) || static_cast<std::size_t>(PyBytes_GET_SIZE(given)) % kTokenBytes != 0) {
        throw nb::type_error("tokens: bytes of u32s, or a tuple of strings");
    }
    return {PyBytes_AS_STRING(given), static_cast<std::size_t>(PyBytes_GET_SIZE(given)) / kTokenBytes, kTokenBytes};
}

std::vector<Piece> pieces_in(PyObject* given) {
    if (!PyTuple_Check(given)) {
        return {piece_in(given)};
    }
    std::vector<Piece> pieces;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at) {
        pieces.push_back(piece_in(PyTuple_GET_ITEM(given, at)));
    }
    return pieces;
}

// A window begins at each `stride`-th token; with EAGLE it has one token of the next block. XXH3 would derive the seed's
// secret for each window that is longer than 240 bytes: half of the time.
void hash_chain(Reader tokens, std::size_t stride, std::size_t width, std::size_t count, u64 seed, char* out) {
    alignas(64) unsigned char secret[XXH_SECRET_DEFAULT_SIZE];
    XXH3_generateSecret_fromSeed(secret, seed);
    u32 window[kBlockSizeMax + 1];
    u64 pair[2] = {};  // the hash before, the local hash
    for (std::size_t block = 0; block < count; ++block) {
        const std::size_t known = block == 0 ? 0 : width - stride;
        std::copy_n(window + stride, known, window);
        tokens.read(window + known, width - known);
        pair[1] = XXH3_64bits_withSecretandSeed(window, width * kTokenBytes, secret, sizeof secret, seed);
        pair[0] = block == 0 ? pair[1] : XXH3_64bits_withSeed(pair, sizeof pair, kChainSeed);
        std::memcpy(out + block * kHashBytes, &pair[0], kHashBytes);
    }
}

nb::bytes hash_blocks(nb::handle given, std::size_t block_size, u64 seed, bool is_eagle) {
    if (block_size < 1 || block_size > kBlockSizeMax) {
        throw nb::value_error("block_size: 1..4096 tokens");
    }
    const std::vector<Piece> pieces = pieces_in(given.ptr());
    const std::size_t width = block_size + (is_eagle ? 1 : 0);
    std::size_t size = 0;
    for (const Piece& each : pieces) {
        size += each.size;
    }
    const std::size_t count = size < width ? 0 : (size - width) / block_size + 1;
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kHashBytes));
    if (made == nullptr) {
        throw nb::python_error();
    }
    nb::bytes hashes = nb::steal<nb::bytes>(made);
    {
        std::optional<nb::gil_scoped_release> released;
        if (size > kGilKeptTokens) {
            released.emplace();
        }
        hash_chain(Reader(pieces), block_size, width, count, seed, PyBytes_AS_STRING(made));
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
