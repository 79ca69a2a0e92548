// Sessions and the ranks that serve them: tests/reference/affinity.py has the rules. Knows nothing of Python.
#pragma once

#include "rows.hpp"

namespace kv {

class Sessions {
public:
    Sessions(Ranks& ranks, double idle_s, u64 sessions_max) : ranks_(ranks), idle_s_(idle_s), sessions_max_(sessions_max) {}

    struct Session {
        std::string name;
        Held rank;
        u64 leases;
    };
    using Ref = std::shared_ptr<Session>;

    // Binds the session to the row for a lease. Call `end` once when that lease ends.
    Ref bind(std::string_view name, u32 row, double now_s) {
        tick(now_s);
        const Ref* const known = busy_.find(name);
        const Ref session = known != nullptr ? *known : pop_idle(name, row);
        moved_total += session->rank.row() != row;
        session->rank = Held(ranks_, row);
        ++session->leases;
        busy_.put(name, session);
        if (size() > sessions_max_) {
            idle_.empty() ? busy_.erase_first() : idle_.erase_first();
            ++evicted_total;
        }
        return session;
    }
    // Ends one of the session's leases; null: the lease has no session.
    void end(const Ref& session, double now_s) {
        if (session != nullptr && --session->leases == 0 && !name_of(session).empty()) {
            busy_.erase(session->name);
            idle_.put(session->name, Idle{session->rank, now_s + idle_s_});
        }
    }
    // The session's name; empty: there is none, or it is no longer bound.
    std::string_view name_of(const Ref& session) const {
        const Ref* const known = session == nullptr ? nullptr : busy_.find(session->name);
        return known != nullptr && *known == session ? session->name : std::string_view();
    }
    // Returns the bound session of a restored lease, and counts the lease; null for an empty name.
    Ref restored(std::string_view name) const {
        if (name.empty()) {
            return nullptr;
        }
        const Ref* const known = busy_.find(name);
        if (known == nullptr) {
            throw std::invalid_argument("a session was not restored");
        }
        ++(*known)->leases;
        return *known;
    }
    // The row of the session's rank; `kNoRow`: it is not bound.
    u32 bound(std::string_view name, double now_s) const {
        if (name.empty()) {
            return kNoRow;
        }
        if (const Ref* const session = busy_.find(name)) {
            return (*session)->rank.row();
        }
        const Idle* const idle = idle_.find(name);
        return idle != nullptr && now_s < idle->until_s ? idle->rank.row() : kNoRow;
    }
    void forget(std::string_view worker_id) {
        busy_.erase_if([&](const Ref& session) { return session->rank.key().worker_id == worker_id; });
        idle_.erase_if([&](const Idle& idle) { return idle.rank.key().worker_id == worker_id; });
    }
    // Drops expired sessions; what `bound` returns stays the same.
    void tick(double now_s) {
        while (!idle_.empty() && idle_.first().second.until_s <= now_s) {
            idle_.erase_first();
        }
    }

    std::size_t size() const { return busy_.size() + idle_.size(); }
    i64 evicted_total = 0, moved_total = 0;

    MoreRows bound_rows() const {
        std::vector<std::pair<std::string, Held>> copies;
        for (const auto& [name, session] : busy_) {
            copies.emplace_back(name, session->rank);
        }
        return more_rows(std::move(copies), [](Part& part, const auto& each) { part.row(each.first, each.second); });
    }
    void restore_bound(const Row& row) {
        std::string name;
        RankKey key;
        row.take(name, key);
        busy_.put(name, std::make_shared<Session>(Session{name, Held(ranks_, key), 0}));
    }
    MoreRows idle_rows() const {
        std::vector<std::pair<std::string, Idle>> copies(idle_.begin(), idle_.end());
        return more_rows(std::move(copies), [](Part& part, const auto& each) { part.row(each.first, each.second.rank, each.second.until_s); });
    }
    void restore_idle(const Row& row) {
        std::string name;
        RankKey key;
        double until_s = 0;
        row.take(name, key, until_s);
        idle_.put(name, Idle{Held(ranks_, key), until_s});
    }

private:
    struct Idle {
        Held rank;
        double until_s;
    };
    Ref pop_idle(std::string_view name, u32 row) {
        const std::optional<Idle> idle = idle_.pop(name);
        return std::make_shared<Session>(Session{std::string(name), idle.has_value() ? idle->rank : Held(ranks_, row), 0});
    }

    Ranks& ranks_;
    const double idle_s_;
    const u64 sessions_max_;
    OrderedMap<Ref> busy_;   // with open leases
    OrderedMap<Idle> idle_;  // in the order of their expiry
};

}  // namespace kv
