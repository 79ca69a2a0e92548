// The journal of a router's decisions, and the leases of those that are carried out: all that follows a decision, in one call each.
#pragma once

#include "core_bindings.hpp"
#include "journal.hpp"

namespace kv {

// The batches of one journal. `owner` is its `router.journal.encoder.JournalEncoder`, which writes what is rare.
struct PyJournal : Batches {
    PyJournal(nanobind::object of, nanobind::object seq, nanobind::object encode, std::size_t batch_bytes_max, std::size_t bytes_max)
        : Batches(batch_bytes_max, bytes_max), owner(std::move(of)), kv_seq(std::move(seq)), encoded(std::move(encode)) {}

    // Adds the decision's record, behind those of the standings that it is the first to see.
    void decided(const nanobind::handle& given);
    void add(const Pack& record, double now_s);
    void forget_seen();

    nanobind::object owner, kv_seq, encoded;

private:
    // What the last decision looked at: as long as it stays the same, no standing has changed.
    std::shared_ptr<const Standing> standing_;
    std::shared_ptr<const std::vector<u64>> epochs_;
    nanobind::object trusts_;
};

struct PyLease;

// The leases of one router: `now` is its clock, `breakers` its `router.fleet.breakers.Breakers`, `journal` none or its `PyJournal`.
struct PyLeases {
    PyLeases(nanobind::object of, nanobind::object clock, double period_s, nanobind::object followers, nanobind::object kept);

    double time() const { return nanobind::cast<double>(now()); }

    nanobind::object core_object, now, breakers, journal_object;
    PyCore* core;
    PyJournal* journal;  // nullptr: none
    double renew_s;      // the shortest time between two renewals
    u64 taken_total = 0;
    // For replicas. A lease that ends before they ask is never told.
    PyLease* eldest_untold = nullptr;
    PyLease* newest_untold = nullptr;
    std::vector<std::pair<std::string, std::string>> news;  // of leases that were told: the events' tags and leases
};

// One decision that is carried out, and what came of it.
struct PyLease {
    PyLease(nanobind::object of, nanobind::object made);
    PyLease(const PyLease&) = delete;
    PyLease& operator=(const PyLease&) = delete;
    ~PyLease() { told(); }

    void first_token();
    void on_bytes();
    void end(nanobind::str how, std::optional<i64> cached, std::optional<i64> output, bool is_whole, bool is_streamed,
             std::optional<i64> later_tokens, std::optional<double> decode_s);
    // Takes it from those that replicas do not know.
    void told();

    nanobind::object leases_object, verdict_object;
    PyLeases* leases;
    const Verdict* verdict;
    u64 number;  // of the router's leases, from 1
    PyLease* older = nullptr;
    PyLease* newer = nullptr;
    bool is_told = true;
    double renewed_s = 0, ended_s = 0;
    std::optional<double> first_byte_s, ttft_s, itl_s;
    nanobind::object outcome;  // nullptr: it is open
    std::optional<i64> cached_tokens, output_tokens;
    bool came_whole = false;

private:
    const std::string& id() const { return verdict->request->decision_id; }
    void renew(const char* tag, double now_s);
    void follow(const char* event, double now_s) const;
};

}  // namespace kv
