// Rows of a checkpoint and records of the journal in msgpack, written as msgspec writes them: the shortest form of each number. Rows
// are read from the objects that msgspec decodes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ranks.hpp"

// In Python a rank is a tuple of its two fields.
namespace nanobind::detail {
template <>
struct type_caster<kv::RankKey> {
    using Pair = std::pair<std::string, kv::i64>;
    NB_TYPE_CASTER(kv::RankKey, make_caster<Pair>::Name)

    bool from_python(handle from, std::uint8_t, cleanup_list*) noexcept {
        Pair pair;
        const bool is_rank = try_cast(from, pair);
        value = {std::move(pair.first), pair.second};
        return is_rank;
    }
    static handle from_cpp(const kv::RankKey& key, rv_policy policy, cleanup_list* cleanup) noexcept {
        return make_caster<Pair>::from_cpp(Pair(key.worker_id, key.dp_rank), policy, cleanup);
    }
};
}  // namespace nanobind::detail

namespace kv {

// The packed hashes of blocks.
class Chain {
public:
    Chain() = default;
    // `data` is not copied, and must live longer.
    Chain(const u64* data, std::size_t size) : data_(data), size_(size) {}
    explicit Chain(nanobind::bytes packed) : data_(static_cast<const u64*>(packed.data())), size_(packed.size() / sizeof(u64)) {
        if (packed.size() % sizeof(u64) != 0) {
            throw std::invalid_argument("blocks: found " + std::to_string(packed.size()) + ", allowed a multiple of 8 bytes");
        }
        const auto drop = [](const void* bytes) { nanobind::handle(static_cast<PyObject*>(const_cast<void*>(bytes))).dec_ref(); };
        owner_ = std::shared_ptr<const void>(packed.release().ptr(), drop);
    }

    const u64* data() const { return data_; }
    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    u64 operator[](std::size_t at) const { return data_[at]; }

private:
    std::shared_ptr<const void> owner_;
    const u64* data_ = nullptr;
    std::size_t size_ = 0;
};

class Pack {
public:
    std::string_view view() const { return {bytes_.data(), size_}; }
    std::size_t size() const { return size_; }
    void clear() { size_ = 0; }
    // Makes room for this many more bytes, which the caller writes.
    char* more(std::size_t size) {
        if (bytes_.size() - size_ < size) {
            bytes_.resize(std::max(2 * bytes_.size(), size_ + std::max(size, kRoom)));
        }
        size_ += size;
        return bytes_.data() + size_ - size;
    }
    // Appends bytes that are packed already.
    void append(std::string_view packed) {
        if (!packed.empty()) {
            std::memcpy(more(packed.size()), packed.data(), packed.size());
        }
    }
    void nil() { byte(0xc0); }
    void array(std::size_t count) { sized(count, 0x90, 16, 0xdc); }
    void map(std::size_t count) { sized(count, 0x80, 16, 0xde); }
    void put(bool value) { byte(value ? 0xc3 : 0xc2); }
    void put(double value) {
        u64 bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        number(0xcb, bits, 3);
    }
    void put(u64 value) {
        if (value < 0x80) {
            byte(static_cast<unsigned>(value));
        } else {
            const unsigned log = value <= 0xFF ? 0 : value <= 0xFFFF ? 1 : value <= 0xFFFF'FFFF ? 2 : 3;
            number(0xcc + log, value, log);
        }
    }
    void put(u32 value) { put(static_cast<u64>(value)); }
    void put(i64 value) {
        if (value >= 0) {
            put(static_cast<u64>(value));
        } else if (value >= -32) {
            byte(static_cast<unsigned>(value) & 0xFF);
        } else {
            const unsigned log = value >= -0x80 ? 0 : value >= -0x8000 ? 1 : value >= -0x8000'0000LL ? 2 : 3;
            number(0xd0 + log, static_cast<u64>(value), log);
        }
    }
    void put(std::string_view text) {
        if (text.size() >= 32 && text.size() <= 0xFF) {
            number(0xd9, text.size(), 0);
        } else {
            sized(text.size(), 0xa0, 32, 0xda);
        }
        append(text);
    }
    void put(const std::string& text) { put(std::string_view(text)); }
    void put(const char* text) { put(std::string_view(text)); }
    void put(const RankKey& key) { row(key.worker_id, key.dp_rank); }
    void put(const Held& rank) { put(rank.key()); }
    template <typename... Fields>
    void put(const std::tuple<Fields&...>& fields) {
        std::apply([this](const Fields&... each) { row(each...); }, fields);
    }
    void put(const Chain& chain) { bytes({reinterpret_cast<const char*>(chain.data()), chain.size() * sizeof(u64)}); }
    template <typename Value>
    void put(const std::optional<Value>& value) {
        value.has_value() ? put(*value) : nil();
    }
    template <typename Value>
    void put(const std::vector<Value>& values) {
        array(values.size());
        for (const Value& each : values) {
            put(each);
        }
    }
    void bytes(std::string_view data) {
        bytes(data.size());
        append(data);
    }
    // The header of bytes that follow.
    void bytes(std::size_t size) {
        const unsigned log = size <= 0xFF ? 0 : size <= 0xFFFF ? 1 : 2;
        number(0xc4 + log, size, log);
    }
    template <typename... Fields>
    void row(const Fields&... fields) {
        array(sizeof...(fields));
        (put(fields), ...);
    }

private:
    static constexpr std::size_t kRoom = 512;

