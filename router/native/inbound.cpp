// What router/request/reading.py asks about a request: where in the body its prompt is, and whether it has only what most requests have.
// All calls keep the GIL.
#include <algorithm>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "http.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

class PlainRequests {
public:
    // A request is plain if it has the same values at all `keys` as the sample of its type, and if it has none of the `headers`.
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

using http::Text;
constexpr Text kSpace = " \t\n\r";

// Walks over JSON, and checks no more of it than it needs to find where values end.
class Walk {
public:
    explicit Walk(Text json) : json_(json) {}

    std::size_t at = 0;

    // Skips spaces, and returns the next byte; 0: there is none.
    char next() {
        at = std::min(json_.find_first_not_of(kSpace, at), json_.size());
        return at < json_.size() ? json_[at] : '\0';
    }
    bool skip(char byte) {
        const bool is_next = next() == byte;
        at += is_next;
        return is_next;
    }
    // Skips a value; false: it does not end.
    bool value() {
        std::size_t depth = 0;
        do {
            const char begin = next();
            if (begin == '"') {
                if (!text()) {
                    return false;
                }
            } else if (begin == '[' || begin == '{' || begin == ']' || begin == '}') {
                depth += begin == '[' || begin == '{' ? 1 : static_cast<std::size_t>(-1);
                ++at;
            } else if (begin == '\0') {
                return false;
            } else {
                const auto ends = [depth](char byte) {  // a number or a word; in a list, all up to a quote or bracket
                    return depth == 0 ? byte == ',' || byte == '}' : byte == '"' || (byte | 0x20) == '{' || (byte | 0x20) == '}';
                };
                at = static_cast<std::size_t>(std::find_if(json_.begin() + static_cast<std::ptrdiff_t>(at), json_.end(), ends) - json_.begin());
            }
        } while (depth != 0);
        return true;
    }
    // Skips a string, at its first quote: it ends at a quote with an even number of backslashes before it.
    bool text() {
        for (std::size_t end = at;;) {
            end = json_.find('"', end + 1);
            if (end == Text::npos) {
                return false;
            }
            const std::size_t before = json_.find_last_not_of('\\', end - 1);
            if ((end - 1 - before) % 2 == 0) {
                at = end + 1;
                return true;
            }
        }
    }

private:
    Text json_;
};

// Finds the prompt in a body: returns its key, where its JSON begins and ends, and the body with `0` in its place. None: the body has no
// prompt, or several, or is no object.
nb::object prompt_in(const nb::handle& body) {
    const Text json = PyBytes_Check(body.ptr()) ? Text(PyBytes_AS_STRING(body.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(body.ptr())))
                                                : Text(PyByteArray_AS_STRING(body.ptr()), static_cast<std::size_t>(PyByteArray_GET_SIZE(body.ptr())));
    Walk walk(json);
    Text key;
    std::size_t begin = 0, end = 0;
    bool is_object = walk.skip('{');
    do {
        is_object = is_object && walk.next() == '"';
        const std::size_t name_at = walk.at + 1;
        is_object = is_object && walk.text();
        const Text name = is_object ? json.substr(name_at, walk.at - 1 - name_at) : Text();
        is_object = is_object && walk.skip(':');
        walk.next();
        const std::size_t value_at = walk.at;
        is_object = is_object && walk.value();
        if (is_object && (name == "messages" || name == "prompt" || name == "input")) {
            is_object = key.empty();
            key = name;
            begin = value_at;
            end = json.find_last_not_of(kSpace, walk.at - 1) + 1;  // `value` skips spaces behind a word, too
        }
    } while (is_object && walk.skip(','));
    if (!is_object || key.empty() || !walk.skip('}')) {
        return nb::none();
    }
    return nb::make_tuple(nb::str(key.data(), key.size()), begin, end, http::joined({json.substr(0, begin), "0", json.substr(end)}));
}

}  // namespace

void bind_inbound(nb::module_& module) {
    module.def("prompt_in", &prompt_in, nb::arg());
    nb::class_<PlainRequests>(module, "PlainRequests")
        .def(nb::init<std::vector<nb::object>, const nb::tuple&, std::vector<nb::object>>(), nb::arg(), nb::arg(), nb::arg())
        .def("have", &PlainRequests::have, nb::arg(), nb::arg());
}

}  // namespace kv
