// From what Python hands in to plain memory. Callers have checked what came from outside: here a wrong argument is a bug, and
// raises the language's errors.
#pragma once

#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "common.hpp"

namespace kv {

namespace nb = nanobind;

// Sequence hashes: `bytes`, which are read where they lie, or a sequence of numbers, no other buffer; valid while this lives.
class HashesIn {
public:
    explicit HashesIn(nb::handle given) : owner_(nb::borrow(given)) {
        PyObject* object = given.ptr();
        if (PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) % static_cast<Py_ssize_t>(sizeof(u64)) == 0) {
            data_ = reinterpret_cast<const u64*>(PyBytes_AS_STRING(object));
            count_ = static_cast<std::size_t>(PyBytes_GET_SIZE(object)) / sizeof(u64);
            return;
        }
        if (PyObject_CheckBuffer(object) || !nb::try_cast(given, copy_)) {
            throw nb::type_error("sequence_hashes: u64 numbers, or packed in bytes");
        }
        data_ = copy_.data();
        count_ = copy_.size();
    }
    HashesIn(const HashesIn&) = delete;
    HashesIn& operator=(const HashesIn&) = delete;

    const u64* data() const { return data_; }
    std::size_t size() const { return count_; }

private:
    nb::object owner_;
    std::vector<u64> copy_;
    const u64* data_ = nullptr;
    std::size_t count_ = 0;
};

// Writable int32s: 4 rows of `columns` each.
class DepthsOut {
public:
    explicit DepthsOut(nb::handle out) {
        if (PyObject_GetBuffer(out.ptr(), &view_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
            throw nb::python_error();
        }
    }
    DepthsOut(const DepthsOut&) = delete;
    DepthsOut& operator=(const DepthsOut&) = delete;
    ~DepthsOut() { PyBuffer_Release(&view_); }

    std::int32_t* data() const { return static_cast<std::int32_t*>(view_.buf); }
    std::size_t columns() const { return static_cast<std::size_t>(view_.len) / (kTiers * sizeof(std::int32_t)); }

private:
    Py_buffer view_{};
};

inline u32 checked_tier(u32 tier) {
    if (tier >= kTiers) {
        throw nb::value_error("tier: beyond 3");
    }
    return tier;
}

}  // namespace kv
