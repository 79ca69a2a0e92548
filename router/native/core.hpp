// All that a router's decisions read and write, except the fleet's registrations, breakers and the index: a fold over events. It has no
// clock, randomness or input of its own: times, seeds and the index's answers are arguments. It calls no Python. Only one thread may use it.
#pragma once

#include <functional>

#include "approximate.hpp"
#include "costs.hpp"
#include "decision_sums.hpp"
#include "ledger.hpp"
#include "newcomers.hpp"
#include "offered.hpp"

namespace kv {

enum class Mode { kCost, kSoonest, kTurn, kDraw, kOfTwo, kLeastLoaded, kNamed, kUser };
enum class Affinity { kOff, kSoft, kHard };

// One phase's `router.decision.policy.Policy`.
struct Policy {
    std::string name;
    Mode mode;
    bool reads_overlap, reads_load, reads_rates;
    Weights weights;
    double temperature;
    bool predicts;
    bool bounds_newcomers;
    Affinity affinity;
    double affinity_discount;
    std::optional<double> ttft_target_s, itl_target_s;
    std::string unmet;
};

// The ranks that serve a model.
struct Standing {
    std::shared_ptr<Ranks> ranks;  // `held` refers to it
    std::vector<Held> held;
    std::vector<u32> rows;
    std::vector<i64> capacity;  // blocks of KV of each rank; 0: not known
};

// How far the index's answer is trusted at each rank of a standing.
struct Trusts {
    std::vector<double> factors;      // share of the overlap that is credited
    std::vector<u32> without_events;  // places of ranks whose overlap is judged by what was routed to them
};

// What a decision reads of the ranks that serve a model, at one moment.
struct View {
    View(std::shared_ptr<const Standing> of, double time_s, u64 turns)
        : standing(std::move(of)), now_s(time_s), turn(turns), ranks(standing->rows.size(), RankNumbers{}) {}  // copying one is faster than making each

    const RankNumbers& at(u32 place) const { return ranks[only.has_value() ? 0 : place]; }

    std::shared_ptr<const Standing> standing;
    double now_s;
    u64 turn;
    std::vector<RankNumbers> ranks;
    std::optional<u32> only;  // the one place whose numbers are kept, in `ranks[0]`; none: `ranks` has every place
    std::vector<u32> without_events;  // as in `Trusts`
    std::shared_ptr<const std::vector<u64>> epochs;  // null: every epoch is 0
    std::vector<char> spent;   // whether each rank is a newcomer that had its share; empty: none is
    double output_tokens = 0;
    bool is_learnt = false, is_blank = true;
    bool has_load = false, has_rates = false, predicts = false;  // what was read so far, for the policies that used this view
    std::optional<Held> bound;  // the rank of the request's session
};

// The Python objects that a verdict keeps beside what the core computes.
struct Named {
    nanobind::object request, model_view, trusts;
    nanobind::object why;           // why each rank may not take the request, empty if it may; None: all may
    nanobind::object epochs, seqs;  // how far the index read each rank's stream; None: it was not asked
};

// A view, and a policy's choice among its ranks.
class Verdict {
public:
    Verdict(std::shared_ptr<const View> of, std::shared_ptr<const Policy> by, std::shared_ptr<const Request> what, u64 draw, Named names)
        : view(std::move(of)), policy(std::move(by)), request(std::move(what)), seed(draw), named(std::move(names)) {}

    // `excluded`: whether each rank may not take the request; empty: all may. One rank at least must be allowed to.
    // `multiplier`: what multiplies each rank's cost; empty: nothing. For a user's mode, `take_choice` must follow.
    void decide(const std::vector<char>& excluded, std::vector<double> multiplier);
    void take_choice(std::size_t winner, std::string reason, std::optional<std::size_t> runner_up, std::optional<double> margin,
                     bool meets_targets, const std::vector<double>& costs);
    // Frees memory: keeps only the winner, its terms and its predictions, and no column of the ranks.
    void forget_others();

    std::shared_ptr<const View> view;
    std::shared_ptr<const Policy> policy;
    std::shared_ptr<const Request> request;
    u64 seed;
    Named named;
    std::vector<u32> candidates;  // places in the view, ascending
    std::size_t decided_candidates = 0;  // how many there were before `forget_others`; 0: it was not called
    bool passes_over = false;     // `candidates` leaves out newcomers that had their share
    std::vector<Terms> terms;     // of each candidate's cost; empty: the mode weighs no costs
    bool is_timed = false;        // `terms` are in ms: computed here, not given by a user's mode
    std::size_t winner_at = 0;
    std::optional<std::size_t> runner_up;
    std::optional<double> margin;
    std::string reason;
    bool meets_targets = true;
    i64 overlap_blocks = 0, most_blocks = 0, expected_blocks = 0, regret_blocks = 0;  // `most_blocks`: the winner's overlap on all tiers
    i64 lost_blocks = 0;  // the winner's expected blocks that will be evicted before the request is computed

