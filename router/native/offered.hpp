// The load that routed requests bring to the workers of each model and role, over the last minutes: every routed attempt counts, of this
// router and of its replicas. Knows nothing of Python.
//
//   work of a prompt   uncached tokens * kPrefillTokenS + pairs * kPrefillPairS    seconds of the reference engine
//   pairs              uncached * (context - uncached / 2), as in tests/reference/time_cost.py
#pragma once

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
    static constexpr std::size_t kSlots = 120;

    struct Sums {
        i64 requests = 0, uncached_tokens = 0, context_tokens = 0;
        std::map<int, i64> steps;  // requests by the step of their prompt's work
    };

    // `context_tokens`: of the whole request.
    void routed(const Group& group, i64 uncached_tokens, i64 context_tokens, double now_s);
    // What came in the slots from `first` on; slot n begins at n * `kSlotS`.
    std::map<Group, Sums> since(i64 first) const;
    // The middle of a step, in seconds; 0: nothing is computed.
    static double work_s(int step);

private:
    std::deque<std::pair<i64, std::map<Group, Sums>>> slots_;
};

}  // namespace kv
