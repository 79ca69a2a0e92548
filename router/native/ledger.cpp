#include "ledger.hpp"

#include <algorithm>
#include <numeric>

namespace kv {

namespace {

void push(std::vector<i64>& window, i64 value) {
    if (window.size() == Reported::kReports) {
        window.erase(window.begin());
    }
    window.push_back(value);
}

}  // namespace

void Reported::withdraw() {
    newest.assign(3, 0);
    foreign = excess = 0;
    reported.clear();
    surpluses.clear();
    reported_at_s.reset();
}

void Reported::ended(i64 of) {
    if (is_settled(of)) {
        excess = std::max<i64>(0, excess - 1);
    } else {
        --young_of(of);
    }
}

void Reported::report(i64 running, i64 waiting, i64 used_blocks, i64 promised, double now_s) {
    newest = {running, waiting, used_blocks};
    reported_at_s = now_s;
    push(reported, running + waiting);
    push(surpluses, running + waiting - promised);
    ++generation;
    young_of(generation) = 0;
    foreign = excess = 0;
    if (reported.size() == kReports) {
        const i64 unsettled = std::accumulate(young.begin(), young.end(), i64{0});
        foreign = std::max<i64>(0, *std::min_element(surpluses.begin(), surpluses.end()));
        excess = std::max<i64>(0, promised - unsettled - *std::max_element(reported.begin(), reported.end()));
    }
}

RankLoad& Ledger::load(u32 row) {
    RankLoad& found = loads_.add(row);
    found.is_gone = false;
    return found;
}

void Ledger::count(RankLoad& load, const Lease& lease) {
    ++load.requests;
    load.queued_tokens += lease.uncached_tokens;
    load.extra_blocks += lease.extra_blocks;
}

void Ledger::book(const Promise& promise, double now_s, std::string_view origin) {
    leases_.add(promise.lease_id, [&] {
        RankLoad& at = load(promise.row);
        const std::vector<u64>& blocks = *promise.blocks;
        const u32 end = blocks.empty() ? 0 : tree_.add(promise.row, blocks.data(), blocks.size());
        Lease made{Held(ranks_, promise.row), promise.blocks, end, std::string(origin), promise.uncached_tokens, promise.extra_blocks,
                   at.reported.generation, now_s + lease_s_};
        count(at, made);
        at.reported.booked();
        return made;
    });
}

void Ledger::renew(std::string_view lease_id, double now_s, bool is_prefilled) {
    Lease* const lease = leases_.move_last(lease_id);
    if (lease == nullptr) {
        return;
    }
    if (is_prefilled) {
        loads_[lease->rank.row()].queued_tokens -= lease->uncached_tokens;
        lease->uncached_tokens = 0;
    }
    lease->expires_at_s = now_s + lease_s_;
}

bool Ledger::end(std::string_view lease_id) {
    const std::optional<Lease> lease = leases_.pop(lease_id);
    if (!lease.has_value()) {
        return false;
    }
    const u32 row = lease->rank.row();
    RankLoad& at = loads_[row];
    if (lease->end != 0) {
        tree_.remove(row, lease->end);
    }
    --at.requests;
    at.queued_tokens -= lease->uncached_tokens;
    at.extra_blocks -= lease->extra_blocks;
    at.reported.ended(lease->generation);
    drop_if_over(row);
    return true;
}

void Ledger::drop_if_over(u32 row) {
    if (loads_[row].is_gone && loads_[row].requests == 0) {
        loads_.erase(row);
    }
}

void Ledger::expire(std::string_view lease_id, bool by_engine) {
    const bool is_ended = end(lease_id);
    (by_engine ? corrected_total : expired_total) += is_ended;
}

void Ledger::reconcile(u32 row, i64 running, i64 waiting, i64 used_blocks, double now_s) {
    RankLoad& at = load(row);
    at.reported.report(running, waiting, used_blocks, at.requests, now_s);
}

void Ledger::unreport(u32 row) {
    if (RankLoad* const at = loads_.find(row)) {
        at->reported.withdraw();
    }
}

std::vector<Ledger::Event> Ledger::tick(double now_s) const {
    std::vector<Event> events;
    for (const auto& [lease_id, lease] : leases_) {
        if (lease.expires_at_s > now_s) {
            break;
        }
        events.push_back(Event{lease_id, false, lease.rank.row()});
    }
    for (const u32 row : loads_.rows()) {
        const Reported& reported = loads_[row].reported;
        if (reported.excess != 0) {
            unknown_to(row, now_s, events);
        }
        if (reported.is_silent(now_s)) {
            events.push_back(Event{"", false, row});
        }
    }
    return events;
}

// The rank's eldest leases, as many as its engine does not report, end; of other routers' leases these decide.
void Ledger::unknown_to(u32 row, double now_s, std::vector<Event>& events) const {
    const Reported& reported = loads_[row].reported;
    i64 found = 0;
    for (const auto& [lease_id, lease] : leases_) {
        const double renewed_s = lease.expires_at_s - lease_s_;
        if (renewed_s > now_s - kSilentS || found == reported.excess) {
            return;
        }
        if (lease.rank.row() == row && reported.is_settled(lease.generation)) {
            ++found;
            if (lease.origin.empty() && lease.expires_at_s > now_s) {
                events.push_back(Event{lease_id, true, row});
            }
        }
    }
}

void Ledger::forget(std::string_view worker_id) {
    for (const u32 row : loads_.of(worker_id)) {
        loads_[row].reported.withdraw();
        loads_[row].is_gone = true;
        drop_if_over(row);
    }
}

void Ledger::mark_gone(u32 row) {
    if (RankLoad* const at = loads_.find(row)) {
        at->is_gone = true;
    }
}

void Ledger::columns(const u32* rows, std::size_t count, const u64* chain, std::size_t length, i64* queued, i64* requests, i64* blocks,
                     i64* shared) {
    asked_.assign(rows, rows + count);
    for (std::size_t at = 0; at < count; ++at) {
        const RankLoad* const load = loads_.find(rows[at]);
        queued[at] = load == nullptr ? 0 : load->queued_tokens;
        requests[at] = load == nullptr ? 0 : load->requests + load->reported.foreign;
        blocks[at] = load == nullptr ? 0 : load->extra_blocks + tree_.blocks(rows[at]);
    }
    tree_.depths(chain, length, asked_.data(), count, shared);
}

bool Ledger::is_empty() const {
    return leases_.empty() && tree_.is_empty() && std::all_of(loads_.rows().begin(), loads_.rows().end(), [this](u32 row) {
               return loads_[row].requests == 0 && loads_[row].queued_tokens == 0 && loads_[row].extra_blocks == 0;
           });
}

void Ledger::rank_rows(Parts& parts) const {
    for (const u32 row : loads_.rows()) {
        const Reported& reported = loads_[row].reported;
        Pack packed;
        packed.array(3);
        packed.put(ranks_.key(row));
        packed.put(loads_[row].is_gone);
        packed.row(reported.generation, reported.young, reported.newest, reported.foreign, reported.excess, reported.reported,
                   reported.surpluses, reported.reported_at_s);
        parts.packed(packed.view());
    }
}

void Ledger::restore_rank(Unpack& in) {
    RankKey key;
    bool is_gone = false;
    Reported reported;
    if (in.array() != 3) {
        throw std::invalid_argument("a rank has 3 fields");
    }
    in.take(key);
    in.take(is_gone);
    in.row(reported.generation, reported.young, reported.newest, reported.foreign, reported.excess, reported.reported,
           reported.surpluses, reported.reported_at_s);
    if (reported.generation < 0 || reported.young.size() != Reported::kReports + 1 || reported.newest.size() != 3 ||
        reported.reported.size() > Reported::kReports || reported.surpluses.size() != reported.reported.size()) {
        throw std::invalid_argument("a rank's reports have another form");
    }
    RankLoad& at = load(Held(ranks_, key).row());
    at.is_gone = is_gone;
    at.reported = std::move(reported);
}

MoreRows Ledger::lease_rows() const {
    return more_rows(std::vector<std::pair<std::string, Lease>>(leases_.begin(), leases_.end()), [](Parts& parts, const auto& row) {
        const Lease& lease = row.second;
        parts.row(row.first, lease.rank, lease.origin, lease.blocks, lease.uncached_tokens, lease.extra_blocks, lease.generation,
                  lease.expires_at_s);
    });
}

void Ledger::restore_lease(Unpack& in) {
    std::string lease_id, origin;
    RankKey key;
    Chain blocks;
    i64 uncached_tokens = 0, extra_blocks = 0, generation = 0;
    double expires_at_s = 0;
    in.row(lease_id, key, origin, blocks, uncached_tokens, extra_blocks, generation, expires_at_s);
    const u32 row = ranks_.find(key);
    RankLoad* const at = loads_.find(row);
    if (at == nullptr || leases_.find(lease_id) != nullptr || generation < 0) {
        throw std::invalid_argument("a lease is of no rank that was restored, or there twice");
    }
    const u32 end = blocks->empty() ? 0 : tree_.add(row, blocks->data(), blocks->size());
    count(*at, leases_.put(lease_id, Lease{Held(ranks_, row), blocks, end, origin, uncached_tokens, extra_blocks, generation,
                                           expires_at_s}));
}

}  // namespace kv
