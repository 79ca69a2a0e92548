// The chains of many keys. A block counts once per key, however many chains of the key have it. Chains may be marked.
// Knows nothing of Python. Not thread-safe.
//
// Every chain ends where a stretch ends. A stretch counts, per key, the chains that go through it. It exists as long as
// there are any, and is joined with its only child once no chain ends at it. Adding and removing take one step per
// stretch on the path, however long the stretches are. One walk finds every key's longest prefix of a chain.
#pragma once

#include <algorithm>

#include "stretches.hpp"

namespace kv {

// How many chains of a key go through a stretch, and how many of them are marked.
struct ChainCount {
    u32 key;
    u32 chains, marked;
};

struct ChainCounts {
    std::vector<ChainCount> counts;  // by key
    u32 marked_keys = 0;             // keys with a marked chain
    u32 ends = 0;                    // chains that end here

    void reset() {
        counts.clear();
        marked_keys = ends = 0;
    }
    std::vector<ChainCount>::iterator place_of(u32 key) {
        return std::lower_bound(counts.begin(), counts.end(), key, [](const ChainCount& each, u32 of) { return each.key < of; });
    }
    // Counts a chain of the key; returns whether it is the first.
    bool count_in(u32 key, bool is_marked) {
        auto found = place_of(key);
        const bool is_first = found == counts.end() || found->key != key;
        if (is_first) {
            found = counts.insert(found, ChainCount{key, 0, 0});
        }
        ++found->chains;
        marked_keys += is_marked && found->marked++ == 0;
        return is_first;
    }
    // Takes back one chain of the key, which has one; returns whether it was the last.
    bool count_out(u32 key, bool is_marked) {
        const auto found = place_of(key);
        marked_keys -= is_marked && --found->marked == 0;
        if (--found->chains != 0) {
            return false;
        }
        counts.erase(found);
        return true;
    }
};

class ChainTree : Stretches<ChainCounts> {
public:
    // Adds a chain to the key; returns its end, which stays valid until `remove`.
    u32 add(u32 key, const u64* chain, std::size_t count, bool is_marked) {
        u32 at = kRoot;
        std::size_t done = 0, added = 0;
        while (done < count) {
            u32 child = child_of(at, chain[done]);
            if (child == kNone) {
                child = add_node(at, chain + done, count - done);
            } else if (const std::size_t length = alike(child, chain + done, count - done); length < nodes_[child].blocks.size()) {
                const u32 front = split(child, length);
                nodes_[front].counts = nodes_[child].counts;
                nodes_[front].marked_keys = nodes_[child].marked_keys;
                child = front;
            }
            at = child;
            const std::size_t length = nodes_[at].blocks.size();
            done += length;
            added += nodes_[at].count_in(key, is_marked) ? length : 0;
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
    // Removes the chain of the key for which `add` returned this end.
    void remove(u32 key, u32 end, bool is_marked) {
        --nodes_[end].ends;
        std::size_t freed = 0;
        for (u32 at = end; at != kRoot;) {
            Node& node = nodes_[at];
            const u32 parent = node.parent;
            freed += node.count_out(key, is_marked) ? node.blocks.size() : 0;
            if (node.counts.empty()) {
                remove_node(at);
            } else if (node.ends == 0 && node.children == 1) {
                join(at);
            }
            at = parent;
        }
        if (freed != 0) {
            blocks_[key] -= static_cast<i64>(freed);
        }
    }
    // Removes the mark from a marked chain of the key.
    void unmark(u32 key, u32 end) {
        for (u32 at = end; at != kRoot; at = nodes_[at].parent) {
            nodes_[at].marked_keys -= --nodes_[at].place_of(key)->marked == 0;
        }
    }
    // How many distinct blocks the key's chains have.
    i64 blocks(u64 key) const { return key < blocks_.size() ? blocks_[key] : 0; }
    // Calls `each` for every key: with its place in `keys`, how many leading blocks of the chain the key's chains have,
    // and how many its marked chains have.
    template <typename Each>
    void depths(const u64* chain, std::size_t count, const std::vector<u32>& keys, Each each) {
        u32 at = kRoot, top = kRoot;
        std::size_t depth = 0;
        while (depth < count) {
            const u32 child = child_of(at, chain[depth]);
            if (child == kNone) {
                break;
            }
            const Node& node = nodes_[child];
            if (node.counts.size() < nodes_[at].counts.size()) {  // a parent has all keys of its child: equal sizes, equal keys
                spread(nodes_[at], static_cast<i64>(depth));
            }
            if (node.marked_keys < nodes_[at].marked_keys) {
                spread_marked(nodes_[at], static_cast<i64>(depth));
            }
            top = top == kRoot ? child : top;
            at = child;
            const std::size_t length = alike(child, chain + depth, count - depth);
            depth += length;
            if (length < node.blocks.size()) {
                break;
            }
        }
        spread(nodes_[at], static_cast<i64>(depth));
        spread_marked(nodes_[at], static_cast<i64>(depth));
        for (std::size_t place = 0; place < keys.size(); ++place) {
            const bool is_known = keys[place] < depths_.size();
            each(place, is_known ? depths_[keys[place]] : 0, is_known ? marked_depths_[keys[place]] : 0);
        }
        spread(nodes_[top], 0);
        spread_marked(nodes_[top], 0);
    }
    bool is_empty() const { return edges_.empty() && nodes_[kRoot].ends == 0; }

private:
    void spread(const ChainCounts& node, i64 depth) {
        for (const ChainCount& each : node.counts) {
            depths_[each.key] = depth;
        }
    }
    void spread_marked(const ChainCounts& node, i64 depth) {
        for (const ChainCount& each : node.counts) {
            if (each.marked != 0) {
                marked_depths_[each.key] = depth;
            }
        }
    }

    std::vector<i64> blocks_;  // by key
    std::vector<i64> depths_, marked_depths_;  // by key; zeroes between calls
};

}  // namespace kv
