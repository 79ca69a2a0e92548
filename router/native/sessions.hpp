// Sessions and the ranks that serve them: tests/reference/affinity.py has the rules. Knows nothing of Python.
#pragma once

#include "rows.hpp"

namespace kv {

class Sessions {
public:
    Sessions(Ranks& ranks, double idle_s, u64 sessions_max) : ranks_(ranks), idle_s_(idle_s), sessions_max_(sessions_max) {}

    void bind(std::string_view lease_id, std::string_view name, u32 row, double now_s);
    void end(std::string_view lease_id, double now_s);
    // The row of the session's rank; `kNoRow`: it is not bound.
    u32 bound(std::string_view name, double now_s) const;
    void forget(std::string_view worker_id);
    // Drops expired sessions; answers do not change by that.
    void tick(double now_s);

    std::size_t size() const { return busy_.size() + idle_.size(); }
    std::size_t in_flight() const { return busy_.size(); }
    i64 evicted_total = 0, moved_total = 0;

    void bound_rows(Parts& parts) const;
    void restore_bound(Unpack& in);
    void idle_rows(Parts& parts) const;
    void restore_idle(Unpack& in);
    void lease_rows(Parts& parts) const;
    void restore_lease(Unpack& in);

private:
    struct Session {
        std::string name;
        Held rank;
        u64 leases;
    };
    using SessionRef = std::shared_ptr<Session>;
    struct Idle {
        Held rank;
        double until_s;
    };
    bool is_busy(const SessionRef& session) const {
        const SessionRef* const known = busy_.find(session->name);
        return known != nullptr && *known == session;
    }
    SessionRef pop_idle(std::string_view name, u32 row);

    Ranks& ranks_;
    const double idle_s_;
    const u64 sessions_max_;
    OrderedMap<SessionRef> busy_;  // in flight
    OrderedMap<Idle> idle_;        // in the order of their expiry
    OrderedMap<SessionRef> of_lease_;
};

}  // namespace kv