    void byte(unsigned value) { *more(1) = static_cast<char>(value); }
    // A number of 2**`log` bytes after its kind. Machines that we build for are little-endian, msgpack is not.
    void number(unsigned kind, u64 value, unsigned log) {
        const std::size_t size = std::size_t{1} << log;
        const u64 swapped = __builtin_bswap64(value << (64 - 8 * size));
        char* const to = more(1 + sizeof swapped);
        *to = static_cast<char>(kind);
        std::memcpy(to + 1, &swapped, sizeof swapped);
        size_ -= sizeof swapped - size;
    }
    void sized(std::size_t count, unsigned fixed, std::size_t fixed_max, unsigned wide) {
        if (count < fixed_max) {
            byte(fixed | static_cast<unsigned>(count));
        } else {
            const bool is_long = count > 0xFFFF;
            number(wide + is_long, count, is_long ? 2 : 1);
        }
    }

    std::string bytes_;  // the first `size_` are written
    std::size_t size_ = 0;
};

// One row of a table to restore, as msgspec decoded it. Throws `std::invalid_argument` if the row has other fields.
class Row {
public:
    explicit Row(nanobind::handle list) : list_(list) {}

    template <typename... Fields>
    void take(Fields&&... fields) const {
        if (!nanobind::isinstance<nanobind::list>(list_) || nanobind::len(list_) != sizeof...(fields)) {
            wrong();
        }
        std::size_t at = 0;
        (read(list_[at++], fields), ...);
    }

private:
    [[noreturn]] static void wrong() { throw std::invalid_argument("a row has another form"); }
    template <typename Value>
    static void read(nanobind::handle from, Value& value) {
        if (!nanobind::try_cast(from, value)) {
            wrong();
        }
    }
    static void read(nanobind::handle from, Chain& chain) {
        nanobind::bytes packed;
        read(from, packed);
        chain = Chain(packed);
    }
    template <typename... Fields>
    static void read(nanobind::handle from, std::tuple<Fields&...> fields) {
        std::apply([from](Fields&... each) { Row(from).take(each...); }, fields);
    }

    nanobind::handle list_;
};

// A part of a table: rows, packed; full from `kBytes` on.
class Part {
public:
    template <typename... Fields>
    void row(const Fields&... fields) {
        rows_.row(fields...);
        ++count_;
    }
    bool is_full() const { return rows_.size() >= kBytes; }
    // The rows as one packed list.
    std::string list() const {
        std::string list(5, '\xdd');
        for (unsigned at = 0; at < 4; ++at) {
            list[1 + at] = static_cast<char>(count_ >> (24 - 8 * at) & 0xFF);
        }
        return list.append(rows_.view());
    }

private:
    static constexpr std::size_t kBytes = 32 * 1024;

    Pack rows_;
    std::size_t count_ = 0;
};

// Writes a frozen table's next rows; returns whether more follow.
using MoreRows = std::function<bool(Part&)>;

// Returns a writer that calls `write` for the rows of each of `sources`, until the part is full.
template <typename Source, typename Write>
MoreRows more_rows(std::vector<Source> sources, Write write) {
    return [sources = std::move(sources), write, at = std::size_t{0}](Part& part) mutable {
        for (; !part.is_full() && at < sources.size(); ++at) {
            write(part, sources[at]);
        }
        return at < sources.size();
    };
}

}  // namespace kv
