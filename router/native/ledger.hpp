// What was promised to every rank, and which blocks its requests will bring there: tests/reference/ledger.py and predictions.py have the
// rules. Knows nothing of Python.
#pragma once

#include <deque>
#include <limits>

#include "chain_tree.hpp"
#include "rates.hpp"
#include "sessions.hpp"

namespace kv {

// What was routed to a rank under a lease: `kv_protocol.ledger.Routed`. The texts are the caller's.
struct Promise {
    std::string_view lease_id;
    u32 row = kNoRow;  // the caller must hold it
    Chain blocks;
    i64 uncached_tokens = 0, extra_blocks = 0;
    u64 epoch = 0;
    std::string_view session_id;
};

// The reports of a rank's engine, and how they differ from the promises.
class Reported {
public:
    static constexpr std::size_t kReports = 5;
    static constexpr double kUnreportedS = 5.0;

    void withdraw();
    bool is_silent(double now_s) const { return reported_at_s.has_value() && now_s - *reported_at_s >= kUnreportedS; }
    // Whether a lease of this generation was booked before the newest `kReports` + 1 reports.
    bool is_settled(i64 of) const { return of < generation - static_cast<i64>(kReports); }
    void booked() { ++young_of(generation); }
    void ended(i64 of);
    void report(i64 running, i64 waiting, i64 used_blocks, i64 promised, double now_s);
    auto fields() { return std::tie(generation, young, newest, foreign, excess, reported, surpluses, reported_at_s); }

    i64 generation = 0;
    std::vector<i64> young = std::vector<i64>(kReports + 1);  // open leases of each of the newest generations
    std::vector<i64> newest = std::vector<i64>(3);             // running, waiting, used blocks
    i64 foreign = 0, excess = 0;           // requests beyond the leases; leases beyond the requests
    std::vector<i64> reported, surpluses;  // in the newest reports: requests, and requests less leases
    std::optional<double> reported_at_s;

private:
    i64& young_of(i64 of) { return young[static_cast<std::size_t>(of % static_cast<i64>(young.size()))]; }
};

struct RankLoad {
    i64 requests = 0, queued_tokens = 0, extra_blocks = 0;
    i64 bringing = 0;  // requests that are still bringing blocks to the rank
    u64 epoch = 0;     // of the rank's stream when these were routed
    Reported reported;
    bool is_gone = false;  // forgotten, except for open leases
};

class Ledger {
public:
    // A lease expired, or its engine does not report it. Without a `lease_id`: the rank's engine has stopped reporting.
    struct Event {
        std::string lease_id;
        bool is_by_engine;
        u32 row;
    };

    struct Lease {
        static constexpr double kNever = -std::numeric_limits<double>::infinity(), kOpen = std::numeric_limits<double>::infinity();

        Held rank;
        Chain blocks;
        u32 end = 0;  // where the chain ends in the tree; 0: no block has a hash
        std::string origin{};
        i64 uncached_tokens = 0, extra_blocks = 0, generation = 0;
        double expires_at_s = 0;
        u64 epoch = 0;
        double bringing_until_s = kNever;  // its blocks are on their way until then; `kOpen`: its first token has not come
        Sessions::Ref session{};           // null: none
        std::optional<Expected> expected{};  // computed by the decision, if its outcome teaches how fast the rank is

        bool is_bringing() const { return bringing_until_s != kNever; }
        auto fields() {
            return std::tie(origin, blocks, uncached_tokens, extra_blocks, generation, expires_at_s, epoch, bringing_until_s);
        }
    };

    Ledger(Ranks& ranks, double lease_s) : ranks_(ranks), lease_s_(lease_s), loads_(ranks) {}

    // Returns the lease, valid until the next call; nullptr: its id is in use.
    Lease* book(const Promise& promise, double now_s, std::string_view origin);
    void renew(std::string_view lease_id, double now_s, bool is_prefilled);
    // Returns the lease that ended; none: it is unknown.
    std::optional<Lease> end(std::string_view lease_id);
    // Stops predicting blocks that should have come by now.
    void let_go(double now_s);
    void reconcile(u32 row, i64 running, i64 waiting, i64 used_blocks, double now_s);
    void unreport(u32 row);
    // Returns the events that are due; the caller must apply them.
    std::vector<Event> tick(double now_s) const;
    void forget(std::string_view worker_id);
    // Marks the rank of an unregistered worker to be dropped once its leases have ended.
    void mark_gone(u32 row);

    // Sets for each row: queued tokens, requests including foreign ones, distinct blocks.
    void read_load(const std::vector<u32>& rows, std::vector<RankNumbers>& to) const;
    // Sets for each row how many leading blocks of the chain are on their way, at most `most`; 0 if its stream is in another epoch than
    // `epochs` has. With `reads_shared` it also sets how many leading blocks are in use.
    void read_depths(const std::vector<u32>& rows, const Chain& chain, const std::vector<u64>& epochs, double now_s, bool reads_shared,
                     i64 most, std::vector<RankNumbers>& to);
    i64 blocks(u32 row) const { return tree_.blocks(row) + loads_[row].extra_blocks; }
    const RankMap<RankLoad>& loads() const { return loads_; }
    std::size_t open_leases() const { return leases_.size(); }
    bool has(std::string_view lease_id) const { return leases_.find(lease_id) != nullptr; }
    i64 expired_total = 0, corrected_total = 0;
    bool is_empty() const;

    void rank_rows(Part& part);
    void restore_rank(const Row& row);
    MoreRows lease_rows(const Sessions& sessions) const;
    void restore_lease(const Row& row, const Sessions& sessions);

private:
    // How old a lease's last renewal must be for `unknown_to`; how long after a first token `Seen::until_s` is.
    static constexpr double kSilentS = 10.0, kSeenS = 2.0;

    // A lease after its first token. Until `until_s` its blocks still count as on their way.
    struct Seen {
        double until_s;
        std::string lease_id;
    };
    RankLoad& load(u32 row);
    void count(RankLoad& load, Lease& lease);
    void stop_bringing(Lease& lease);
    void unknown_to(u32 row, double now_s, std::vector<Event>& events) const;
    void drop_if_over(u32 row);

    Ranks& ranks_;
    const double lease_s_;
    OrderedMap<Lease> leases_;  // in the order of their expiry
    RankMap<RankLoad> loads_;
    ChainTree tree_;          // the chains of the leases; those whose blocks are on their way are marked
    std::deque<Seen> seen_;  // in the order of `until_s`
};

}  // namespace kv
