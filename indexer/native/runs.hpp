// The run tree: a radix tree of block chains, compressed.
//
//     run      consecutive blocks of one extent, with one set of holders; a child follows a run's last block
//     run 0    the root: it has no holders, and is the parent of all runs without a known parent
//
//     sequence A B C D E F held by rank 1, A B C G by rank 2:
//
//         0 ── [A B C]{1 2} ─┬─ [D E F]{1}
//                            └─ [G]{2}
//
// A change of holders of part of a run splits it; neighbours that became equal are merged again, so that a run is as
// long as its extent and its holders allow. Neither changes the numbers of blocks.
#pragma once

#include <algorithm>

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
    u32 next;      // sibling, or next free run
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
    // The run of a block that is in use.
    u32 of(u32 block) const { return blocks_->run(block); }

    u32 size() const { return live_; }
    // Runs are below this number; some of them may be free.
    u32 numbers() const { return numbers_; }
    // The bytes of runs in use. Free ones, of which a removal may leave many, do not count: `add` takes them first.
    u64 bytes() const { return (u64{live_} + 1) * sizeof(Run); }

    // Returns a new run without blocks, which is not in the tree; it owns a reference to `set`.
    u32 add(u32 extent, u32 begin, u32 set, double now_s) {
        u32 made = free_;
        if (made != kNone) {
            free_ = runs_[made].next;
        } else {
            runs_.reserve(std::size_t{numbers_} + 1);
            made = numbers_++;
        }
        budget_->used += sizeof(Run);
        sets_->acquire(set);
        runs_[made] = Run{begin, 0, extent, kRoot, 0, 0, 0, 0, set, 0, now_s};
        ++live_;
        return made;
    }

    // Frees a run that is not in the tree.
    void remove(u32 run) {
        sets_->release(runs_[run].set);
        runs_[run] = Run{};
        runs_[run].next = free_;
        free_ = run;
        --live_;
        budget_->used -= sizeof(Run);
    }

    // Makes the run a child of `parent`: its first block follows the last one of `parent`.
    void link(u32 run, u32 parent) {
        Run& own = runs_[run];
        Run& above = runs_[parent];
        own.parent = parent;
        own.previous = 0;
        own.next = above.first_child;
        if (above.first_child != 0) {
            runs_[above.first_child].previous = run;
        }
        above.first_child = run;
        ++above.child_count;
    }

    void unlink(u32 run) {
        const Run& own = runs_[run];
        if (own.previous != 0) {
            runs_[own.previous].next = own.next;
        } else {
            runs_[own.parent].first_child = own.next;
        }
        if (own.next != 0) {
            runs_[own.next].previous = own.previous;
        }
        --runs_[own.parent].child_count;
    }

    // Gives the run another set of holders; the caller must merge it with its neighbours afterwards.
    void set_holders(u32 run, u32 set) {
        sets_->acquire(set);
        sets_->release(runs_[run].set);
        runs_[run].set = set;
    }

    struct Halves {
        u32 head, tail;
    };

    // Splits the run after its first `count` blocks, which are not all. The tail gets the new number if it is shorter
    // and has few children, as each child must be changed; otherwise the head gets it.
    Halves split(u32 run, u32 count) {
        const u32 made = add(runs_[run].extent, runs_[run].begin, runs_[run].set, runs_[run].last_stored_s);
        Run& own = runs_[run];
        Run& part = runs_[made];
        if (own.length - count < count && own.child_count <= kFewChildren) {
            part.begin = own.begin + count;
            part.length = own.length - count;
            own.length = count;
            adopt_children(made, run);
            link(made, run);
            relabel(part, made);
            return {run, made};
        }
        part.length = count;
        part.is_parent_unknown = own.is_parent_unknown;
        replace(run, made);
        own.begin += count;
        own.length -= count;
        own.is_parent_unknown = 0;
        link(run, made);
        relabel(part, made);
        return {made, run};
    }

    // Makes part of the run a run of its own; returns its number.
    u32 isolate(u32 run, u32 offset, u32 length) {
        if (offset != 0) {
            run = split(run, offset).tail;
        }
        return length < runs_[run].length ? split(run, length).head : run;
    }

    // Merges the run with its parent and its only child, if their holders are the same and their blocks adjacent.
    void merge_around(u32 run) {
        const u32 parent = runs_[run].parent;
        merge_with_child(run);
        merge_with_child(parent);
    }

    void merge_with_child(u32 run) {
        const Run& own = runs_[run];
        if (run != kRoot && own.child_count == 1) {
            const Run& child = runs_[own.first_child];
            if (child.set == own.set && child.extent == own.extent && child.begin == own.end()) {
                merge(run, own.first_child);
            }
        }
    }

    // Whether `block` is in the run or in one below it.
    bool is_behind(u32 block, u32 run) const {
        u32 at = of(block);
        while (at != kRoot && at != run) {
            at = runs_[at].parent;
        }
        return at == run;
    }

    void reset() {
        budget_->used -= numbers_ == 0 ? 0 : bytes();
        runs_.release();
        runs_.reserve(1);
        runs_[kRoot] = Run{};
        numbers_ = 1;
        live_ = 0;
        free_ = kNone;
        budget_->used += bytes();
    }

private:
    static constexpr u32 kFewChildren = 4;

    // Merges `parent` and its only child into one run.
    void merge(u32 parent, u32 child) {
        Run& above = runs_[parent];
        Run& below = runs_[child];
        if (below.length <= above.length && below.child_count <= kFewChildren) {
            relabel(below, parent);
            above.length += below.length;
            above.last_stored_s = std::max(above.last_stored_s, below.last_stored_s);
            adopt_children(parent, child);
            remove(child);
            return;
        }
        relabel(above, child);
        replace(parent, child);
        below.begin = above.begin;
        below.length += above.length;
        below.is_parent_unknown = above.is_parent_unknown;
        below.last_stored_s = std::max(above.last_stored_s, below.last_stored_s);
        remove(parent);
    }

    // Moves the children of `from` to `run`, which had none.
    void adopt_children(u32 run, u32 from) {
        runs_[run].first_child = runs_[from].first_child;
        runs_[run].child_count = runs_[from].child_count;
        runs_[from].first_child = 0;
        runs_[from].child_count = 0;
        for (u32 child = runs_[run].first_child; child != 0; child = runs_[child].next) {
            runs_[child].parent = run;
        }
    }

    // Puts `run` in the place of `old`, under its parent and among its siblings.
    void replace(u32 old, u32 run) {
        const Run& was = runs_[old];
        Run& own = runs_[run];
        own.parent = was.parent;
        own.next = was.next;
        own.previous = was.previous;
        if (was.previous != 0) {
            runs_[was.previous].next = run;
        } else {
            runs_[was.parent].first_child = run;
        }
        if (was.next != 0) {
            runs_[was.next].previous = run;
        }
    }

    void relabel(const Run& part, u32 run) {
        for (u32 block = part.begin; block < part.end(); ++block) {
            blocks_->set_run(block, run);
        }
    }

    Budget* budget_;
    Blocks* blocks_;
    HolderSets* sets_;
    Buffer<Run> runs_;
    u32 numbers_ = 0;
    u32 live_ = 0;
    u32 free_ = kNone;
};

}  // namespace kv
