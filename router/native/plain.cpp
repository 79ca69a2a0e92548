// Tells plain requests, which state no more than most do (router/request/reading.py). All calls keep the GIL.
#include <structmember.h>

#include <algorithm>
#include <vector>

#include "bindings.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

PyObject* field(const nb::handle& of, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(of.ptr()) + offset);
}

// The type of a request with fields in slots, which `sample` has as a plain one has them.
struct Kind {
    Kind(const nb::handle& of, const nb::tuple& keys) : sample(nb::borrow(of)) {
        for (const nb::handle name : keys) {
            if (nb::hasattr(of.type(), name)) {
                const nb::object member = nb::getattr(of.type(), name);
                if (!Py_IS_TYPE(member.ptr(), &PyMemberDescr_Type)) {
                    throw nb::type_error("samples: allowed are types whose fields lie in slots");
                }
                offsets.push_back(reinterpret_cast<const PyMemberDescrObject*>(member.ptr())->d_member->offset);
            }
        }
    }
    bool is_like(const nb::handle& request) const {
        return Py_IS_TYPE(request.ptr(), Py_TYPE(sample.ptr())) && std::all_of(offsets.begin(), offsets.end(), [&](Py_ssize_t offset) {
                   return field(request, offset) == field(sample, offset);
               });
    }
    nb::object sample;
    std::vector<Py_ssize_t> offsets;
};

class PlainRequests {
public:
    PlainRequests(const nb::tuple& samples, const nb::tuple& keys, const nb::iterable& headers) {
        for (const nb::handle name : headers) {
            headers_.push_back(nb::borrow(name));
        }
        for (const nb::handle sample : samples) {
            kinds_.emplace_back(sample, keys);
        }
    }

    bool have(const nb::handle& request, const nb::dict& headers) const {
        return std::any_of(kinds_.begin(), kinds_.end(), [&](const Kind& kind) { return kind.is_like(request); }) &&
               std::none_of(headers_.begin(), headers_.end(), [&](const nb::object& name) { return PyDict_Contains(headers.ptr(), name.ptr()) != 0; });
    }

private:
    std::vector<Kind> kinds_;
    std::vector<nb::object> headers_;
};

}  // namespace

void bind_plain(nb::module_& module) {
    nb::class_<PlainRequests>(module, "PlainRequests")
        .def(nb::init<const nb::tuple&, const nb::tuple&, const nb::iterable&>(), nb::arg(), nb::arg(), nb::arg())
        .def("have", &PlainRequests::have, nb::arg(), nb::arg());
}

}  // namespace kv
