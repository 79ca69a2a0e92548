#include "routed_tree.hpp"

#include <algorithm>
#include <utility>

namespace kv {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

RoutedTree::RoutedTree() : nodes_(1) { nodes_[kRoot].age = Age{kNever, 0}; }

double RoutedTree::next_expiry_s() {
    const u32 leaf = oldest();
    return leaf == kNone ? kNever : nodes_[leaf].age.expires_at_s;
}

std::size_t RoutedTree::expire(double now_s) {
    std::size_t dropped = 0;
    while (next_expiry_s() <= now_s) {
        dropped += drop(block_count_);
    }
    return dropped;
}

std::size_t RoutedTree::add(const u64* chain, std::size_t count, Age age, std::size_t capacity) {
    u32 at = kRoot;
    std::size_t done = 0;
    while (done < count) {
        u32 child = child_of(at, chain[done]);
        if (child == kNone) {
            break;
        }
        const std::size_t alike = shared_blocks(nodes_[child].blocks, chain + done, count - done);
        if (alike < nodes_[child].blocks.size()) {
            split(child, alike);
            child = nodes_[child].parent;
        }
        nodes_[child].age = age;
        at = child;
        done += alike;
    }
    if (done < count) {
        block_count_ += count - done;
        if (at != kRoot && nodes_[at].first_child == kNone) {
            nodes_[at].blocks.insert(nodes_[at].blocks.end(), chain + done, chain + count);
        } else {
            at = new_node(at, chain + done, count - done, age);
        }
    }
    if (at != kRoot && nodes_[at].first_child == kNone) {
        list_leaf(at);
    }
    std::size_t dropped = 0;
    while (block_count_ > capacity) {
        dropped += drop(block_count_ - capacity);
    }
    return dropped;
}

std::size_t RoutedTree::overlap(const u64* chain, std::size_t count, double now_s) const {
    u32 at = kRoot;
    std::size_t depth = 0;
    while (depth < count) {
        at = child_of(at, chain[depth]);
        if (at == kNone || nodes_[at].age.expires_at_s <= now_s) {
            break;
        }
        const std::size_t alike = shared_blocks(nodes_[at].blocks, chain + depth, count - depth);
        depth += alike;
        if (alike < nodes_[at].blocks.size()) {
            break;
        }
    }
    return depth;
}

std::vector<RoutedTree::Row> RoutedTree::rows() const {
    std::vector<Row> made;
    std::vector<std::pair<i64, u32>> unseen;
    const auto see = [this, &unseen](i64 parent, u32 number) {
        for (u32 child = nodes_[number].last_child; child != kNone; child = nodes_[child].before) {
            unseen.emplace_back(parent, child);
        }
    };
    see(-1, kRoot);
    while (!unseen.empty()) {
        const auto [parent, number] = unseen.back();
        unseen.pop_back();
        see(static_cast<i64>(made.size()), number);
        made.push_back(Row{parent, &nodes_[number].blocks, nodes_[number].age});
    }
    return made;
}

bool RoutedTree::restore(i64 parent, const u64* blocks, std::size_t count, Age age) {
    const i64 above = parent + 1;  // the numbers of nodes are those of the calls, behind the root, until one is dropped
    const bool is_there = 0 <= above && above < static_cast<i64>(nodes_.size()) && free_.empty();
    if (!is_there || child_of(static_cast<u32>(above), blocks[0]) != kNone) {
        return false;
    }
    list_leaf(new_node(static_cast<u32>(above), blocks, count, age));
    block_count_ += count;
    return true;
}

bool RoutedTree::is_current(const Leaf& leaf) const {
    return nodes_[leaf.node].age == leaf.age && nodes_[leaf.node].first_child == kNone;
}

// Enters a leaf, or one whose age changed.
void RoutedTree::list_leaf(u32 number) {
    leaves_.push_back(Leaf{nodes_[number].age, number});
    std::push_heap(leaves_.begin(), leaves_.end());
    if (leaves_.size() > leaves_max_) {
        const auto outdated = [this](const Leaf& each) { return !is_current(each); };
        leaves_.erase(std::remove_if(leaves_.begin(), leaves_.end(), outdated), leaves_.end());
        std::make_heap(leaves_.begin(), leaves_.end());
        leaves_max_ = 2 * leaves_.size() + kLeavesFirst;
    }
}

// Returns the oldest leaf; none if the tree is empty.
u32 RoutedTree::oldest() {
    while (!leaves_.empty()) {
        if (is_current(leaves_.front())) {
            return leaves_.front().node;
        }
        std::pop_heap(leaves_.begin(), leaves_.end());
        leaves_.pop_back();
    }
    return kNone;
}

// Drops the oldest leaf, of a tree that is not empty, or the deepest `blocks_max` of its blocks; returns how many.
std::size_t RoutedTree::drop(std::size_t blocks_max) {
    const u32 leaf = oldest();
    const std::size_t held = nodes_[leaf].blocks.size(), dropped = std::min(blocks_max, held);
    block_count_ -= dropped;
    if (dropped < held) {
        nodes_[leaf].blocks.resize(held - dropped);
        return dropped;
    }
    const u32 parent = nodes_[leaf].parent;
    unlink(leaf);
    nodes_[leaf] = Node{};
    free_.push_back(leaf);
    if (parent != kRoot && nodes_[parent].first_child == kNone) {
        list_leaf(parent);
    }
    return dropped;
}

u32 RoutedTree::child_of(u32 parent, u64 first) const {
    return edges_.find(Edge{parent, first});
}

// Returns a new child of `parent`, its last.
u32 RoutedTree::new_node(u32 parent, const u64* blocks, std::size_t count, Age age) {
    u32 number = static_cast<u32>(nodes_.size());
    if (free_.empty()) {
        nodes_.emplace_back();
    } else {
        number = free_.back();
        free_.pop_back();
    }
    nodes_[number].blocks.assign(blocks, blocks + count);
    nodes_[number].age = age;
    link_last(parent, number);
    return number;
}

void RoutedTree::link_last(u32 parent, u32 number) {
    Node &node = nodes_[number], &above = nodes_[parent];
    node.parent = parent;
    node.before = above.last_child;
    node.after = kNone;
    (node.before == kNone ? above.first_child : nodes_[node.before].after) = number;
    above.last_child = number;
    edges_.put(Edge{parent, node.blocks[0]}, number);
}

void RoutedTree::unlink(u32 number) {
    const Node& node = nodes_[number];
    Node& above = nodes_[node.parent];
    (node.before == kNone ? above.first_child : nodes_[node.before].after) = node.after;
    (node.after == kNone ? above.last_child : nodes_[node.after].before) = node.before;
    edges_.erase(Edge{node.parent, node.blocks[0]});
}

// Puts a new node of the first `length` blocks in the place of `number`, which keeps the later ones and becomes its child.
void RoutedTree::split(u32 number, std::size_t length) {
    const std::vector<u64> blocks = std::move(nodes_[number].blocks);
    const u32 parent = nodes_[number].parent, before = nodes_[number].before, after = nodes_[number].after;
    const u32 front = new_node(parent, blocks.data(), length, nodes_[number].age);  // as the last: it is moved below
    nodes_[nodes_[front].before].after = kNone;
    nodes_[parent].last_child = nodes_[front].before;
    nodes_[front].before = before;
    nodes_[front].after = after;
    (before == kNone ? nodes_[parent].first_child : nodes_[before].after) = front;
    (after == kNone ? nodes_[parent].last_child : nodes_[after].before) = front;
    nodes_[number].blocks.assign(blocks.begin() + static_cast<std::ptrdiff_t>(length), blocks.end());
    link_last(front, number);
}

}  // namespace kv
