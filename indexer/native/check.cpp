// What in a tree contradicts itself. Nothing does, or it is our bug: tests and the fuzzer ask after every few changes.
#include <cstring>

#include "tree.hpp"

namespace kv {

namespace {

class Checker {
public:
    void expect(bool is_well, const std::string& what, u64 about) {
        if (!is_well && found.size() < 20) {
            found.push_back(what + " (" + std::to_string(about) + ")");
        }
    }
    std::vector<std::string> found;
};

}  // namespace

std::vector<std::string> Tree::self_check() const {
    Checker check;
    std::vector<u32> references(sets_.numbers(), 0), children(runs_.numbers(), 0);
    u64 blocks = 0, runs = 0, extents = 0;
    std::vector<u64> held(ranks_.numbers(), 0);
    std::vector<Digest> digests(std::size_t{ranks_.numbers()} * kTiers);
    for (u32 run = next_in_walk(Runs::kRoot); run != Runs::kRoot; run = next_in_walk(run)) {
        const Run& own = runs_[run];
        ++runs;
        blocks += own.length;
        ++references[own.set];
        ++children[own.parent];
        check.expect(own.length != 0, "a run without blocks is in the tree", run);
        check.expect(own.set != HolderSets::kEmpty || own.child_count != 0, "a run is for nobody and nothing", run);
        check.expect(own.is_parent_unknown == 0 || own.parent == Runs::kRoot, "an unknown parent is known", run);
        check.expect(own.next == 0 || runs_[own.next].previous == run, "siblings disagree", run);
        extents += own.begin == own.extent;
        const u32 end = own.extent + blocks_.used(own.extent);
        check.expect(own.end() <= end, "a run leaves its extent", run);
        check.expect(own.child_count != 0 || own.end() == end, "a leaf does not end its extent", run);
        const auto holders = members(own.set);
        for (const auto& holder : holders) {
            check.expect(ranks_.has(holder.first), "an unknown rank holds blocks", holder.first);
            held[holder.first] += own.length;
        }
        for (u32 block = own.begin; block < own.end(); ++block) {
            const u64 hash = blocks_.hash(block);
            check.expect(runs_.of(block) == run, "a block names another run", block);
            check.expect(find(hash) == block, "the map does not lead to a block", block);
            for (const auto& holder : holders) {
                for (u32 tier = 0; tier < kTiers; ++tier) {
                    if ((holder.second >> tier & 1) != 0) {
                        Digest& digest = digests[std::size_t{holder.first} * kTiers + tier];
                        digest.add(hash);
                        ++digest.count;
                    }
                }
            }
        }
    }
    for (u32 run = 0; run < runs_.numbers(); ++run) {
        check.expect(run == Runs::kRoot || runs_[run].length == 0 || runs_[run].child_count == children[run],
                     "children are miscounted", run);
    }
    for (u32 set = 1; set < sets_.numbers(); ++set) {
        check.expect(sets_.references(set) == references[set], "references to a set are miscounted", set);
    }
    const Digest nothing;
    for (u32 rank = 0; rank < ranks_.numbers(); ++rank) {
        if (!ranks_.has(rank)) {
            continue;
        }
        check.expect(ranks_.at(rank).held == held[rank], "the blocks of a rank are miscounted", rank);
        for (u32 tier = 0; tier < kTiers; ++tier) {
            const Digest* own = ranks_.at(rank).digests[tier].get();
            const Digest& told = own == nullptr ? nothing : *own;
            const Digest& seen = digests[std::size_t{rank} * kTiers + tier];
            check.expect(told.count == seen.count &&
                             std::memcmp(told.buckets(), seen.buckets(), sizeof(u64) * Digest::kBuckets) == 0,
                         "a digest is not that of the blocks held", rank * kTiers + tier);
        }
    }
    check.expect(blocks == map_.size(), "the map's size is not the number of blocks", blocks);
    check.expect(runs == runs_.size(), "runs are miscounted", runs);
    check.expect(extents == blocks_.extents(), "extents are miscounted", extents);
    check.expect(map_.contradictions() == 0, "entries of the map are misplaced", map_.contradictions());
    u64 bytes = 0;
    for (const auto& part : memory()) {
        bytes += part.second;
    }
    check.expect(bytes == budget_.used, "the parts' bytes are not what is used", bytes);
    for (const auto& entry : parked_.oldest_first()) {
        check.expect(ranks_.has(entry.block.rank), "an unknown rank has parked blocks", entry.block.rank);
        check.expect(find(entry.parent) == kNone, "a parked block's parent is known", entry.parent);
    }
    return check.found;
}

}  // namespace kv
