// Blocks that ranks probably hold, of the requests routed to them: tests/reference/approximate.py has the rules. Knows nothing
// of Python.
#pragma once

#include "rows.hpp"
#include "routed_tree.hpp"

namespace kv {

// The rows of a rank's blocks at the time of a checkpoint, packed before they next change, or when they are read.
struct FrozenBlocks {
    RankKey key;
    RoutedTree* tree;  // none: they are packed
    std::vector<std::string> rows;

    void pack();
};

class Approximate {
public:
    Approximate(Ranks& ranks, double ttl_s, u64 blocks_max) : ranks_(ranks), ttl_s_(ttl_s), blocks_max_(blocks_max), routed_(ranks) {}

    // `capacity_blocks`: of the rank; 0: not stated.
    void routed(u32 row, const Chain& chain, double now_s, u64 capacity_blocks);
    i64 overlap(u32 row, const u64* chain, std::size_t count, double now_s) const;
    void forget(std::string_view worker_id, double now_s);
    // Drops expired blocks; answers do not change by that.
    void tick(double now_s);

    std::vector<std::pair<RankKey, u64>> blocks() const;
    u64 requests = 0, expired_blocks = 0, evicted_blocks = 0, left_blocks = 0;

    MoreRows freeze();
    void restore(Unpack& in);

private:
    struct Blocks {
        std::unique_ptr<RoutedTree> tree;
        std::weak_ptr<FrozenBlocks> frozen;
    };
    u64 expire(Blocks& blocks, double now_s);
    static void thaw(Blocks& blocks);
    Blocks& add(u32 row);

    Ranks& ranks_;
    const double ttl_s_;
    const u64 blocks_max_;
    RankMap<Blocks> routed_;
};

}  // namespace kv
