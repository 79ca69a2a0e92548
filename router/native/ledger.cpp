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

void Ledger::count(RankLoad& load, Lease& lease) {
    ++load.requests;
    load.queued_tokens += lease.uncached_tokens;
    load.extra_blocks += lease.extra_blocks;
    if (!lease.blocks.empty()) {
        lease.end = tree_.add(lease.rank.row(), lease.blocks.data(), lease.blocks.size(), lease.is_bringing());
    }
    if (lease.is_bringing()) {
        ++load.bringing;
        load.epoch = lease.epoch;
    }
}

Ledger::Lease* Ledger::book(const Promise& promise, double now_s, std::string_view origin) {
    let_go(now_s);
    return leases_.add(promise.lease_id, [&] {
        RankLoad& at = load(promise.row);
        if (!promise.blocks.empty() && at.bringing != 0 && at.epoch != promise.epoch) {  // the old epoch's blocks will not come
            for (auto& [_, lease] : leases_) {
                if (lease.rank.row() == promise.row) {
                    stop_bringing(lease);
                }
            }
        }
        Lease made{Held(ranks_, promise.row), promise.blocks, 0, std::string(origin), promise.uncached_tokens, promise.extra_blocks,
                   at.reported.generation, now_s + lease_s_, promise.epoch, promise.blocks.empty() ? Lease::kNever : Lease::kOpen};
        count(at, made);
        at.reported.booked();
        return made;
    });
}

void Ledger::stop_bringing(Lease& lease) {
    if (lease.is_bringing()) {
        tree_.unmark(lease.rank.row(), lease.end);
        --loads_[lease.rank.row()].bringing;
        lease.bringing_until_s = Lease::kNever;
    }
}

void Ledger::let_go(double now_s) {
    while (!seen_.empty() && seen_.front().until_s <= now_s) {
        Lease* const lease = leases_.find(seen_.front().lease_id);
        if (lease != nullptr && lease->bringing_until_s == seen_.front().until_s) {
            stop_bringing(*lease);
        }
        seen_.pop_front();
    }
}

void Ledger::renew(std::string_view lease_id, double now_s, bool is_prefilled) {
    Lease* const lease = leases_.move_last(lease_id);
    if (lease == nullptr) {
        return;
    }
    if (is_prefilled) {
        loads_[lease->rank.row()].queued_tokens -= lease->uncached_tokens;
        lease->uncached_tokens = 0;
        if (lease->bringing_until_s == Lease::kOpen) {
            lease->bringing_until_s = now_s + kSeenS;
            seen_.push_back(Seen{lease->bringing_until_s, std::string(lease_id)});
        }
    }
    lease->expires_at_s = now_s + lease_s_;
}

std::optional<Ledger::Lease> Ledger::end(std::string_view lease_id) {
    std::optional<Lease> lease = leases_.pop(lease_id);
    if (lease.has_value()) {
        const u32 row = lease->rank.row();
        RankLoad& at = loads_[row];
        if (lease->end != 0) {
            tree_.remove(row, lease->end, lease->is_bringing());
        }
        at.bringing -= lease->is_bringing();
        --at.requests;
        at.queued_tokens -= lease->uncached_tokens;
        at.extra_blocks -= lease->extra_blocks;
        at.reported.ended(lease->generation);
        drop_if_over(row);
    }
    return lease;
}

void Ledger::drop_if_over(u32 row) {
    if (loads_[row].is_gone && loads_[row].requests == 0) {
        loads_.erase(row);
    }
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

// Adds events that end the rank's eldest leases, as many as its engine does not report; other routers end theirs.
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
    for (auto& [_, lease] : leases_) {
        if (lease.rank.key().worker_id == worker_id) {
            stop_bringing(lease);
            lease.expected.reset();
        }
    }
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

void Ledger::read_load(const std::vector<u32>& rows, std::vector<RankNumbers>& to) const {
    for (std::size_t at = 0; at < rows.size(); ++at) {
        if (const RankLoad* const load = loads_.find(rows[at])) {
            to[at].queued = load->queued_tokens;
            to[at].requests = load->requests + load->reported.foreign;
            to[at].blocks = blocks(rows[at]);
        }
    }
}

void Ledger::read_depths(const std::vector<u32>& rows, const Chain& chain, const std::vector<u64>& epochs, double now_s, bool reads_shared,
                         i64 most, std::vector<RankNumbers>& to) {
    let_go(now_s);
    tree_.depths(chain.data(), chain.size(), rows, [&](std::size_t at, i64 shared, i64 brought) {
        to[at].predicted = brought != 0 && loads_[rows[at]].epoch != epochs[at] ? 0 : std::min(brought, most);
        to[at].shared = reads_shared ? shared : to[at].shared;
    });
}

bool Ledger::is_empty() const {
    return leases_.empty() && tree_.is_empty() && std::all_of(loads_.rows().begin(), loads_.rows().end(), [this](u32 row) {
               return loads_[row].requests == 0 && loads_[row].queued_tokens == 0 && loads_[row].extra_blocks == 0;
           });
}

void Ledger::rank_rows(Part& part) {
    for (const u32 row : loads_.rows()) {
        part.row(ranks_.key(row), loads_[row].is_gone, loads_[row].reported.fields());
    }
}

void Ledger::restore_rank(const Row& row) {
    RankKey key;
    bool is_gone = false;
    Reported reported;
    row.take(key, is_gone, reported.fields());
    if (reported.generation < 0 || reported.young.size() != Reported::kReports + 1 || reported.newest.size() != 3 ||
        reported.reported.size() > Reported::kReports || reported.surpluses.size() != reported.reported.size()) {
        throw std::invalid_argument("a rank's reports have another form");
    }
    RankLoad& at = load(Held(ranks_, key).row());
    at.is_gone = is_gone;
    at.reported = std::move(reported);
}

MoreRows Ledger::lease_rows(const Sessions& sessions) const {
    struct Copy {
        std::string lease_id;
        Lease lease;
        std::string session;
    };
    std::vector<Copy> copies;
    for (const auto& [lease_id, lease] : leases_) {
        copies.push_back({lease_id, lease, std::string(sessions.name_of(lease.session))});
    }
    return more_rows(std::move(copies), [](Part& part, Copy& copy) {
        Lease& lease = copy.lease;
        part.row(copy.lease_id, lease.rank, lease.fields(), copy.session, lease.expected.value_or(Expected{}).fields());
    });
}

void Ledger::restore_lease(const Row& row, const Sessions& sessions) {
    std::string lease_id, session;
    RankKey key;
    Expected expected;
    Lease made{Held(ranks_, kNoRow), {}};
    row.take(lease_id, key, made.fields(), session, expected.fields());
    const u32 rank = ranks_.find(key);
    RankLoad* const at = loads_.find(rank);
    if (at == nullptr || leases_.find(lease_id) != nullptr || made.generation < 0 || (made.is_bringing() && made.blocks.empty())) {
        throw std::invalid_argument("a lease is of no rank that was restored, there twice, or brings no blocks");
    }
    made.rank = Held(ranks_, rank);
    made.session = sessions.restored(session);
    if (!expected.model.empty()) {
        made.expected = std::move(expected);
    }
    count(*at, made);
    if (made.is_bringing() && made.bringing_until_s != Lease::kOpen) {
        const auto later = [](double until_s, const Seen& each) { return until_s < each.until_s; };
        seen_.insert(std::upper_bound(seen_.begin(), seen_.end(), made.bringing_until_s, later), Seen{made.bringing_until_s, lease_id});
    }
    leases_.put(lease_id, std::move(made));
}

}  // namespace kv
