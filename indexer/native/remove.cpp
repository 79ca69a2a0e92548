// Removals and clears: a rank no longer holds blocks, and a run that has neither holders nor children is erased.
#include <algorithm>

#include "tree.hpp"

namespace kv {

void Tree::remove(u32 rank, const u64* hashes, std::size_t count, u32 tier) {
    ranks_.at(rank);
    const Holder holder{rank, tier};
    std::size_t fetched = 0;
    for (std::size_t at = 0; at < count;) {
        if (at >= fetched) {
            fetched = std::min<std::size_t>(count, at + SpotsAhead::kAhead);
            prefetch(hashes + at, fetched - at);
        }
        const u32 block = find(hashes[at]);
        Piece piece{0, 1};
        bool is_held = false;
        if (block != kNone) {
            piece = piece_at(hashes + at, count - at, block);
            is_held = sets_.contains(runs_[runs_.of(block)].set, holder);
        }
        if (is_held) {
            release(runs_.of(block), piece.offset, piece.length, holder);
        } else {
            counters_.unknown_removals += piece.length;
        }
        at += piece.length;
    }
    reset_if_empty();
}

// The longest piece of `block`'s run that the next hashes name one after the other, from `block` on or back from it.
Tree::Piece Tree::piece_at(const u64* hashes, std::size_t left, u32 block) const {
    const Run& run = runs_[runs_.of(block)];
    const u32 offset = block - run.begin;
    const std::size_t most = std::min<std::size_t>(left, run.length - offset);
    const u32 upwards = static_cast<u32>(common_prefix(hashes, blocks_.hashes() + block, most));
    u32 downwards = 1;
    while (downwards < left && downwards <= offset && hashes[downwards] == blocks_.hash(block - downwards)) {
        ++downwards;
    }
    return upwards >= downwards ? Piece{offset, upwards} : Piece{offset - (downwards - 1), downwards};
}

void Tree::release(u32 run, u32 offset, u32 length, Holder holder) {
    const u32 after = sets_.without(runs_[run].set, holder);
    const bool is_unheld = after == HolderSets::kEmpty;
    const Run& own = runs_[run];
    const bool is_end = is_unheld && own.child_count == 0 && offset != 0 && offset + length == own.length;
    if (!is_end) {  // the end of a leaf is cut off without a split
        run = runs_.isolate(run, offset, length);
        offset = 0;
    }
    Digest& digest = ranks_.digest(holder);
    digest.count -= length;
    ranks_.at(holder.rank).held -= sets_.tiers_of(after, holder.rank) == 0 ? length : 0;
    const u64* hashes = blocks_.hashes() + runs_[run].begin + offset;
    for (u32 at = 0; at < length; ++at) {
        digest.discard(hashes[at]);
    }
    if (is_end) {
        erase_last(run, length);
        return;
    }
    runs_.set_holders(run, after);
    if (is_unheld && runs_[run].child_count == 0) {
        prune(run);
    } else {
        runs_.merge_around(run);
    }
}

// Erases the run if it has neither holders nor children, and then each run above it for which this is true.
void Tree::prune(u32 run) {
    while (run != Runs::kRoot && runs_[run].set == HolderSets::kEmpty && runs_[run].child_count == 0) {
        const u32 parent = runs_[run].parent;
        erase_last(run, runs_[run].length);
        runs_.unlink(run);
        runs_.remove(run);
        run = parent;
    }
    runs_.merge_with_child(run);
}

// Erases the last `count` blocks of a run; no other run may lie after it in its extent.
void Tree::erase_last(u32 run, u32 count) {
    Run& own = runs_[run];
    own.length -= count;
    const u64* hashes = blocks_.hashes() + own.end();
    SpotsAhead spots(map_, hashes, count);
    for (u32 at = 0; at < count; ++at) {
        map_.erase(spots.at(at), own.end() + at);
    }
    blocks_.shrink(own.extent, count);
}

void Tree::clear(u32 rank, u32 tier_bits) {
    ranks_.at(rank);
    for (u32 tier = 0; tier < kTiers; ++tier) {
        if ((tier_bits >> tier & 1) != 0) {
            clear_tier({rank, tier});
        }
    }
    reset_if_empty();
}

void Tree::clear_tier(Holder holder) {
    for (u32 run = 1; run < runs_.numbers() && ranks_.count_of(holder) != 0; ++run) {
        if (runs_[run].length != 0 && sets_.contains(runs_[run].set, holder)) {
            release(run, 0, runs_[run].length, holder);
        }
    }
}

}  // namespace kv
