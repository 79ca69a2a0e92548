#include "block_map.hpp"

namespace kv {

// Empties the map, but leaves one segment, even beyond the memory limit: no lookup works without a segment.
void BlockMap::reset() {
    budget_->used -= bytes();
    buckets_.release();
    std::vector<Segment>().swap(segments_);
    directory_.release();
    shift_ = 63;
    size_ = 0;
    ++splits_;
    buckets_.reserve(kBuckets);
    directory_.reserve(directory_size());
    segments_.push_back({0, 0, 0});
    budget_->used += bytes();
}

// The rest of `find_or_insert`: looks beyond the first bucket, and splits a full segment.
u32 BlockMap::find_or_insert_slowly(u64 hash, u32 block) {
    Spot place = spot(hash);
    const u32 found = find(hash, place);
    if (found != kNone) {
        return found;
    }
    while (segments_[place.bucket / kBuckets].count >= kSplitAt) {
        if (!split(static_cast<u32>(place.bucket / kBuckets))) {
            if (segments_[place.bucket / kBuckets].count >= kFull) {
                return kNone;
            }
            break;
        }
        place = spot(hash);
    }
    insert(place, block);
    return block;
}

void BlockMap::insert(const Spot& spot, u32 block) {
    std::size_t at = spot.bucket;
    u32 empty = entries_with(buckets_[at], 0);
    while (empty == 0) {
        ++buckets_[at].passed;
        at = following(at);
        empty = entries_with(buckets_[at], 0);
    }
    const u32 entry = static_cast<u32>(__builtin_ctz(empty));
    buckets_[at].tags[entry] = static_cast<Tag>(spot.tag);
    buckets_[at].blocks[entry] = block;
    ++segments_[spot.bucket / kBuckets].count;
    ++size_;
}

// Reserves the memory that a split needs; false if there is none.
bool BlockMap::make_room(bool doubles) {
    if (!budget_->fits_much(kSegmentBytes + (doubles ? directory_size() * sizeof(u32) : 0))) {
        return false;
    }
    try {
        buckets_.reserve((segments_.size() + 1) * kBuckets);
        if (segments_.size() == segments_.capacity()) {
            segments_.reserve(2 * segments_.size());
        }
        moving_.reserve(std::size_t{kEntries} * kBuckets);
        directory_.reserve(directory_size() * 2);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

void BlockMap::double_directory() {
    const std::size_t size = directory_size();
    directory_.reserve(size * 2);
    for (std::size_t at = size; at-- > 0;) {
        directory_[2 * at] = directory_[2 * at + 1] = directory_[at];
    }
    --shift_;
    budget_->used += size * sizeof(u32);
}

bool BlockMap::split(u32 segment) {
    const u32 depth = segments_[segment].depth;
    const bool doubles = depth == 64 - shift_;
    if (depth == kDepthMax || !make_room(doubles)) {
        return false;
    }
    if (doubles) {
        double_directory();
    }
    const u32 upper = static_cast<u32>(segments_.size()), prefix = segments_[segment].prefix * 2 + 1;
    segments_.push_back({0, depth + 1, prefix});
    budget_->used += kSegmentBytes;
    segments_[segment].depth = depth + 1;
    segments_[segment].prefix = prefix - 1;
    const u32 width = 64 - shift_ - (depth + 1);
    for (u32 at = prefix << width; at < (prefix + 1) << width; ++at) {
        directory_[at] = upper;
    }
    ++splits_;
    move_entries(segment);
    return true;
}

// Moves the blocks that now belong to another segment. Their old bucket follows from their new spot, since a spot's
// place within its segment does not depend on the directory.
void BlockMap::move_entries(u32 segment) {
    moving_.clear();
    for (std::size_t at = std::size_t{segment} * kBuckets; at < (std::size_t{segment} + 1) * kBuckets; ++at) {
        for (u32 entry = 0; entry < kEntries; ++entry) {
            if (buckets_[at].tags[entry] != 0) {
                moving_.push_back(buckets_[at].blocks[entry]);
            }
        }
    }
    for (std::size_t at = 0; at < moving_.size(); ++at) {
        if (at + 16 < moving_.size()) {
            __builtin_prefetch(blocks_->hashes() + moving_[at + 16]);
        }
        const Spot to = spot(blocks_->hash(moving_[at]));
        if (to.bucket / kBuckets != segment) {
            erase({std::size_t{segment} * kBuckets + to.bucket % kBuckets, to.tag}, moving_[at]);
            insert(to, moving_[at]);
        }
    }
}

void BlockMap::reserve(u64 count) {
    u32 depth = 0;
    while (depth < kDepthMax && (u64{kSplitAt} << depth) * 19 / 20 < count) {
        ++depth;
    }
    for (u32 segment = 0; segment < segments_.size(); ++segment) {
        while (segments_[segment].depth < depth) {
            if (!split(segment)) {
                return;
            }
        }
    }
}

}  // namespace kv
