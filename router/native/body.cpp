// Reads bodies of HTTP/1.1 messages: the grammar, and its sources, are in `router/http/framing.py`. All calls keep the GIL.
#include "http.hpp"

#include <algorithm>

namespace nb = nanobind;

namespace kv::http {

namespace {

constexpr std::size_t kLineBytesMax = 4096, kTrailerBytesMax = 16 << 10, kSizeDigitsMax = 15, kTailBytes = 4096;
constexpr std::size_t kSpareBytes = 8 << 10;  // unused memory that a stream may hold: thousands are open at once

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

void append(std::string& payload, Text piece) { payload.append(piece); }

class BodyReader {
public:
    explicit BodyReader(std::int64_t body_bytes) : left(std::max<std::int64_t>(body_bytes, 0)), body_bytes_(body_bytes) {}

    // Appends the payload in `data` to `payload`; returns where in `data` the body ends, -1 if it does not.
    template <typename Payload>
    std::int64_t feed(Text data, Payload& payload) {
        if (body_bytes_ == kChunked) {
            return feed_chunks(data, payload);
        }
        const std::size_t taken = body_bytes_ == kUntilClose ? data.size() : std::min(data.size(), static_cast<std::size_t>(left));
        append(payload, data.substr(0, taken));
        left -= body_bytes_ == kUntilClose ? 0 : static_cast<std::int64_t>(taken);
        return body_bytes_ == kUntilClose || left != 0 ? -1 : static_cast<std::int64_t>(taken);
    }

    std::int64_t left;

private:
    enum class State { kSize, kData, kEnd, kTrailers };

    template <typename Payload>
    std::int64_t feed_chunks(Text data, Payload& payload) {
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
    std::string line_;  // its beginning
    std::size_t trailer_bytes_ = 0;
};

// Where the last event ends: behind an empty line, whichever ends its lines have. 0: at none of the places behind `seen`.
std::size_t events_end(Text data, std::size_t seen) {
    for (std::size_t end = data.size(); end > std::max<std::size_t>(seen, 1); --end) {
        const char last = data[end - 1], before = data[end - 2];
        if ((last == '\n' && (before == '\n' || (before == '\r' && end > 2 && data[end - 3] == '\n'))) || (last == '\r' && before == '\r')) {
            return end;
        }
    }
    return 0;
}

std::size_t count_of(Text data, Text what) {
    std::size_t count = 0;
    for (std::size_t at = data.find(what); at != Text::npos; at = data.find(what, at + what.size())) {
        ++count;
    }
    return count;
}

class AnswerBody {
public:
    AnswerBody(std::int64_t body_bytes, const nb::bytes& mark) : reader_(body_bytes), mark_(view_of(mark)) {}

    std::int64_t feed(const nb::bytes& data) {
        const std::int64_t end = reader_.feed(view_of(data), pending);
        has_begun = has_begun || !pending.empty();
        return end;
    }

    nb::bytes take(std::size_t size) {
        const Text taken = Text(pending).substr(0, size);
        marks = count_of(taken, mark_.empty() ? "\n\n" : Text(mark_));
        if (marks == 0 && mark_.empty()) {
            marks = count_of(taken, "\n\r\n");
        }
        tail_.append(taken.substr(taken.size() - std::min(taken.size(), kTailBytes)));
        if (tail_.size() > 4 * kTailBytes) {
            tail_.erase(0, tail_.size() - kTailBytes);
        }
        nb::bytes found(taken.data(), taken.size());
        pending.erase(0, taken.size());
        if (pending.capacity() > kSpareBytes && pending.size() <= kSpareBytes) {
            pending.shrink_to_fit();
        }
        seen_ = 0;
        return found;
    }

    nb::bytes take_events() {
        const std::size_t end = events_end(pending, seen_);
        nb::bytes found = take(end);
        seen_ = pending.size();
        return found;
    }

    void drop() {
        pending = {};
        seen_ = 0;
    }

    nb::bytes tail() const {
        const std::size_t size = std::min(tail_.size(), kTailBytes);
        return nb::bytes(tail_.data() + tail_.size() - size, size);
    }

    std::string pending;
    std::size_t marks = 0;
    bool has_begun = false;

private:
    BodyReader reader_;
    std::string mark_, tail_;
    std::size_t seen_ = 0;  // pending bytes in which no event ends
};

}  // namespace

void bind_bodies(nb::module_& module) {
    module.attr("TAIL_BYTES") = kTailBytes;
    nb::class_<BodyReader>(module, "BodyReader")
        .def(nb::init<std::int64_t>(), nb::arg())
        .def("feed", [](BodyReader& reader, const nb::bytes& data, const nb::bytearray& payload) { return reader.feed(view_of(data), payload); },
             nb::arg(), nb::arg())
        .def_ro("left", &BodyReader::left);
    nb::class_<AnswerBody>(module, "AnswerBody")
        .def(nb::init<std::int64_t, const nb::bytes&>(), nb::arg(), nb::arg())
        .def("feed", &AnswerBody::feed, nb::arg())
        .def("has", [](const AnswerBody& body, const nb::bytes& text) { return body.pending.find(view_of(text)) != std::string::npos; }, nb::arg())
        .def("take_events", &AnswerBody::take_events)
        .def("take", &AnswerBody::take, nb::arg())
        .def("drop", &AnswerBody::drop)
        .def_ro("marks", &AnswerBody::marks)
        .def_ro("has_begun", &AnswerBody::has_begun)
        .def_prop_ro("size", [](const AnswerBody& body) { return body.pending.size(); })
        .def_prop_ro("pending", [](const AnswerBody& body) { return nb::bytes(body.pending.data(), body.pending.size()); })
        .def_prop_ro("tail", &AnswerBody::tail);
}

}  // namespace kv::http
