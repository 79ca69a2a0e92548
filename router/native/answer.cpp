// Reads what a complete answer says of itself: its token counts, near the end of a body that is otherwise passed on unread, and the
// header with its decode time (`kv_protocol/decode_time.py`).
//
//     "usage": {"prompt_tokens": <n>, "completion_tokens": <n>, "prompt_tokens_details": {"cached_tokens": <n>}}
//     "usage": {"input_tokens": <n>, "output_tokens": <n>, "input_tokens_details": {"cached_tokens": <n>}}  of a response
//     "usage": {"prompt_tokens": <n>}                                                                      of embeddings
//
// A whole answer and a stream state usage last. If it comes several times (a stream may state it with every event), the last one counts.
// Source: the OpenAI API reference, "The chat completion object", "The response object", "Create embeddings".
#include "answer.hpp"

#include <nanobind/stl/optional.h>

#include "http.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::http {

namespace {

constexpr Text kUsage = "\"usage\"", kKeyEnd = "_tokens\"", kSpace = " \t\n\r\f\v";
constexpr std::size_t kCountDigitsMax = 10;
using Count = std::optional<i64>;

// The number after a colon; none if there are no digits, or too many.
Count count_at(Text tail, std::size_t at) {
    at = std::min(tail.find_first_not_of(kSpace, at), tail.size());
    if (at == tail.size() || tail[at] != ':') {
        return {};
    }
    const std::size_t begin = std::min(tail.find_first_not_of(kSpace, at + 1), tail.size());
    const std::size_t end = std::min(tail.find_first_not_of("0123456789", begin), tail.size());
    return end == begin || end - begin > kCountDigitsMax ? std::nullopt : std::optional(std::stoll(std::string(tail.substr(begin, end - begin))));
}

// Reads the last number of each key after the last `"usage"`.
void read_usage(Text tail, Answer& to) {
    for (std::size_t at = std::min(tail.rfind(kUsage), tail.size()); (at = tail.find(kKeyEnd, at)) != Text::npos; at += kKeyEnd.size()) {
        const std::size_t quote = tail.rfind('"', at);
        const Text key = quote == Text::npos ? Text() : tail.substr(quote + 1, at - quote - 1);
        Count* const of = key == "completion" || key == "output" ? &to.output_tokens
                          : key == "cached"                      ? &to.cached_tokens
                          : key == "prompt" || key == "input"    ? &to.input_tokens
                                                                 : nullptr;
        if (const auto found = count_at(tail, at + kKeyEnd.size()); of != nullptr && found) {
            *of = found;
        }
    }
}

// A header's milliseconds as seconds: at most nine digits, and six after a point; none if it is anything else.
std::optional<double> decode_s_in(const nb::dict& headers) {
    static const nb::handle name = PyBytes_FromString("x-kv-decode-ms");
    PyObject* const found = PyDict_GetItemWithError(headers.ptr(), name.ptr());
    if (found == nullptr) {
        return {};
    }
    const std::string text(view_of(nb::borrow<nb::bytes>(found)));
    const std::size_t point = text.find('.'), whole = std::min(point, text.size()), rest = text.size() - whole;
    const bool is_plain = text.find_first_not_of("0123456789.") == std::string::npos && text.rfind('.') == point;
    const bool is_number = is_plain && whole >= 1 && whole <= 9 && rest != 1 && rest <= 7;
    return is_number ? std::optional(PyOS_string_to_double(text.c_str(), nullptr, nullptr) / 1000.0) : std::nullopt;
}

// `tail`: a body's end. `later_events` came after a stream's first bytes, its first `tokens_before` by another worker.
Answer answer_of(const nb::bytes& tail, const nb::dict& headers, bool is_streamed, bool has_begun, i64 later_events, i64 tokens_before,
                 bool has_one_choice) {
    Answer made;
    read_usage(view_of(tail).substr(tail.size() - std::min(tail.size(), kTailBytes)), made);
    made.later_tokens = has_one_choice ? later_events : 0;
    if (has_one_choice && made.output_tokens.has_value() && (later_events != 0 || !is_streamed)) {
        made.later_tokens = std::max<i64>(0, *made.output_tokens - tokens_before - 1);
    }
    if (!is_streamed) {
        made.decode_s = decode_s_in(headers);
    }
    made.came_whole = tail.size() != 0 && !has_begun;
    return made;
}

}  // namespace

void bind_answers(nb::module_& module) {
    nb::class_<Answer>(module, "Answer")
        .def(nb::init<Count, Count, Count, Count, std::optional<double>, bool>(), "output_tokens"_a = nb::none(), "cached_tokens"_a = nb::none(),
             "input_tokens"_a = nb::none(), nb::kw_only(), "later_tokens"_a = nb::none(), "decode_s"_a = nb::none(), "came_whole"_a = false)
        .def_ro("output_tokens", &Answer::output_tokens)
        .def_ro("cached_tokens", &Answer::cached_tokens)
        .def_ro("input_tokens", &Answer::input_tokens)
        .def_ro("later_tokens", &Answer::later_tokens)
        .def_ro("decode_s", &Answer::decode_s)
        .def_ro("came_whole", &Answer::came_whole);
    module.def("answer_of", &answer_of, "tail"_a, "headers"_a, "is_streamed"_a, "has_begun"_a, "later_events"_a = 0, "tokens_before"_a = 0,
               "has_one_choice"_a = false);
    module.def("latency_of", &latency_of, "first_s"_a.none(), "duration_s"_a, "later_tokens"_a, "decode_s"_a.none(), nb::kw_only(), "is_streamed"_a);
}

}  // namespace kv::http
