// Tells plain requests, which state no more than most do (router/request/reading.py). All calls keep the GIL.
#include <algorithm>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

class PlainRequests {
public:
    // A request is plain if a sample is of its type and has its values at all `keys`, and if it has none of the `headers`.
    PlainRequests(std::vector<nb::object> samples, const nb::tuple& keys, std::vector<nb::object> headers)
        : samples_(std::move(samples)), headers_(std::move(headers)) {
        for (const nb::object& sample : samples_) {
            std::vector<Slot>& slots = slots_.emplace_back();
            for (const nb::handle key : keys) {
                const nb::object member = nb::getattr(sample.type(), key, nb::none());
                if (Py_IS_TYPE(member.ptr(), &PyMemberDescr_Type)) {  // it lies in a slot
                    slots.emplace_back(sample.type(), nb::cast<const char*>(key));
                }
            }
        }
    }

    bool have(const nb::handle& request, const nb::dict& headers) const {
        for (std::size_t at = 0; at < slots_.size(); ++at) {
            const nb::object& sample = samples_[at];
            if (Py_IS_TYPE(request.ptr(), Py_TYPE(sample.ptr()))) {
                const auto is_same = [&](const Slot& slot) { return slot.of(request).is(slot.of(sample)); };
                const auto is_given = [&](const nb::handle& name) { return PyDict_Contains(headers.ptr(), name.ptr()) != 0; };
                return std::all_of(slots_[at].begin(), slots_[at].end(), is_same) && std::none_of(headers_.begin(), headers_.end(), is_given);
            }
        }
        return false;
    }

private:
    std::vector<nb::object> samples_, headers_;
    std::vector<std::vector<Slot>> slots_;  // of each sample's keys
};

}  // namespace

void bind_plain(nb::module_& module) {
    nb::class_<PlainRequests>(module, "PlainRequests")
        .def(nb::init<std::vector<nb::object>, const nb::tuple&, std::vector<nb::object>>(), nb::arg(), nb::arg(), nb::arg())
        .def("have", &PlainRequests::have, nb::arg(), nb::arg());
}

}  // namespace kv
