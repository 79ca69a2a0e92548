// Messages of canonical batches (kv_protocol/codec.py): framing is checked for the whole message before anything is
// applied; then each event is applied, or refused for itself. Offsets and reasons are those of the codec.
#include <cstring>

#include "tree.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire's byte order is taken for this machine's");

namespace kv {

namespace {

constexpr std::size_t kMessageBytesMax = 512 * 1024, kCountBytes = 2, kHeadBytes = 52;
constexpr u8 kVersion = 1, kStored = 0, kRemoved = 1, kCleared = 2, kHasParent = 1;

template <class T>
T read(const u8* data) {
    T value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

struct Head {
    u8 kind, tier, flags;
    u64 seq, parent;
    u32 start, count;

    explicit Head(const u8* at)
        : kind(at[1]), tier(at[2]), flags(at[3]), seq(read<u64>(at + 12)), parent(read<u64>(at + 36)),
          start(read<u32>(at + 44)), count(read<u32>(at + 48)) {}
    bool has_parent() const { return (flags & kHasParent) != 0; }
};

std::string hex(u8 number) {
    const char* digits = "0123456789abcdef";
    std::string found = "0x";
    if (number >> 4 != 0) {
        found += digits[number >> 4];
    }
    return found + digits[number & 15];
}

// Where the batch after the one at `at` begins.
std::size_t checked_frame(const u8* data, std::size_t size, std::size_t at) {
    if (size - at < kHeadBytes) {
        throw Malformed(at, text(size - at) + " bytes left, a batch head needs " + text(kHeadBytes));
    }
    if (data[at] != kVersion) {
        throw Malformed(at, "version " + text(data[at]) + ", only " + text(kVersion) + " is known");
    }
    const std::size_t body = at + kHeadBytes;
    const u64 count = Head(data + at).count;
    if (count > (size - body) / sizeof(u64)) {
        throw Malformed(body - 4, "n is " + text(count) + " blocks, only " + text((size - body) / sizeof(u64)) + " follow");
    }
    return body + count * sizeof(u64);
}

// The number of batches in a message that can be cut into them.
u32 checked_count(const u8* data, std::size_t size) {
    if (size > kMessageBytesMax) {
        throw Malformed(kMessageBytesMax, text(size) + " bytes, at most " + text(kMessageBytesMax) + " allowed");
    }
    if (size < kCountBytes) {
        throw Malformed(0, text(size) + " bytes, a count needs " + text(kCountBytes));
    }
    const u32 count = read<u16>(data);
    if (count == 0) {
        throw Malformed(0, "count is 0, at least one batch is needed");
    }
    std::size_t at = kCountBytes;
    for (u32 batch = 0; batch < count; ++batch) {
        at = checked_frame(data, size, at);
    }
    if (at != size) {
        throw Malformed(at, text(size - at) + " bytes after the last of " + text(count) + " batches");
    }
    return count;
}

// Why a stored event may not be; empty where it may.
std::string stored_refusal(const Head& head) {
    if (head.count == 0) {
        return "sequence_hashes: found 0, allowed at least one block";
    }
    if (head.has_parent() == (head.start == 0)) {
        return "start: found " + text(head.start) + ", allowed 0 without a parent, more than 0 with one";
    }
    if (u64{head.start} + head.count > u64{1} << 32) {
        return "start: found " + text(head.start) + ", allowed a u32, as the positions of all its blocks";
    }
    return "";
}

std::string event_refusal(const Head& head) {
    if (head.kind == kStored) {
        return stored_refusal(head);
    }
    if (head.has_parent() || head.start != 0) {
        const std::string parent = head.has_parent() ? text(head.parent) : "None";
        return "parent and start: found (" + parent + ", " + text(head.start) + "), allowed only on a stored event";
    }
    if (head.kind == kRemoved) {
        return head.count == 0 ? "sequence_hashes: found 0, allowed at least one block" : "";
    }
    if (head.kind == kCleared && head.count == 0) {
        return "";
    }
    return "kind: found " + text(head.kind) + ", allowed 0 stored, 1 removed, 2 cleared (without blocks)";
}

// Why the batch at `at` may not be applied, and the byte that says so; an empty reason where it may.
Refusal checked_event(const Head& head, u32 event, u64 at) {
    if (head.tier >= kTiers) {
        return {event, at + 2, "tier " + text(head.tier) + ", allowed 0.." + text(kTiers - 1)};
    }
    if ((head.flags & ~kHasParent) != 0) {
        return {event, at + 3, "flags " + hex(head.flags) + ", only bit 0 is known"};
    }
    std::string reason = event_refusal(head);
    if (reason.empty() && head.seq == 0) {
        reason = "seq: found 0, allowed 1 or more";
    }
    return {event, at, std::move(reason)};
}

}  // namespace

// The first places that an event will look at in the map are fetched while the one before it is applied.
void Tree::prefetch_event(const u8* frame) const {
    const Head head(frame);
    if (head.count != 0) {
        const u64 hashes[2] = {read<u64>(frame + kHeadBytes), head.parent};
        prefetch(hashes, head.has_parent() ? 2 : 1);
    }
}

std::vector<Refusal> Tree::apply_batch(u32 rank, const u8* data, std::size_t size, double now_s) {
    ranks_.at(rank);
    const u32 count = checked_count(data, size);
    std::vector<Refusal> refusals;
    // Applies the event whose hashes are in `aligned_`; returns how many of its blocks there was no memory for.
    const auto apply = [&](const Head& head) -> std::size_t {
        if (head.kind == kStored) {
            const u64* parent = head.has_parent() ? &head.parent : nullptr;
            return store(rank, parent, aligned_.data(), head.count, head.tier, now_s);
        }
        if (head.kind == kRemoved) {
            remove(rank, aligned_.data(), head.count, head.tier);
        } else {
            clear(rank, 1u << head.tier);
        }
        return 0;
    };
    std::size_t at = kCountBytes;
    for (u32 event = 0; event < count; ++event) {
        const Head head(data + at);
        Refusal refusal = checked_event(head, event, at);
        const std::size_t next = at + kHeadBytes + head.count * sizeof(u64);
        if (event + 1 < count) {
            prefetch_event(data + next);
        }
        if (refusal.reason.empty()) {
            aligned_.resize(head.count);
            if (head.count != 0) {
                std::memcpy(aligned_.data(), data + at + kHeadBytes, head.count * sizeof(u64));
            }
            refusal.refused_blocks = apply(head);
            if (refusal.refused_blocks != 0) {
                const std::string refused = text(refusal.refused_blocks);
                refusal.reason = "no memory for " + refused + " of " + text(head.count) + " blocks";
            }
        }
        if (!refusal.reason.empty()) {
            refusals.push_back(std::move(refusal));
        }
        at = next;
    }
    return refusals;
}

}  // namespace kv
