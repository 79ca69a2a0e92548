// The blocks routed to one rank, by the rules in tests/reference/approximate.py. Knows nothing of Python. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "chain_tree.hpp"

namespace kv {

// When blocks expire, and the number of the last request that had them.
struct Age {
    double expires_at_s;
    u64 request;
    bool operator==(const Age& other) const { return expires_at_s == other.expires_at_s && request == other.request; }
    bool operator<(const Age& other) const {
        return expires_at_s != other.expires_at_s ? expires_at_s < other.expires_at_s : request < other.request;
    }
};

class RoutedTree {
public:
    // One stretch: the place of its parent among the rows (-1: none), its blocks and its age.
    struct Row {
        i64 parent;
        const std::vector<u64>* blocks;
        Age age;
    };

    RoutedTree();

    std::size_t block_count() const { return block_count_; }
    // When the next blocks expire; infinity if there are none.
    double next_expiry_s();
    // Drops what expires at `now_s` or before; returns how many blocks.
    std::size_t expire(double now_s);
    // Adds the blocks of a chain as the newest, and drops the oldest beyond `capacity`; returns how many it dropped.
    std::size_t add(const u64* chain, std::size_t count, Age age, std::size_t capacity);
    // How many leading blocks of the chain are held and not expired.
    std::size_t overlap(const u64* chain, std::size_t count, double now_s) const;
    // Every stretch, parents before their children, children in the order in which they came; valid until the next change.
    std::vector<Row> rows() const;
    // Adds a stretch below the `parent`-th restored one, -1: the root; false: there is none, or the child exists.
    bool restore(i64 parent, const u64* blocks, std::size_t count, Age age);

private:
    static constexpr u32 kRoot = 0;
    static constexpr u32 kNone = Edges::kNone;
    static constexpr std::size_t kLeavesFirst = 64;

    // A stretch. Children are a list, in the order in which they came.
    struct Node {
        std::vector<u64> blocks;
        Age age{};
        u32 parent = kNone;
        u32 first_child = kNone, last_child = kNone;
        u32 before = kNone, after = kNone;
    };
    // A heap's entry, oldest on top; outdated if the node has another age, or children.
    struct Leaf {
        Age age;
        u32 node;
        bool operator<(const Leaf& other) const { return other.age < age; }
    };

    bool is_current(const Leaf& leaf) const;
    void list_leaf(u32 number);
    u32 oldest();
    std::size_t drop(std::size_t blocks_max);
    u32 child_of(u32 parent, u64 first) const;
    u32 new_node(u32 parent, const u64* blocks, std::size_t count, Age age);
    void link_last(u32 parent, u32 number);
    void unlink(u32 number);
    void split(u32 number, std::size_t length);

    std::vector<Node> nodes_;
    std::vector<u32> free_;
    Edges edges_;
    std::vector<Leaf> leaves_;
    std::size_t leaves_max_ = kLeavesFirst;
    std::size_t block_count_ = 0;
};

}  // namespace kv
