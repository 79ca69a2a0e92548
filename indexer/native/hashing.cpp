// Renders chats of the byte model (kv_runtime/text/byte_model.py) as strings in which each character is a token, and
// hashes full blocks of tokens (kv_protocol/hashing.py).
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "common.hpp"

#ifdef KV_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#if XXH_VERSION_NUMBER < 801
#undef KV_HAVE_XXHASH  // an older one cannot derive a seed's secret once for many blocks
#endif
#endif

namespace nb = nanobind;

namespace kv {

namespace {

// The string at the key of a message; null if there is none, or the message has not exactly two keys.
PyObject* string_at(PyObject* message, PyObject* key) {
    PyObject* found = PyDict_CheckExact(message) && PyDict_GET_SIZE(message) == 2 ? PyDict_GetItem(message, key) : nullptr;
    return found != nullptr && PyUnicode_CheckExact(found) ? found : nullptr;
}

// A character for each byte of the text in UTF-8; an error if it has lone surrogates.
PyObject* byte_text(PyObject* text) {
    if (PyUnicode_IS_ASCII(text)) {
        return Py_NewRef(text);
    }
    const nb::object bytes = nb::steal(PyUnicode_AsUTF8String(text));
    return bytes.is_valid() ? PyUnicode_DecodeLatin1(PyBytes_AS_STRING(bytes.ptr()), PyBytes_GET_SIZE(bytes.ptr()), nullptr)
                            : nullptr;
}

// Returns for each message the mark of its role, its text and `end`; then `last`. Chats with options, or with a
// message that is not just a role and a text, are left to `other`.
nb::object chat_pieces(nb::handle other, nb::dict marks, nb::str end, nb::str last, nb::handle messages, nb::kwargs options) {
    static PyObject* const role_key = PyUnicode_InternFromString("role");
    static PyObject* const content_key = PyUnicode_InternFromString("content");
    const bool is_list = PyList_CheckExact(messages.ptr()) && options.size() == 0;
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(messages.ptr()) : 0;
    const nb::object pieces = nb::steal(PyTuple_New(3 * count + 1));
    bool is_plain = is_list;
    for (Py_ssize_t at = 0; is_plain && at < count; ++at) {
        PyObject* message = PyList_GET_ITEM(messages.ptr(), at);
        PyObject *role = string_at(message, role_key), *content = string_at(message, content_key);
        PyObject* mark = role == nullptr || content == nullptr ? nullptr : PyDict_GetItem(marks.ptr(), role);
        PyObject* text = mark == nullptr ? nullptr : byte_text(content);
        is_plain = text != nullptr;
        if (is_plain) {
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at, Py_NewRef(mark));
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at + 1, text);
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at + 2, Py_NewRef(end.ptr()));
        }
    }
    if (!is_plain) {
        PyErr_Clear();
        return other(messages, **options);
    }
    PyTuple_SET_ITEM(pieces.ptr(), 3 * count, Py_NewRef(last.ptr()));
    return pieces;
}

}  // namespace

#ifdef KV_HAVE_XXHASH
namespace {

constexpr u64 kChainSeed = 1337;
constexpr char kEagleScheme[] = "xxh3-1337-eagle";
constexpr int kTokenBytes = 4;
constexpr int kBlockSizeMax = 4096;
// Some 10 us of hashing (blocks of 32): for fewer tokens, releasing and retaking the GIL costs more than others gain.
constexpr int kGilKeptTokens = 24 * 1024;

// Tokens as u32s in bytes, or as the code points of a tuple's strings: both are immutable, so other threads may run.
class Tokens {
public:
    explicit Tokens(PyObject* given) {
        if (!PyTuple_Check(given)) {
            add(given);
            return;
        }
        pieces_.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(given)));
        for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at) {
            add(PyTuple_GET_ITEM(given, at));
        }
    }

    Py_ssize_t size() const { return size_; }

    // The next `count` tokens, which must exist.
    void read(u32* out, Py_ssize_t count) {
        while (count != 0) {
            const Piece& piece = pieces_[piece_];
            const Py_ssize_t some = std::min(count, piece.size - at_);
            for (Py_ssize_t each = 0; each < some; ++each) {
                *out++ = PyUnicode_READ(piece.kind, piece.data, at_ + each);
            }
            count -= some;
            at_ += some;
            if (at_ == piece.size) {
                ++piece_;
                at_ = 0;
            }
        }
    }

