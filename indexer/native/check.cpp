// Finds contradictions in a tree; each is a bug of the tree. Tests and the fuzzer ask after every few changes. All runs
// are walked once, and what is counted on the way is compared with the tree's own counts.
#include <cstring>

#include "tree.hpp"

namespace kv {

class SelfCheck {
public:
    explicit SelfCheck(const Tree& tree)
        : tree_(tree), references_(tree.sets_.numbers(), 0), children_(tree.runs_.numbers(), 0),
          held_(tree.ranks_.numbers(), 0), digests_(std::size_t{tree.ranks_.numbers()} * kTiers) {}

    std::vector<std::string> found() {
        for (u32 run = tree_.next_in_walk(Runs::kRoot); run != Runs::kRoot; run = tree_.next_in_walk(run)) {
            check_run(run);
            check_blocks(run);
            count(run);
        }
        check_links();
        for (u32 rank = 0; rank < tree_.ranks_.numbers(); ++rank) {
            if (tree_.ranks_.has(rank)) {
                check_rank(rank);
            }
        }
        check_totals();
        check_parked();
        return std::move(found_);
    }

private:
    static constexpr std::size_t kFoundMax = 20;

    void expect(bool is_well, const char* what, u64 about) {
        if (!is_well && found_.size() < kFoundMax) {
            found_.push_back(what + (" (" + text(about) + ")"));
        }
    }

    Digest& digest(u32 rank, u32 tier) { return digests_[std::size_t{rank} * kTiers + tier]; }

    // A run has holders or children, a place among its siblings and in its extent, and only known holders.
    void check_run(u32 run) {
        const Run& own = tree_.runs_[run];
        expect(own.length != 0, "a run without blocks is in the tree", run);
        expect(own.set != HolderSets::kEmpty || own.child_count != 0, "a run has neither holders nor children", run);
        expect(own.is_parent_unknown == 0 || own.parent == Runs::kRoot, "an unknown parent is known", run);
        expect(own.next == 0 || tree_.runs_[own.next].previous == run, "siblings disagree", run);
        const u32 end = own.extent + tree_.blocks_.used(own.extent);
        expect(own.end() <= end, "a run leaves its extent", run);
        expect(own.child_count != 0 || own.end() == end, "a leaf does not end its extent", run);
        for (const auto& holder : tree_.members(own.set)) {
            expect(tree_.ranks_.has(holder.first), "an unknown rank holds blocks", holder.first);
        }
    }

    // The blocks of a run name it, and the map leads to them.
    void check_blocks(u32 run) {
        const Run& own = tree_.runs_[run];
        for (u32 block = own.begin; block < own.end(); ++block) {
            expect(tree_.runs_.of(block) == run, "a block names another run", block);
            expect(tree_.find(tree_.blocks_.hash(block)) == block, "the map does not lead to a block", block);
        }
    }

    void count(u32 run) {
        const Run& own = tree_.runs_[run];
        ++runs_;
        blocks_ += own.length;
        extents_ += own.begin == own.extent;
        ++references_[own.set];
        ++children_[own.parent];
        for (const auto& holder : tree_.members(own.set)) {
            held_[holder.first] += own.length;
            for (u32 tier = 0; tier < kTiers; ++tier) {
                if ((holder.second >> tier & 1) != 0) {
                    count_held(own, digest(holder.first, tier));
                }
            }
        }
    }

    void count_held(const Run& run, Digest& digest) const {
        digest.count += run.length;
        for (u32 block = run.begin; block < run.end(); ++block) {
            digest.add(tree_.blocks_.hash(block));
        }
    }

    // Runs know how many children they have, and sets of holders how many runs they are of.
    void check_links() {
        for (u32 run = 0; run < tree_.runs_.numbers(); ++run) {
            const Run& own = tree_.runs_[run];
            expect(run == Runs::kRoot || own.length == 0 || own.child_count == children_[run],
                   "children are miscounted", run);
        }
        for (u32 set = 1; set < tree_.sets_.numbers(); ++set) {
            expect(tree_.sets_.references(set) == references_[set], "references to a set are miscounted", set);
        }
    }

    // A rank knows how many blocks it holds, and its digests are theirs.
    void check_rank(u32 rank) {
        const Digest nothing;
        expect(tree_.ranks_.at(rank).held == held_[rank], "the blocks of a rank are miscounted", rank);
        for (u32 tier = 0; tier < kTiers; ++tier) {
            const Digest* own = tree_.ranks_.at(rank).digests[tier].get();
            const Digest& told = own == nullptr ? nothing : *own;
            const Digest& seen = digest(rank, tier);
            expect(told.count == seen.count &&
                       std::memcmp(told.buckets(), seen.buckets(), sizeof(u64) * Digest::kBuckets) == 0,
                   "a digest is not that of the blocks held", rank * kTiers + tier);
        }
    }

    // The map, the runs, the extents and the bytes are as many as the tree has counted.
    void check_totals() {
        expect(blocks_ == tree_.map_.size(), "the map's size is not the number of blocks", blocks_);
        expect(runs_ == tree_.runs_.size(), "runs are miscounted", runs_);
        expect(extents_ == tree_.blocks_.extents(), "extents are miscounted", extents_);
        u64 bytes = 0;
        for (const auto& part : tree_.memory()) {
            bytes += part.second;
        }
        expect(bytes == tree_.budget_.used, "the parts' bytes are not what is used", bytes);
    }

    // A parked block is of a rank that is known, and waits for a parent that is not.
    void check_parked() {
        for (const auto& entry : tree_.parked_.oldest_first()) {
            expect(tree_.ranks_.has(entry.block.rank), "an unknown rank has parked blocks", entry.block.rank);
            expect(tree_.find(entry.parent) == kNone, "a parked block's parent is known", entry.parent);
        }
    }

    const Tree& tree_;
    std::vector<std::string> found_;
    u64 blocks_ = 0, runs_ = 0, extents_ = 0;
    std::vector<u32> references_;  // by set
    std::vector<u32> children_;    // by run
    std::vector<u64> held_;        // by rank
    std::vector<Digest> digests_;  // by rank and tier
};

std::vector<std::string> Tree::self_check() const { return SelfCheck(*this).found(); }

}  // namespace kv
