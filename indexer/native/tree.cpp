// Ranks, and what concerns the tree as a whole.
#include "tree.hpp"

#include <algorithm>

namespace kv {

namespace {

constexpr u64 kReservedBlocksMax = u64{1} << 27;  // the map is never made larger than this beforehand
constexpr u64 kWorthReset = u64{8} << 20;  // bytes; an empty tree that keeps more gives them back

}  // namespace

std::size_t common_prefix(const u64* left, const u64* right, std::size_t count) {
    std::size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        u64 differ = 0;
        for (std::size_t lane = 0; lane < 8; ++lane) {
            differ |= left[at + lane] ^ right[at + lane];
        }
        if (differ != 0) {
            break;
        }
    }
    while (at < count && left[at] == right[at]) {
        ++at;
    }
    return at;
}

Tree::Tree(const Limits& limits)
    : limits_(limits),
      budget_{limits.memory_bytes_max},
      blocks_(budget_),
      map_(budget_, blocks_, limits.seed),
      sets_(budget_),
      runs_(budget_, blocks_, sets_),
      ranks_(budget_) {}

void Tree::add_rank(u32 rank, u64 capacity_blocks) {
    if (!ranks_.has(rank)) {
        const u64 needed = Ranks::kRankBytes + blocks_.bytes_for_more() + Budget::kLittle;
        if (!budget_.fits(needed)) {
            throw IndexFull("a rank and its first blocks need " + text(needed) + " bytes; " + text(budget_.used) + " of " +
                            text(budget_.limit) + " are used");
        }
        ranks_.add(rank);
    }
    ranks_.at(rank).capacity = std::max(ranks_.at(rank).capacity, capacity_blocks);
    u64 all = 0;
    for (u32 each = 0; each < ranks_.numbers(); ++each) {
        all += ranks_.has(each) ? ranks_.at(each).capacity : 0;
    }
    reserve_for(all);
}

// Enlarges the map beforehand, to at most a quarter of the allowed memory.
void Tree::reserve_for(u64 capacity_blocks) {
    u64 count = std::min(capacity_blocks, kReservedBlocksMax);
    if (limits_.memory_bytes_max != 0) {
        count = std::min(count, limits_.memory_bytes_max / 64);
    }
    map_.reserve(count);
}

void Tree::drop(u32 rank) {
    if (ranks_.has(rank)) {
        clear(rank, kAllTiers);
        ranks_.remove(rank);
    }
}

void Tree::reset_if_empty() {
    if (map_.size() != 0 || blocks_.kept_bytes() + map_.bytes() < kWorthReset) {
        return;
    }
    runs_.reset();
    sets_.reset();
    blocks_.reset();
    map_.reset();
}

u64 Tree::held_blocks() const {
    u64 held = 0;
    for (u32 rank = 0; rank < ranks_.numbers(); ++rank) {
        held += ranks_.has(rank) ? ranks_.at(rank).held : 0;
    }
    return held;
}

}  // namespace kv
