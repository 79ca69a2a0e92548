// What requests saved, by their decisions and outcomes, for each model, tenant, LoRA adapter and prefix family. Knows nothing of Python.
//
//   predicted(r)   min(blocks that rank r is expected to hold, reusable blocks) * B       B = block size
//   reused         cached tokens that the worker reported, at most the prompt; predicted(winner) if it reported none
//   baseline       (reused + sum of predicted(r) over the other candidates) / candidates  what a random candidate would reuse
//   routing        reused - baseline; may be below 0
//   foregone       max(0, largest predicted(r) of the other candidates - predicted(winner))
//   seconds(c)     p * (c * kPrefillTokenS + c^2 / 2 * kPrefillPairS)      to compute the first c tokens of a prompt
//   saved          seconds(reused)
//   baseline in s  the mean of seconds(reused) and the seconds(predicted(r)) of the other candidates
//
// p is the winner's prefill factor at the decision, 1 if none was learnt or the mode reads none. If candidates were not compared (the
// mode reads no overlap), the baseline is the request's own reuse: no saving by routing is claimed.
#pragma once

#include "core.hpp"

namespace kv {

// The sum of what some requests saved, in tokens and in seconds of prefill.
struct Sums {
    i64 requests = 0, compared_requests = 0;
    i64 prompt_tokens = 0, reused_tokens = 0, reported_tokens = 0;  // `reported_tokens`: the reuse that workers reported
    double baseline_tokens = 0;
    i64 foregone_tokens = 0;
    double saved_s = 0, learnt_s = 0, baseline_s = 0, evicted_blocks = 0;  // `learnt_s`: `saved_s` by learnt factors

    // In the order of `_OF_CORE` of router/attribution/report.py.
    auto fields() {
        return std::tie(requests, compared_requests, prompt_tokens, reused_tokens, reported_tokens, baseline_tokens, foregone_tokens,
                        saved_s, learnt_s, baseline_s, evicted_blocks);
    }
    void add(Sums other) {
        std::apply([&](auto&... own) { std::apply([&](const auto&... more) { ((own += more), ...); }, other.fields()); }, fields());
    }
};

// What a decision's saving is computed from once its outcome is known.
struct Placement {
    std::array<std::string, 4> names;  // of its model, tenant, adapter and family; the family is the hash of a block, in hexadecimal
    i64 isl_tokens = 0;                // of the prompt; 0: it was not encoded
    i64 block_size = 1, predicted_tokens = 0;
    i64 candidates = 0;  // 0: they were not compared
    i64 others_blocks = 0, others_blocks_squared = 0, best_blocks = 0;  // of the candidates beside the winner
    double factor = 1;
    bool is_learnt = false;

    Sums saved(std::optional<i64> reported_tokens) const;
};

// Sums for the names with most requests, in bounded memory.
//
//   known name         its row gets the request
//   new, room left     it gets a row
//   new, no room       the row with the smallest `requests + missed` (the eldest of several) is added to `other`; the new name's row
//                      begins at 0, with that number as its `missed`
//
// With N requests in all and K rows: rows and `other` add up to everything, exactly. A name with a row had at least its `requests` and at
// most `requests + missed`, and missed <= N / K. A name without a row had at most `absent_max` <= N / K requests.
// Source: Metwally, Agrawal, El Abbadi, "Efficient computation of frequent and top-k elements in data streams", 2005.
class TopRows {
public:
    struct Row {
        i64 missed = 0;
        Sums sums;

        i64 requests_max() const { return sums.requests + missed; }  // the most that its name may have had
    };

    void count(const std::string& name, const Sums& saved, std::size_t rows_max);
    void charge(const std::string& name, double blocks);
    // The most requests that a name without a row may have had.
    i64 absent_max(std::size_t rows_max) const { return rows.size() >= rows_max ? smallest()->second.requests_max() : 0; }

    OrderedMap<Row> rows;  // by name, the eldest first
    Sums other;

private:
    OrderedMap<Row>::Entry smallest() const {
        return std::min_element(rows.begin(), rows.end(), [](const auto& one, const auto& next) {
            return one.second.requests_max() < next.second.requests_max();
        });
    }
};

// The same decisions and outcomes in the same order give the same sums, in a running router and from its journal.
//
//   decision that computes a prompt   kept until its outcome, at most `pending_max`; the oldest is dropped
//   outcome ok                        its saving is added to the total and to one row of each dimension
//   any other outcome                 `not_answered`: what a failed attempt computed is not known
//   ok, but the prompt not encoded    `unseen`: neither its length nor its prefix is known
class Attribution {
public:
    Attribution(std::size_t rows, std::size_t blocks, std::size_t decisions) : rows_max(rows), family_blocks(blocks), pending_max(decisions) {}

    void decided(const Verdict& verdict);
    // Returns the decision if it was counted.
    std::optional<Placement> ended(std::string_view decision_id, bool is_ok, std::optional<i64> cached_tokens);
    // Forgets a decision whose outcome belongs to another period.
    void forget(std::string_view decision_id) { pending.erase(decision_id); }
    // Charges evicted blocks to a decision that was counted.
    void charge(const Placement& placement, double blocks);

    const std::size_t rows_max, family_blocks, pending_max;
    OrderedMap<Placement> pending;
    Sums total;
    std::array<TopRows, 4> of_names;
    i64 not_answered = 0, unseen = 0, dropped = 0;
};

}  // namespace kv
