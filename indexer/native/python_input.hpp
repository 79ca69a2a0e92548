// From what Python hands in to plain memory. What is not plainly right is given to the checks in indexer/index/buffers.py,
// which say what is wrong in the same words as for the tests' reference, or know how to read it after all.
#pragma once

#include <vector>

#include <nanobind/nanobind.h>

#include "common.hpp"

namespace kv {

namespace nb = nanobind;

// Numbers (u64) of a list, a tuple, bytes or a buffer; valid while this lives.
class HashesIn {
public:
    explicit HashesIn(nb::handle given) { read(given); }
    HashesIn(const HashesIn&) = delete;
    HashesIn& operator=(const HashesIn&) = delete;
    HashesIn(HashesIn&& other) noexcept
        : data_(other.data_),
          count_(other.count_),
          view_(other.view_),
          owner_(std::move(other.owner_)),
          copy_(std::move(other.copy_)) {
        other.view_.obj = nullptr;
    }
    ~HashesIn() {
        if (view_.obj != nullptr) {
            PyBuffer_Release(&view_);
        }
    }

    const u64* data() const { return data_; }
    std::size_t size() const { return count_; }

private:
    void read(nb::handle given);
    void read_items(nb::handle items);
    bool read_buffer(nb::handle given);
    void refer_to(const void* data, std::size_t bytes);

    const u64* data_ = nullptr;
    std::size_t count_ = 0;
    Py_buffer view_{};
    nb::object owner_;
    std::vector<u64> copy_;
};

// Writable int32s: 4 rows for each query, of `columns` each, which are at least as many as asked.
class DepthsOut {
public:
    DepthsOut(nb::handle out, std::size_t columns_min);
    DepthsOut(const DepthsOut&) = delete;
    DepthsOut& operator=(const DepthsOut&) = delete;
    ~DepthsOut() { PyBuffer_Release(&view_); }

    std::int32_t* data() const { return data_; }
    std::size_t columns() const { return columns_; }

private:
    Py_buffer view_{};
    std::int32_t* data_ = nullptr;
    std::size_t columns_ = 0;
};

u32 rank_in(nb::handle rank);  // KeyError where no rank can have that number
u32 tier_in(nb::handle tier);
double seconds_in(nb::handle now_s);  // LimitExceeded where it is not finite
// False: None was given.
bool optional_hash_in(nb::handle hash, const char* field, u64& found);
u64 hash_in(nb::handle hash, const char* field);
// Whether it is the number of a rank that could be.
bool is_rank(nb::handle rank, u32& found);

}  // namespace kv
