// Loads of dumps, and repairs: then the rank's blocks, or those in some buckets, are exactly the blocks of the rows.
#include <algorithm>

#include "tree.hpp"

namespace kv {

std::size_t Tree::load(u32 rank, const std::vector<ColumnsView>& chunks, double now_s) {
    clear(rank, kAllTiers);
    return hold_rows(rank, chunks, now_s);
}

std::size_t Tree::repair(u32 rank, const u8* buckets, const std::vector<ColumnsView>& chunks, double now_s) {
    for (u32 tier = 0; tier < kTiers; ++tier) {
        const std::vector<u64> held = held_in(buckets, {rank, tier});
        remove(rank, held.data(), held.size(), tier);
    }
    return hold_rows(rank, chunks, now_s);
}

// The blocks in `buckets` that the rank holds on the tier, children before their parents.
std::vector<u64> Tree::held_in(const u8* buckets, Holder holder) const {
    ranks_.at(holder.rank);
    std::vector<u64> found;
    for (u32 run = next_in_walk(Runs::kRoot); run != Runs::kRoot; run = next_in_walk(run)) {
        if (!sets_.contains(runs_[run].set, holder)) {
            continue;
        }
        for (u32 block = runs_[run].begin; block < runs_[run].end(); ++block) {
            const u64 hash = blocks_.hash(block);
            const u32 bucket = static_cast<u32>(hash >> 56);
            if ((buckets[bucket >> 3] >> (bucket & 7) & 1) != 0) {
                found.push_back(hash);
            }
        }
    }
    std::reverse(found.begin(), found.end());
    return found;
}

std::size_t Tree::hold_rows(u32 rank, const std::vector<ColumnsView>& chunks, double now_s) {
    const u64 before = counters_.refused_blocks;
    for (const ColumnsView& rows : chunks) {
        for (std::size_t at = 0; at < rows.rows;) {
            at += load_chain(rank, rows, at, now_s);
        }
    }
    return counters_.refused_blocks - before;
}

// Makes the rank hold the chain of rows that begins at `at`; returns its length.
std::size_t Tree::load_chain(u32 rank, const ColumnsView& rows, std::size_t at, double now_s) {
    const u32 bits = rows.tiers[at] & kAllTiers;
    const bool has_parent = (rows.tiers[at] & kRowHasParent) != 0;
    const u64 parent = read<u64>(rows.parents + 8 * at);
    std::size_t length = 1;
    chain_.assign(1, read<u64>(rows.hashes + 8 * at));
    while (at + length < rows.rows && rows.tiers[at + length] == (bits | kRowHasParent) &&
           read<u64>(rows.parents + 8 * (at + length)) == chain_.back()) {
        chain_.push_back(read<u64>(rows.hashes + 8 * (at + length++)));
    }
    const Counters before = counters_;
    Counters after = before;
    for (u32 tier = 0; tier < kTiers; ++tier) {
        if ((bits >> tier & 1) != 0) {
            counters_.parent_conflicts = before.parent_conflicts;
            counters_.refused_blocks = before.refused_blocks;
            store(rank, has_parent ? &parent : nullptr, chain_.data(), length, tier, now_s);
            after.parent_conflicts = std::max(after.parent_conflicts, counters_.parent_conflicts);
            after.refused_blocks = std::max(after.refused_blocks, counters_.refused_blocks);
        }
    }
    counters_.parent_conflicts = after.parent_conflicts;  // a row counts once, on however many tiers it is
    counters_.refused_blocks = after.refused_blocks;
    return length;
}

}  // namespace kv
