// Reads bodies of HTTP/1.1 messages: the grammar, and its sources, are in `router/http/framing.py`. All calls keep the GIL.
#include "http.hpp"

#include <algorithm>

namespace nb = nanobind;

namespace kv::http {

namespace {

constexpr std::size_t kLineBytesMax = 4096, kTrailerBytesMax = 16 << 10, kSizeDigitsMax = 15, kTailBytes = 4096;

// The digits of a chunk's size at the beginning of `line`; `size` is what they say.
std::size_t size_digits(Text line, std::int64_t& size) {
    std::size_t at = 0;
    std::uint64_t found = 0;
    for (; at < line.size() && at <= kSizeDigitsMax; ++at) {
        const char digit = lower(line[at]);
        if (!((digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f'))) {
            break;
        }
        found = 16 * found + static_cast<std::uint64_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    size = static_cast<std::int64_t>(found);
    return at;
}

void append(const nb::bytearray& payload, Text piece) {
    const Py_ssize_t before = PyByteArray_GET_SIZE(payload.ptr());
    if (PyByteArray_Resize(payload.ptr(), before + static_cast<Py_ssize_t>(piece.size())) != 0) {
        throw nb::python_error();
    }
    std::copy(piece.begin(), piece.end(), PyByteArray_AS_STRING(payload.ptr()) + before);
}

class BodyReader {
public:
    explicit BodyReader(std::int64_t body_bytes) : left(std::max<std::int64_t>(body_bytes, 0)), body_bytes_(body_bytes) {}

    std::int64_t feed(const nb::bytes& given, const nb::bytearray& payload) {
        const Text data = view_of(given);
        if (body_bytes_ == kChunked) {
            return feed_chunks(data, payload);
        }
        const std::size_t taken = body_bytes_ == kUntilClose ? data.size() : std::min(data.size(), static_cast<std::size_t>(left));
        append(payload, data.substr(0, taken));
        left -= body_bytes_ == kUntilClose ? 0 : static_cast<std::int64_t>(taken);
        return body_bytes_ == kUntilClose || left != 0 ? -1 : static_cast<std::int64_t>(taken);
    }

    void remember(Text payload) {
        tail_.append(payload.substr(payload.size() - std::min(payload.size(), kTailBytes)));
        if (tail_.size() > 4 * kTailBytes) {
            tail_.erase(0, tail_.size() - kTailBytes);
        }
    }

    nb::bytes tail() const {
        const std::size_t size = std::min(tail_.size(), kTailBytes);
        return nb::bytes(tail_.data() + tail_.size() - size, size);
    }

    std::int64_t left;

private:
    enum class State { kSize, kData, kEnd, kTrailers };

    std::int64_t feed_chunks(Text data, const nb::bytearray& payload) {
        for (std::size_t at = 0; at < data.size();) {
            if (state_ == State::kData) {
                const Text piece = data.substr(at, static_cast<std::size_t>(left));
                append(payload, piece);
                at += piece.size();
                left -= static_cast<std::int64_t>(piece.size());
                state_ = left == 0 ? State::kEnd : State::kData;
                continue;
            }
            const std::size_t line_end = data.find('\n', at);
            line_ += data.substr(at, line_end == Text::npos ? line_end : line_end + 1 - at);
            if (line_.size() > kLineBytesMax) {
                malformed(400, "chunk: found a line of " + std::to_string(line_.size()) + " bytes and more, allowed " + std::to_string(kLineBytesMax));
            }
            if (line_end == Text::npos) {
                return -1;
            }
            at = line_end + 1;
            const bool is_last = read(line_);
            line_.clear();
            if (is_last) {
                return static_cast<std::int64_t>(at);
            }
        }
        return -1;
    }

    // Returns whether the body ends with this line.
    bool read(Text line) {
        if (state_ == State::kEnd) {
            if (line != "\r\n") {
                malformed(400, "chunk: found bytes beyond its size, allowed CRLF");
            }
            state_ = State::kSize;
        } else if (state_ == State::kSize) {
            const std::size_t digits = size_digits(line, left);
            std::size_t at = std::min(line.find_first_not_of(" \t", digits), line.size());
            if (at < line.size() && line[at] == ';') {
                at += span(line, at, kText);
            }
            if (digits == 0 || digits > kSizeDigitsMax || line.substr(at) != "\r\n") {
                malformed(400, "chunk: found size " + shown(line) + ", allowed hexadecimal digits");
            }
            state_ = left != 0 ? State::kData : State::kTrailers;
        } else if (line == "\r\n") {
            return true;
        } else {
            const std::size_t name_end = span(line, 0, kToken), end = name_end + 1 + span(line, std::min(name_end + 1, line.size()), kText);
            trailer_bytes_ += line.size();
            if (trailer_bytes_ > kTrailerBytesMax || name_end == 0 || line[name_end] != ':' || line.substr(std::min(end, line.size())) != "\r\n") {
                malformed(400, "trailer: found no header line, or more than " + std::to_string(kTrailerBytesMax) + " bytes of them");
            }
            const Text name = line.substr(0, name_end);
            if (same(name, "transfer-encoding") || same(name, "content-length")) {
                malformed(400, "trailer: found " + std::string(name) + ", allowed none that frames a message");
            }
        }
        return false;
    }

    std::int64_t body_bytes_;
    State state_ = State::kSize;
    std::string line_, tail_;  // the beginning of a line; the end of what was passed on
    std::size_t trailer_bytes_ = 0;
};

// Where the last event ends: behind an empty line, whichever ends its lines have; 0: there is no complete one.
std::size_t events_end(Text data) {
    for (std::size_t end = data.size(); end > 1; --end) {
        const char last = data[end - 1], before = data[end - 2];
        if ((last == '\n' && (before == '\n' || (before == '\r' && end > 2 && data[end - 3] == '\n'))) || (last == '\r' && before == '\r')) {
            return end;
        }
    }
    return 0;
}

nb::bytes take_events(const nb::bytearray& buffer) {
    const Text data(buffer.c_str(), buffer.size());
    const std::size_t end = events_end(data);
    nb::bytes events(data.data(), end);
    if (end != 0) {
        char* const kept = PyByteArray_AS_STRING(buffer.ptr());
        std::copy(kept + end, kept + data.size(), kept);
        if (PyByteArray_Resize(buffer.ptr(), static_cast<Py_ssize_t>(data.size() - end)) != 0) {
            throw nb::python_error();
        }
    }
    return events;
}

}  // namespace

void bind_bodies(nb::module_& module) {
    module.attr("TAIL_BYTES") = kTailBytes;
    module.def("take_events", &take_events, nb::arg());
    nb::class_<BodyReader>(module, "BodyReader")
        .def(nb::init<std::int64_t>(), nb::arg())
        .def("feed", &BodyReader::feed, nb::arg(), nb::arg())
        .def("remember", [](BodyReader& reader, const nb::bytes& payload) { reader.remember(view_of(payload)); }, nb::arg())
        .def_ro("left", &BodyReader::left)
        .def_prop_ro("tail", &BodyReader::tail);
}

}  // namespace kv::http
