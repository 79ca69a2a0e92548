// How fast ranks compute, and how long answers are: tests/reference/rates.py has the rules. Knows nothing of Python.
#pragma once

#include <limits>

#include "costs.hpp"
#include "rows.hpp"

namespace kv {

constexpr double kSecondsMax = 600.0;
constexpr double kOutputTokens = 128.0;  // expected of an answer while none was measured

// What is known of an outcome: `kv_protocol.journal.OutcomeKnown`.
struct Outcome {
    double now_s = 0;
    bool is_ok = false;
    std::optional<double> ttft_s, itl_s;  // `itl_s`: the mean time between tokens
    i64 output_tokens = 0;                 // 0: not known
    std::optional<i64> cached_tokens;      // none: the worker reported none
};

// A factor that all ranks of a model share, and the weighted mean of the factors that they have of their own.
struct SharedFactor {
    double shared = 1.0;
    i64 measured = 0;
    double weighted = 0.0;
    i64 weights = 0;

    double mean() const { return weights != 0 ? weighted / static_cast<double>(weights) : 1.0; }
    double learn(double own, i64 of_rank, double ratio);
    void left(double own, i64 of_rank);
    auto fields() { return std::tie(shared, measured, weighted, weights); }
};

// The seconds that the reference engine would need in place of a decision's winner.
struct Expected {
    std::string model;
    double ttft_s = 0, itl_s = 0;
    auto fields() { return std::tie(model, ttft_s, itl_s); }
};

class Rates {
public:
    struct Model {
        SharedFactor prefill, decode;
        double output_tokens = kOutputTokens;
        i64 answers = 0;
    };

    using ModelRef = std::shared_ptr<Model>;
    struct Rank {
        std::string name;
        ModelRef model;
        double prefill = 1.0, decode = 1.0;
        i64 prefills = 0, decodes = 0;
        double measured_s = -std::numeric_limits<double>::infinity();
        auto fields() { return std::tie(name, prefill, decode, prefills, decodes, measured_s); }
    };

    explicit Rates(Ranks& ranks) : ranks_(ranks), known_(ranks) {}

    // Sets the factors of each row as they are used now; returns the expected tokens of an answer, and whether factors were learnt.
    std::pair<double, bool> read(std::string_view model, const std::vector<u32>& rows, double now_s, std::vector<RankNumbers>& to);
    // Learns from the outcome of a decision for the rank of the row.
    void learn(u32 row, const Expected& expected, const Outcome& outcome);
    void forget(std::string_view worker_id);
    void restore_learnt(const std::string& model, double prefill, double decode, double output_tokens, i64 answers);

    // Returns for each model: mean factors of its ranks, expected tokens of an answer, number of answers.
    std::vector<std::tuple<std::string, double, double, double, i64>> learnt() const;
    i64 refused_total = 0;

    const RankMap<Rank>& ranks() const { return known_; }
    void model_rows(Part& part) const;
    void restore_model(const Row& row);
    void rank_rows(Part& part);
    void restore_rank(const Row& row);

private:
    bool is_possible(double seconds);
    ModelRef model(const std::string& name);

    Ranks& ranks_;
    OrderedMap<ModelRef> models_;
    RankMap<Rank> known_;
    std::vector<const Rank*> asked_;  // a buffer of `read`, kept for its memory
};

}  // namespace kv
