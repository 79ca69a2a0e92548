// Blocks that ranks probably hold, judged only by the requests that were routed to them. The rules are in
// tests/reference/approximate.py. Knows nothing of Python.
#pragma once

#include "rows.hpp"

namespace kv {

// When a stretch of routed blocks expires, and its neighbours in the order of their last requests.
struct RoutedStretch {
    double expires_at_s = 0;
    u32 older = 0, newer = 0;

    void reset() {}
};

// The blocks routed to one rank. Its stretches are in a ring: the root, then the oldest stretch, up to the newest one.
// A request moves all stretches on its path to the newest end, the deepest first. So children are older than their
// parents, and the oldest stretch has no child.
class RoutedTree : Stretches<RoutedStretch> {
public:
    std::size_t block_count() const { return block_count_; }
    // Whether some blocks expire at `now_s` or before.
    bool expires(double now_s) const { return block_count_ != 0 && nodes_[nodes_[kRoot].newer].expires_at_s <= now_s; }
    // Drops the blocks that expire at `now_s` or before; returns how many.
    std::size_t expire(double now_s) {
        std::size_t dropped = 0;
        while (expires(now_s)) {
            dropped += drop(block_count_);
        }
        return dropped;
    }
    // Adds the blocks of a chain as the newest, and drops the oldest beyond `capacity`; returns how many it dropped.
    std::size_t add(const u64* chain, std::size_t count, double expires_at_s, std::size_t capacity) {
        u32 at = kRoot;
        std::size_t done = 0;
        for (u32 child = kNone; done < count && (child = child_of(at, chain[done])) != kNone;) {
            const std::size_t length = alike(child, chain + done, count - done);
            done += length;
            at = child;
            if (length < nodes_[child].blocks.size()) {
                at = split(child, length);
                link(at, nodes_[kRoot].older);
            }
        }
        if (done < count && at != kRoot && nodes_[at].children == 0) {
            nodes_[at].blocks.insert(nodes_[at].blocks.end(), chain + done, chain + count);
        } else if (done < count) {
            at = add_node(at, chain + done, count - done);
            link(at, nodes_[kRoot].older);
        }
        block_count_ += count - done;
        for (; at != kRoot; at = nodes_[at].parent) {
            nodes_[at].expires_at_s = expires_at_s;
            unlink(at);
            link(at, nodes_[kRoot].older);
        }
        std::size_t dropped = 0;
        while (block_count_ > capacity) {
            dropped += drop(block_count_ - capacity);
        }
        return dropped;
    }
    // How many leading blocks of the chain are held and not expired.
    std::size_t overlap(const u64* chain, std::size_t count, double now_s) const {
        u32 at = kRoot;
        std::size_t depth = 0;
        while (depth < count) {
            at = child_of(at, chain[depth]);
            if (at == kNone || nodes_[at].expires_at_s <= now_s) {
                break;
            }
            const std::size_t length = alike(at, chain + depth, count - depth);
            depth += length;
            if (length < nodes_[at].blocks.size()) {
                break;
            }
        }
        return depth;
    }

    // Adds a row for each stretch, the newest first, so that parents precede their children. A row: the rank, the place of the stretch's
    // parent among the rank's rows (-1: none), the blocks, when they expire.
    void rows(Part& to, const RankKey& rank) const {
        std::vector<i64> places(nodes_.size(), -1);
        i64 place = 0;
        for (u32 at = nodes_[kRoot].older; at != kRoot; at = nodes_[at].older) {
            const Node& node = nodes_[at];
            places[at] = place++;
            to.row(rank, places[node.parent], Chain(node.blocks.data(), node.blocks.size()), node.expires_at_s);
        }
    }
    // Adds the stretch of the next row. Returns false if it is empty, if its parent (-1: the root) is not an earlier
    // row's stretch, or if that parent has a child that begins with the same block.
    bool restore(i64 parent, const Chain& blocks, double expires_at_s) {
        const i64 above = parent + 1;  // node 0 is the root, node n + 1 is row n
        if (blocks.empty() || above < 0 || above >= static_cast<i64>(nodes_.size()) || child_of(static_cast<u32>(above), blocks[0]) != kNone) {
            return false;
        }
        const u32 number = add_node(static_cast<u32>(above), blocks.data(), blocks.size());
        nodes_[number].expires_at_s = expires_at_s;
        link(number, kRoot);
        block_count_ += blocks.size();
        return true;
    }

private:
    void unlink(u32 number) {
        const Node& node = nodes_[number];
        nodes_[node.older].newer = node.newer;
        nodes_[node.newer].older = node.older;
    }
    void link(u32 number, u32 older) {
        const u32 newer = nodes_[older].newer;
        nodes_[number].older = older;
        nodes_[number].newer = newer;
        nodes_[older].newer = nodes_[newer].older = number;
    }
    // Drops the oldest stretch, or the deepest `blocks_max` of its blocks; returns how many.
    std::size_t drop(std::size_t blocks_max) {
        const u32 oldest = nodes_[kRoot].newer;
        const std::size_t held = nodes_[oldest].blocks.size(), dropped = std::min(blocks_max, held);
        block_count_ -= dropped;
        if (dropped < held) {
            nodes_[oldest].blocks.resize(held - dropped);
        } else {
            unlink(oldest);
            remove_node(oldest);
        }
        return dropped;
    }

