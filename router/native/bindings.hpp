// What the extension's classes share: packed words of 8 bytes, columns of any object that shows its memory, and errors as the
// project words them.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "chain_tree.hpp"
#include "columns.hpp"

namespace kv {

[[noreturn]] inline void refuse(const std::string& field, i64 found, const std::string& allowed) {
    throw nanobind::value_error((field + ": found " + std::to_string(found) + ", allowed " + allowed).c_str());
}

// Eight bytes each, as they lie in memory.
template <typename Word>
struct Words {
    Words(const nanobind::bytes& given, const char* field) : data(reinterpret_cast<const Word*>(given.c_str())) {
        if (given.size() % sizeof(Word) != 0) {
            refuse(field, static_cast<i64>(given.size()), "a multiple of 8 bytes");
        }
        count = given.size() / sizeof(Word);
    }
    const Word* data;
    std::size_t count;
};

inline nanobind::bytes new_bytes(std::size_t bytes) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
    if (made == nullptr) {
        throw nanobind::python_error();
    }
    return nanobind::steal<nanobind::bytes>(made);
}

struct Buffer : Py_buffer {
    Buffer() : Py_buffer{} {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(this); }
};

template <typename Number>
constexpr const char* kind_of() {
    return std::is_floating_point<Number>::value ? "float64" : sizeof(Number) == 8 ? "int64" : "int32";
}

template <typename Number>
bool is_kind(const Buffer& buffer) {
    const char kind = buffer.format == nullptr ? 'B' : buffer.format[0];
    const bool is_right = std::is_floating_point<Number>::value ? kind == 'd' : kind == 'q' || kind == 'l' || kind == 'i';
    return is_right && buffer.itemsize == sizeof(Number);
}

// Numbers of one kind, one for each rank, of any object that shows its memory; a given count is required.
template <typename Number>
class Numbers {
public:
    Numbers(const nanobind::handle& given, const char* field, Py_ssize_t count = -1) {
        if (PyObject_GetBuffer(given.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
            throw nanobind::python_error();
        }
        if (buffer_.ndim != 1 || !is_kind<Number>(buffer_)) {
            refuse(field, buffer_.ndim, std::string("one column of ") + kind_of<Number>());
        }
        if (count >= 0 && buffer_.shape[0] != count) {
            refuse(field, buffer_.shape[0], std::to_string(count) + (count == 1 ? " number" : " numbers"));
        }
    }

    Py_ssize_t count() const { return buffer_.shape[0]; }
    Column<Number> column() const { return {static_cast<const char*>(buffer_.buf), buffer_.strides[0]}; }

private:
    Buffer buffer_;
};

// The same, in so many rows.
template <typename Number>
class Table {
public:
    Table(const nanobind::handle& given, const char* field, Py_ssize_t rows) {
        if (PyObject_GetBuffer(given.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
            throw nanobind::python_error();
        }
        if (buffer_.ndim != 2 || buffer_.shape[0] != rows || !is_kind<Number>(buffer_)) {
            const Py_ssize_t found = buffer_.ndim == 2 && is_kind<Number>(buffer_) ? buffer_.shape[0] : buffer_.ndim;
            refuse(field, found, std::to_string(rows) + " rows of " + kind_of<Number>());
        }
    }

    Py_ssize_t count() const { return buffer_.shape[1]; }
    Column<Number> row(Py_ssize_t at) const {
        return {static_cast<const char*>(buffer_.buf) + at * buffer_.strides[0], buffer_.strides[1]};
    }

private:
    Buffer buffer_;
};

void bind_routed_tree(nanobind::module_& module);
void bind_costs(nanobind::module_& module);
void bind_records(nanobind::module_& module);
void bind_named_tuples(nanobind::module_& module);

}  // namespace kv
