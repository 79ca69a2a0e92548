// Maps sequence hashes to blocks by extendible hashing: a cache line a lookup, 5.3 bytes an entry, 7.6-15 a used one.
//
//     directory   top bits of the spread hash -> segment
//     segment     1024 buckets; splits in two when 70 % full, so that no insertion waits for a rehash of everything
//     bucket      12 entries: a tag of 8 bits each (0: empty) and the block; the hash itself is read from the block
//
// An entry that finds its bucket full goes to the next one of the segment, and is counted in every bucket that it passed.
// So a search knows where to end, and a removal leaves no mark behind.
#pragma once

#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "blocks.hpp"
#include "buffer.hpp"
#include "common.hpp"

namespace kv {

class BlockMap {
public:
    // Where a hash belongs. Valid only until `splits()` returns another number.
    struct Spot {
        u64 bucket;
        u32 tag;
    };

    BlockMap(Budget& budget, const Blocks& blocks, u64 seed)
        : budget_(&budget),
          blocks_(&blocks),
          seed_(seed),
          odd_(splitmix64(seed) | 1) {
        reset();
    }

    Spot spot(u64 hash) const {
        u64 spread = (hash ^ seed_) * 0x9FB21C651E98DF25u;
        spread = (spread ^ (spread >> 32)) * odd_;
        return {u64{directory_[spread >> shift_]} * kBuckets + (spread >> 30) % kBuckets, tag_of(spread)};
    }
    void prefetch(const Spot& spot) const {
        __builtin_prefetch(buckets_.data() + spot.bucket, 1);
        asm volatile("");  // else GCC removes the call: a function that only prefetches seems to have no effect
    }
    u64 splits() const { return splits_; }

    // The block of that hash, or kNone.
    u32 find(u64 hash) const { return find(hash, spot(hash)); }
    u32 find(u64 hash, const Spot& spot) const;
    // Returns the block of that hash. If there is none, inserts `block` and returns it, or kNone without memory.
    u32 find_or_insert(u64 hash, const Spot& spot, u32 block);
    // Removes `block`, which is in the map at that spot.
    void erase(const Spot& spot, u32 block);
    // Makes room for `count` entries, as far as memory allows.
    void reserve(u64 count);
    void reset();

    u64 size() const { return size_; }
    u64 bytes() const {
        return segments_.empty() ? 0 : segments_.size() * kSegmentBytes + directory_size() * sizeof(u32);
    }

private:
    static constexpr u32 kEntries = 12, kBuckets = 1024, kDepthMax = 24;
    static constexpr u32 kSplitAt = kEntries * kBuckets * 7 / 10, kFull = kEntries * kBuckets * 19 / 20;

    enum Tag : u8 {};  // not a char, which may alias any object: after a store to it, all would be read again
    struct alignas(64) Bucket {
        Tag tags[kEntries];
        u32 passed;
        u32 blocks[kEntries];
    };
    struct Segment {
        u32 count;
        u32 depth;
        u32 prefix;
    };
    static constexpr u64 kSegmentBytes = kBuckets * sizeof(Bucket) + sizeof(Segment);

    // 1..255, as a word: if it were stored as a byte, the next read of the whole word would have to wait.
    static u32 tag_of(u64 spread) {
        const u32 tag = static_cast<u32>(spread >> 22) & 0xFF;
        return tag == 0 ? 1 : tag;
    }
    static u32 entries_with(const Bucket& bucket, u32 tag);
    static std::size_t following(std::size_t bucket) {
        return bucket % kBuckets == kBuckets - 1 ? bucket - (kBuckets - 1) : bucket + 1;
    }
    // At least two: `shift_` is at most 63.
    std::size_t directory_size() const { return std::size_t{1} << (64 - shift_); }
    u32 find_or_insert_slowly(u64 hash, u32 block);
    void insert(const Spot& spot, u32 block);
    bool split(u32 segment);
    bool make_room(bool doubles);
    void double_directory();
    void move_entries(u32 segment);

