// Blocks that ranks are about to hold, from requests in flight: tests/reference/predictions.py has the rules. Knows nothing of
// Python.
#pragma once

#include <deque>

#include "ledger.hpp"

namespace kv {

class Predictions {
public:
    explicit Predictions(Ranks& ranks) : ranks_(ranks), current_(ranks) {}

    void add(const Promise& promise, double now_s);
    void see(std::string_view lease_id, double now_s);
    void end(std::string_view lease_id);
    void forget(std::string_view worker_id);
    // Drops expired predictions.
    void tick(double now_s);
    // Leading blocks of the chain that are expected at each row, if its stream is in the epoch of `epochs`.
    void column(const u32* rows, std::size_t count, const u64* chain, std::size_t length, const u64* epochs, double now_s, i64* out);
    bool is_empty() const { return predictions_.empty() && current_.size() == 0 && tree_.is_empty(); }

    void life_rows(Parts& parts) const;
    void restore_life(Unpack& in);
    MoreRows rows() const;
    void restore(Unpack& in);
    void seen_rows(Parts& parts) const;
    void restore_seen(Unpack& in);

private:
    static constexpr double kSeenS = 2.0;

    // One epoch of a rank's stream.
    struct Life {
        Held rank;
        u64 epoch;
    };
    using LifeRef = std::shared_ptr<const Life>;
    struct Prediction {
        LifeRef life;
        u32 end = 0;  // of its chain in the tree; 0: it has no blocks, or they count no more
        Chain blocks;
        bool is_seen = false;
        u64 number = 0;
    };
    struct Seen {
        double over_at_s;
        std::string lease_id;
        u64 number;
    };
    LifeRef begin(u32 row, u64 epoch);
    bool is_current(const LifeRef& life) const {
        const LifeRef* const current = current_.find(life->rank.row());
        return current != nullptr && *current == life;
    }
    std::vector<LifeRef> lives() const;

    Ranks& ranks_;
    OrderedMap<Prediction> predictions_;
    RankMap<LifeRef> current_;  // the epoch of the rank's last request
    ChainTree tree_;
    std::deque<Seen> seen_;  // in the order of their expiry
    u64 numbers_ = 0;
    std::vector<LifeRef> restored_;
    std::vector<i64> asked_;
};

}  // namespace kv
