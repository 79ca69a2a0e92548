// Parses heads of HTTP/1.1 messages: the grammar, and its sources, are in `router/http/heads.py`. All calls keep the GIL.
#include "http.hpp"

#include <algorithm>
#include <initializer_list>
#include <tuple>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::http {

namespace {

constexpr std::size_t kHeadBytesMax = 32 << 10, kLinesMax = 100, kDigitsMax = 18, kShownMax = 100;
constexpr std::size_t kJoinedBytesMax = 16 << 10;

// Of `router/http/heads.py`, which names them when it is imported: as long as the process.
PyObject *request_head, *answer_head, *malformed_error;

// Headers that say how a message is read, and who may send it. Those before `kConnection` may come once.
enum Known : std::size_t { kHost, kLength, kCoding, kContent, kExpect, kConnection, kOrigin, kType, kKnownCount };
constexpr std::array<Text, kKnownCount> kNames{"host",   "content-length", "transfer-encoding", "content-encoding",
                                               "expect", "connection",     "origin",            "content-type"};
constexpr Text kStream = "text/event-stream";

nb::object ascii(Text of) { return checked(PyUnicode_DecodeLatin1(of.data(), static_cast<Py_ssize_t>(of.size()), nullptr)); }

// A named tuple of these fields.
nb::object named(PyObject* type, std::initializer_list<nb::object> fields) {
    auto* const of = reinterpret_cast<PyTypeObject*>(type);
    nb::object made = checked(of->tp_alloc(of, static_cast<Py_ssize_t>(fields.size())));
    Py_ssize_t at = 0;
    for (const nb::object& field : fields) {
        PyTuple_SET_ITEM(made.ptr(), at++, field.inc_ref().ptr());
    }
    return made;
}

bool contains(const nb::object& set, const nb::object& what) {
    const int found = PySet_Contains(set.ptr(), what.ptr());
    if (found < 0) {
        throw nb::python_error();
    }
    return found != 0;
}

Text stripped(Text of) {
    const std::size_t begin = std::min(of.find_first_not_of(" \t"), of.size());
    return of.substr(begin, of.find_last_not_of(" \t") + 1 - begin);
}

// Calls `found` with each member of a list.
template <typename Found>
void each_token(Text list, Found found) {
    for (std::size_t at = 0, end = 0; end != Text::npos; at = end + 1) {
        end = list.find(',', at);
        found(stripped(list.substr(at, end == Text::npos ? end : end - at)));
    }
}

bool has_token(Text list, Text token) {
    bool has = false;
    each_token(list, [&](Text each) { has = has || same(each, token); });
    return has;
}

// The header lines of a head, and what those of them say that frame the message.
struct Fields {
    nb::dict headers;
    std::array<std::string, kKnownCount> values;
    std::array<bool, kKnownCount> has{};

    // `each` gets every name, as an object and as it was sent, and its line.
    template <typename Each>
    void read(Text lines, int status_of_many, Each each) {
        std::size_t count = 0;
        for (std::size_t at = 0; at < lines.size(); at = lines.find("\r\n", at) + 2) {
            ++count;
        }
        if (count > kLinesMax) {
            malformed(status_of_many, "headers: found " + std::to_string(count) + " lines, allowed " + std::to_string(kLinesMax));
        }
        for (std::size_t at = 0, end = 0; at < lines.size(); at = end + 2) {
            end = lines.find("\r\n", at);
            const Text line = lines.substr(at, end - at);
            const std::size_t name_end = span(line, 0, kToken);
            if (name_end == 0 || name_end == line.size() || line[name_end] != ':' || !all(line.substr(name_end + 1), kText)) {
                malformed(400, "headers: found " + shown(line) + ", allowed name: value, without control characters");
            }
            each(add(line.substr(0, name_end), stripped(line.substr(name_end + 1))), line);
        }
    }

