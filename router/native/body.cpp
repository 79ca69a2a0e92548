// Reads bodies of HTTP/1.1 messages: the grammar, and its sources, are in `router/http/heads.py`. All calls keep the GIL.
#include "http.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <vector>

namespace nb = nanobind;

namespace kv::http {

namespace {

constexpr std::size_t kLineBytesMax = 4096, kTrailerBytesMax = 16 << 10, kSizeDigitsMax = 15;
constexpr std::size_t kSpareBytes = 8 << 10;  // unused memory that a stream may hold: thousands are open at once

// How many digits at the beginning of `line` give a chunk's size; sets `size` to their value.
std::size_t size_digits(Text line, std::int64_t& size) {
    std::uint64_t found = 0;
    const char* const end = line.data() + std::min(line.size(), kSizeDigitsMax + 1);
    const auto digits = static_cast<std::size_t>(std::from_chars(line.data(), end, found, 16).ptr - line.data());
    size = static_cast<std::int64_t>(found);
    return digits;
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
    explicit BodyReader(std::int64_t of) : left(std::max<std::int64_t>(of, 0)), body_bytes(of) {}

    // Appends the payload in `data` to `payload`; returns where in `data` the body ends, -1 if it does not.
    template <typename Payload>
    std::int64_t feed(Text data, Payload& payload) {
        if (body_bytes == kChunked) {
            return feed_chunks(data, payload);
        }
        const std::size_t taken = body_bytes == kUntilClose ? data.size() : std::min(data.size(), static_cast<std::size_t>(left));
        append(payload, data.substr(0, taken));
        left -= body_bytes == kUntilClose ? 0 : static_cast<std::int64_t>(taken);
        return body_bytes == kUntilClose || left != 0 ? -1 : static_cast<std::int64_t>(taken);
    }

    std::int64_t left, body_bytes;

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

    State state_ = State::kSize;
    std::string line_;  // the beginning of a line that is not complete
    std::size_t trailer_bytes_ = 0;
};

// Where the last event ends: after an empty line, with any kind of line ends. 0: none ends after `seen`.
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

nb::bytes chunk(Text payload) {
    std::array<char, 24> line{};
    const int size = std::snprintf(line.data(), line.size(), "%zx\r\n", payload.size());
    const std::string framed = std::string(line.data(), static_cast<std::size_t>(size)).append(payload).append("\r\n");
    return nb::bytes(framed.data(), framed.size());
}

// Keeps the complete events of a stream of at most `bytes_max` bytes, and nothing of a longer stream.
class KeptEvents {
public:
    explicit KeptEvents(std::size_t most) : bytes_max(most) {}

    void add(Text events) {
        is_overfull = is_overfull || kept.size() + events.size() > bytes_max;
        if (is_overfull) {
            kept = {};
        } else {
            kept.append(events);
        }
    }

    std::size_t bytes_max;
    std::string kept;
    bool is_overfull = false;
};

class AnswerBody {
public:
    // `mark`: a text to count; if empty, events are counted. `is_later`: the client has a part of the answer already.
    AnswerBody(std::int64_t body_bytes, const nb::bytes& mark, bool is_later)
        : reader_(body_bytes), mark_(view_of(mark)), counts_(is_later && mark_.empty()) {}

    // Reads the payload in `data`. While a stream `flows`, takes its complete events and returns them, framed as a
    // chunk if the client gets chunks; empty: none is complete. None: the caller has to take them, as the stream does
    // not flow, nothing was taken yet, the body ends, or an alarm is pending.
    nb::object feed(const nb::bytes& data) {
        end = reader_.feed(view_of(data), pending);
        has_begun = has_begun || !pending.empty();
        const bool passes = is_stream_ && flows && !tail_.empty() && end < 0;
        const std::size_t events = passes ? events_end(pending, seen_) : 0;
        if (!passes || (events == 0 && pending.size() > pending_max_) || is_judged()) {
            return nb::none();
        }
        const std::string taken = cut(events);
        seen_ = pending.size();
        if (taken.empty()) {
            return nb::bytes("", 0);
        }
        if (kept_ != nullptr) {
            kept_->add(taken);
        }
        return is_chunked_ ? chunk(taken) : nb::bytes(taken.data(), taken.size());
    }

    // Makes the body a stream that may flow, framed in chunks or not; `kept` gets its events. An alarm is one of the texts `alarms`, or
    // more than `most` bytes without a complete event.
    void pass_on(bool chunks, std::size_t most, KeptEvents* kept, const nb::tuple& alarms) {
        is_stream_ = true;
        is_chunked_ = chunks;
        pending_max_ = most;
        kept_ = kept;
        alarms_.clear();
        for (const nb::handle alarm : alarms) {
            alarms_.emplace_back(view_of(nb::cast<nb::bytes>(alarm)));
        }
    }

    bool until_close() const { return reader_.body_bytes == kUntilClose; }

    nb::bytes take(std::size_t size) {
        const std::string taken = cut(size);
        return nb::bytes(taken.data(), taken.size());
    }

