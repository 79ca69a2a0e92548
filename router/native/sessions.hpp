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

    // Binds the session to the row for a lease, which is to `end`.
    Ref bind(std::string_view name, u32 row, double now_s);
    // One of the session's leases ends; null: the lease has no session.
    void end(const Ref& session, double now_s);
    // The session's name; empty: there is none, or it is bound no more.
    std::string_view name_of(const Ref& session) const;
    // The session that a restored lease has: a bound one, none for an empty name.
    Ref restored(std::string_view name) const;
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

private:
    struct Idle {
        Held rank;
        double until_s;
    };
    Ref pop_idle(std::string_view name, u32 row);

    Ranks& ranks_;
    const double idle_s_;
    const u64 sessions_max_;
    OrderedMap<Ref> busy_;   // in flight
    OrderedMap<Idle> idle_;  // in the order of their expiry
};

}  // namespace kv
