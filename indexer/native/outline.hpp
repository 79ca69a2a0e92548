// The shape of a tree for people: its chains without forks, what lies behind each, and how many requests went through it.
//
// It is copied from the tree slice by slice: the copying thread holds the tree's lock for one slice at a time. It is
// laid out afterwards without the tree:
//
//     copy      kSliceRuns runs: length, time, hashes of both ends, and the hash of the block before
//     warm      requests, each at the run that its block lies in
//     lay_out   nodes in breadth-first order, so that the children of one lie in a row; sums from the leaves up
//
// The tree may change between slices. A run whose parent is not the one it was copied with is left out, with all behind it,
// and counted: nothing is ever shown behind a block that it does not follow.
#pragma once

#include <vector>

#include "common.hpp"

namespace kv {

class Tree;

// A request that went through the blocks up to `hash`: what it weighs, and when it came.
struct PassedRequest {
    u64 hash;
    double heat;
    double used_s;
};

// Blocks in a row without a fork, whatever their holders. `children`: nodes behind the last; `depth_blocks`: from the root to it.
struct OutlineNode {
    u64 first = 0, last = 0;
    u64 blocks = 0, subtree_blocks = 0, depth_blocks = 0;
    double heat = 0, used_s = 0, stored_s = 0;  // used_s 0: no request used it
    u32 parent = kNone;
    u32 children_begin = 0, children = 0;
};
enum class OutlineOrder { subtree, heat, recent, blocks };

class Outline {
public:
    static constexpr u32 kSliceRuns = 4096, kSliceRequests = 1024;

    // Copies the next slice; false after the last.
    bool copy(const Tree& tree);
    void warm(const Tree& tree, const PassedRequest* requests, std::size_t count);
    void lay_out();

    // The node that ends with the block; kNone if none does.
    u32 find(u64 last) const;
    const OutlineNode& at(u32 node) const { return nodes_.at(node); }
    // The children of a node (kNone: the roots) from `offset` on, in descending order, equal ones by their first block.
    std::vector<OutlineNode> children(u32 node, OutlineOrder order, std::size_t offset, std::size_t limit) const;
    u32 child_count(u32 node) const { return node == kNone ? roots_ : nodes_.at(node).children; }
    u64 blocks() const { return blocks_; }
    u64 skipped_blocks() const { return copied_blocks_ - blocks_; }
    std::size_t size() const { return nodes_.size(); }

private:
    struct CopiedRun {
        u64 first, last, above;  // `above`: the block before the first
        double stored_s;
        u32 parent, length;      // length 0: not in use
        double heat, used_s;
    };

    void sort_children();
    bool is_child(const CopiedRun& run) const;
    void add_node(u32 head, u32 parent);
    void add_children_of(u32 tail, u32 parent);
    void sum_up();

    std::vector<CopiedRun> runs_;
    std::vector<u32> children_begin_, children_;  // of runs
    std::vector<u32> tails_;                      // of nodes: their last runs
    std::vector<OutlineNode> nodes_;
    std::vector<u32> by_last_;
    u64 copied_blocks_ = 0, blocks_ = 0;
    u32 roots_ = 0;
};

}  // namespace kv
