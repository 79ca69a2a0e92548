// What the extension's classes share: texts, slots, columns of any object that shows its memory, and errors as the project words them.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <nanobind/nanobind.h>
#include <structmember.h>

#include "stretches.hpp"

namespace kv {

[[noreturn]] inline void refuse(const std::string& field, i64 found, const std::string& allowed) {
    throw nanobind::value_error((field + ": found " + std::to_string(found) + ", allowed " + allowed).c_str());
}

// What a `str` says, as UTF-8, for as long as it lives.
inline std::string_view text_of(const nanobind::handle& text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) {
        throw nanobind::python_error();
    }
    return {data, static_cast<std::size_t>(size)};
}

// A field that objects of a type have in a slot: by `__slots__`, or as `msgspec.Struct`s.
class Slot {
public:
    Slot(const nanobind::handle& type, const char* name) {
        const nanobind::object member = type.attr(name);
        if (!Py_IS_TYPE(member.ptr(), &PyMemberDescr_Type)) {
            throw nanobind::type_error((std::string(name) + ": allowed is a field in a slot").c_str());
        }
        offset_ = reinterpret_cast<const PyMemberDescrObject*>(member.ptr())->d_member->offset;
    }
    nanobind::handle of(const nanobind::handle& owner) const { return at(owner); }
    void set(const nanobind::handle& owner, const nanobind::handle& value) const {
        Py_XINCREF(value.ptr());
        Py_XSETREF(at(owner), value.ptr());
    }

private:
    PyObject*& at(const nanobind::handle& owner) const {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner.ptr()) + offset_);
    }
    Py_ssize_t offset_;
};

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

// Copies numbers of one kind, `rows` times `count` of them, of any object that shows its memory, in which they lie row by row.
template <typename Number>
std::vector<Number> numbers_in(const nanobind::handle& given, const char* field, std::size_t rows, std::size_t count) {
    Buffer buffer;
    if (PyObject_GetBuffer(given.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        throw nanobind::python_error();
    }
    const char kind = buffer.format == nullptr ? 'B' : buffer.format[0];
    const bool is_right = std::is_floating_point<Number>::value ? kind == 'd' : kind == 'q' || kind == 'l' || kind == 'i';
    const int dimensions = rows == 1 ? 1 : 2;
    if (!is_right || buffer.itemsize != sizeof(Number) || buffer.ndim != dimensions ||
        buffer.shape[dimensions - 1] != static_cast<Py_ssize_t>(count) || (dimensions == 2 && buffer.shape[0] != static_cast<Py_ssize_t>(rows))) {
        refuse(field, buffer.ndim == 0 ? 0 : buffer.shape[buffer.ndim - 1],
               std::to_string(rows) + " x " + std::to_string(count) + " " + kind_of<Number>());
    }
    const auto* const numbers = static_cast<const Number*>(buffer.buf);
    return {numbers, numbers + rows * count};
}

void bind_core(nanobind::module_& module);
void bind_inbound(nanobind::module_& module);

}  // namespace kv
