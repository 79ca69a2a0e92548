// What the files of HTTP share (`heads.cpp`, `calls.cpp`, `relay.cpp`, `body.cpp`, `answer.cpp`).
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>

namespace kv::http {

using Text = std::string_view;

constexpr std::size_t kTailBytes = 4096;  // how much of a body's end is kept

enum : std::int64_t { kChunked = -1, kUntilClose = -2 };  // in place of a body's length

// Classes of bytes: tchar; what a value may have; visible ASCII (RFC 9110, 5.6.2 and 5.5).
enum : unsigned char { kToken = 1, kText = 2, kVisible = 4 };

constexpr std::array<unsigned char, 256> byte_classes() {
    std::array<unsigned char, 256> of{};
    for (std::size_t byte = 0; byte < of.size(); ++byte) {
        const bool is_visible = byte > 0x20 && byte < 0x7f, is_letter = (byte | 0x20) >= 'a' && (byte | 0x20) <= 'z' && byte < 0x80;
        const bool is_text = is_visible || byte == ' ' || byte == '\t' || byte >= 0x80;
        of[byte] = static_cast<unsigned char>((is_visible ? kVisible : 0) | (is_text ? kText : 0) |
                                              (is_letter || (byte >= '0' && byte <= '9') ? kToken : 0));
    }
    for (const char each : Text("!#$%&'*+-.^_`|~")) {
        of[static_cast<unsigned char>(each)] |= kToken;
    }
    return of;
}

inline constexpr std::array<unsigned char, 256> kClasses = byte_classes();

// How many consecutive bytes, from `at` on, are of the class.
inline std::size_t span(Text of, std::size_t at, unsigned char kind) {
    std::size_t end = at;
    while (end < of.size() && (kClasses[static_cast<unsigned char>(of[end])] & kind) != 0) {
        ++end;
    }
    return end - at;
}

inline bool all(Text of, unsigned char kind) { return span(of, 0, kind) == of.size(); }

inline char lower(char byte) { return byte >= 'A' && byte <= 'Z' ? static_cast<char>(byte | 0x20) : byte; }

// Whether the texts are equal, except for the case of letters.
inline bool same(Text found, Text to) {
    bool is_same = found.size() == to.size();
    for (std::size_t at = 0; is_same && at < to.size(); ++at) {
        is_same = lower(found[at]) == lower(to[at]);
    }
    return is_same;
}

inline Text view_of(const nanobind::bytes& data) { return {data.c_str(), data.size()}; }

inline nanobind::object checked(PyObject* made) {
    if (made == nullptr) {
        throw nanobind::python_error();
    }
    return nanobind::steal(made);
}

inline nanobind::object bytes(Text of) { return checked(PyBytes_FromStringAndSize(of.data(), static_cast<Py_ssize_t>(of.size()))); }

// The bytes of all parts.
template <typename Parts>
nanobind::object joined(const Parts& parts) {
    std::size_t size = 0;
    for (const Text part : parts) {
        size += part.size();
    }
    nanobind::object made = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* to = PyBytes_AS_STRING(made.ptr());
    for (const Text part : parts) {
        to = std::copy(part.begin(), part.end(), to);
    }
    return made;
}
inline nanobind::object joined(std::initializer_list<Text> parts) { return joined<std::initializer_list<Text>>(parts); }

// A number in decimal.
class Digits {
public:
    explicit Digits(std::int64_t number) : end_(std::to_chars(text_.data(), text_.data() + text_.size(), number).ptr) {}
    operator Text() const { return {text_.data(), static_cast<std::size_t>(end_ - text_.data())}; }

private:
    std::array<char, 24> text_;
    const char* end_;
};

// The name of an attribute; it lives as long as the process.
struct Name {
    explicit Name(const char* of) : object(PyUnicode_InternFromString(of)) {}
    PyObject* object;
};

inline nanobind::object get(nanobind::handle of, const Name& name) { return checked(PyObject_GetAttr(of.ptr(), name.object)); }

// The beginning of what was found, as an error shows it.
std::string shown(Text found);

// Raises `router.http.heads.Malformed`.
[[noreturn]] void malformed(int status, const std::string& message);

void bind_heads(nanobind::module_& module);
void bind_calls(nanobind::module_& module);
void bind_relay(nanobind::module_& module);
void bind_bodies(nanobind::module_& module);
void bind_answers(nanobind::module_& module);

}  // namespace kv::http
