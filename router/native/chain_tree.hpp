// The chains of many keys, each block counted once per key, however many of its chains have it. Some of the chains are marked. Knows
// nothing of Python. Not thread-safe.
//
// A node is a stretch: consecutive blocks, without a fork, where chains end only at its end. It counts, per key, the chains that go
// through it; it exists while there is one, and is joined with its only child once no chain ends at it. Adding and removing cost one
// step per node on the path, by forks, not by blocks; one walk finds every key's longest prefix of a chain.
#pragma once

#include <cstddef>
#include <cstdint>
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
u64 drawn_seed();

// A child of a node, by its first block.
struct Edge {
    u32 parent;
    u64 first;
    bool operator==(const Edge& other) const { return parent == other.parent && first == other.first; }
};

// The edges of one tree, in a table with open addressing: a lookup reads one place of memory.
class Edges {
public:
    static constexpr u32 kNone = 0xFFFF'FFFF;

    bool empty() const { return size_ == 0; }
    // The child; `kNone`: there is none.
    u32 find(Edge edge) const;
    // Sets the edge's child; returns the former one, or `kNone`.
    u32 put(Edge edge, u32 child);
    void erase(Edge edge);

private:
    struct Place {
        Edge edge;
        u32 child = kNone;  // `kNone`: it is free
    };
    std::size_t begin_of(Edge edge) const { return mixed(mixed(edge.first ^ seed_) + edge.parent) & (places_.size() - 1); }
    std::size_t place_of(Edge edge) const;
    void grow();

    u64 seed_ = drawn_seed();  // so that clients cannot choose hashes that collide
    std::vector<Place> places_ = std::vector<Place>(16);  // a power of two, at most three quarters in use
    std::size_t size_ = 0;
};

// How many leading blocks are equal.
std::size_t shared_blocks(const std::vector<u64>& blocks, const u64* chain, std::size_t count);

class ChainTree {
public:
    ChainTree();

    // Adds a chain to the key; returns its end, which stays valid until `remove`.
    u32 add(u32 key, const u64* chain, std::size_t count, bool is_marked);
    // Removes a chain that was added to the key, and ends there.
    void remove(u32 key, u32 end, bool is_marked);
    // Takes its mark from such a chain.
    void unmark(u32 key, u32 end);
    // How many distinct blocks the key's chains have.
    i64 blocks(u64 key) const { return key < blocks_.size() ? blocks_[key] : 0; }
    // Sets out[i] to how many leading blocks of the chain those of keys[i] have, and marked[i] to how many its marked ones have; 0 for
    // keys without chains.
    void depths(const u64* chain, std::size_t count, const u32* keys, std::size_t keys_count, i64* out, i64* marked);
    bool is_empty() const { return edges_.empty() && nodes_[kRoot].ends == 0; }

private:
    static constexpr u32 kRoot = 0;
    static constexpr u32 kNone = Edges::kNone;
    static constexpr std::size_t kSpareNodes = 256;

    struct Count {
        u32 key;
        u32 chains, marked;
    };
    // A stretch. `children_xor`: of one child, its number.
    struct Node {
        std::vector<u64> blocks;
        std::vector<Count> counts;  // by key
        u32 marked_keys = 0;        // that have a marked chain
        u32 parent = kNone;
        u32 ends = 0;
        u32 children = 0;
        u32 children_xor = 0;
    };
    u32 child_of(u32 parent, u64 first) const;
    u32 new_node(u32 parent, const u64* blocks, std::size_t count);
    void free_node(u32 number);
    u32 split(u32 number, std::size_t length);
    void join(u32 number);
    static bool count_in(Node& node, u32 key, bool is_marked);
    static bool count_out(Node& node, u32 key, bool is_marked);
    void spread(const Node& node, i64 depth);
    void spread_marked(const Node& node, i64 depth);

    std::vector<Node> nodes_;
    std::vector<u32> free_;
    Edges edges_;
    std::vector<i64> blocks_;  // by key
    std::vector<i64> depths_, marked_depths_;  // by key; zeroes between calls
};

}  // namespace kv
