#include "outline.hpp"

#include <algorithm>
#include <numeric>

#include "tree.hpp"

namespace kv {

bool Outline::copy(const Tree& tree) {
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

void Outline::warm(const Tree& tree, const PassedRequest* requests, std::size_t count) {
    for (const PassedRequest* each = requests; each != requests + count; ++each) {
        const u32 block = tree.find(each->hash);
        const u32 number = block == kNone ? Runs::kRoot : tree.runs_.of(block);
        if (number == Runs::kRoot || number >= runs_.size() || runs_[number].length == 0) {
            continue;
        }
        CopiedRun& copied = runs_[number];
        if (copied.first == tree.blocks_.hash(tree.runs_[number].begin)) {  // else it is another run meanwhile
            copied.heat += each->heat;
            copied.used_s = std::max(copied.used_s, each->used_s);
        }
    }
}

bool Outline::is_child(const CopiedRun& run) const {
    if (run.length == 0 || run.parent >= runs_.size()) {
        return false;
    }
    const CopiedRun& parent = runs_[run.parent];
    return run.parent == Runs::kRoot || (parent.length != 0 && parent.last == run.above);
}

// The children of each run in a row of `children_`, a counting sort by parent.
void Outline::sort_children() {
    children_begin_.assign(runs_.size() + 1, 0);
    for (const CopiedRun& run : runs_) {
        if (is_child(run)) {
            ++children_begin_[run.parent + 1];
        }
    }
    std::partial_sum(children_begin_.begin(), children_begin_.end(), children_begin_.begin());
    children_.resize(children_begin_.back());
    std::vector<u32> next(children_begin_.begin(), children_begin_.end() - 1);
    for (u32 number = 1; number < runs_.size(); ++number) {
        if (is_child(runs_[number])) {
            children_[next[runs_[number].parent]++] = number;
        }
    }
}

// The node that begins with a run: it goes on while a run has one child.
void Outline::add_node(u32 head, u32 parent) {
    OutlineNode node;
    node.parent = parent;
    node.first = runs_[head].first;
    node.depth_blocks = parent == kNone ? 0 : nodes_[parent].depth_blocks;
    u32 run = head;
    while (true) {
        const CopiedRun& own = runs_[run];
        node.blocks += own.length;
        node.heat += own.heat;
        node.used_s = std::max(node.used_s, own.used_s);
        node.stored_s = std::max(node.stored_s, own.stored_s);
        if (children_begin_[run + 1] - children_begin_[run] != 1) {
            break;
        }
        run = children_[children_begin_[run]];
    }
    node.last = runs_[run].last;
    node.depth_blocks += node.blocks;
    node.subtree_blocks = node.blocks;
    blocks_ += node.blocks;
    nodes_.push_back(node);
    tails_.push_back(run);
}

void Outline::add_children_of(u32 tail, u32 parent) {
    for (u32 at = children_begin_[tail]; at < children_begin_[tail + 1]; ++at) {
        add_node(children_[at], parent);
    }
}

void Outline::sum_up() {
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

void Outline::lay_out() {
    sort_children();
    add_children_of(Runs::kRoot, kNone);
    roots_ = static_cast<u32>(nodes_.size());
    for (u32 node = 0; node < nodes_.size(); ++node) {
        const auto begin = static_cast<u32>(nodes_.size());
        add_children_of(tails_[node], node);
        nodes_[node].children_begin = begin;
        nodes_[node].children = static_cast<u32>(nodes_.size()) - begin;
    }
    sum_up();
    by_last_.resize(nodes_.size());
    std::iota(by_last_.begin(), by_last_.end(), 0u);
    std::sort(by_last_.begin(), by_last_.end(), [this](u32 a, u32 b) { return nodes_[a].last < nodes_[b].last; });
    runs_ = {};
    children_begin_ = children_ = tails_ = {};
}

u32 Outline::find(u64 last) const {
    const auto found = std::lower_bound(by_last_.begin(), by_last_.end(), last,
                                        [this](u32 node, u64 hash) { return nodes_[node].last < hash; });
    return found == by_last_.end() || nodes_[*found].last != last ? kNone : *found;
}

namespace {

double most(const OutlineNode& node, OutlineOrder order) {
    switch (order) {
        case OutlineOrder::heat: return node.heat;
        case OutlineOrder::recent: return node.stored_s;
        case OutlineOrder::blocks: return static_cast<double>(node.blocks);
        default: return static_cast<double>(node.subtree_blocks);
    }
}

}  // namespace

std::vector<OutlineNode> Outline::children(u32 node, OutlineOrder order, std::size_t offset, std::size_t limit) const {
    const std::size_t count = child_count(node), end = std::min(count, offset + limit);
    if (offset >= end) {
        return {};
    }
    std::vector<u32> numbers(count);
    std::iota(numbers.begin(), numbers.end(), node == kNone ? 0u : nodes_[node].children_begin);
    std::partial_sort(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(end), numbers.end(), [&](u32 a, u32 b) {
        const double left = most(nodes_[a], order), right = most(nodes_[b], order);
        return left != right ? left > right : nodes_[a].first < nodes_[b].first;
    });
    std::vector<OutlineNode> found;
    for (std::size_t at = offset; at < end; ++at) {
        found.push_back(nodes_[numbers[at]]);
    }
    return found;
}

}  // namespace kv
