#include "predictions.hpp"

#include <algorithm>

namespace kv {

void Predictions::add(const Promise& promise, double now_s) {
    tick(now_s);
    predictions_.add(promise.lease_id, [&] {
        const LifeRef* const current = current_.find(promise.row);
        const LifeRef life = current != nullptr && (*current)->epoch == promise.epoch ? *current : begin(promise.row, promise.epoch);
        const std::vector<u64>& blocks = *promise.blocks;
        const u32 end = blocks.empty() ? 0 : tree_.add(promise.row, blocks.data(), blocks.size());
        return Prediction{life, end, promise.blocks, false, ++numbers_};
    });
}

// Begins an epoch of the rank: blocks of the former one are taken out of the tree.
Predictions::LifeRef Predictions::begin(u32 row, u64 epoch) {
    if (const LifeRef* const former = current_.find(row)) {
        for (const auto& [_, prediction] : predictions_) {
            if (prediction.life == *former && prediction.end != 0) {
                tree_.remove(row, prediction.end);
                prediction.end = 0;
            }
        }
    }
    return current_.add(row) = std::make_shared<const Life>(Life{Held(ranks_, row), epoch});
}

void Predictions::see(std::string_view lease_id, double now_s) {
    Prediction* const prediction = predictions_.find(lease_id);
    if (prediction != nullptr && !prediction->is_seen) {
        prediction->is_seen = true;
        seen_.push_back(Seen{now_s + kSeenS, std::string(lease_id), prediction->number});
    }
}

void Predictions::end(std::string_view lease_id) {
    const std::optional<Prediction> known = predictions_.pop(lease_id);
    if (!known.has_value()) {
        return;
    }
    const u32 row = known->life->rank.row();
    if (known->end != 0) {
        tree_.remove(row, known->end);
    }
    if (is_current(known->life) && tree_.blocks(row) == 0) {
        current_.erase(row);
    }
}

void Predictions::forget(std::string_view worker_id) {
    std::vector<std::string> of_worker;
    for (const auto& [lease_id, prediction] : predictions_) {
        if (prediction.life->rank.key().worker_id == worker_id) {
            of_worker.push_back(lease_id);
        }
    }
    for (const std::string& lease_id : of_worker) {
        end(lease_id);
    }
}

void Predictions::tick(double now_s) {
    while (!seen_.empty() && seen_.front().over_at_s <= now_s) {
        const Seen seen = std::move(seen_.front());
        seen_.pop_front();
        const Prediction* const prediction = predictions_.find(seen.lease_id);
        if (prediction != nullptr && prediction->number == seen.number) {
            end(seen.lease_id);
        }
    }
}

void Predictions::column(const u32* rows, std::size_t count, const u64* chain, std::size_t length, const u64* epochs, double now_s,
                         i64* out) {
    tick(now_s);
    std::fill(out, out + count, 0);
    if (predictions_.empty()) {
        return;
    }
    asked_.assign(rows, rows + count);
    tree_.depths(chain, length, asked_.data(), count, out);
    for (std::size_t at = 0; at < count; ++at) {
        if (out[at] != 0 && (*current_.find(rows[at]))->epoch != epochs[at]) {
            out[at] = 0;
        }
    }
}

std::vector<Predictions::LifeRef> Predictions::lives() const {
    std::vector<LifeRef> found;
    for (const u32 row : current_.rows()) {
        found.push_back(current_[row]);
    }
    std::size_t known = found.size();
    for (const auto& [_, prediction] : predictions_) {
        if (!is_current(prediction.life) && std::find(found.begin() + static_cast<std::ptrdiff_t>(known), found.end(),
                                                      prediction.life) == found.end()) {
            found.push_back(prediction.life);
        }
    }
    return found;
}

void Predictions::life_rows(Parts& parts) const {
    for (const LifeRef& life : lives()) {
        parts.row(life->rank, life->epoch, is_current(life));
    }
}

void Predictions::restore_life(Unpack& in) {
    RankKey key;
    u64 epoch = 0;
    bool is_now = false;
    in.row(key, epoch, is_now);
    const Held rank(ranks_, key);
    restored_.push_back(is_now ? begin(rank.row(), epoch) : std::make_shared<const Life>(Life{rank, epoch}));
}

MoreRows Predictions::rows() const {
    const std::vector<LifeRef> all = lives();
    std::unordered_map<const Life*, u64> numbers;
    for (std::size_t at = 0; at < all.size(); ++at) {
        numbers.emplace(all[at].get(), at);
    }
    return more_rows(std::vector<std::pair<std::string, Prediction>>(predictions_.begin(), predictions_.end()),
                     [numbers](Parts& parts, const auto& row) {
                         const Prediction& each = row.second;
                         parts.row(row.first, numbers.at(each.life.get()), each.blocks, each.is_seen);
                     });
}

void Predictions::restore(Unpack& in) {
    std::string lease_id;
    u64 number = 0;
    Chain blocks;
    bool is_seen = false;
    in.row(lease_id, number, blocks, is_seen);
    if (number >= restored_.size() || predictions_.find(lease_id) != nullptr) {
        throw std::invalid_argument("a prediction is of no epoch that was restored, or there twice");
    }
    const LifeRef life = restored_[static_cast<std::size_t>(number)];
    const u32 end = is_current(life) && !blocks->empty() ? tree_.add(life->rank.row(), blocks->data(), blocks->size()) : 0;
    predictions_.put(lease_id, Prediction{life, end, blocks, is_seen, ++numbers_});
}

void Predictions::seen_rows(Parts& parts) const {
    for (const Seen& seen : seen_) {
        const Prediction* const prediction = predictions_.find(seen.lease_id);
        if (prediction != nullptr && prediction->number == seen.number) {
            parts.row(seen.over_at_s, seen.lease_id);
        }
    }
}

void Predictions::restore_seen(Unpack& in) {
    double over_at_s = 0;
    std::string lease_id;
    in.row(over_at_s, lease_id);
    const Prediction* const prediction = predictions_.find(lease_id);
    if (prediction == nullptr) {
        throw std::invalid_argument("a prediction was not restored");
    }
    seen_.push_back(Seen{over_at_s, lease_id, prediction->number});
}

}  // namespace kv
