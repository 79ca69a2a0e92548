// Parses heads of HTTP/1.1 requests: the grammar, and its sources, are in `router/http/heads.py`. All calls keep the GIL.
#include <tuple>

#include <nanobind/stl/string.h>

#include "fields.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::http {

namespace {

constexpr std::size_t kShownMax = 100;

// Types that `router/http/heads.py` names when it is imported; they live as long as the process.
PyObject *request_head, *malformed_error;

nb::object ascii(Text of) { return checked(PyUnicode_DecodeLatin1(of.data(), static_cast<Py_ssize_t>(of.size()), nullptr)); }

// A request's path and query; `made` holds the text if it is not a part of the target.
Text path_of(Text method, Text target, std::string& made) {
    if (target.empty() || !all(target, kVisible)) {
        malformed(400, "target: found " + shown(target) + ", allowed visible ASCII");
    }
    if (target[0] == '/' || (target == "*" && method == "OPTIONS")) {
        return target;
    }
    const std::size_t authority = same(target.substr(0, 7), "http://") ? 7 : same(target.substr(0, 8), "https://") ? 8 : Text::npos;
    if (authority != Text::npos) {
        const std::size_t end = std::min(target.find_first_of("/?#@", authority), target.size());
        if (end > authority && (end == target.size() || target[end] == '/' || target[end] == '?')) {
            return made = (end < target.size() && target[end] == '/' ? "" : "/") + std::string(target.substr(end));
        }
    }
    malformed(400, "target: found " + shown(target) + ", allowed /path or http://authority/path");
}

// The method, the path with its query, and whether it is HTTP/1.1.
std::tuple<Text, Text, bool> request_line(Text line, std::string& made) {
    const std::size_t first = line.find(' '), second = line.find(' ', first + 1);
    if (first == Text::npos || second == Text::npos || line.find(' ', second + 1) != Text::npos) {
        malformed(400, "request line: found " + shown(line) + ", allowed method, target, version, one space between");
    }
    const Text method = line.substr(0, first), version = line.substr(second + 1);
    if (version != "HTTP/1.1" && version != "HTTP/1.0") {
        const auto is_digit = [version](std::size_t at) { return version[at] >= '0' && version[at] <= '9'; };
        const bool is_another = version.size() == 8 && version.substr(0, 5) == "HTTP/" && is_digit(5) && version[6] == '.' && is_digit(7);
        malformed(is_another ? 505 : 400, "version: found " + shown(version) + ", allowed HTTP/1.1 and HTTP/1.0");
    }
    if (method.empty() || !all(method, kToken)) {
        malformed(400, "method: found " + shown(method) + ", allowed a token");
    }
    if (method == "CONNECT") {
        malformed(501, "method: CONNECT is not served");
    }
    return {method, path_of(method, line.substr(first + 1, second - first - 1), made), version == "HTTP/1.1"};
}

// How many bytes the empty lines before a request have (RFC 9112, 2.2); a last CR may begin another one.
std::size_t empty_lines(Text data) {
    std::size_t at = 0;
    for (; at < data.size() && (data[at] == '\r' || data[at] == '\n'); at += 2) {
        if (data[at] == '\n' || (at + 1 < data.size() && data[at + 1] != '\n')) {
            malformed(400, "request line: found a bare CR or LF before it, allowed CRLF");
        }
        if (at + 1 == data.size()) {
            break;
        }
    }
    return at;
}

// Reads requests of clients; what they have in common is given once, to the constructor.
class RequestReader {
public:
    RequestReader(nb::object exchange, nb::object hosts, nb::bytes lines, std::size_t body_bytes_max)
        : exchange_(std::move(exchange)), hosts_(std::move(hosts)), lines_(std::move(lines)), body_bytes_max_(body_bytes_max) {}

