// The run tree: a radix tree of block chains, compressed.
//
//     run      blocks in a row, in one extent, with one set of holders; a child hangs on a run's last block
//     run 0    the root: it has no holders, and is the parent of all runs without a known parent
//
//     sequence A B C D E F held by rank 1, A B C G by rank 2:
//
//         0 ── [A B C]{1 2} ─┬─ [D E F]{1}
//                            └─ [G]{2}
//
// A change of holders of part of a run splits it; neighbours that became equal are merged again, so that a run is as
// long as its extent and its holders allow. Numbers of blocks stay the same through both.
#pragma once

#include "blocks.hpp"
#include "buffer.hpp"
#include "common.hpp"
#include "holder_sets.hpp"

namespace kv {

struct Run {
    u32 begin;
    u32 length;  // 0: not in use
    u32 extent;
    u32 parent;
    u32 first_child;
    u32 next;      // sibling, or free
    u32 previous;  // sibling
    u32 child_count;
    u32 set;
    u32 is_parent_unknown;
    double last_stored_s;

    u32 end() const { return begin + length; }
    u32 last() const { return begin + length - 1; }
};

class Runs {
public:
    static constexpr u32 kRoot = 0;

    Runs(Budget& budget, Blocks& blocks, HolderSets& sets)
        : budget_(&budget), blocks_(&blocks), sets_(&sets) {
        reset();
    }

    Run& operator[](u32 run) { return runs_[run]; }
    const Run& operator[](u32 run) const { return runs_[run]; }
    // The run of a block, which is in one.
    u32 of(u32 block) const { return blocks_->run(block); }

    u32 size() const { return live_; }
    // One more than the largest number of a run.
    u32 numbers() const { return numbers_; }
    // Of runs in use: those that are free are taken first, and a removal may need many for a while.
    u64 bytes() const { return (u64{live_} + 1) * sizeof(Run); }

    // A run without blocks or a place in the tree; its `set` is referred to.
    u32 add(u32 extent, u32 begin, u32 set, double now_s);
    // A run without a place in the tree is no more.
    void remove(u32 run);
    // The run hangs on the last block of `parent`.
    void link(u32 run, u32 parent);
    void unlink(u32 run);
    // The run has other holders; merge afterwards.
    void set_holders(u32 run, u32 set);

    struct Halves {
        u32 head, tail;
    };
    // The run is two: its first `count` blocks, which are not all of them, and the others.
    Halves split(u32 run, u32 count);
    // Part of the run is a run of its own, whose number is returned.
    u32 isolate(u32 run, u32 offset, u32 length);
    // The run is one with its parent and with its only child, where they are alike and lie in a row.
    void merge_around(u32 run);
    void merge_with_child(u32 run);
    // Whether `block` lies behind the first block of `run`, or is it.
    bool is_behind(u32 block, u32 run) const;
    void reset();

private:
    static constexpr u32 kFewChildren = 4;

    u32 merge(u32 parent, u32 child);
    void adopt_children(u32 run, u32 from);
    void replace(u32 old, u32 run);
    void relabel(const Run& part, u32 run);

    Budget* budget_;
    Blocks* blocks_;
    HolderSets* sets_;
    Buffer<Run> runs_;
    u32 numbers_ = 0;
    u32 live_ = 0;
    u32 free_ = kNone;
};

}  // namespace kv
