// Which share of full misses newly joined ranks get: tests/reference/newcomers.py has the rules. Knows nothing of Python.
#pragma once

#include <algorithm>

#include "rows.hpp"

namespace kv {

class Newcomers {
    static constexpr double kGatherS = 30.0;  // ranks that join in this time after the model's eldest are founders
    static constexpr i64 kSettledShare = 4;   // a rank that has filled a quarter of its cache is settled

    struct Share {
        std::string model;
        double joined_s = 0;
        i64 settled_blocks = 0;
        bool is_newcomer = false, is_settled = false;
        double promised_blocks = 0;
        i64 misses = 0;
        bool is_unsettled() const { return is_newcomer && !is_settled; }
        auto fields() { return std::tie(model, joined_s, settled_blocks, is_newcomer, is_settled, promised_blocks, misses); }
    };

public:
    explicit Newcomers(Ranks& ranks) : ranks_(ranks), shares_(ranks) {}

    void joined(std::string_view worker_id, const std::vector<u32>& rows, const std::string& model, i64 total_blocks, double now_s) {
        forget(worker_id);
        double eldest_s = now_s;
        for (const u32 row : shares_.rows()) {
            eldest_s = shares_[row].model == model ? std::min(eldest_s, shares_[row].joined_s) : eldest_s;
        }
        const bool is_newcomer = total_blocks != 0 && now_s - eldest_s >= kGatherS;
        for (const u32 row : rows) {
            shares_.add(row) = Share{model, now_s, (total_blocks + kSettledShare - 1) / kSettledShare, is_newcomer, false, 0.0, 0};
            unsettled_ += is_newcomer;
        }
    }
    void forget(std::string_view worker_id) {
        for (const u32 row : shares_.of(worker_id)) {
            unsettled_ -= shares_[row].is_unsettled();
            shares_.erase(row);
        }
    }
    void used(u32 row, i64 blocks) { settle(row, static_cast<double>(blocks)); }
    void promised(u32 row, double uncached_blocks) {
        Share* const share = shares_.find(row);
        if (share != nullptr && !share->is_settled) {
            share->promised_blocks += uncached_blocks;
            settle(row, share->promised_blocks);
        }
    }
    bool is_any() const { return unsettled_ != 0; }
    // Counts a full miss that went to `winner`: a request of which no row was expected to hold a block.
    void missed(u32 winner, const std::vector<u32>& rows) {
        for (const u32 row : rows) {
            Share* const share = shares_.find(row);
            if (share != nullptr && share->is_unsettled()) {
                share->misses = row == winner ? 0 : share->misses + 1;
            }
        }
    }
    // Whether each row is a newcomer whose share is spent; empty: none is.
    std::vector<char> spent(const std::vector<u32>& rows) const {
        const auto is_settled = [this](u32 row) {
            const Share* const share = shares_.find(row);
            return share != nullptr && share->is_settled;
        };
        if (!is_any() || !std::any_of(rows.begin(), rows.end(), is_settled)) {
            return {};
        }
        std::vector<char> flags;
        bool is_one = false;
        for (const u32 row : rows) {
            const Share* const share = shares_.find(row);
            flags.push_back(share != nullptr && share->is_unsettled() && share->misses < 2 * static_cast<i64>(rows.size()) - 1);
            is_one = is_one || flags.back();
        }
        return is_one ? flags : std::vector<char>{};
    }

    void rows(Part& part) {
        for (const u32 row : shares_.rows()) {
            part.row(ranks_.key(row), shares_[row].fields());
        }
    }
    void restore(const Row& row) {
        RankKey key;
        Share share;
        row.take(key, share.fields());
        const Held rank(ranks_, key);
        Share& at = shares_.add(rank.row());
        unsettled_ += share.is_unsettled() - at.is_unsettled();
        at = std::move(share);
    }

private:
    void settle(u32 row, double blocks) {
        Share* const share = shares_.find(row);
        if (share != nullptr && share->settled_blocks != 0 && blocks >= static_cast<double>(share->settled_blocks)) {
            unsettled_ -= share->is_unsettled();
            share->is_settled = true;
        }
    }

    Ranks& ranks_;
    RankMap<Share> shares_;
    int unsettled_ = 0;
};

}  // namespace kv
