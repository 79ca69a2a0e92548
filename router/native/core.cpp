#include "attribution.hpp"

#include <algorithm>

namespace kv {

namespace {

constexpr i64 kCountMax = (i64{1} << 40) - 1;  // tokens or blocks of one request: sums over all leases still fit 64 bits

}  // namespace

Core::Core(double lease_s, double approximate_ttl_s, u64 approximate_blocks_max, double affinity_idle_s, u64 affinity_sessions_max)
    : ledger(ranks, lease_s), approximate(ranks, approximate_ttl_s, approximate_blocks_max),
      sessions(ranks, affinity_idle_s, affinity_sessions_max), newcomers(ranks), rates(ranks), attempts(ranks) {}

// ---------------------------------------------------------------------------------------------------------------- what is read

std::shared_ptr<Standing> Core::standing(const std::vector<RankKey>& keys, std::vector<i64> capacity) {
    auto made = std::make_shared<Standing>();
    made->ranks = ranks_;
    made->capacity = std::move(capacity);
    made->held.reserve(keys.size());
    for (const RankKey& key : keys) {
        made->held.emplace_back(ranks, key);
        made->rows.push_back(made->held.back().row());
    }
    return made;
}

std::shared_ptr<View> Core::look(std::shared_ptr<const Standing> of, const Trusts& trusts, const Policy& policy, const Request& request,
                                 std::vector<std::int32_t> tiers, std::shared_ptr<const std::vector<u64>> epochs, double now_s) {
    const u64* const turn = turns.find(request.model);
    auto view = std::make_shared<View>(std::move(of), now_s, turn == nullptr ? 0 : *turn);
    view->without_events = trusts.without_events;
    if (epochs != nullptr) {
        const std::vector<u32>& rows = view->standing->rows;
        view->epochs = std::move(epochs);
        for (std::size_t place = 0; place < rows.size(); ++place) {
            for (std::size_t tier = 0; tier < kTiers; ++tier) {
                view->ranks[place].held[tier] = tiers[tier * rows.size() + place];
            }
            view->ranks[place].trust = trusts.factors[place];
            view->ranks[place].capacity = view->standing->capacity[place];
        }
        for (const u32 place : trusts.without_events) {
            const i64 held = approximate.overlap(rows[place], request.blocks.data(), request.reusable(), now_s);
            view->ranks[place].held.fill(static_cast<std::int32_t>(held));
        }
        view->spent = newcomers.spent(rows);
        view->is_blank = false;
    }
    read(*view, policy, request);
    return view;
}

std::shared_ptr<View> Core::look_again(const View& view, const Policy& policy, const Request& request) {
    check(view);
    auto again = std::make_shared<View>(view);
    read(*again, policy, request);
    return again;
}

void Core::read(View& view, const Policy& policy, const Request& request) {
    const std::vector<u32>& rows = view.standing->rows;
    const bool reads_load = !view.has_load && (policy.reads_load || !view.is_blank);
    if (reads_load) {
        ledger.read_load(rows, view.ranks);
        view.has_load = true;
    }
    if (!view.is_blank && (reads_load || policy.predicts != view.predicts)) {
        const i64 most = policy.predicts ? static_cast<i64>(request.reusable()) : 0;
        ledger.read_depths(rows, request.blocks, *view.epochs, view.now_s, reads_load, most, view.ranks);
        view.predicts = policy.predicts;
    }
    if (policy.affinity != Affinity::kOff && !view.bound.has_value()) {
        const u32 bound = sessions.bound(request.session_id, view.now_s);
        view.bound = bound == kNoRow ? std::nullopt : std::optional<Held>(Held(ranks, bound));
    }
    if (!view.is_blank && policy.reads_rates && !view.has_rates) {
        std::tie(view.output_tokens, view.is_learnt) = rates.read(request.model, rows, view.now_s, view.ranks);
        view.has_rates = true;
    }
}

std::pair<double, double> Core::expected_s(const Verdict& verdict, std::size_t place) const {
    const RankNumbers& rank = verdict.view->at(static_cast<u32>(place));
    const Request& request = *verdict.request;
    const i64 tokens = request.isl_tokens, own_blocks = request.own_blocks();
    const i64 lost = verdict.policy->reads_rates ? rank.lost(own_blocks) : 0;
    const double uncached = static_cast<double>(std::max<i64>(0, tokens - (rank.expected() - lost) * request.block_size));
    const double pairs = uncached * (static_cast<double>(tokens) - uncached * 0.5);
    const double queued = static_cast<double>(rank.queued);
    const double ttft_s = kFirstS + (queued + uncached) * kPrefillTokenS + pairs * kPrefillPairS;
    const i64 blocks = rank.blocks - rank.shared + own_blocks;
    const double step_s = kStepS + (static_cast<double>(rank.requests) + 1.0) * kStepSequenceS;
    return {request.is_prefilled ? ttft_s : 0.0, step_s + static_cast<double>(blocks * request.block_size) * kStepKvTokenS};
}

// ---------------------------------------------------------------------------------------------------------------- what happens

void Core::check(const View& view) const {
    if (view.standing->ranks != ranks_) {
        throw std::invalid_argument("verdict: found one of another core, allowed this core's");
    }
    if (view.only.has_value()) {
        throw std::invalid_argument("verdict: found one that forgot all but its winner, allowed one with every rank");
    }
}

void Core::take(const Verdict& verdict) {
    check(*verdict.view);
    const View& view = *verdict.view;
    const Request& request = *verdict.request;
    const u32 winner = verdict.winner();
    const Promise promised = verdict.promise();
    if (promised.uncached_tokens > kCountMax || promised.extra_blocks > kCountMax) {
        throw std::invalid_argument("uncached_tokens and extra_blocks: found more, allowed 0..2^40-1");
    }
    turned(request.model);
    if (verdict.policy->reads_overlap && newcomers.is_any() && verdict.expected_blocks == 0 && request.reusable_blocks() != 0) {
        if (std::all_of(view.ranks.begin(), view.ranks.end(), [](const RankNumbers& rank) { return rank.expected() == 0; })) {
            newcomers.missed(winner, view.standing->rows);
        }
    }
    Ledger::Lease* const lease = promise(promised, view.now_s, "");
    if (lease != nullptr && view.has_rates) {
        lease->expected = expected(verdict);
    }
    decided.add(verdict);
    if (attribution != nullptr) {
        attribution->decided(verdict);
    }
}

void Core::turned(std::string_view model) {
    u64* const turn = turns.find(model);
    turn == nullptr ? void(turns.put(model, 1)) : void(++*turn);
}

void DecisionSums::add(const Verdict& verdict) {
    const std::vector<u32>& without_events = verdict.view->without_events;
    count(decisions, verdict.policy->name, verdict.reason);
    regret_blocks.add(static_cast<double>(verdict.regret_blocks));
    predicted_blocks += verdict.expected_blocks - verdict.overlap_blocks;
    approximate += std::find(without_events.begin(), without_events.end(), verdict.place()) != without_events.end();
    if (verdict.margin.has_value() && verdict.is_timed) {
        margin_s.add(*verdict.margin * 1e-3);
    }
}

Expected Core::expected(const Verdict& verdict) const {
    const auto [ttft_s, itl_s] = expected_s(verdict, verdict.place());
    return {std::string(verdict.request->model), ttft_s, itl_s};
}

void Core::learn(const Verdict& verdict, const Outcome& outcome) {
    const Held winner(ranks, verdict.view->standing->held[verdict.place()].key());
    rates.learn(winner.row(), expected(verdict), outcome);
}

void Core::promised(const RankKey& rank, Promise routed, double now_s, std::string_view origin) {
    const Held held(ranks, rank);
    routed.row = held.row();
    promise(routed, now_s, origin);
}

Ledger::Lease* Core::promise(const Promise& promise, double now_s, std::string_view origin) {
    const Worker* const worker = workers_.find(ranks.key(promise.row).worker_id);
    ++attempts_total;
    if (!promise.blocks.empty()) {
        ends.emplace_back(promise.blocks[promise.blocks.size() - 1], now_s);
        if (ends.size() > kEndsMax) {
            ends.pop_front();
        }
    }
    if (worker != nullptr) {
        ++attempts.add(promise.row);
        const i64 blocks = static_cast<i64>(promise.blocks.size()) + promise.extra_blocks;
        offered.routed(worker->group, promise.uncached_tokens, blocks * worker->block_size, now_s);
        newcomers.promised(promise.row, static_cast<double>(promise.uncached_tokens) / static_cast<double>(worker->block_size));
        approximate.routed(promise.row, promise.blocks, now_s, worker->total_blocks);
    }
    Ledger::Lease* const lease = ledger.book(promise, now_s, origin);
    if (lease != nullptr && !promise.session_id.empty()) {
        lease->session = sessions.bind(promise.session_id, promise.row, now_s);
    }
    if (!origin.empty() && worker == nullptr) {
        ledger.mark_gone(promise.row);
    }
    return lease;
}

std::optional<Ledger::Lease> Core::end(std::string_view lease_id, double now_s) {
    std::optional<Ledger::Lease> lease = ledger.end(lease_id);
    if (lease.has_value()) {
        sessions.end(lease->session, now_s);
    }
    return lease;
}

void Core::expired(std::string_view lease_id, bool by_engine, double now_s) {
    if (end(lease_id, now_s).has_value()) {
        ++(by_engine ? ledger.corrected_total : ledger.expired_total);
    }
}

void Core::ended(std::string_view decision_id, const Outcome& outcome) {
    const std::optional<Ledger::Lease> lease = end(decision_id, outcome.now_s);
    if (lease.has_value() && lease->expected.has_value()) {
        rates.learn(lease->rank.row(), *lease->expected, outcome);
    }
    if (attribution != nullptr) {
        attribution->ended(decision_id, outcome.is_ok, outcome.cached_tokens);
    }
}

void Core::reported(const RankKey& rank, i64 running, i64 waiting, i64 used_blocks, double now_s) {
    const Held held(ranks, rank);
    ledger.reconcile(held.row(), running, waiting, used_blocks, now_s);
    newcomers.used(held.row(), used_blocks);
}

void Core::registered(const std::string& worker_id, Group group, i64 block_size, u64 total_blocks) {
    workers_.put(worker_id, Worker{std::move(group), block_size, total_blocks});
}

void Core::left(const std::string& worker_id) {
    workers_.erase(worker_id);
    for (const u32 row : attempts.of(worker_id)) {
        attempts.erase(row);
    }
}

void Core::joined(const std::string& worker_id, const std::vector<i64>& dp_ranks, const std::string& model, u64 total_blocks,
                  double now_s) {
    std::vector<Held> held;
    std::vector<u32> rows;
    for (const i64 dp_rank : dp_ranks) {
        held.emplace_back(ranks, RankKey{worker_id, dp_rank});
        rows.push_back(held.back().row());
    }
    newcomers.joined(worker_id, rows, model, static_cast<i64>(total_blocks), now_s);
}

void Core::forget(const std::string& worker_id, double now_s) {
    approximate.forget(worker_id, now_s);
    ledger.forget(worker_id);
    newcomers.forget(worker_id);
    rates.forget(worker_id);
    sessions.forget(worker_id);
}

void Core::let_go(double now_s) {
    approximate.tick(now_s);
    ledger.let_go(now_s);
    sessions.tick(now_s);
}

// ---------------------------------------------------------------------------------------------------------------- checkpoints

std::optional<std::pair<std::string, std::string>> Checkpoint::next() {
    if (tables.empty()) {
        return std::nullopt;
    }
    const auto& [name, more] = tables.front();
    Part part;
    const bool is_more = more(part);
    std::pair<std::string, std::string> made{name, part.list()};
    if (!is_more) {
        tables.pop_front();
    }
    return made;
}

std::vector<Core::Table> Core::tables() {
    // A small table is written whole when it is frozen.
    const auto at_once = [](auto write) {
        return [write]() -> MoreRows {
            auto written = std::make_shared<Part>();
            write(*written);
            return [written](Part& part) {
                part = std::move(*written);
                return false;
            };
        };
    };
    const auto totals = [this] {
        return std::tie(ledger.expired_total, ledger.corrected_total, approximate.expired_blocks, approximate.evicted_blocks,
                        approximate.left_blocks, sessions.evicted_total, sessions.moved_total, rates.refused_total);
    };
    const auto turn_rows = [this](Part& part) {
        for (const auto& [model, count] : turns) {
            part.row(model, count);
        }
    };
    const auto restore_turn = [this](const Row& row) {
        std::string model;
        u64 count = 0;
        row.take(model, count);
        turns.put(model, count);
    };
    return {
        {"totals", at_once([totals](Part& part) { part.row(totals()); }), [totals](const Row& row) { row.take(totals()); }},
        {"turns", at_once(turn_rows), restore_turn},
        {"bound", [this] { return sessions.bound_rows(); }, [this](const Row& row) { sessions.restore_bound(row); }},
        {"idle", [this] { return sessions.idle_rows(); }, [this](const Row& row) { sessions.restore_idle(row); }},
        {"ranks", at_once([this](Part& part) { ledger.rank_rows(part); }), [this](const Row& row) { ledger.restore_rank(row); }},
        {"leases", [this] { return ledger.lease_rows(sessions); }, [this](const Row& row) { ledger.restore_lease(row, sessions); }},
        {"stretches", [this] { return approximate.freeze(); }, [this](const Row& row) { approximate.restore(row); }},
        {"newcomers", at_once([this](Part& part) { newcomers.rows(part); }), [this](const Row& row) { newcomers.restore(row); }},
        {"model_rates", at_once([this](Part& part) { rates.model_rows(part); }), [this](const Row& row) { rates.restore_model(row); }},
        {"rank_rates", at_once([this](Part& part) { rates.rank_rows(part); }), [this](const Row& row) { rates.restore_rank(row); }},
    };
}

std::vector<std::string> Core::table_names() {
    std::vector<std::string> names;
    for (const Table& table : tables()) {
        names.emplace_back(table.name);
    }
    return names;
}

std::shared_ptr<Checkpoint> Core::checkpoint() {
    auto made = std::make_shared<Checkpoint>();
    for (const Table& table : tables()) {
        made->tables.emplace_back(table.name, table.freeze());
    }
    return made;
}

void Core::restore(const std::string& name, nanobind::list rows) {
    for (const Table& table : tables()) {
        if (name == table.name) {
            for (const nanobind::handle row : rows) {
                table.restore(Row(row));
            }
        }
    }
}

}  // namespace kv