    // Returns what was read, and what serves it: None twice (no head yet), a `RequestHead` and None, or an `Exchange` and one of `posts`.
    nb::tuple read(const nb::bytes& given, const nb::object& client, const nb::object& began_s, const nb::dict& posts) const {
        Text data = view_of(given), line, lines;
        const std::size_t before = empty_lines(data);
        data.remove_prefix(before);
        if (!cut_head(data, before, 431, line, lines)) {
            return nb::make_tuple(nb::none(), nb::none());
        }
        std::string made;
        const auto [method, target, http_1_1] = request_line(line, made);
        Fields fields;
        fields.read(lines, 431, [](const nb::object&, Text) {});
        if (http_1_1 && !fields.has(kHost)) {
            malformed(400, "host: found none, one is needed");
        }
        const std::int64_t body_bytes = fields.body_bytes(http_1_1);
        const Text content = fields.value(kContent), expect = fields.value(kExpect);
        if (fields.has(kContent) && !same(content, "identity")) {
            malformed(415, "content-encoding: found " + shown(content) + ", allowed identity");
        }
        if (fields.has(kExpect) && !same(expect, "100-continue")) {
            malformed(417, "expect: found " + shown(expect) + ", allowed 100-continue");
        }
        const Text behind = data.substr(line.size() + lines.size() + 4);
        const std::size_t mark = std::min(target.find('?'), target.size());
        const std::size_t length = static_cast<std::size_t>(std::max<std::int64_t>(body_bytes, 0));
        const bool is_whole = body_bytes != kChunked && length <= behind.size();
        const bool keep_alive = http_1_1 && !has_token(fields.value(kConnection), "close");
        static const nb::handle post = ascii("POST").release();
        const nb::object method_text = method == "POST" ? nb::borrow(post) : ascii(method), path = ascii(target.substr(0, mark));
        const nb::object query = ascii(target.substr(std::min(mark + 1, target.size())));
        const nb::object body = is_whole ? bytes(behind.substr(0, length)) : nb::none();
        PyObject* const serves = PyDict_GetItemWithError(posts.ptr(), path.ptr());
        if (serves != nullptr && !checks_all && method == "POST" && keep_alive && is_whole && length == behind.size() && length <= body_bytes_max_ &&
            !fields.has(kOrigin) && contains(hosts_, fields.object(kHost))) {
            const std::array<PyObject*, 8> of{client.ptr(),         method_text.ptr(), path.ptr(),    query.ptr(),
                                              fields.headers.ptr(), body.ptr(),        began_s.ptr(), lines_.ptr()};
            return nb::make_tuple(checked(PyObject_Vectorcall(exchange_.ptr(), of.data(), of.size(), nullptr)), nb::borrow(serves));
        }
        const nb::object head = named(request_head, {method_text, path, query, fields.headers, nb::cast(body_bytes == kUntilClose ? 0 : body_bytes),
                                    nb::cast(keep_alive), nb::cast(http_1_1), body, bytes(is_whole ? behind.substr(length) : behind)});
        return nb::make_tuple(head, nb::none());
    }

    bool checks_all = false;  // true: `read` makes no `Exchange`, so that Python checks every request

private:
    nb::object exchange_, hosts_;  // the type `Exchange`, a set
    nb::bytes lines_;
    std::size_t body_bytes_max_;
};

}  // namespace

PyObject* answer_head;

std::string shown(Text found) {
    const nb::object repr = checked(PyObject_Repr(ascii(found.substr(0, kShownMax)).ptr()));
    return nb::cast<std::string>(repr);
}

void malformed(int status, const std::string& message) {
    PyErr_SetObject(malformed_error, nb::make_tuple(status, nb::str(message.data(), message.size())).ptr());
    throw nb::python_error();
}

void bind_heads(nb::module_& module) {
    module.def("name_heads",
               [](nb::object request_type, nb::object answer_type, nb::object error) {
                   request_head = request_type.release().ptr();
                   answer_head = answer_type.release().ptr();
                   malformed_error = error.release().ptr();
               },
               "request_head"_a, "answer_head"_a, "malformed"_a);
    nb::class_<RequestReader>(module, "RequestReader")
        .def(nb::init<nb::object, nb::object, nb::bytes, std::size_t>(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("read", &RequestReader::read, nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def_rw("checks_all", &RequestReader::checks_all);
}

}  // namespace kv::http
