#include "approximate.hpp"

#include <algorithm>

namespace kv {

void FrozenBlocks::pack() {
    if (tree == nullptr) {
        return;
    }
    for (const RoutedTree::Row& row : tree->rows()) {
        Pack packed;
        packed.array(5);
        packed.put(key);
        packed.put(row.parent);
        packed.bytes({reinterpret_cast<const char*>(row.blocks->data()), row.blocks->size() * sizeof(u64)});
        packed.put(row.age.expires_at_s);
        packed.put(row.age.request);
        rows.emplace_back(packed.view());
    }
    tree = nullptr;
}

void Approximate::thaw(Blocks& blocks) {
    if (const auto frozen = blocks.frozen.lock()) {
        frozen->pack();
        blocks.frozen.reset();
    }
}

u64 Approximate::expire(Blocks& blocks, double now_s) {
    if (blocks.tree->next_expiry_s() > now_s) {
        return 0;
    }
    thaw(blocks);
    return blocks.tree->expire(now_s);
}

Approximate::Blocks& Approximate::add(u32 row) {
    Blocks& blocks = routed_.add(row);
    if (blocks.tree == nullptr) {
        blocks.tree = std::make_unique<RoutedTree>();
    }
    return blocks;
}

void Approximate::routed(u32 row, const Chain& chain, double now_s, u64 capacity_blocks) {
    if (chain.empty()) {
        return;
    }
    Blocks& blocks = add(row);
    ++requests;
    expired_blocks += expire(blocks, now_s);
    thaw(blocks);
    const u64 capacity = std::min(capacity_blocks == 0 ? blocks_max_ : capacity_blocks, blocks_max_);
    evicted_blocks += blocks.tree->add(chain.data(), chain.size(), Age{now_s + ttl_s_, requests}, capacity);
}

i64 Approximate::overlap(u32 row, const u64* chain, std::size_t count, double now_s) const {
    const Blocks* const blocks = routed_.find(row);
    return blocks == nullptr ? 0 : static_cast<i64>(blocks->tree->overlap(chain, count, now_s));
}

void Approximate::forget(std::string_view worker_id, double now_s) {
    for (const u32 row : routed_.of(worker_id)) {
        expired_blocks += expire(routed_[row], now_s);
        left_blocks += routed_[row].tree->block_count();
        thaw(routed_[row]);
        routed_.erase(row);
    }
}

void Approximate::tick(double now_s) {
    const std::vector<u32> rows(routed_.rows().begin(), routed_.rows().end());
    for (const u32 row : rows) {
        expired_blocks += expire(routed_[row], now_s);
        if (routed_[row].tree->block_count() == 0) {
            thaw(routed_[row]);
            routed_.erase(row);
        }
    }
}

std::vector<std::pair<RankKey, u64>> Approximate::blocks() const {
    std::vector<std::pair<RankKey, u64>> found;
    for (const u32 row : routed_.rows()) {
        found.emplace_back(ranks_.key(row), routed_[row].tree->block_count());
    }
    return found;
}

MoreRows Approximate::freeze() {
    std::vector<std::shared_ptr<FrozenBlocks>> frozen;
    for (const u32 row : routed_.rows()) {
        thaw(routed_[row]);
        frozen.push_back(std::make_shared<FrozenBlocks>(FrozenBlocks{ranks_.key(row), routed_[row].tree.get(), {}}));
        routed_[row].frozen = frozen.back();
    }
    return more_rows(std::move(frozen), [](Parts& parts, const std::shared_ptr<FrozenBlocks>& blocks) {
        blocks->pack();
        for (const std::string& row : blocks->rows) {
            parts.packed(row);
        }
        blocks->rows.clear();
    });
}

void Approximate::restore(Unpack& in) {
    RankKey key;
    i64 parent = 0;
    Chain blocks;
    double expires_at_s = 0;
    u64 request = 0;
    in.row(key, parent, blocks, expires_at_s, request);
    const Held rank(ranks_, key);
    if (blocks.empty() ||
        !add(rank.row()).tree->restore(parent, blocks.data(), blocks.size(), Age{expires_at_s, request})) {
        throw std::invalid_argument("a stretch is empty, or its parent is no earlier row without such a child");
    }
}

}  // namespace kv
