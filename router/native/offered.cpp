#include "offered.hpp"

#include <cmath>

namespace kv {

namespace {

constexpr int kStepsPerDoubling = 4;  // the work is known to 10 %

// From 1 us on.
int step_of(i64 uncached_tokens, i64 context_tokens) {
    const double uncached = static_cast<double>(uncached_tokens);
    const double pairs = uncached * (static_cast<double>(std::max(context_tokens, uncached_tokens)) - uncached / 2);
    const double work_us = 1e6 * (uncached * kPrefillTokenS + pairs * kPrefillPairS);
    return work_us >= 1.0 ? 1 + static_cast<int>(kStepsPerDoubling * std::log2(work_us)) : 0;
}

}  // namespace

void OfferedLoads::routed(const Group& group, i64 uncached_tokens, i64 context_tokens, double now_s) {
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

std::map<Group, OfferedLoads::Sums> OfferedLoads::since(i64 first) const {
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

double OfferedLoads::work_s(int step) { return step == 0 ? 0.0 : 1e-6 * std::pow(2.0, (step - 0.5) / kStepsPerDoubling); }

}  // namespace kv
