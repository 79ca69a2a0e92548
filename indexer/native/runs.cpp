#include "runs.hpp"

#include <algorithm>

namespace kv {

void Runs::reset() {
    budget_->used -= numbers_ == 0 ? 0 : bytes();
    runs_.release();
    runs_.reserve(1);
    runs_[kRoot] = Run{};
    numbers_ = 1;
    live_ = 0;
    free_ = kNone;
    budget_->used += bytes();
}

u32 Runs::add(u32 extent, u32 begin, u32 set, double now_s) {
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

void Runs::remove(u32 run) {
    sets_->release(runs_[run].set);
    runs_[run] = Run{};
    runs_[run].next = free_;
    free_ = run;
    --live_;
    budget_->used -= sizeof(Run);
}

void Runs::link(u32 run, u32 parent) {
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

void Runs::unlink(u32 run) {
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

void Runs::set_holders(u32 run, u32 set) {
    sets_->acquire(set);
    sets_->release(runs_[run].set);
    runs_[run].set = set;
}

void Runs::relabel(const Run& part, u32 run) {
    for (u32 block = part.begin; block < part.end(); ++block) {
        blocks_->set_run(block, run);
    }
}

// `run` takes the place of `old` among its siblings.
void Runs::replace(u32 old, u32 run) {
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

// The children of `from` are those of `run`, which has none.
void Runs::adopt_children(u32 run, u32 from) {
    runs_[run].first_child = runs_[from].first_child;
    runs_[run].child_count = runs_[from].child_count;
    runs_[from].first_child = 0;
    runs_[from].child_count = 0;
    for (u32 child = runs_[run].first_child; child != 0; child = runs_[child].next) {
        runs_[child].parent = run;
    }
}

// The shorter half gets the new number, unless that would mean telling many children.
Runs::Halves Runs::split(u32 run, u32 count) {
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

u32 Runs::isolate(u32 run, u32 offset, u32 length) {
    if (offset != 0) {
        run = split(run, offset).tail;
    }
    return length < runs_[run].length ? split(run, length).head : run;
}

// Make `parent` and its only child one; return its number.
u32 Runs::merge(u32 parent, u32 child) {
    Run& above = runs_[parent];
    Run& below = runs_[child];
    if (below.length <= above.length && below.child_count <= kFewChildren) {
        relabel(below, parent);
        above.length += below.length;
        above.last_stored_s = std::max(above.last_stored_s, below.last_stored_s);
        adopt_children(parent, child);
        remove(child);
        return parent;
    }
    relabel(above, child);
    replace(parent, child);
    below.begin = above.begin;
    below.length += above.length;
    below.is_parent_unknown = above.is_parent_unknown;
    below.last_stored_s = std::max(above.last_stored_s, below.last_stored_s);
    remove(parent);
    return child;
}

void Runs::merge_with_child(u32 run) {
    const Run& own = runs_[run];
    if (run != kRoot && own.child_count == 1) {
        const Run& child = runs_[own.first_child];
        if (child.set == own.set && child.extent == own.extent && child.begin == own.end()) {
            merge(run, own.first_child);
        }
    }
}

void Runs::merge_around(u32 run) {
    const u32 parent = runs_[run].parent;
    merge_with_child(run);
    merge_with_child(parent);
}

bool Runs::is_behind(u32 block, u32 run) const {
    u32 at = of(block);
    while (at != kRoot && at != run) {
        at = runs_[at].parent;
    }
    return at == run;
}

}  // namespace kv