    u32 place() const { return candidates[winner_at]; }
    std::size_t candidate_count() const { return decided_candidates != 0 ? decided_candidates : candidates.size(); }
    u32 winner() const { return view->standing->rows[place()]; }
    u64 epoch() const { return view->epochs == nullptr ? 0 : (*view->epochs)[place()]; }
    std::vector<double> costs() const;  // of each candidate; empty: the mode weighs none
    // The prompt's tokens that the winner is to compute.
    i64 uncached_tokens() const;
    // The predicted seconds until a candidate's first token, and between tokens; none if the policy has no costs in ms, or the
    // request's phase has no such tokens.
    std::optional<double> ttft_s(std::size_t at) const;
    std::optional<double> itl_s(std::size_t at) const;
    Promise promise() const;
    // Adds the journal's record: `kv_protocol.decided.Decided`. `packed_request`: the request as msgpack.
    void record(Pack& to, std::string_view packed_request, u64 kv_seq) const;

private:
    void choose(const std::vector<double>& multiplier);
    void set_margin();
    void cheapest();
    void soonest();
    double output_tokens() const;
    void settle();
    void bind();
    bool is_by_affinity() const;
    std::optional<std::size_t> bound() const;
};

class Attribution;

// A core's state at one moment, as the tables that are still to be written.
class Checkpoint {
public:
    // Returns the next part: a table's name, and a packed list of rows; none: all is written. A table has at least one part.
    std::optional<std::pair<std::string, std::string>> next();

    std::deque<std::pair<std::string, MoreRows>> tables;
};

class Core {
public:
    Core(double lease_s, double approximate_ttl_s, u64 approximate_blocks_max, double affinity_idle_s, u64 affinity_sessions_max);

    // ------------------------------------------------------------------------------------------------ what is read
    std::shared_ptr<Standing> standing(const std::vector<RankKey>& ranks, std::vector<i64> capacity);
    // Returns what the policy reads for a request. `tiers`, `epochs`: the index's answer; no epochs: it was not asked.
    std::shared_ptr<View> look(std::shared_ptr<const Standing> standing, const Trusts& trusts, const Policy& policy,
                               const Request& request, std::vector<std::int32_t> tiers,
                               std::shared_ptr<const std::vector<u64>> epochs, double now_s);
    // Copies the view for another policy, and adds what only this policy reads, except the index's answer.
    std::shared_ptr<View> look_again(const View& view, const Policy& policy, const Request& request);
    // The seconds that the reference engine would need at a place until the first token, and between tokens.
    std::pair<double, double> expected_s(const Verdict& verdict, std::size_t place) const;

    // ------------------------------------------------------------------------------------------------ what happens
    void take(const Verdict& verdict);
    // Counts a decision for the model.
    void turned(std::string_view model);
    // Throws `std::invalid_argument` for a view of another core, which has other rows, and for one that forgot its columns.
    void check(const View& view) const;
    // Learns how fast the winner is from an outcome that is ok. Tools may pass a decision of another core.
    void learn(const Verdict& verdict, const Outcome& outcome);
    void promised(const RankKey& rank, Promise promise, double now_s, std::string_view origin);
    void first_token(std::string_view lease_id, double now_s) { ledger.renew(lease_id, now_s, true); }
    void renewed(std::string_view lease_id, double now_s) { ledger.renew(lease_id, now_s, false); }
    // Ends a lease and returns it; none: it is unknown, or has ended. `ended`, `expired` and replicas' events call it.
    std::optional<Ledger::Lease> end(std::string_view lease_id, double now_s);
    void expired(std::string_view lease_id, bool by_engine, double now_s);
    void ended(std::string_view decision_id, const Outcome& outcome);
    void reported(const RankKey& rank, i64 running, i64 waiting, i64 used_blocks, double now_s);
    void unreported(const RankKey& rank) { ledger.unreport(ranks.find(rank)); }
    void registered(const std::string& worker_id, Group group, i64 block_size, u64 total_blocks);
    void joined(const std::string& worker_id, const std::vector<i64>& dp_ranks, const std::string& model, u64 total_blocks, double now_s);
    void left(const std::string& worker_id);
    void forget(const std::string& worker_id, double now_s);
    void let_go(double now_s);

    std::shared_ptr<Checkpoint> checkpoint();
    // Restores a part's rows. Begin with an empty state, and keep the order of `table_names`, as checkpoints do.
    void restore(const std::string& table, nanobind::list rows);
    std::vector<std::string> table_names();

private:
    std::shared_ptr<Ranks> ranks_ = std::make_shared<Ranks>();

public:
    Ranks& ranks = *ranks_;
    Ledger ledger;
    Approximate approximate;
    Sessions sessions;
    Newcomers newcomers;
    Rates rates;
    OrderedMap<u64> turns;  // number of decisions, by model

    // ------------------------------------------------------------------------------------------------ for metrics, in no checkpoint
    static constexpr std::size_t kEndsMax = 8192;
    DecisionSums decided;
    double match_s = 0, choose_s = 0;  // how long the last decision took: to ask the index, and all else
    StageSums stages;                  // of decisions that were carried out
    OfferedLoads offered;
    RankMap<u64> attempts;  // routed to each rank of the fleet, by this router and its replicas
    u64 attempts_total = 0;
    std::deque<std::pair<u64, double>> ends;   // a prompt's last block, and when it was routed, here or by a replica: the newest `kEndsMax`
    std::shared_ptr<Attribution> attribution;  // null: nobody asks what requests saved

private:
    struct Worker {
        Group group;
        i64 block_size;
        u64 total_blocks;
    };
    // Returns the new lease, valid until the next call; nullptr: its id is in use.
    Ledger::Lease* promise(const Promise& promise, double now_s, std::string_view origin);
    Expected expected(const Verdict& verdict) const;
    // A part of the state in a checkpoint: what writes its rows, and what restores one.
    struct Table {
        const char* name;
        std::function<MoreRows()> freeze;
        std::function<void(const Row&)> restore;
    };
    std::vector<Table> tables();
    void read(View& view, const Policy& policy, const Request& request);

    OrderedMap<Worker> workers_;
};

// The index in [0, count) that the seed's `draw`-th number gives: kv_protocol/splitmix.py.
std::size_t choice_index(u64 seed, std::size_t count, u64 draw = 0);
double unit_interval(u64 seed, u64 draw = 0);

}  // namespace kv
