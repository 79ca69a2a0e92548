// Reads the header lines of HTTP/1.1 messages: the grammar is in `router/http/heads.py`.
#pragma once

#include "http.hpp"
#include "ordered_map.hpp"

namespace kv::http {

constexpr std::size_t kHeadBytesMax = 32 << 10, kLinesMax = 100, kDigitsMax = 18;

// Headers that say how a message is read, and who may send it. Those before `kConnection` may come only once.
enum Known : std::size_t { kHost, kLength, kCoding, kContent, kExpect, kConnection, kOrigin, kType, kKnownCount };
inline constexpr std::array<Text, kKnownCount> kNames{"host",   "content-length", "transfer-encoding", "content-encoding",
                                                      "expect", "connection",     "origin",            "content-type"};

// A header's name in lower case, and which of `Known` it is; `kKnownCount`: none.
struct HeaderName {
    nanobind::object text;
    std::size_t known;

    explicit HeaderName(Text sent) {
        std::string letters(sent);
        std::transform(letters.begin(), letters.end(), letters.begin(), lower);
        known = static_cast<std::size_t>(std::find(kNames.begin(), kNames.end(), letters) - kNames.begin());
        text = bytes(letters);
    }
    // Keeps the first `kSeenMax` different names, as most messages have the same ones.
    static HeaderName of(Text sent) {
        static OrderedMap<HeaderName>& seen = *new OrderedMap<HeaderName>();
        if (const HeaderName* const found = seen.find(sent)) {
            return *found;
        }
        return seen.size() < kSeenMax && sent.size() <= kSeenBytesMax ? seen.put(sent, HeaderName(sent)) : HeaderName(sent);
    }

private:
    static constexpr std::size_t kSeenMax = 256, kSeenBytesMax = 64;
};

// `AnswerHead` of `router/http/heads.py`; it lives as long as the process.
extern PyObject* answer_head;

// Makes a named tuple of these fields.
inline nanobind::object named(PyObject* type, std::initializer_list<nanobind::object> fields) {
    auto* const of = reinterpret_cast<PyTypeObject*>(type);
    nanobind::object made = checked(of->tp_alloc(of, static_cast<Py_ssize_t>(fields.size())));
    Py_ssize_t at = 0;
    for (const nanobind::object& field : fields) {
        PyTuple_SET_ITEM(made.ptr(), at++, field.inc_ref().ptr());
    }
    return made;
}

inline bool contains(const nanobind::object& set, const nanobind::object& what) {
    const int found = PySet_Contains(set.ptr(), what.ptr());
    if (found < 0) {
        throw nanobind::python_error();
    }
    return found != 0;
}

inline Text stripped(Text of) {
    const std::size_t begin = std::min(of.find_first_not_of(" \t"), of.size());
    return of.substr(begin, of.find_last_not_of(" \t") + 1 - begin);
}

// Calls `found` with each member of a comma-separated list.
template <typename Found>
void each_token(Text list, Found found) {
    for (std::size_t at = 0, end = 0; end != Text::npos; at = end + 1) {
        end = list.find(',', at);
        found(stripped(list.substr(at, end == Text::npos ? end : end - at)));
    }
}

inline bool has_token(Text list, Text token) {
    bool has = false;
    each_token(list, [&](Text each) { has = has || same(each, token); });
    return has;
}

// The headers of a message, and the values of those that determine its framing.
struct Fields {
    nanobind::dict headers;

    // Reads header lines; `each` gets every name and its line. `status_of_many`: the status for too many lines.
    template <typename Each>
    void read(Text lines, int status_of_many, Each each) {
        std::size_t count = 0;
        for (std::size_t at = 0, end = 0; at < lines.size(); at = end + 2) {
            if (++count > kLinesMax) {
                malformed(status_of_many, "headers: found more than " + std::to_string(kLinesMax) + " lines, allowed " + std::to_string(kLinesMax));
            }
            end = lines.find("\r\n", at);
            const Text line = lines.substr(at, end - at);
            const std::size_t name_end = span(line, 0, kToken);
            if (name_end == 0 || name_end == line.size() || line[name_end] != ':' || !all(line.substr(name_end + 1), kText)) {
                malformed(400, "headers: found " + shown(line) + ", allowed name: value, without control characters");
            }
            const HeaderName name = HeaderName::of(line.substr(0, name_end));
            add(name, stripped(line.substr(name_end + 1)));
            each(name.text, line);
        }
    }

    bool has(Known header) const { return values_[header] != nullptr; }
    // The header's value; empty: there is no such header, or its value is empty.
    Text value(Known header) const { return has(header) ? view_of(object(header)) : Text(); }
    nanobind::bytes object(Known header) const { return nanobind::borrow<nanobind::bytes>(values_[header]); }

    // The body's length in bytes, `kChunked` or `kUntilClose`.
    std::int64_t body_bytes(bool http_1_1) const {
        if (has(kCoding)) {
            if (has(kLength)) {
                malformed(400, "transfer-encoding: found beside content-length, allowed alone");
            }
            if (!http_1_1) {
                malformed(400, "transfer-encoding: found in HTTP/1.0, allowed in HTTP/1.1");
            }
            if (!same(value(kCoding), "chunked")) {
                malformed(501, "transfer-encoding: found " + shown(value(kCoding)) + ", allowed chunked");
            }
            return kChunked;
        }
        if (!has(kLength)) {
            return kUntilClose;
        }
        const Text digits = value(kLength);
        std::int64_t length = 0;
        if (digits.empty() || digits.size() > kDigitsMax || digits.find_first_not_of("0123456789") != Text::npos) {
            malformed(400, "content-length: found " + shown(digits) + ", allowed 1 to " + std::to_string(kDigitsMax) + " digits");
        }
        std::from_chars(digits.data(), digits.data() + digits.size(), length);
        return length;
    }

private:
    void add(const HeaderName& name, Text value) {
        PyObject* const key = name.text.ptr();
        const Py_ssize_t count = PyDict_Size(headers.ptr());
        PyObject* set = PyDict_SetDefault(headers.ptr(), key, bytes(value).ptr());
        if (set != nullptr && PyDict_Size(headers.ptr()) == count) {
            if (name.known < kConnection) {
                malformed(400, std::string(kNames[name.known]) + ": found it twice, allowed once");
            }
            const nanobind::object all = joined({view_of(nanobind::borrow<nanobind::bytes>(set)), ", ", value});
            set = PyDict_SetItem(headers.ptr(), key, all.ptr()) == 0 ? all.ptr() : nullptr;
        }
        if (set == nullptr) {
            throw nanobind::python_error();
        }
        if (name.known < kKnownCount) {
            values_[name.known] = set;
        }
    }

    std::array<PyObject*, kKnownCount> values_{};  // `headers` owns them
};

// Cuts the head at the data's beginning into start line and header lines, without the empty line that ends it; false if
// the head is not complete. `empty_bytes`: the size of the empty lines before the head, which are not part of `data`.
inline bool cut_head(Text data, std::size_t empty_bytes, int status_of_long, Text& start_line, Text& lines) {
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

}  // namespace kv::http
