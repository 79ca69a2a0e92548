// Sequence hashes of the full blocks of a prompt. The rules, and the Python twin: kv_protocol/hashing.py.
#include "hashing.hpp"

#include <cstddef>
#include <cstring>
#include <optional>

#include "common.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#undef KV_HAVE_XXHASH  // tokens and hashes are read and written as they lie in memory
#endif

#ifdef KV_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
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
constexpr std::size_t kGilKeptBytes = 64 * 1024;

// A Python buffer, held while it is read.
class View {
public:
    explicit View(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { PyBuffer_Release(&view_); }

    const unsigned char* data() const { return static_cast<const unsigned char*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_;
};

// A block's window is `width` bytes from every `stride`-th byte on; with EAGLE it reaches into the next block.
struct Windows {
    std::size_t stride;
    std::size_t width;

    std::size_t count(std::size_t size) const { return size < width ? 0 : (size - width) / stride + 1; }
};

void hash_chain(const unsigned char* tokens, Windows windows, std::size_t count, u64 seed, char* out) {
    u64 pair[2] = {};  // the hash before, the local hash
    for (std::size_t block = 0; block < count; ++block) {
        pair[1] = XXH3_64bits_withSeed(tokens + block * windows.stride, windows.width, seed);
        pair[0] = block == 0 ? pair[1] : XXH3_64bits_withSeed(pair, sizeof pair, kChainSeed);
        std::memcpy(out + block * kHashBytes, &pair[0], kHashBytes);
    }
}

nb::bytes hash_blocks(nb::handle tokens, std::size_t block_size, u64 seed, bool is_eagle) {
    if (block_size < 1 || block_size > kBlockSizeMax) {
        throw nb::value_error("block_size: 1..4096 tokens");
    }
    const View view(tokens);
    const Windows windows{kTokenBytes * block_size, kTokenBytes * (block_size + (is_eagle ? 1 : 0))};
    const std::size_t count = windows.count(view.size());
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kHashBytes));
    if (made == nullptr) {
        throw nb::python_error();
    }
    nb::bytes hashes = nb::steal<nb::bytes>(made);
    {
        std::optional<nb::gil_scoped_release> released;
        if (view.size() > kGilKeptBytes) {
            released.emplace();
        }
        hash_chain(view.data(), windows, count, seed, PyBytes_AS_STRING(made));
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
