// What the extension's bindings share: casters, views of texts, slots, and errors in the project's wording.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include "core.hpp"

namespace kv {

using Seconds = std::optional<double>;

inline Seconds seconds_of(const nanobind::handle& value) { return value.is_none() ? Seconds{} : Seconds(nanobind::cast<double>(value)); }

inline nanobind::bytes bytes_of(std::string_view packed) { return nanobind::bytes(packed.data(), packed.size()); }

[[noreturn]] inline void refuse(const std::string& field, i64 found, const std::string& allowed) {
    throw nanobind::value_error((field + ": found " + std::to_string(found) + ", allowed " + allowed).c_str());
}

// The text of a `str` as UTF-8; it is valid as long as the `str` lives.
inline std::string_view text_of(const nanobind::handle& text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) {
        throw nanobind::python_error();
    }
    return {data, static_cast<std::size_t>(size)};
}

// A field that a type keeps in a slot, because it has `__slots__` or is a `msgspec.Struct`.
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

void bind_decisions(nanobind::module_& module, nanobind::class_<Core>& core);
void bind_leases(nanobind::module_& module);
void bind_core(nanobind::module_& module);
void bind_inbound(nanobind::module_& module);

}  // namespace kv