    nb::bytes take_events() {
        nb::bytes found = take(events_end(pending, seen_));
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

    // Whether the last bytes have the event `data: [DONE]`. No text within another event looks like that: JSON escapes the
    // line's end before it.
    bool has_end_mark() const {
        const Text mark = "[DONE]", field = "data:";
        const std::string all = "\n" + (tail_ + pending).substr(std::max(tail_.size() + pending.size(), kTailBytes) - kTailBytes);
        for (std::size_t at = all.rfind(mark); at != Text::npos; at = all.rfind(mark, at - 1)) {
            const std::size_t last = at - (all[at - 1] == ' ' ? 1 : 0), begin = last - std::min(last, field.size());
            if (begin > 0 && Text(all).substr(begin, last - begin) == field && (all[begin - 1] == '\n' || all[begin - 1] == '\r')) {
                return true;
            }
        }
        return false;
    }

    std::string pending;
    std::int64_t end = -1;
    std::size_t marks = 0, later = 0;  // of the last take; of all that a stream took while it `counts_`
    bool has_begun = false, flows = false;

private:
    bool is_judged() const {
        return std::any_of(alarms_.begin(), alarms_.end(), [this](const std::string& each) { return pending.find(each) != std::string::npos; });
    }

    std::string cut(std::size_t size) {
        std::string taken;
        if (size < pending.size()) {
            taken = pending.substr(0, size);
            pending.erase(0, size);
        } else {
            taken.swap(pending);
        }
        marks = count_of(taken, mark_.empty() ? "\n\n" : Text(mark_));
        if (marks == 0 && mark_.empty()) {
            marks = count_of(taken, "\n\r\n");
        }
        later += is_stream_ && counts_ ? marks : 0;
        counts_ = counts_ || (mark_.empty() ? !taken.empty() : marks > 0);
        tail_.append(Text(taken).substr(taken.size() - std::min(taken.size(), kTailBytes)));
        if (tail_.size() > 4 * kTailBytes) {
            tail_.erase(0, tail_.size() - kTailBytes);
        }
        if (pending.capacity() > kSpareBytes && pending.size() <= kSpareBytes) {
            pending.shrink_to_fit();
        }
        seen_ = 0;
        return taken;
    }

    BodyReader reader_;
    std::string mark_, tail_;
    std::vector<std::string> alarms_;
    KeptEvents* kept_ = nullptr;
    std::size_t seen_ = 0;  // pending bytes in which no event ends
    std::size_t pending_max_ = 0;
    bool counts_, is_stream_ = false, is_chunked_ = false;  // `counts_`: marks count as `later` from now on
};

}  // namespace

void bind_bodies(nb::module_& module) {
    module.attr("TAIL_BYTES") = kTailBytes;
    module.def("chunk", [](const nb::bytes& payload) { return chunk(view_of(payload)); }, nb::arg());
    nb::class_<BodyReader>(module, "BodyReader")
        .def(nb::init<std::int64_t>(), nb::arg())
        .def("feed", [](BodyReader& reader, const nb::bytes& data, const nb::bytearray& payload) { return reader.feed(view_of(data), payload); },
             nb::arg(), nb::arg())
        .def_ro("left", &BodyReader::left);
    nb::class_<KeptEvents>(module, "KeptEvents")
        .def(nb::init<std::size_t>(), nb::arg())
        .def("add", [](KeptEvents& kept, const nb::bytes& events) { kept.add(view_of(events)); }, nb::arg())
        .def_ro("is_overfull", &KeptEvents::is_overfull)
        .def_prop_ro("events", [](const KeptEvents& kept) { return nb::bytes(kept.kept.data(), kept.kept.size()); });
    nb::class_<AnswerBody>(module, "AnswerBody")
        .def(nb::init<std::int64_t, const nb::bytes&, bool>(), nb::arg(), nb::arg(), nb::arg() = false)
        .def("feed", &AnswerBody::feed, nb::arg())
        .def("pass_on", &AnswerBody::pass_on, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::keep_alive<1, 4>())
        .def("has", [](const AnswerBody& body, const nb::bytes& text) { return body.pending.find(view_of(text)) != std::string::npos; }, nb::arg())
        .def("take_events", &AnswerBody::take_events)
        .def("take", &AnswerBody::take, nb::arg())
        .def("drop", &AnswerBody::drop)
        .def_ro("end", &AnswerBody::end)
        .def_ro("marks", &AnswerBody::marks)
        .def_prop_ro("until_close", &AnswerBody::until_close)
        .def_ro("later", &AnswerBody::later)
        .def_ro("has_begun", &AnswerBody::has_begun)
        .def_prop_ro("has_end_mark", &AnswerBody::has_end_mark)
        .def_rw("flows", &AnswerBody::flows)
        .def_prop_ro("size", [](const AnswerBody& body) { return body.pending.size(); })
        .def_prop_ro("pending", [](const AnswerBody& body) { return nb::bytes(body.pending.data(), body.pending.size()); })
        .def_prop_ro("tail", &AnswerBody::tail);
}

}  // namespace kv::http
