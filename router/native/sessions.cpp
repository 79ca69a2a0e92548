#include "sessions.hpp"

namespace kv {

Sessions::SessionRef Sessions::pop_idle(std::string_view name, u32 row) {
    const std::optional<Idle> idle = idle_.pop(name);
    return std::make_shared<Session>(Session{std::string(name), idle.has_value() ? idle->rank : Held(ranks_, row), 0});
}

void Sessions::bind(std::string_view lease_id, std::string_view name, u32 row, double now_s) {
    if (of_lease_.find(lease_id) != nullptr) {
        return;
    }
    tick(now_s);
    const SessionRef* const known = busy_.find(name);
    const SessionRef session = known != nullptr ? *known : pop_idle(name, row);
    moved_total += session->rank.row() != row;
    session->rank = Held(ranks_, row);
    ++session->leases;
    busy_.put(name, session);
    of_lease_.put(lease_id, session);
    if (size() > sessions_max_) {
        idle_.empty() ? busy_.erase_first() : idle_.erase_first();
        ++evicted_total;
    }
}

void Sessions::end(std::string_view lease_id, double now_s) {
    const std::optional<SessionRef> found = of_lease_.pop(lease_id);
    if (!found.has_value()) {
        return;
    }
    const SessionRef& session = *found;
    --session->leases;
    if (session->leases == 0 && is_busy(session)) {
        busy_.erase(session->name);
        idle_.put(session->name, Idle{session->rank, now_s + idle_s_});
    }
}

u32 Sessions::bound(std::string_view name, double now_s) const {
    if (name.empty()) {
        return kNoRow;
    }
    if (const SessionRef* const session = busy_.find(name)) {
        return (*session)->rank.row();
    }
    const Idle* const idle = idle_.find(name);
    return idle != nullptr && now_s < idle->until_s ? idle->rank.row() : kNoRow;
}

void Sessions::forget(std::string_view worker_id) {
    busy_.erase_if([&](const auto&, const SessionRef& session) { return session->rank.key().worker_id == worker_id; });
    idle_.erase_if([&](const auto&, const Idle& idle) { return idle.rank.key().worker_id == worker_id; });
}

void Sessions::tick(double now_s) {
    while (!idle_.empty() && idle_.first().second.until_s <= now_s) {
        idle_.erase_first();
    }
}

void Sessions::bound_rows(Parts& parts) const {
    for (const auto& [name, session] : busy_) {
        parts.row(name, session->rank);
    }
}

void Sessions::restore_bound(Unpack& in) {
    std::string name;
    RankKey key;
    in.row(name, key);
    busy_.put(name, std::make_shared<Session>(Session{name, Held(ranks_, key), 0}));
}

void Sessions::idle_rows(Parts& parts) const {
    for (const auto& [name, idle] : idle_) {
        parts.row(name, idle.rank, idle.until_s);
    }
}

void Sessions::restore_idle(Unpack& in) {
    std::string name;
    RankKey key;
    double until_s = 0;
    in.row(name, key, until_s);
    idle_.put(name, Idle{Held(ranks_, key), until_s});
}

void Sessions::lease_rows(Parts& parts) const {
    for (const auto& [lease_id, session] : of_lease_) {
        parts.row(lease_id, is_busy(session) ? std::optional<std::string>(session->name) : std::nullopt);
    }
}

void Sessions::restore_lease(Unpack& in) {
    std::string lease_id;
    std::optional<std::string> name;
    in.row(lease_id, name);
    SessionRef session = std::make_shared<Session>(Session{"", Held(ranks_, kNoRow), 0});
    if (name.has_value()) {
        const SessionRef* const known = busy_.find(*name);
        if (known == nullptr) {
            throw std::invalid_argument("a session was not restored");
        }
        session = *known;
    }
    ++session->leases;
    of_lease_.put(lease_id, session);
}

}  // namespace kv
