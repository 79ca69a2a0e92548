#include "chain_tree.hpp"

#include <algorithm>
#include <cstring>
#include <random>

namespace kv {

u64 drawn_seed() {
    std::random_device source;
    return static_cast<u64>(source()) << 32 | source();
}

namespace {

template <typename Counts>
auto place_of(Counts& counts, u32 key) {
    return std::lower_bound(counts.begin(), counts.end(), key, [](const auto& each, u32 of) { return each.key < of; });
}

}  // namespace

std::size_t shared_blocks(const std::vector<u64>& blocks, const u64* chain, std::size_t count) {
    constexpr std::size_t kAtOnce = 32;
    const std::size_t most = std::min(blocks.size(), count);
    std::size_t at = 0;
    while (at + kAtOnce <= most && std::memcmp(&blocks[at], chain + at, kAtOnce * sizeof(u64)) == 0) {
        at += kAtOnce;
    }
    while (at < most && blocks[at] == chain[at]) {
        ++at;
    }
    return at;
}

// Where the edge is, or where it would be put.
std::size_t Edges::place_of(Edge edge) const {
    std::size_t at = begin_of(edge);
    while (places_[at].child != kNone && !(places_[at].edge == edge)) {
        at = (at + 1) & (places_.size() - 1);
    }
    return at;
}

u32 Edges::find(Edge edge) const { return places_[place_of(edge)].child; }

u32 Edges::put(Edge edge, u32 child) {
    Place* place = &places_[place_of(edge)];
    const u32 former = place->child;
    if (former == kNone && 4 * ++size_ > 3 * places_.size()) {
        grow();
        place = &places_[place_of(edge)];
    }
    *place = Place{edge, child};
    return former;
}

// Edges behind it that would not be found any more move up.
void Edges::erase(Edge edge) {
    const std::size_t mask = places_.size() - 1;
    std::size_t hole = place_of(edge);
    size_ -= places_[hole].child != kNone;
    for (std::size_t at = (hole + 1) & mask; places_[at].child != kNone && places_[hole].child != kNone; at = (at + 1) & mask) {
        if (((at - begin_of(places_[at].edge)) & mask) >= ((at - hole) & mask)) {
            places_[hole] = places_[at];
            hole = at;
        }
    }
    places_[hole].child = kNone;
}

void Edges::grow() {
    std::vector<Place> former(2 * places_.size());
    std::swap(former, places_);
    for (const Place& each : former) {
        if (each.child != kNone) {
            places_[place_of(each.edge)] = each;
        }
    }
}

ChainTree::ChainTree() : nodes_(1) {}

u32 ChainTree::add(u32 key, const u64* chain, std::size_t count, bool is_marked) {
    u32 at = kRoot;
    std::size_t done = 0, added = 0;
    while (done < count) {
        u32 child = child_of(at, chain[done]);
        if (child == kNone) {
            child = new_node(at, chain + done, count - done);
        } else {
            const std::size_t alike = shared_blocks(nodes_[child].blocks, chain + done, count - done);
            if (alike < nodes_[child].blocks.size()) {
                child = split(child, alike);
            }
        }
        at = child;
        const std::size_t length = nodes_[at].blocks.size();
        done += length;
        added += count_in(nodes_[at], key, is_marked) ? length : 0;
    }
    ++nodes_[at].ends;
    if (key >= blocks_.size()) {
        blocks_.resize(key + 1);
        depths_.resize(key + 1);
        marked_depths_.resize(key + 1);
    }
    blocks_[key] += static_cast<i64>(added);
    return at;
}

void ChainTree::remove(u32 key, u32 end, bool is_marked) {
    --nodes_[end].ends;
    std::size_t freed = 0;
    for (u32 at = end; at != kRoot;) {
        Node& node = nodes_[at];
        const u32 parent = node.parent;
        freed += count_out(node, key, is_marked) ? node.blocks.size() : 0;
        if (node.counts.empty()) {
            edges_.erase(Edge{parent, node.blocks[0]});
            --nodes_[parent].children;
            nodes_[parent].children_xor ^= at;
            free_node(at);
        } else if (node.ends == 0 && node.children == 1) {
            join(at);
        }
        at = parent;
    }
    if (freed != 0) {
        blocks_[key] -= static_cast<i64>(freed);
    }
}

void ChainTree::unmark(u32 key, u32 end) {
    for (u32 at = end; at != kRoot; at = nodes_[at].parent) {
        nodes_[at].marked_keys -= --place_of(nodes_[at].counts, key)->marked == 0;
    }
}

void ChainTree::depths(const u64* chain, std::size_t count, const u32* keys, std::size_t keys_count, i64* out, i64* marked) {
    u32 at = kRoot, top = kRoot;
    std::size_t depth = 0;
    while (depth < count) {
        const u32 child = child_of(at, chain[depth]);
        if (child == kNone) {
            break;
        }
        const Node& node = nodes_[child];
        if (node.counts.size() < nodes_[at].counts.size()) {  // no key is below that is not above: as many are the same
            spread(nodes_[at], static_cast<i64>(depth));
        }
        if (node.marked_keys < nodes_[at].marked_keys) {
            spread_marked(nodes_[at], static_cast<i64>(depth));
        }
        top = top == kRoot ? child : top;
        at = child;
        const std::size_t alike = shared_blocks(node.blocks, chain + depth, count - depth);
        depth += alike;
        if (alike < node.blocks.size()) {
            break;
        }
    }
    spread(nodes_[at], static_cast<i64>(depth));
    spread_marked(nodes_[at], static_cast<i64>(depth));
    for (std::size_t place = 0; place < keys_count; ++place) {
        const bool is_known = keys[place] < depths_.size();
        out[place] = is_known ? depths_[keys[place]] : 0;
        marked[place] = is_known ? marked_depths_[keys[place]] : 0;
    }
    spread(nodes_[top], 0);
    spread_marked(nodes_[top], 0);
}

void ChainTree::spread(const Node& node, i64 depth) {
    for (const Count& each : node.counts) {
        depths_[each.key] = depth;
    }
}

void ChainTree::spread_marked(const Node& node, i64 depth) {
    for (const Count& each : node.counts) {
        if (each.marked != 0) {
            marked_depths_[each.key] = depth;
        }
    }
}

u32 ChainTree::child_of(u32 parent, u64 first) const {
    return edges_.find(Edge{parent, first});
}

// Returns a new child of `parent`, or a node in the place of that with the same first block.
u32 ChainTree::new_node(u32 parent, const u64* blocks, std::size_t count) {
    u32 number = static_cast<u32>(nodes_.size());
    if (free_.empty()) {
        nodes_.emplace_back();
    } else {
        number = free_.back();
        free_.pop_back();
    }
    Node& node = nodes_[number];
    node.blocks.assign(blocks, blocks + count);
    node.parent = parent;
    const u32 former = edges_.put(Edge{parent, blocks[0]}, number);
    nodes_[parent].children += former == kNone ? 1 : 0;
    nodes_[parent].children_xor ^= number ^ (former == kNone ? 0 : former);
    return number;
}

void ChainTree::free_node(u32 number) {
    Node& node = nodes_[number];
    if (free_.size() < kSpareNodes) {  // the next chain has its memory
        node.blocks.clear();
        node.counts.clear();
        node.marked_keys = node.ends = node.children = node.children_xor = 0;
    } else {
        node = Node{};
    }
    free_.push_back(number);
}

// Returns a new node of the first `length` blocks; `number`, at which chains end, keeps the later ones.
u32 ChainTree::split(u32 number, std::size_t length) {
    const std::vector<u64> blocks = std::move(nodes_[number].blocks);
    const u32 front = new_node(nodes_[number].parent, blocks.data(), length);
    Node& back = nodes_[number];
    nodes_[front].counts = back.counts;
    nodes_[front].marked_keys = back.marked_keys;
    back.blocks.assign(blocks.begin() + static_cast<std::ptrdiff_t>(length), blocks.end());
    back.parent = front;
    edges_.put(Edge{front, back.blocks[0]}, number);
    nodes_[front].children = 1;
    nodes_[front].children_xor = number;
    return front;
}

// Merges the node into its only child, which stays, since chains end there or below it.
void ChainTree::join(u32 number) {
    Node& node = nodes_[number];
    const u32 only = node.children_xor, parent = node.parent;
    Node& child = nodes_[only];
    edges_.erase(Edge{number, child.blocks[0]});
    edges_.put(Edge{parent, node.blocks[0]}, only);
    nodes_[parent].children_xor ^= number ^ only;
    node.blocks.insert(node.blocks.end(), child.blocks.begin(), child.blocks.end());
    child.blocks = std::move(node.blocks);
    child.parent = parent;
    free_node(number);
}

// Counts a chain of the key; returns whether it is the first.
bool ChainTree::count_in(Node& node, u32 key, bool is_marked) {
    auto found = place_of(node.counts, key);
    const bool is_first = found == node.counts.end() || found->key != key;
    if (is_first) {
        found = node.counts.insert(found, Count{key, 0, 0});
    }
    ++found->chains;
    node.marked_keys += is_marked && found->marked++ == 0;
    return is_first;
}

// Takes back one chain of the key, which has one; returns whether it was the last.
bool ChainTree::count_out(Node& node, u32 key, bool is_marked) {
    const auto found = place_of(node.counts, key);
    node.marked_keys -= is_marked && --found->marked == 0;
    if (--found->chains != 0) {
        return false;
    }
    node.counts.erase(found);
    return true;
}

}  // namespace kv