    // The body's length in bytes, `kChunked` or `kUntilClose`.
    std::int64_t body_bytes(bool http_1_1) const {
        if (has[kCoding]) {
            if (has[kLength]) {
                malformed(400, "transfer-encoding: found beside content-length, allowed alone");
            }
            if (!http_1_1) {
                malformed(400, "transfer-encoding: found in HTTP/1.0, allowed in HTTP/1.1");
            }
            if (!same(values[kCoding], "chunked")) {
                malformed(501, "transfer-encoding: found " + shown(values[kCoding]) + ", allowed chunked");
            }
            return kChunked;
        }
        if (!has[kLength]) {
            return kUntilClose;
        }
        const std::string& digits = values[kLength];
        if (digits.empty() || digits.size() > kDigitsMax || digits.find_first_not_of("0123456789") != Text::npos) {
            malformed(400, "content-length: found " + shown(digits) + ", allowed 1 to " + std::to_string(kDigitsMax) + " digits");
        }
        return std::stoll(digits);
    }

private:
    nb::object add(Text sent, Text value) {
        std::string letters(sent);
        std::transform(letters.begin(), letters.end(), letters.begin(), lower);
        nb::object name = bytes(letters);
        PyObject* const key = name.ptr();
        const auto known = static_cast<std::size_t>(std::find(kNames.begin(), kNames.end(), letters) - kNames.begin());
        const Py_ssize_t count = PyDict_Size(headers.ptr());
        PyObject* const before = PyDict_SetDefault(headers.ptr(), key, bytes(value).ptr());
        std::string joined;
        if (before != nullptr && PyDict_Size(headers.ptr()) == count) {
            if (known < kConnection) {
                malformed(400, std::string(kNames[known]) + ": found it twice, allowed once");
            }
            value = joined = std::string(view_of(nb::borrow<nb::bytes>(before))).append(", ").append(value);
            PyDict_SetItem(headers.ptr(), key, bytes(value).ptr());
        }
        if (PyErr_Occurred() != nullptr) {
            throw nb::python_error();
        }
        if (known < kKnownCount) {
            has[known] = true;
            values[known] = value;
        }
        return name;
    }
};

// A request's path and query.
std::string path_of(Text method, Text target) {
    if (target.empty() || !all(target, kVisible)) {
        malformed(400, "target: found " + shown(target) + ", allowed visible ASCII");
    }
    if (target[0] == '/' || (target == "*" && method == "OPTIONS")) {
        return std::string(target);
    }
    const std::size_t authority = same(target.substr(0, 7), "http://") ? 7 : same(target.substr(0, 8), "https://") ? 8 : Text::npos;
    if (authority != Text::npos) {
        const std::size_t end = std::min(target.find_first_of("/?#@", authority), target.size());
        if (end > authority && (end == target.size() || target[end] == '/' || target[end] == '?')) {
            return (end < target.size() && target[end] == '/' ? "" : "/") + std::string(target.substr(end));
        }
    }
    malformed(400, "target: found " + shown(target) + ", allowed /path or http://authority/path");
}

// The method, the path with its query, and whether it is HTTP/1.1.
std::tuple<Text, std::string, bool> request_line(Text line) {
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
    return {method, path_of(method, line.substr(first + 1, second - first - 1)), version == "HTTP/1.1"};
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

// The head at the beginning, behind `empty_bytes`, without its last two CRLF; false where it is not complete.
bool cut_head(Text data, std::size_t empty_bytes, int status_of_long, Text& start_line, Text& lines) {
    const std::size_t end = data.substr(0, kHeadBytesMax).find("\r\n\r\n");
    if (end == Text::npos) {
        if (empty_bytes + data.size() >= kHeadBytesMax) {
            const std::string most = std::to_string(kHeadBytesMax);
            malformed(status_of_long, "head: found more than " + most + " bytes, allowed " + most);
        }
        return false;
    }
    const std::size_t line_end = data.find("\r\n");
    start_line = data.substr(0, line_end);
    lines = data.substr(line_end + 2, end - line_end);  // each with its CRLF
    return true;
}

// Reads requests of clients; what is known of all of them is given once.
class RequestReader {
public:
    RequestReader(nb::object exchange, nb::object hosts, nb::bytes lines, std::size_t body_bytes_max)
        : exchange_(std::move(exchange)), hosts_(std::move(hosts)), lines_(std::move(lines)), body_bytes_max_(body_bytes_max) {}

    // What was read, and what serves it: None and None, a `RequestHead` and None, or an `Exchange` and one of `posts`.
    nb::tuple read(const nb::bytes& given, const nb::object& client, const nb::object& began_s, const nb::dict& posts) const {
        Text data = view_of(given), line, lines;
        const std::size_t before = empty_lines(data);
        data.remove_prefix(before);
        if (!cut_head(data, before, 431, line, lines)) {
            return nb::make_tuple(nb::none(), nb::none());
        }
        const auto [method, path_and_query, http_1_1] = request_line(line);
        Fields fields;
        fields.read(lines, 431, [](const nb::object&, Text) {});
        if (http_1_1 && !fields.has[kHost]) {
            malformed(400, "host: found none, one is needed");
        }
        const std::int64_t body_bytes = fields.body_bytes(http_1_1);
        const std::string &content = fields.values[kContent], &expect = fields.values[kExpect];
        if (fields.has[kContent] && !same(content, "identity")) {
            malformed(415, "content-encoding: found " + shown(content) + ", allowed identity");
        }
        if (fields.has[kExpect] && !same(expect, "100-continue")) {
            malformed(417, "expect: found " + shown(expect) + ", allowed 100-continue");
        }
        const Text target = path_and_query, behind = data.substr(line.size() + lines.size() + 4);
        const std::size_t mark = std::min(target.find('?'), target.size());
        const std::size_t length = static_cast<std::size_t>(std::max<std::int64_t>(body_bytes, 0));
        const bool is_whole = body_bytes != kChunked && length <= behind.size();
        const bool keep_alive = http_1_1 && !has_token(fields.values[kConnection], "close");
        const nb::object method_text = ascii(method), path = ascii(target.substr(0, mark));
        const nb::object query = ascii(target.substr(std::min(mark + 1, target.size())));
        const nb::object body = is_whole ? bytes(behind.substr(0, length)) : nb::none();
        PyObject* const serves = PyDict_GetItemWithError(posts.ptr(), path.ptr());
        if (serves != nullptr && !checks_all && method == "POST" && keep_alive && is_whole && length == behind.size() && length <= body_bytes_max_ &&
            !fields.has[kOrigin] && contains(hosts_, bytes(fields.values[kHost]))) {
            const std::array<PyObject*, 8> of{client.ptr(),         method_text.ptr(), path.ptr(),    query.ptr(),
                                              fields.headers.ptr(), body.ptr(),        began_s.ptr(), lines_.ptr()};
            return nb::make_tuple(checked(PyObject_Vectorcall(exchange_.ptr(), of.data(), of.size(), nullptr)), nb::borrow(serves));
        }
        const nb::object head = named(request_head, {method_text, path, query, fields.headers, nb::cast(body_bytes == kUntilClose ? 0 : body_bytes),
                                    nb::cast(keep_alive), nb::cast(http_1_1), body, bytes(is_whole ? behind.substr(length) : behind)});
        return nb::make_tuple(head, nb::none());
    }

    bool checks_all = false;

private:
    nb::object exchange_, hosts_;  // the type `Exchange`, a set
    nb::bytes lines_;
    std::size_t body_bytes_max_;
};

// Writes requests to one worker.
class RequestWriter {
public:
    RequestWriter(const nb::bytes& prefix, const nb::bytes& host_line) : prefix_(view_of(prefix)), host_line_(view_of(host_line)) {}

    // The parts of a request. `body` is one part or a tuple of them; only short bytes are copied into one part with the head.
    nb::object request(Text method, Text path, const nb::bytes& headers, const nb::object& body) const {
        if (!all(method, kToken) || !all(path, kVisible)) {
            throw nb::value_error("request: found a method or path that is not visible ASCII");
        }
        const bool is_whole = PyBytes_Check(body.ptr());
        const nb::tuple parts = PyTuple_Check(body.ptr()) ? nb::borrow<nb::tuple>(body) : nb::make_tuple(body);
        std::size_t size = 0;
        for (const nb::handle part : parts) {
            size += nb::len(part);
        }
        std::string head;
        head.reserve(512 + headers.size() + (size <= kJoinedBytesMax ? size : 0));
        head.append(method).append(" ").append(prefix_).append(path).append(" HTTP/1.1\r\n").append(host_line_);
        head.append(std::to_string(size)).append("\r\n").append(view_of(headers)).append("\r\n");
        if (is_whole && size <= kJoinedBytesMax) {
            return nb::make_tuple(bytes(head.append(view_of(nb::borrow<nb::bytes>(body)))));
        }
        return nb::make_tuple(bytes(head)) + parts;
    }

private:
    std::string prefix_, host_line_;
};

// Reads answers of workers; `dropped` are names of headers that clients do not get.
class AnswerReader {
public:
    explicit AnswerReader(nb::object dropped) : dropped_(std::move(dropped)) {}

    // The answer that begins with `part`, behind interim answers: see `router/http/heads.py`.
    nb::object answer(const nb::bytes& given, const nb::bytes& part, bool has_begun) const {
        const std::string joined = part.size() == 0 ? std::string() : std::string(view_of(part)).append(view_of(given));
        Text data = part.size() == 0 ? view_of(given) : Text(joined), line, lines;
        nb::object found = nb::none();
        while (cut_head(data, 0, 502, line, lines)) {
            const Text behind = data.substr(line.size() + lines.size() + 4);
            const int status = status_of(line);
            const Head head = parsed(status, line, lines);
            const bool is_whole = head.body_bytes == static_cast<std::int64_t>(behind.size());
            if (status >= 200 && is_whole && !has_begun) {
                std::string framed = is_bodyless(status) ? "" : "content-length: " + std::to_string(behind.size()) + "\r\n";
                framed.append("\r\n").append(behind);
                const Text tail = behind.substr(behind.size() - std::min(behind.size(), kTailBytes));
                return nb::make_tuple(status, head.headers, bytes(head.passed_on), bytes(framed), bytes(tail), head.reusable, head.is_stream);
            }
            found = named(answer_head, {nb::cast(status), head.headers, nb::cast(head.body_bytes), nb::cast(head.reusable),
                                        nb::cast(head.is_stream), bytes(head.passed_on), bytes(behind)});
            if (status >= 200) {
                break;
            }
            data = behind;
        }
        const nb::bytes nothing("", 0);
        return nb::make_tuple(0, found, nothing, nothing, nothing, false, false);
    }

private:
    struct Head {
        nb::dict headers;
        std::string passed_on;  // its lines for the client
        std::int64_t body_bytes;
        bool reusable, is_stream;
    };

    static bool is_bodyless(int status) { return status == 204 || status == 304; }

    static int status_of(Text line) {
        const bool is_status = line.size() >= 12 && (line.substr(0, 9) == "HTTP/1.1 " || line.substr(0, 9) == "HTTP/1.0 ") &&
                               line[9] >= '1' && line[9] <= '5' && line.substr(10, 2).find_first_not_of("0123456789") == Text::npos &&
                               (line.size() == 12 || line[12] == ' ') && all(line.substr(12), kText);
        if (!is_status) {
            malformed(502, "status line: found " + shown(line) + ", allowed HTTP/1.1 and a status of 100 to 599");
        }
        const int status = 100 * (line[9] - '0') + 10 * (line[10] - '0') + (line[11] - '0');
        if (status == 101) {
            malformed(502, "status: found 101, allowed none that changes the protocol");
        }
        return status;
    }

    Head parsed(int status, Text line, Text lines) const {
        const bool http_1_1 = line[7] == '1';
        Fields fields;
        std::string passed_on = "HTTP/1.1 " + std::string(line.substr(9)) + "\r\n";
        const std::size_t start_size = passed_on.size();
        fields.read(lines, 502, [&](const nb::object& name, Text of) {
            if (!contains(dropped_, name)) {
                passed_on.append(of).append("\r\n");
            }
        });
        std::int64_t body_bytes = fields.body_bytes(http_1_1);
        if (status < 200 || is_bodyless(status)) {
            body_bytes = 0;
        }
        const Text connection = fields.values[kConnection];
        if (fields.has[kConnection]) {
            each_token(connection, [&](Text name) { remove(passed_on, start_size, name); });
        }
        const bool reusable = http_1_1 && body_bytes != kUntilClose && !has_token(connection, "close");
        return {fields.headers, std::move(passed_on), body_bytes, reusable, same(Text(fields.values[kType]).substr(0, kStream.size()), kStream)};
    }

    // Removes the header lines of this name.
    static void remove(std::string& lines, std::size_t from, Text name) {
        for (std::size_t at = from, end = 0; at < lines.size(); at = end) {
            end = lines.find("\r\n", at) + 2;
            const Text line = Text(lines).substr(at, end - at);
            if (same(line.substr(0, line.find(':')), name)) {
                lines.erase(at, end - at);
                end = at;
            }
        }
    }

    nb::object dropped_;  // a frozenset of names
};

}  // namespace

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
    nb::class_<RequestWriter>(module, "RequestWriter")
        .def(nb::init<const nb::bytes&, const nb::bytes&>(), nb::arg(), nb::arg())
        .def("request", &RequestWriter::request, nb::arg(), nb::arg(), nb::arg(), nb::arg());
    nb::class_<AnswerReader>(module, "AnswerReader")
        .def(nb::init<nb::object>(), nb::arg())
        .def("answer", &AnswerReader::answer, nb::arg(), nb::arg(), nb::arg());
}

}  // namespace kv::http
