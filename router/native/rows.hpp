// Rows of a checkpoint and records of the journal in msgpack, written as msgspec writes them: the shortest form of each number.
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
#include <vector>

#include "ranks.hpp"

namespace kv {

// The hashes of a request's blocks, which the folds share with their owner.
class Chain {
public:
    Chain() = default;
    Chain(std::shared_ptr<const void> owner, const u64* data, std::size_t size) : owner_(std::move(owner)), data_(data), size_(size) {}

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
    // Room for this many more bytes, which the caller writes.
    char* more(std::size_t size) {
        if (bytes_.size() - size_ < size) {
            bytes_.resize(std::max(2 * bytes_.size(), size_ + std::max(size, kRoom)));
        }
        size_ += size;
        return bytes_.data() + size_ - size;
    }
    // Bytes that are packed already.
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
    // Of bytes that follow.
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
    // A number of 2**`log` bytes behind its kind. Machines that we build for are little-endian.
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

    std::string bytes_;  // of them `size_` are written
    std::size_t size_ = 0;
};

// Throws `std::invalid_argument` if the next value has another type than was asked for.
class Unpack {
public:
    explicit Unpack(std::string_view data) : left_(data) {}

    bool is_over() const { return left_.empty(); }
    std::size_t array() {
        const unsigned kind = next();
        return (kind & 0xF0) == 0x90 ? kind & 0x0F : kind == 0xdc ? big(2) : kind == 0xdd ? big(4) : wrong();
    }
    template <typename... Fields>
    void row(Fields&... fields) {
        if (array() != sizeof...(fields)) {
            wrong();
        }
        (take(fields), ...);
    }
    void take(bool& value) {
        const unsigned kind = next();
        value = kind == 0xc3 || (kind != 0xc2 && wrong());
    }
    void take(u64& value) {
        const unsigned kind = next();
        value = kind < 0x80 ? kind : kind >= 0xcc && kind <= 0xcf ? big(1U << (kind - 0xcc)) : wrong();
    }
    void take(i64& value) {
        const unsigned kind = peek();
        if (kind >= 0xe0) {
            value = static_cast<i64>(next()) - 0x100;
        } else if (kind >= 0xd0 && kind <= 0xd3) {
            next();
            const unsigned size = 1U << (kind - 0xd0);
            const u64 bits = big(size) << (64 - 8 * size);
            value = static_cast<i64>(bits) >> (64 - 8 * size);
        } else {
            u64 found = 0;
            take(found);
            value = found >> 63 ? static_cast<i64>(wrong()) : static_cast<i64>(found);
        }
    }
    void take(double& value) {
        if (peek() != 0xcb) {  // an integer in place of a float
            i64 whole = 0;
            take(whole);
            value = static_cast<double>(whole);
            return;
        }
        next();
        const u64 bits = big(8);
        std::memcpy(&value, &bits, sizeof value);
    }
    void take(std::string& text) {
        const unsigned kind = next();
        text = cut((kind & 0xE0) == 0xa0 ? kind & 0x1F : kind >= 0xd9 && kind <= 0xdb ? big(1U << (kind - 0xd9)) : wrong());
    }
    void take(RankKey& key) { row(key.worker_id, key.dp_rank); }
    void take(Chain& chain) {
        const unsigned kind = next();
        const std::string_view data = cut(kind >= 0xc4 && kind <= 0xc6 ? big(1U << (kind - 0xc4)) : wrong());
        if (data.size() % sizeof(u64) != 0) {
            wrong();
        }
        auto blocks = std::make_shared<std::vector<u64>>(data.size() / sizeof(u64));
        if (!data.empty()) {
            std::memcpy(blocks->data(), data.data(), data.size());
        }
        chain = Chain(blocks, blocks->data(), blocks->size());
    }
    template <typename Value>
    void take(std::optional<Value>& value) {
        value.reset();
        if (peek() == 0xc0) {
            next();
        } else {
            take(value.emplace());
        }
    }
    template <typename Value>
    void take(std::vector<Value>& values) {
        const std::size_t count = array();
        values.clear();
        for (std::size_t at = 0; at < count; ++at) {
            take(values.emplace_back());
        }
    }

private:
    [[noreturn]] static u64 wrong() { throw std::invalid_argument("a row has another form"); }
    unsigned peek() const { return left_.empty() ? static_cast<unsigned>(wrong()) : static_cast<unsigned char>(left_[0]); }
    unsigned next() { return static_cast<unsigned char>(cut(1)[0]); }
    std::string_view cut(u64 size) {
        if (size > left_.size()) {
            wrong();
        }
        const std::string_view found = left_.substr(0, static_cast<std::size_t>(size));
        left_.remove_prefix(found.size());
        return found;
    }
    u64 big(unsigned size) {
        u64 value = 0;
        for (const char each : cut(size)) {
            value = value << 8 | static_cast<unsigned char>(each);
        }
        return value;
    }

    std::string_view left_;
};

// Writes rows as the lists that a checkpoint's parts have: one ends at `kPartBytes` or more, or at `kPartRows` rows.
class Parts {
public:
    static constexpr std::size_t kPartBytes = 32 * 1024, kPartRows = 256;

    template <typename... Fields>
    void row(const Fields&... fields) {
        rows_.row(fields...);
        ended();
    }
    // A row that is packed already.
    void packed(std::string_view row) {
        rows_.append(row);
        ended();
    }
    // No row follows.
    void over() { cut(); }
    // Whole parts, oldest first.
    std::deque<std::string> parts;

private:
    void ended() {
        ++count_;
        if (rows_.size() >= kPartBytes || count_ == kPartRows) {
            cut();
        }
    }
    void cut() {
        std::string part(5, '\xdd');
        for (unsigned at = 0; at < 4; ++at) {
            part[1 + at] = static_cast<char>(count_ >> (24 - 8 * at) & 0xFF);
        }
        parts.push_back(part.append(rows_.view()));
        rows_.clear();
        count_ = 0;
    }

    Pack rows_;
    std::size_t count_ = 0;
};

// Writes a frozen table's next rows; returns whether more follow.
using MoreRows = std::function<bool(Parts&)>;

// Writes the rows that `write` makes of each of `rows`, some at a time.
template <typename Row, typename Write>
MoreRows more_rows(std::vector<Row> rows, Write write) {
    return [rows = std::move(rows), write, at = std::size_t{0}](Parts& parts) mutable {
        for (; parts.parts.empty() && at < rows.size(); ++at) {
            write(parts, rows[at]);
        }
        return at < rows.size();
    };
}

}  // namespace kv
