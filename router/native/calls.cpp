// Writes the header lines of a call to a worker, and those that the router adds to its answer. All calls keep the GIL.
#include <utility>

#include "bindings.hpp"
#include "http.hpp"

namespace nb = nanobind;

namespace kv::http {

namespace {

constexpr std::size_t kTraceBytesMax = 1024;  // longer trace headers are dropped: workers refuse 8,190 bytes

// `first` are the lines with which each call begins.
class CallLines {
public:
    explicit CallLines(const nb::bytes& first) : first_(view_of(first)) {}

    // The lines of the call that carries out a verdict, with some headers of its client, and the lines of its answer.
    nb::object lines(const nb::handle& verdict, const nb::dict& client) const {
        static const Name request{"request"}, request_id{"request_id"}, decision_id{"decision_id"}, winner{"winner"}, overlap{"overlap_blocks"};
        static const std::pair<nb::handle, std::size_t> passed_on[] = {
            {bytes("traceparent").release(), kTraceBytesMax}, {bytes("tracestate").release(), kTraceBytesMax}, {bytes("x-session-id").release(), SIZE_MAX}};
        const nb::object route = get(verdict, request), id = get(route, request_id), decision = get(route, decision_id);
        const auto rank = nb::cast<nb::tuple>(get(verdict, winner));
        const nb::object worker = rank[0];
        std::string call = first_, answer = "x-request-id: ";
        call.append("x-request-id: ").append(text_of(id)).append("\r\n");
        for (const auto& [name, most] : passed_on) {
            PyObject* const found = PyDict_GetItemWithError(client.ptr(), name.ptr());
            if (found == nullptr) {
                continue;
            }
            const auto value = nb::cast<nb::bytes>(nb::handle(found));
            if (value.size() <= most) {
                call.append(view_of(nb::borrow<nb::bytes>(name))).append(": ").append(view_of(value)).append("\r\n");
            }
        }
        answer.append(text_of(id)).append("\r\nx-decision-id: ").append(text_of(decision)).append("\r\nx-worker-instance-id: ").append(text_of(worker));
        answer.append("\r\nx-dp-rank: ").append(std::to_string(nb::cast<std::int64_t>(rank[1])));
        answer.append("\r\nx-overlap-blocks: ").append(std::to_string(nb::cast<std::int64_t>(get(verdict, overlap)))).append("\r\n");
        return nb::make_tuple(bytes(call), bytes(answer));
    }

private:
    std::string first_;
};

}  // namespace

void bind_calls(nb::module_& module) {
    nb::class_<CallLines>(module, "CallLines").def(nb::init<const nb::bytes&>(), nb::arg()).def("lines", &CallLines::lines, nb::arg(), nb::arg());
}

}  // namespace kv::http
