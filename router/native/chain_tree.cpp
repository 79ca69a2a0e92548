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

u32 ChainTree::add(u32 key, const u64* chain, std::size_t count) {
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
        added += count_in(nodes_[at].counts, key) ? length : 0;
    }
    ++nodes_[at].ends;
    if (key >= blocks_.size()) {
        blocks_.resize(key + 1);
        depths_.resize(key + 1);
    }
    blocks_[key] += static_cast<i64>(added);
    return at;
}

bool ChainTree::remove(u32 key, u32 end) {
    if (end >= nodes_.size() || nodes_[end].ends == 0) {
        return false;
    }
    for (u32 at = end; at != kRoot; at = nodes_[at].parent) {
        const auto found = place_of(nodes_[at].counts, key);
        if (found == nodes_[at].counts.end() || found->key != key) {
            return false;
        }
    }
    --nodes_[end].ends;
    std::size_t freed = 0;
    for (u32 at = end; at != kRoot;) {
        Node& node = nodes_[at];
        const u32 parent = node.parent;
        freed += count_out(node.counts, key) ? node.blocks.size() : 0;
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
    return true;
}

void ChainTree::depths(const u64* chain, std::size_t count, const i64* keys, std::size_t keys_count, i64* out) {
    u32 at = kRoot, top = kRoot;
    std::size_t depth = 0;
    while (depth < count) {
        const u32 child = child_of(at, chain[depth]);
        if (child == kNone) {
            break;
        }
        const Node& node = nodes_[child];
        if (node.counts.size() < nodes_[at].counts.size()) {  // no key is below that is not above: as many are the same
            spread(nodes_[at].counts, static_cast<i64>(depth));
        }
        top = top == kRoot ? child : top;
        at = child;
        const std::size_t alike = shared_blocks(node.blocks, chain + depth, count - depth);
        depth += alike;
        if (alike < node.blocks.size()) {
            break;
        }
    }
    spread(nodes_[at].counts, static_cast<i64>(depth));
    for (std::size_t place = 0; place < keys_count; ++place) {
        const u64 key = static_cast<u64>(keys[place]);
        out[place] = key < depths_.size() ? depths_[key] : 0;
    }
    spread(nodes_[top].counts, 0);
}

void ChainTree::spread(const std::vector<Count>& counts, i64 depth) {
    for (const Count& each : counts) {
        depths_[each.key] = depth;
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
        node.ends = node.children = node.children_xor = 0;
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
bool ChainTree::count_in(std::vector<Count>& counts, u32 key) {
    const auto found = place_of(counts, key);
    if (found != counts.end() && found->key == key) {
        ++found->chains;
        return false;
    }
    counts.insert(found, Count{key, 1});
    return true;
}

// Takes back one chain of the key, which has one; returns whether it was the last.
bool ChainTree::count_out(std::vector<Count>& counts, u32 key) {
    const auto found = place_of(counts, key);
    if (--found->chains != 0) {
        return false;
    }
    counts.erase(found);
    return true;
}

}  // namespace kv
