// A tree of chains of blocks. A node is a stretch: consecutive blocks without a fork. Knows nothing of Python. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

namespace kv {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

// The last steps of splitmix64.
inline u64 mixed(u64 value) {
    value = (value ^ (value >> 30)) * 0xBF58'476D'1CE4'E5B9u;
    value = (value ^ (value >> 27)) * 0x94D0'49BB'1331'11EBu;
    return value ^ (value >> 31);
}

inline u64 drawn_seed() {
    std::random_device source;
    return static_cast<u64>(source()) << 32 | source();
}

// The edge from a node to the child that begins with this block.
struct Edge {
    u32 parent;
    u64 first;
    bool operator==(const Edge& other) const { return parent == other.parent && first == other.first; }
};

// The edges of one tree, in a table with open addressing: most lookups read one place of memory.
class Edges {
public:
    static constexpr u32 kNone = 0xFFFF'FFFF;

    bool empty() const { return size_ == 0; }
    // The child; `kNone`: there is none.
    u32 find(Edge edge) const { return places_[place_of(edge)].child; }
    // Sets the edge's child; returns the former one, or `kNone`.
    u32 put(Edge edge, u32 child) {
        Place* place = &places_[place_of(edge)];
        const u32 former = place->child;
        if (former == kNone && 4 * ++size_ > 3 * places_.size()) {
            grow();
            place = &places_[place_of(edge)];
        }
        *place = Place{edge, child};
        return former;
    }
    // Erases the edge, and moves up following edges that would no longer be found.
    void erase(Edge edge) {
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

private:
    struct Place {
        Edge edge;
        u32 child = kNone;  // `kNone`: it is free
    };
    std::size_t begin_of(Edge edge) const { return mixed(mixed(edge.first ^ seed_) + edge.parent) & (places_.size() - 1); }
    // Where the edge is, or where it would be put.
    std::size_t place_of(Edge edge) const {
        std::size_t at = begin_of(edge);
        while (places_[at].child != kNone && !(places_[at].edge == edge)) {
            at = (at + 1) & (places_.size() - 1);
        }
        return at;
    }
    void grow() {
        std::vector<Place> former(2 * places_.size());
        std::swap(former, places_);
        for (const Place& each : former) {
            if (each.child != kNone) {
                places_[place_of(each.edge)] = each;
            }
        }
    }

    u64 seed_ = drawn_seed();  // so that clients cannot choose hashes that collide
    std::vector<Place> places_ = std::vector<Place>(16);  // a power of two, at most three quarters in use
    std::size_t size_ = 0;
};

// `More`: what a tree keeps of each stretch beside its blocks.
template <typename More>
class Stretches {
protected:
    static constexpr u32 kRoot = 0, kNone = Edges::kNone;

    struct Node : More {
        std::vector<u64> blocks;
        u32 parent = kNone;
        u32 children = 0;
        u32 children_xor = 0;  // XOR of the children's numbers; with one child, its number
    };

    u32 child_of(u32 parent, u64 first) const { return edges_.find({parent, first}); }
    // How many leading blocks the chain and the node have in common.
    std::size_t alike(u32 number, const u64* chain, std::size_t count) const {
        constexpr std::size_t kAtOnce = 32;
        const std::vector<u64>& blocks = nodes_[number].blocks;
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
    // Returns a new child of `parent`, which replaces a child with the same first block.
    u32 add_node(u32 parent, const u64* blocks, std::size_t count) {
        u32 number = static_cast<u32>(nodes_.size());
        if (free_.empty()) {
            nodes_.emplace_back();
        } else {
            number = free_.back();
            free_.pop_back();
        }
        std::vector<u64>& own = nodes_[number].blocks;
        if (own.capacity() > 2 * count) {  // the memory of a long stretch is not kept for a short one
            own = std::vector<u64>(blocks, blocks + count);
        } else {
            own.assign(blocks, blocks + count);
        }
        nodes_[number].parent = parent;
        const u32 former = edges_.put({parent, blocks[0]}, number);
        nodes_[parent].children += former == kNone ? 1 : 0;
        nodes_[parent].children_xor ^= number ^ (former == kNone ? 0 : former);
        return number;
    }
    // Removes a node without children.
    void remove_node(u32 number) {
        const u32 parent = nodes_[number].parent;
        edges_.erase({parent, nodes_[number].blocks[0]});
        --nodes_[parent].children;
        nodes_[parent].children_xor ^= number;
        free_node(number);
    }
    // Returns a new node of the first `length` blocks; `number` keeps the later ones and becomes its child.
    u32 split(u32 number, std::size_t length) {
        const std::vector<u64> blocks = std::move(nodes_[number].blocks);
        const u32 front = add_node(nodes_[number].parent, blocks.data(), length);
        Node& back = nodes_[number];
        back.blocks.assign(blocks.begin() + static_cast<std::ptrdiff_t>(length), blocks.end());
        back.parent = front;
        edges_.put({front, back.blocks[0]}, number);
        nodes_[front].children = 1;
        nodes_[front].children_xor = number;
        return front;
    }
    // Merges the node into its only child.
    void join(u32 number) {
        Node& node = nodes_[number];
        const u32 only = node.children_xor, parent = node.parent;
        Node& child = nodes_[only];
        edges_.erase({number, child.blocks[0]});
        edges_.put({parent, node.blocks[0]}, only);
        nodes_[parent].children_xor ^= number ^ only;
        node.blocks.insert(node.blocks.end(), child.blocks.begin(), child.blocks.end());
        child.blocks = std::move(node.blocks);
        child.parent = parent;
        free_node(number);
    }

    std::vector<Node> nodes_ = std::vector<Node>(1);  // the root first
    Edges edges_;

private:
    static constexpr std::size_t kSpareNodes = 256;

    void free_node(u32 number) {
        Node& node = nodes_[number];
        if (free_.size() < kSpareNodes) {  // a later node reuses its memory
            node.blocks.clear();
            node.reset();
            node.children = node.children_xor = 0;
        } else {
            node = Node{};
        }
        free_.push_back(number);
    }

    std::vector<u32> free_;
};

}  // namespace kv