    Budget* budget_;
    const Blocks* blocks_;
    u64 seed_;
    u64 odd_;
    Buffer<Bucket> buckets_;
    std::vector<Segment> segments_;
    Buffer<u32> directory_;
    std::vector<u32> moving_;
    u32 shift_ = 63;
    u64 splits_ = 0;
    u64 size_ = 0;
};

// The spots of many hashes in order, each fetched before it is needed.
class SpotsAhead {
public:
    static constexpr u32 kAhead = 32;

    SpotsAhead(const BlockMap& map, const u64* hashes, u32 count) : map_(map), hashes_(hashes), count_(count) { fetch(0); }

    // The spot of the hash at `at`; each call must pass the next `at`.
    const BlockMap::Spot& at(u32 at) {
        if (splits_ != map_.splits()) {
            fetch(at);
        }
        if (at + kAhead < count_) {
            fetch_one(at + kAhead);
        }
        return spots_[at % (2 * kAhead)];
    }

private:
    void fetch(u32 from) {
        splits_ = map_.splits();
        for (u32 at = from; at < count_ && at - from < kAhead; ++at) {
            fetch_one(at);
        }
    }
    void fetch_one(u32 at) {
        spots_[at % (2 * kAhead)] = map_.spot(hashes_[at]);
        map_.prefetch(spots_[at % (2 * kAhead)]);
    }

    const BlockMap& map_;
    const u64* hashes_;
    u32 count_;
    u64 splits_ = 0;
    BlockMap::Spot spots_[2 * kAhead];
};

inline u32 BlockMap::entries_with(const Bucket& bucket, u32 tag) {
#if defined(__SSE2__)
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.tags));
    const __m128i same = _mm_cmpeq_epi8(line, _mm_set1_epi32(static_cast<int>(tag * 0x01010101u)));
    return static_cast<u32>(_mm_movemask_epi8(same)) & ((1u << kEntries) - 1);
#else
    u32 found = 0;
    for (u32 entry = 0; entry < kEntries; ++entry) {
        found |= static_cast<u32>(bucket.tags[entry] == tag) << entry;
    }
    return found;
#endif
}

inline u32 BlockMap::find(u64 hash, const Spot& spot) const {
    std::size_t at = spot.bucket;
    for (u32 step = 0; step < kBuckets; ++step) {
        const Bucket& bucket = buckets_[at];
        for (u32 found = entries_with(bucket, spot.tag); found != 0; found &= found - 1) {
            const u32 block = bucket.blocks[__builtin_ctz(found)];
            if (blocks_->hash(block) == hash) {
                return block;
            }
        }
        if (bucket.passed == 0) {
            return kNone;
        }
        at = following(at);
    }
    return kNone;
}

// Handles the common case with one bucket: it has the hash, or no entry passed it and it has room.
inline u32 BlockMap::find_or_insert(u64 hash, const Spot& spot, u32 block) {
    Bucket& bucket = buckets_[spot.bucket];
    for (u32 found = entries_with(bucket, spot.tag); found != 0; found &= found - 1) {
        const u32 known = bucket.blocks[__builtin_ctz(found)];
        if (blocks_->hash(known) == hash) {
            return known;
        }
    }
    const u32 empty = entries_with(bucket, 0);
    Segment& segment = segments_[spot.bucket / kBuckets];
    if (bucket.passed == 0 && empty != 0 && segment.count < kSplitAt) {
        const u32 entry = static_cast<u32>(__builtin_ctz(empty));
        bucket.tags[entry] = static_cast<Tag>(spot.tag);
        bucket.blocks[entry] = block;
        ++segment.count;
        ++size_;
        return block;
    }
    return find_or_insert_slowly(hash, block);
}

inline void BlockMap::erase(const Spot& spot, u32 block) {
    for (std::size_t at = spot.bucket;; at = following(at)) {
        Bucket& bucket = buckets_[at];
        for (u32 found = entries_with(bucket, spot.tag); found != 0; found &= found - 1) {
            const u32 entry = static_cast<u32>(__builtin_ctz(found));
            if (bucket.blocks[entry] == block) {
                bucket.tags[entry] = Tag{};
                --segments_[spot.bucket / kBuckets].count;
                --size_;
                return;
            }
        }
        --bucket.passed;
    }
}

}  // namespace kv
