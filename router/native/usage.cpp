// Reads the token counts at the end of an answer: what they are, and its sources, are in `router/http/usage.py`.
#include "http.hpp"

#include <algorithm>
#include <optional>

#include <nanobind/stl/optional.h>

namespace nb = nanobind;

namespace kv::http {

namespace {

constexpr Text kUsage = "\"usage\"", kKeyEnd = "_tokens\"", kSpace = " \t\n\r\f\v";
constexpr std::size_t kCountDigitsMax = 10;

// The digits behind a colon; nothing where there are none, or too many.
std::optional<std::int64_t> count_at(Text tail, std::size_t at) {
    at = std::min(tail.find_first_not_of(kSpace, at), tail.size());
    if (at == tail.size() || tail[at] != ':') {
        return {};
    }
    const std::size_t begin = std::min(tail.find_first_not_of(kSpace, at + 1), tail.size());
    const std::size_t end = std::min(tail.find_first_not_of("0123456789", begin), tail.size());
    return end == begin || end - begin > kCountDigitsMax ? std::nullopt : std::optional(std::stoll(std::string(tail.substr(begin, end - begin))));
}

PyObject* usage_type;  // of `router/http/usage.py`, which names it when it is imported: as long as the process

// Output, cached and input tokens; the last ones of each that are stated behind the last `"usage"`.
nb::object usage_in(const nb::bytes& given) {
    std::optional<std::int64_t> output, cached, input;
    const Text tail = view_of(given);
    for (std::size_t at = std::min(tail.rfind(kUsage), tail.size()); (at = tail.find(kKeyEnd, at)) != Text::npos; at += kKeyEnd.size()) {
        const std::size_t quote = tail.rfind('"', at);
        const Text key = quote == Text::npos ? Text() : tail.substr(quote + 1, at - quote - 1);
        std::optional<std::int64_t>* const of = key == "completion" || key == "output" ? &output
                                                : key == "cached"                      ? &cached
                                                : key == "prompt" || key == "input"    ? &input
                                                                                       : nullptr;
        if (const auto found = count_at(tail, at + kKeyEnd.size()); of != nullptr && found) {
            *of = found;
        }
    }
    return nb::handle(usage_type)(output, cached, input);
}

}  // namespace

void bind_usage(nb::module_& module) {
    module.def("name_usage", [](nb::object usage) { usage_type = usage.release().ptr(); }, nb::arg());
    module.def("usage_in", &usage_in, nb::arg());
}

}  // namespace kv::http
