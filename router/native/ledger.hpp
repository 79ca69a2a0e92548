// The promised work of every rank: tests/reference/ledger.py has its rules. Knows nothing of Python.
#pragma once

#include "rows.hpp"

namespace kv {

// What was routed to a rank under a lease: `kv_protocol.ledger.Routed`. The texts are the caller's.
struct Promise {
    std::string_view lease_id;
    u32 row = kNoRow;  // held by the caller
    Chain blocks;
    i64 uncached_tokens = 0, extra_blocks = 0;
    u64 epoch = 0;
    std::string_view session_id;
};

// The reports of a rank's engine, and what follows of them for the promises.
class Reported {
public:
    static constexpr std::size_t kReports = 5;
    static constexpr double kUnreportedS = 5.0;

    void withdraw();
    bool is_silent(double now_s) const { return reported_at_s.has_value() && now_s - *reported_at_s >= kUnreportedS; }
    // Whether a lease of this generation was booked before all of the newest reports, and the one before them.
    bool is_settled(i64 of) const { return of < generation - static_cast<i64>(kReports); }
    void booked() { ++young_of(generation); }
    void ended(i64 of);
    void report(i64 running, i64 waiting, i64 used_blocks, i64 promised, double now_s);

    i64 generation = 0;
    std::vector<i64> young = std::vector<i64>(kReports + 1);  // open leases of the newest generations
    std::vector<i64> newest = std::vector<i64>(3);             // running, waiting, used blocks
    i64 foreign = 0, excess = 0;
    std::vector<i64> reported, surpluses;
    std::optional<double> reported_at_s;

private:
    i64& young_of(i64 of) { return young[static_cast<std::size_t>(of % static_cast<i64>(young.size()))]; }
};

struct RankLoad {
    i64 requests = 0, queued_tokens = 0, extra_blocks = 0;
    Reported reported;
    bool is_gone = false;  // forgotten, but for open leases
};

class Ledger {
public:
    // A lease ends, by silence or by its engine's reports; without a lease: the rank's engine has stopped reporting.
    struct Event {
        std::string lease_id;
        bool is_by_engine;
        u32 row;
    };

    Ledger(Ranks& ranks, double lease_s) : ranks_(ranks), lease_s_(lease_s), loads_(ranks) {}

    void book(const Promise& promise, double now_s, std::string_view origin);
    void renew(std::string_view lease_id, double now_s, bool is_prefilled);
    bool end(std::string_view lease_id);
    void expire(std::string_view lease_id, bool by_engine);
    void reconcile(u32 row, i64 running, i64 waiting, i64 used_blocks, double now_s);
    void unreport(u32 row);
    // What the passing of time causes: the caller applies it.
    std::vector<Event> tick(double now_s) const;
    void forget(std::string_view worker_id);
    // Drops the rank of an unregistered worker once its leases have ended.
    void mark_gone(u32 row);

    // Of each row: queued tokens, requests with foreign ones, distinct blocks, and leading blocks of the chain in use.
    void columns(const u32* rows, std::size_t count, const u64* chain, std::size_t length, i64* queued, i64* requests, i64* blocks,
                 i64* shared);
    i64 blocks(u32 row) const { return tree_.blocks(row) + loads_[row].extra_blocks; }
    const RankMap<RankLoad>& loads() const { return loads_; }
    std::size_t open_leases() const { return leases_.size(); }
    bool has(std::string_view lease_id) const { return leases_.find(lease_id) != nullptr; }
    i64 expired_total = 0, corrected_total = 0;
    bool is_empty() const;

    void rank_rows(Parts& parts) const;
    void restore_rank(Unpack& in);
    MoreRows lease_rows() const;
    void restore_lease(Unpack& in);

private:
    static constexpr double kSilentS = 10.0;

    struct Lease {
        Held rank;
        Chain blocks;
        u32 end = 0;  // of the chain in the tree; 0: no block has a hash
        std::string origin;
        i64 uncached_tokens = 0, extra_blocks = 0, generation = 0;
        double expires_at_s = 0;
    };
    RankLoad& load(u32 row);
    void count(RankLoad& load, const Lease& lease);
    void unknown_to(u32 row, double now_s, std::vector<Event>& events) const;
    void drop_if_over(u32 row);

    Ranks& ranks_;
    const double lease_s_;
    OrderedMap<Lease> leases_;  // in the order of their expiry
    RankMap<RankLoad> loads_;
    ChainTree tree_;
    std::vector<i64> asked_;
};

}  // namespace kv
