// The shape of a tree for people: its chains without forks, what lies behind each, and how many requests went through it.
//
// It is copied from the tree slice by slice, so that other threads run meanwhile, and laid out afterwards without the tree:
//
//     copy      copies kSliceRuns runs: length, time, hashes of both ends, and the hash of the block before
//     warm      adds requests, each to the run that its block lies in
//     lay_out   makes nodes, parents before children, and adds up from the leaves
//
// The tree may change between slices. A run whose parent is another one than when it was copied is left out with all
// behind it, and counted as skipped: nothing is ever shown behind a block that it does not follow.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "tree.hpp"

namespace kv {

// A request that went through the blocks up to `hash`: its weight, and when it came.
struct PassedRequest {
    u64 hash;
    double heat;
    double used_s;
};

// A row of blocks without a fork, whoever holds it. `children` follow `last`; `depth_blocks`: from the root to `last`.
struct OutlineNode {
    u64 first = 0, last = 0;
    u64 blocks = 0, subtree_blocks = 0, depth_blocks = 0;
    double heat = 0, used_s = 0, stored_s = 0;  // used_s 0: no request used it
    u32 parent = kNone;
    std::vector<u32> children;
};
enum class OutlineOrder { subtree, heat, recent, blocks };

class Outline {
public:
    static constexpr u32 kSliceRuns = 4096, kSliceRequests = 1024;

    // Copies the next slice; false after the last.
    bool copy(const Tree& tree) {
        if (runs_.empty()) {
            runs_.reserve(tree.runs_.numbers());
            runs_.push_back(CopiedRun{});  // the root
        }
        const u32 numbers = tree.runs_.numbers(), from = static_cast<u32>(runs_.size());
        const u32 end = std::min(numbers, from + kSliceRuns);
        for (u32 number = from; number < end; ++number) {
            const Run& run = tree.runs_[number];
            CopiedRun copied{};
            if (run.length != 0) {
                copied.first = tree.blocks_.hash(run.begin);
                copied.last = tree.blocks_.hash(run.last());
                copied.above = run.parent == Runs::kRoot ? 0 : tree.blocks_.hash(tree.runs_[run.parent].last());
                copied.stored_s = run.last_stored_s;
                copied.parent = run.parent;
                copied.length = run.length;
                copied_blocks_ += run.length;
            }
            runs_.push_back(copied);
        }
        return end < numbers;
    }

    void warm(const Tree& tree, const PassedRequest* requests, std::size_t count) {
        for (const PassedRequest* each = requests; each != requests + count; ++each) {
            const u32 block = tree.find(each->hash);
            const u32 number = block == kNone ? Runs::kRoot : tree.runs_.of(block);
            if (number == Runs::kRoot || number >= runs_.size() || runs_[number].length == 0) {
                continue;
            }
            CopiedRun& copied = runs_[number];
            if (copied.first == tree.blocks_.hash(tree.runs_[number].begin)) {  // the number is still this run's
                copied.heat += each->heat;
                copied.used_s = std::max(copied.used_s, each->used_s);
            }
        }
    }

    void lay_out() {
        std::vector<std::vector<u32>> behind(runs_.size());  // the children of each run
        for (u32 number = 1; number < runs_.size(); ++number) {
            if (is_child(runs_[number])) {
                behind[runs_[number].parent].push_back(number);
            }
        }
        std::vector<std::pair<u32, u32>> pending;  // the first run of a node, and the node before it
        for (const u32 run : behind[Runs::kRoot]) {
            pending.emplace_back(run, kNone);
        }
        for (std::size_t at = 0; at < pending.size(); ++at) {
            const auto node = static_cast<u32>(nodes_.size());
            const u32 tail = add_node(pending[at].first, pending[at].second, behind);
            for (const u32 run : behind[tail]) {
                pending.emplace_back(run, node);
            }
        }
        sum_up();
        runs_ = {};
    }

    // The node that ends with the block; kNone if none does.
    u32 find(u64 last) const {
        const auto found = by_last_.find(last);
        return found == by_last_.end() ? kNone : found->second;
    }

    const OutlineNode& at(u32 node) const { return nodes_.at(node); }

    // The children of a node (kNone: the root).
    const std::vector<u32>& children(u32 node) const { return node == kNone ? roots_ : nodes_.at(node).children; }

    // At most `limit` of the children from `offset` on, in descending order, equal ones by their first block.
    std::vector<u32> children(u32 node, OutlineOrder order, std::size_t offset, std::size_t limit) const {
        std::vector<u32> found = children(node);
        offset = std::min(offset, found.size());
        const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(found.size(), offset + limit));
        std::partial_sort(found.begin(), end, found.end(), [&](u32 a, u32 b) {
            const double left = most(nodes_[a], order), right = most(nodes_[b], order);
            return left != right ? left > right : nodes_[a].first < nodes_[b].first;
        });
        return {found.begin() + static_cast<std::ptrdiff_t>(offset), end};
    }

    u64 blocks() const { return blocks_; }
    u64 skipped_blocks() const { return copied_blocks_ - blocks_; }
    std::size_t size() const { return nodes_.size(); }

private:
    static double most(const OutlineNode& node, OutlineOrder order) {
        switch (order) {
            case OutlineOrder::heat: return node.heat;
            case OutlineOrder::recent: return node.stored_s;
            case OutlineOrder::blocks: return static_cast<double>(node.blocks);
            default: return static_cast<double>(node.subtree_blocks);
        }
    }

    struct CopiedRun {
        u64 first, last, above;  // `above`: the block before the first
        double stored_s;
        u32 parent, length;      // length 0: not in use
        double heat, used_s;
    };

    bool is_child(const CopiedRun& run) const {
        if (run.length == 0 || run.parent >= runs_.size()) {
            return false;
        }
        const CopiedRun& parent = runs_[run.parent];
        return run.parent == Runs::kRoot || (parent.length != 0 && parent.last == run.above);
    }

    // Adds the node that begins with a run and continues as long as a run has one child; returns its last run.
    u32 add_node(u32 run, u32 parent, const std::vector<std::vector<u32>>& behind) {
        OutlineNode node;
        node.parent = parent;
        node.first = runs_[run].first;
        while (true) {
            const CopiedRun& own = runs_[run];
            node.blocks += own.length;
            node.heat += own.heat;
            node.used_s = std::max(node.used_s, own.used_s);
            node.stored_s = std::max(node.stored_s, own.stored_s);
            if (behind[run].size() != 1) {
                break;
            }
            run = behind[run].front();
        }
        node.last = runs_[run].last;
        node.depth_blocks = node.blocks + (parent == kNone ? 0 : nodes_[parent].depth_blocks);
        node.subtree_blocks = node.blocks;
        blocks_ += node.blocks;
        const auto number = static_cast<u32>(nodes_.size());
        by_last_.emplace(node.last, number);
        (parent == kNone ? roots_ : nodes_[parent].children).push_back(number);
        nodes_.push_back(std::move(node));
        return run;
    }

    void sum_up() {
        for (std::size_t at = nodes_.size(); at-- > 0;) {
            const OutlineNode& node = nodes_[at];
            if (node.parent != kNone) {
                OutlineNode& parent = nodes_[node.parent];
                parent.subtree_blocks += node.subtree_blocks;
                parent.heat += node.heat;
                parent.used_s = std::max(parent.used_s, node.used_s);
            }
        }
    }

    std::vector<CopiedRun> runs_;
    std::vector<OutlineNode> nodes_;
    std::vector<u32> roots_;
    std::unordered_map<u64, u32> by_last_;
    u64 copied_blocks_ = 0, blocks_ = 0;
};

}  // namespace kv
