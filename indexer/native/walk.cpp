// Dumps, walks for people, and figures.
#include <algorithm>

#include "tree.hpp"

namespace kv {

namespace {

void append(std::string& column, u64 word) { column.append(reinterpret_cast<const char*>(&word), sizeof word); }

}  // namespace

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

// ------------------------------------------------------------------------------------------------- stretches

bool Tree::begins_stretch(u32 run) const {
    const u32 parent = runs_[run].parent;
    return parent == Runs::kRoot || runs_[parent].child_count != 1 || runs_[parent].set != runs_[run].set;
}

// The blocks up to the end of the run. `known` has what earlier calls found, so that many stretches of one trunk are cheap.
u64 Tree::depth_at_end(u32 run, std::unordered_map<u32, u64>& known) const {
    std::vector<u32> way;
    while (run != Runs::kRoot && known.count(run) == 0) {
        way.push_back(run);
        run = runs_[run].parent;
    }
    u64 depth = run == Runs::kRoot ? 0 : known.at(run);
    for (auto at = way.rbegin(); at != way.rend(); ++at) {
        depth += runs_[*at].length;
        known.emplace(*at, depth);
    }
    return depth;
}

// The stretch that begins with the run, without what only those that are shown need.
Stretch Tree::stretch_of(u32 head) const {
    Stretch found;
    found.last_stored_s = runs_[head].last_stored_s;
    u32 run = head;
    while (true) {
        found.blocks += runs_[run].length;
        found.last_stored_s = std::max(found.last_stored_s, runs_[run].last_stored_s);
        const u32 child = runs_[run].first_child;
        if (runs_[run].child_count != 1 || runs_[child].set != runs_[run].set) {
            break;
        }
        run = child;
    }
    found.hash = blocks_.hash(runs_[run].last());
    found.children = runs_[run].child_count;
    return found;
}

std::vector<Stretch> Tree::prefixes(std::size_t limit, PrefixOrder order) const {
    struct Candidate {
        double most;
        u64 hash;
        u32 head;
        bool operator<(const Candidate& other) const {
            return most != other.most ? most > other.most : hash < other.hash;
        }
    };
    std::vector<Candidate> first;  // a heap whose top is the least of those that are kept
    for (u32 run = 1; run < runs_.numbers() && limit != 0; ++run) {
        if (runs_[run].length == 0 || !begins_stretch(run)) {
            continue;
        }
        const Stretch found = stretch_of(run);
        const double most = order == PrefixOrder::blocks ? static_cast<double>(found.blocks)
            : order == PrefixOrder::holders              ? sets_.ranks_in(runs_[run].set)
                                                         : found.last_stored_s;
        first.push_back({most, found.hash, run});
        std::push_heap(first.begin(), first.end());
        if (first.size() > limit) {
            std::pop_heap(first.begin(), first.end());
            first.pop_back();
        }
    }
    std::sort_heap(first.begin(), first.end());
    std::vector<Stretch> found;
    std::unordered_map<u32, u64> depths;
    for (const Candidate& candidate : first) {
        Stretch stretch = stretch_of(candidate.head);
        const u32 parent = runs_[candidate.head].parent;
        stretch.has_parent = parent != Runs::kRoot;
        stretch.parent = stretch.has_parent ? blocks_.hash(runs_[parent].last()) : 0;
        stretch.depth_blocks = depth_at_end(runs_.of(find(stretch.hash)), depths);
        stretch.holders = members(runs_[candidate.head].set);
        found.push_back(std::move(stretch));
    }
    return found;
}

// ------------------------------------------------------------------------------------------------- figures

const Digest* Tree::digest(u32 rank, u32 tier) const { return ranks_.at(rank).digests[tier].get(); }

std::vector<std::pair<const char*, u64>> Tree::memory() const {
    return {{"blocks", blocks_.bytes()}, {"map", map_.bytes()},     {"runs", runs_.bytes()},
            {"sets", sets_.bytes()},     {"ranks", ranks_.bytes()}, {"parked", parked_.bytes()}};
}

std::vector<std::pair<const char*, u64>> Tree::structure() const {
    return {{"blocks", map_.size()},
            {"runs", runs_.size()},
            {"sets", sets_.size()},
            {"extents", blocks_.extents()},
            {"parked", parked_.size()}};
}

}  // namespace kv
