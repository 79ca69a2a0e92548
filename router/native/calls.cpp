// Writes the header lines of a call to a worker, and those that the router adds to the answer. All calls keep the GIL.
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

    // The header lines of the call that carries out a verdict, some of them its client's; and the lines for the answer.
    nb::object lines(const nb::handle& verdict, const nb::dict& client) const {
        static const Name request{"request"}, request_id{"request_id"}, decision_id{"decision_id"}, winner{"winner"}, overlap{"overlap_blocks"};
        static const std::pair<nb::handle, std::size_t> passed_on[] = {
            {bytes("traceparent").release(), kTraceBytesMax}, {bytes("tracestate").release(), kTraceBytesMax}, {bytes("x-session-id").release(), SIZE_MAX}};
        const nb::object route = get(verdict, request), id = get(route, request_id), decision = get(route, decision_id);
        const auto rank = nb::cast<nb::tuple>(get(verdict, winner));
        const nb::object worker = rank[0];
        std::array<Text, 4 + 4 * std::size(passed_on)> call{first_, "x-request-id: ", text_of(id)};  // the last parts may stay empty
        std::size_t count = 3;
        for (const auto& [name, most] : passed_on) {
            PyObject* const found = PyDict_GetItemWithError(client.ptr(), name.ptr());
            const Text value = found == nullptr ? Text() : view_of(nb::cast<nb::bytes>(nb::handle(found)));
            if (found != nullptr && value.size() <= most) {
                for (const Text each : {Text("\r\n"), view_of(nb::borrow<nb::bytes>(name)), Text(": "), value}) {
                    call[count++] = each;
                }
            }
        }
        call[count] = "\r\n";
        const Digits dp_rank(nb::cast<std::int64_t>(rank[1])), overlap_blocks(nb::cast<std::int64_t>(get(verdict, overlap)));
        return nb::make_tuple(joined(call),
                              joined({"x-request-id: ", text_of(id), "\r\nx-decision-id: ", text_of(decision), "\r\nx-worker-instance-id: ",
                                      text_of(worker), "\r\nx-dp-rank: ", dp_rank, "\r\nx-overlap-blocks: ", overlap_blocks, "\r\n"}));
    }

private:
    std::string first_;
};

}  // namespace

void bind_calls(nb::module_& module) {
    nb::class_<CallLines>(module, "CallLines").def(nb::init<const nb::bytes&>(), nb::arg()).def("lines", &CallLines::lines, nb::arg(), nb::arg());
}

}  // namespace kv::http