    std::size_t block_count_ = 0;
};

class Approximate {
public:
    Approximate(Ranks& ranks, double ttl_s, u64 blocks_max) : ranks_(ranks), ttl_s_(ttl_s), blocks_max_(blocks_max), routed_(ranks) {}

    // `capacity_blocks`: the rank's blocks of KV; 0: not stated.
    void routed(u32 row, const Chain& chain, double now_s, u64 capacity_blocks) {
        if (chain.empty()) {
            return;
        }
        RoutedTree& tree = changed(row);
        const u64 capacity = std::min(capacity_blocks == 0 ? blocks_max_ : capacity_blocks, blocks_max_);
        expired_blocks += tree.expire(now_s);
        evicted_blocks += tree.add(chain.data(), chain.size(), now_s + ttl_s_, capacity);
    }
    i64 overlap(u32 row, const u64* chain, std::size_t count, double now_s) const {
        const auto* const tree = routed_.find(row);
        return tree == nullptr ? 0 : static_cast<i64>((*tree)->overlap(chain, count, now_s));
    }
    void forget(std::string_view worker_id, double now_s) {
        for (const u32 row : routed_.of(worker_id)) {
            expire(row, now_s);
            left_blocks += routed_[row]->block_count();
            routed_.erase(row);
        }
    }
    // Drops expired blocks; what `overlap` returns stays the same.
    void tick(double now_s) {
        const std::vector<u32> rows(routed_.rows().begin(), routed_.rows().end());
        for (const u32 row : rows) {
            expire(row, now_s);
            if (routed_[row]->block_count() == 0) {
                routed_.erase(row);
            }
        }
    }

    const RankMap<std::shared_ptr<RoutedTree>>& trees() const { return routed_; }
    u64 expired_blocks = 0, evicted_blocks = 0, left_blocks = 0;

    MoreRows freeze() const {
        std::vector<std::pair<RankKey, std::shared_ptr<const RoutedTree>>> frozen;
        for (const u32 row : routed_.rows()) {
            frozen.emplace_back(ranks_.key(row), routed_[row]);
        }
        return more_rows(std::move(frozen), [](Part& part, auto& blocks) {
            blocks.second->rows(part, blocks.first);
            blocks.second.reset();
        });
    }
    void restore(const Row& row) {
        RankKey key;
        i64 parent = 0;
        Chain blocks;
        double expires_at_s = 0;
        row.take(key, parent, blocks, expires_at_s);
        const Held rank(ranks_, key);
        if (!changed(rank.row()).restore(parent, blocks, expires_at_s)) {
            throw std::invalid_argument("a stretch is empty, or its parent is no earlier row without such a child");
        }
    }

private:
    // The rank's tree for a change: a new copy, if a checkpoint still has to write the present one.
    RoutedTree& changed(u32 row) {
        std::shared_ptr<RoutedTree>& tree = routed_.add(row);
        if (tree == nullptr || tree.use_count() > 1) {
            tree = tree == nullptr ? std::make_shared<RoutedTree>() : std::make_shared<RoutedTree>(*tree);
        }
        return *tree;
    }
    void expire(u32 row, double now_s) {
        if (routed_[row]->expires(now_s)) {
            expired_blocks += changed(row).expire(now_s);
        }
    }

    Ranks& ranks_;
    const double ttl_s_;
    const u64 blocks_max_;
    RankMap<std::shared_ptr<RoutedTree>> routed_;
};

}  // namespace kv
