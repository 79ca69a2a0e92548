// The load that routed requests bring to the workers of each model and role, over the last minutes. Every attempt counts that this router
// or a replica routed. Knows nothing of Python.
//
//   work of a prompt   uncached tokens * kPrefillTokenS + pairs * kPrefillPairS    seconds of the reference engine
//   pairs              uncached * (context - uncached / 2), as in tests/reference/time_cost.py
#pragma once

#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "costs.hpp"

namespace kv {

using Group = std::pair<std::string, std::string>;  // a model, and the role of its workers

class OfferedLoads {
public:
    static constexpr double kSlotS = 5.0;

    struct Sums {
        i64 requests = 0, uncached_tokens = 0, context_tokens = 0;
        std::map<int, i64> steps;  // requests by the step of their prompt's work
    };

    // `context_tokens`: of the whole prompt, in full blocks.
    void routed(const Group& group, i64 uncached_tokens, i64 context_tokens, double now_s) {
        const i64 number = static_cast<i64>(now_s / kSlotS);
        if (slots_.empty() || slots_.back().first < number) {
            slots_.emplace_back(number, std::map<Group, Sums>{});
            if (slots_.size() > kSlots) {
                slots_.pop_front();
            }
        }
        Sums& sums = slots_.back().second[group];
        ++sums.requests;
        sums.uncached_tokens += uncached_tokens;
        sums.context_tokens += context_tokens;
        ++sums.steps[step_of(uncached_tokens, context_tokens)];
    }
    // What came in the slots from `first` on; slot n begins at n * `kSlotS`.
    std::map<Group, Sums> since(i64 first) const {
        std::map<Group, Sums> found;
        for (const auto& [number, groups] : slots_) {
            for (const auto& [group, sums] : groups) {
                if (number >= first) {
                    Sums& all = found[group];
                    all.requests += sums.requests;
                    all.uncached_tokens += sums.uncached_tokens;
                    all.context_tokens += sums.context_tokens;
                    for (const auto& [step, count] : sums.steps) {
                        all.steps[step] += count;
                    }
                }
            }
        }
        return found;
    }
    // The middle of a step, in seconds; 0 for step 0, in which nothing is computed.
    static double work_s(int step) { return step == 0 ? 0.0 : 1e-6 * std::pow(2.0, (step - 0.5) / kStepsPerDoubling); }

private:
    static constexpr std::size_t kSlots = 120;
    static constexpr int kStepsPerDoubling = 4;  // the work is known to within 10 %

    // The step of a prompt's work; 0: less than 1 us.
    static int step_of(i64 uncached_tokens, i64 context_tokens) {
        const double uncached = static_cast<double>(uncached_tokens);
        const double pairs = uncached * (static_cast<double>(std::max(context_tokens, uncached_tokens)) - uncached / 2);
        const double work_us = 1e6 * (uncached * kPrefillTokenS + pairs * kPrefillPairS);
        return work_us >= 1.0 ? 1 + static_cast<int>(kStepsPerDoubling * std::log2(work_us)) : 0;
    }

    std::deque<std::pair<i64, std::map<Group, Sums>>> slots_;
};

}  // namespace kv
