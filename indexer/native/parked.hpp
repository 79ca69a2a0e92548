// Parked blocks: stored blocks that wait until their parent is in the tree. The tests' reference: tests/reference/index/nodes.py.
#pragma once

#include <list>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "common.hpp"

namespace kv {

struct ParkedBlock {
    u32 rank;
    u64 hash;
    u32 tier;
    bool operator<(const ParkedBlock& other) const {
        return std::tie(rank, hash, tier) < std::tie(other.rank, other.hash, other.tier);
    }
};

class ParkedBlocks {
public:
    struct Entry {
        ParkedBlock block;
        u64 parent;
        double since_s;
    };

    ParkedBlocks(Budget& budget, u32 blocks_max, double ttl_s)
        : budget_(&budget), blocks_max_(blocks_max), ttl_s_(ttl_s) {}

    bool empty() const { return order_.empty(); }
    u64 size() const { return order_.size(); }
    u64 bytes() const { return order_.size() * kEntryBytes; }
    const std::list<Entry>& oldest_first() const { return order_; }
    bool awaits(u64 parent) const { return waiting_.count(parent) != 0; }

    // The block waits, from now on; the oldest gives way where there is no room. False: there is no memory for it.
    bool park(const ParkedBlock& block, u64 parent, double now_s) {
        if (!remove(block) && !budget_->fits(kEntryBytes)) {
            return false;
        }
        places_[block] = order_.insert(order_.end(), Entry{block, parent, now_s});
        waiting_[parent].insert(block);
        budget_->used += kEntryBytes;
        ++parked_total;
        if (order_.size() > blocks_max_) {
            lose_oldest();
        }
        return true;
    }

    // The blocks that waited for `parent`, smallest first; they wait no more.
    std::vector<ParkedBlock> take(u64 parent) {
        const auto found = waiting_.find(parent);
        if (found == waiting_.end()) {
            return {};
        }
        const std::vector<ParkedBlock> blocks(found->second.begin(), found->second.end());
        for (const ParkedBlock& block : blocks) {
            remove(block);
        }
        return blocks;
    }

    bool remove(const ParkedBlock& block) {
        const auto place = places_.find(block);
        if (place == places_.end()) {
            return false;
        }
        const auto waiting = waiting_.find(place->second->parent);
        waiting->second.erase(block);
        if (waiting->second.empty()) {
            waiting_.erase(waiting);
        }
        order_.erase(place->second);
        places_.erase(place);
        budget_->used -= kEntryBytes;
        return true;
    }

    // Nothing of `rank` on `tier` waits, and what was lost there does not matter any more.
    void forget(u32 rank, u32 tier) {
        losers_.erase({rank, tier});
        for (auto at = places_.lower_bound({rank, 0, 0}); at != places_.end() && at->first.rank == rank;) {
            const ParkedBlock block = (at++)->first;
            if (block.tier == tier) {
                remove(block);
            }
        }
    }

    // Lose what waited too long; return the ranks that lost blocks since the last call, ascending.
    std::set<u32> expire(double now_s) {
        while (!order_.empty() && order_.front().since_s + ttl_s_ <= now_s) {
            lose_oldest();
        }
        std::set<u32> ranks;
        for (const auto& loser : losers_) {
            ranks.insert(loser.first);
        }
        losers_.clear();
        return ranks;
    }

    u64 parked_total = 0;
    u64 lost_total = 0;

private:
    // Three nodes of the standard containers, with what their allocator adds: about that.
    static constexpr u64 kEntryBytes = 320;

    void lose_oldest() {
        const ParkedBlock block = order_.front().block;
        remove(block);
        ++lost_total;
        losers_.insert({block.rank, block.tier});
    }

    Budget* budget_;
    u32 blocks_max_;
    double ttl_s_;
    std::list<Entry> order_;
    std::map<ParkedBlock, std::list<Entry>::iterator> places_;
    std::unordered_map<u64, std::set<ParkedBlock>> waiting_;
    std::set<std::pair<u32, u32>> losers_;
};

}  // namespace kv
