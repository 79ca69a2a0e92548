// Makes dumps, walks the tree for people, and returns figures.
#include <algorithm>

#include "tree.hpp"

namespace kv {

// The run after `run` in a walk that meets parents before children; kRoot after the last.
u32 Tree::next_in_walk(u32 run) const {
    if (runs_[run].first_child != 0) {
        return runs_[run].first_child;
    }
    while (run != Runs::kRoot && runs_[run].next == 0) {
        run = runs_[run].parent;
    }
    return run == Runs::kRoot ? Runs::kRoot : runs_[run].next;
}

std::vector<Columns> Tree::dump(u32 rank, std::size_t chunk_blocks) const {
    ranks_.at(rank);
    std::vector<Columns> chunks;
    for (u32 run = next_in_walk(Runs::kRoot); run != Runs::kRoot; run = next_in_walk(run)) {
        const Run& own = runs_[run];
        const u32 tiers = sets_.tiers_of(own.set, rank);
        if (tiers == 0) {
            continue;
        }
        bool has_parent = own.parent != Runs::kRoot;
        u64 parent = has_parent ? blocks_.hash(runs_[own.parent].last()) : 0;
        for (u32 block = own.begin; block < own.end(); ++block) {
            if (chunks.empty() || chunks.back().tiers.size() == chunk_blocks) {
                chunks.emplace_back();
            }
            append(chunks.back().parents, parent);
            append(chunks.back().hashes, blocks_.hash(block));
            chunks.back().tiers += static_cast<char>(tiers | (has_parent ? kRowHasParent : 0));
            has_parent = true;
            parent = blocks_.hash(block);
        }
    }
    return chunks;
}

std::vector<u64> Tree::children(const u64* hash) const {
    u32 run = Runs::kRoot;
    if (hash != nullptr) {
        const u32 block = find(*hash);
        if (block == kNone) {
            return {};
        }
        run = runs_.of(block);
        if (runs_[run].last() != block) {
            return {blocks_.hash(block + 1)};
        }
    }
    std::vector<u64> found;
    for (u32 child = runs_[run].first_child; child != 0; child = runs_[child].next) {
        found.push_back(blocks_.hash(runs_[child].begin));
    }
    std::sort(found.begin(), found.end());
    return found;
}

std::vector<std::pair<u32, u32>> Tree::members(u32 set) const {
    std::vector<std::pair<u32, u32>> found;
    for (u32 rank = 0; rank < sets_.width(set) * 64; ++rank) {
        if (const u32 tiers = sets_.tiers_of(set, rank)) {
            found.emplace_back(rank, tiers);
        }
    }
    return found;
}

std::vector<std::pair<u32, u32>> Tree::holders(u64 hash) const {
    const u32 block = find(hash);
    return block == kNone ? std::vector<std::pair<u32, u32>>{} : members(runs_[runs_.of(block)].set);
}

std::vector<u64> Tree::chain(u64 hash, std::size_t limit) const {
    std::vector<u64> found;
    u32 block = find(hash);
    while (block != kNone && found.size() < limit) {
        const Run& run = runs_[runs_.of(block)];
        const std::size_t count = std::min(std::size_t{run.end() - block}, limit - found.size());
        found.insert(found.end(), blocks_.hashes() + block, blocks_.hashes() + block + count);
        block = run.child_count == 1 ? runs_[run.first_child].begin : kNone;
    }
    return found;
}

// ------------------------------------------------------------------------------------------------- figures

const Digest* Tree::digest(u32 rank, u32 tier) const { return ranks_.at(rank).digests[tier].get(); }

std::vector<std::pair<const char*, u64>> Tree::memory() const {
    return {{"blocks", blocks_.bytes()},
            {"map", map_.bytes()},
            {"runs", runs_.bytes()},
            {"sets", sets_.bytes()},
            {"ranks", ranks_.bytes()}};
}

std::vector<std::pair<const char*, u64>> Tree::structure() const {
    return {{"blocks", map_.size()}, {"runs", runs_.size()}, {"sets", sets_.size()}, {"extents", blocks_.extents()}};
}

}  // namespace kv
