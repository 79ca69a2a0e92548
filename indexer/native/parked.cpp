#include "parked.hpp"

namespace kv {

bool ParkedBlocks::park(const ParkedBlock& block, u64 parent, double now_s) {
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

std::vector<ParkedBlock> ParkedBlocks::take(u64 parent) {
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

bool ParkedBlocks::remove(const ParkedBlock& block) {
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

void ParkedBlocks::forget(u32 rank, u32 tier) {
    losers_.erase({rank, tier});
    for (auto at = places_.lower_bound({rank, 0, 0}); at != places_.end() && at->first.rank == rank;) {
        const ParkedBlock block = (at++)->first;
        if (block.tier == tier) {
            remove(block);
        }
    }
}

std::set<u32> ParkedBlocks::expire(double now_s) {
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

void ParkedBlocks::lose_oldest() {
    const ParkedBlock block = order_.front().block;
    remove(block);
    ++lost_total;
    losers_.insert({block.rank, block.tier});
}

}  // namespace kv
