// Messages of canonical batches (kv_protocol/codec.py). A whole message is checked before anything of it is applied. The
// checks only find that there is a fault; the codec says which.
#include <algorithm>
#include <cstring>

#include "tree.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire's byte order is taken for this machine's");

namespace kv {

namespace {

constexpr std::size_t kMessageBytesMax = 512 * 1024, kCountBytes = 2, kHeadBytes = 52;
constexpr u8 kVersion = 1, kStored = 0, kRemoved = 1, kCleared = 2, kHasParent = 1;

struct Head {
    u8 version, kind, tier, flags;
    u64 epoch, seq, parent;
    std::int64_t time_ns;
    u32 start, count;

    explicit Head(const u8* at)
        : version(at[0]), kind(at[1]), tier(at[2]), flags(at[3]), epoch(read<u64>(at + 4)), seq(read<u64>(at + 12)),
          parent(read<u64>(at + 36)), time_ns(read<std::int64_t>(at + 28)), start(read<u32>(at + 44)),
          count(read<u32>(at + 48)) {}
    bool has_parent() const { return (flags & kHasParent) != 0; }
    // Only a stored event has a position, and a parent unless its position is 0.
    bool is_event() const {
        const bool is_placed = kind == kStored ? has_parent() == (start != 0) : !has_parent() && start == 0;
        return version == kVersion && kind <= kCleared && tier < kTiers && (flags & ~kHasParent) == 0 && seq != 0 &&
            (kind == kCleared) == (count == 0) && is_placed && u64{start} + count <= u64{1} << 32;
    }
};

// Returns the number of batches in a message; throws Malformed unless all are right.
u32 checked_count(const u8* data, std::size_t size) {
    const u32 count = size < kCountBytes || size > kMessageBytesMax ? 0 : read<u16>(data);
    std::size_t at = kCountBytes;
    for (u32 batch = 0; batch < count; ++batch) {
        const bool is_event = size - at >= kHeadBytes && Head(data + at).is_event();
        const u64 blocks = is_event ? Head(data + at).count : 0;
        if (!is_event || blocks > (size - at - kHeadBytes) / sizeof(u64)) {
            throw Malformed(at, "no batch");
        }
        at += kHeadBytes + blocks * sizeof(u64);
    }
    if (count == 0 || at != size) {
        throw Malformed(std::min(at, size), "no message of batches");
    }
    return count;
}

}  // namespace

std::optional<Span> message_span(const u8* data, std::size_t size) try {
    const u32 count = checked_count(data, size);
    std::size_t at = kCountBytes;
    Span span{};
    for (u32 batch = 0; batch < count; ++batch) {
        const Head head(data + at);
        if (batch == 0) {
            span = {head.epoch, head.seq, head.seq, 0};
        } else if (head.epoch != span.epoch || head.seq != ++span.last_seq) {
            return std::nullopt;
        }
        span.time_ns = head.time_ns;
        at += kHeadBytes + head.count * sizeof(u64);
    }
    return span;
} catch (const Malformed&) {
    return std::nullopt;
}

// Prefetches the first places that an event will read in the map, while the event before it is applied.
void Tree::prefetch_event(const u8* frame) const {
    const Head head(frame);
    if (head.count != 0) {
        const u64 hashes[2] = {read<u64>(frame + kHeadBytes), head.parent};
        prefetch(hashes, head.has_parent() ? 2 : 1);
    }
}

std::size_t Tree::apply_batch(u32 rank, const u8* data, std::size_t size, double now_s) {
    ranks_.at(rank);
    const u32 count = checked_count(data, size);
    std::size_t at = kCountBytes, refused = 0;
    for (u32 event = 0; event < count; ++event) {
        const Head head(data + at);
        const u8* hashes = data + at + kHeadBytes;
        at += kHeadBytes + head.count * sizeof(u64);
        if (event + 1 < count) {
            prefetch_event(data + at);
        }
        chain_.resize(head.count);
        if (head.kind == kCleared) {
            clear(rank, 1u << head.tier);
            continue;
        }
        std::memcpy(chain_.data(), hashes, head.count * sizeof(u64));
        if (head.kind == kRemoved) {
            remove(rank, chain_.data(), head.count, head.tier);
        } else {
            refused += store(rank, head.has_parent() ? &head.parent : nullptr, chain_.data(), head.count, head.tier, now_s);
        }
    }
    return refused;
}

}  // namespace kv
