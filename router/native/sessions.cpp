#include "sessions.hpp"

namespace kv {

Sessions::Ref Sessions::pop_idle(std::string_view name, u32 row) {
    const std::optional<Idle> idle = idle_.pop(name);
    return std::make_shared<Session>(Session{std::string(name), idle.has_value() ? idle->rank : Held(ranks_, row), 0});
}

Sessions::Ref Sessions::bind(std::string_view name, u32 row, double now_s) {
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

void Sessions::end(const Ref& session, double now_s) {
    if (session != nullptr && --session->leases == 0 && !name_of(session).empty()) {
        busy_.erase(session->name);
        idle_.put(session->name, Idle{session->rank, now_s + idle_s_});
    }
}

std::string_view Sessions::name_of(const Ref& session) const {
    const Ref* const known = session == nullptr ? nullptr : busy_.find(session->name);
    return known != nullptr && *known == session ? session->name : std::string_view();
}

Sessions::Ref Sessions::restored(std::string_view name) const {
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

u32 Sessions::bound(std::string_view name, double now_s) const {
    if (name.empty()) {
        return kNoRow;
    }
    if (const Ref* const session = busy_.find(name)) {
        return (*session)->rank.row();
    }
    const Idle* const idle = idle_.find(name);
    return idle != nullptr && now_s < idle->until_s ? idle->rank.row() : kNoRow;
}

void Sessions::forget(std::string_view worker_id) {
    busy_.erase_if([&](const auto&, const Ref& session) { return session->rank.key().worker_id == worker_id; });
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

}  // namespace kv