private:
    struct Piece {
        const void* data;
        Py_ssize_t size;
        int kind;  // bytes per token
    };

    void add(PyObject* given) {
        if (PyUnicode_Check(given)) {
            pieces_.push_back({PyUnicode_DATA(given), PyUnicode_GET_LENGTH(given), PyUnicode_KIND(given)});
        } else if (PyBytes_Check(given) && PyBytes_GET_SIZE(given) % kTokenBytes == 0) {
            pieces_.push_back({PyBytes_AS_STRING(given), PyBytes_GET_SIZE(given) / kTokenBytes, kTokenBytes});
        } else {
            throw nb::type_error("tokens: bytes of u32s, or a tuple of strings");
        }
        size_ += pieces_.back().size;
    }

    std::vector<Piece> pieces_;
    std::size_t piece_ = 0;
    Py_ssize_t size_ = 0, at_ = 0;
};

// A window begins at each `stride`-th token; with EAGLE its last token is of the next block. For a window of over 240
// bytes XXH3 would derive the secret from the seed each time, which takes as long as the hashing; so it is derived once.
void hash_chain(Tokens& tokens, Py_ssize_t stride, Py_ssize_t width, u64 seed, std::vector<u64>& hashes) {
    alignas(64) unsigned char secret[XXH_SECRET_DEFAULT_SIZE];
    XXH3_generateSecret_fromSeed(secret, seed);
    u32 window[kBlockSizeMax + 1];
    const std::size_t bytes = sizeof(u32) * static_cast<std::size_t>(width);
    Py_ssize_t known = 0;
    u64 pair[2] = {};  // the sequence hash of the block before, the local hash
    for (u64& hash : hashes) {
        std::copy_n(window + stride, known, window);
        tokens.read(window + known, width - known);
        pair[1] = XXH3_64bits_withSecretandSeed(window, bytes, secret, sizeof secret, seed);
        hash = pair[0] = &hash == hashes.data() ? pair[1] : XXH3_64bits_withSeed(pair, sizeof pair, kChainSeed);
        known = width - stride;
    }
}

nb::object hash_blocks(nb::handle given, nb::tuple hashing, nb::handle seed_given) try {
    const auto began = std::chrono::steady_clock::now();
    Tokens tokens(given.ptr());
    const auto block_size = nb::cast<Py_ssize_t>(hashing[0]);
    const auto seed = nb::cast<u64>(seed_given);
    const bool is_eagle = PyUnicode_CompareWithASCIIString(nb::object(hashing[1]).ptr(), kEagleScheme) == 0;
    if (block_size < 1 || block_size > kBlockSizeMax) {
        throw nb::value_error("block_size: 1..4096 tokens");
    }
    const Py_ssize_t width = block_size + (is_eagle ? 1 : 0), rest = tokens.size() - width;
    std::vector<u64> hashes(rest < 0 ? 0 : static_cast<std::size_t>(rest / block_size + 1));
    {
        std::optional<nb::gil_scoped_release> released;
        if (tokens.size() > kGilKeptTokens) {
            released.emplace();
        }
        hash_chain(tokens, block_size, width, seed, hashes);
    }
    const nb::bytes packed(hashes.data(), sizeof(u64) * hashes.size());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    return nb::make_tuple(tokens.size(), packed, seconds.count());
} catch (const std::exception&) {  // Python's function raises an error that says what is wrong
    return nb::module_::import_("indexer.native.index").attr("hash_by_package")(given, hashing, seed_given);
}

}  // namespace

#endif

// HAS_XXHASH of `module` says whether it can hash, that is, was built with xxhash's header, 0.8.1 or newer.
void bind_hashing(nb::module_& module) {
    module.def("chat_pieces", &chat_pieces);
#ifdef KV_HAVE_XXHASH
    module.def("hash_blocks", &hash_blocks, nb::arg("tokens"), nb::arg("hashing"), nb::arg("seed"));
    module.attr("HAS_XXHASH") = true;
#else
    module.attr("HAS_XXHASH") = false;
#endif
}

}  // namespace kv
