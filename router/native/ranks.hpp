// Each worker rank about which something is known has a row: vectors by row keep what is known. A row lives while held.
#pragma once

#include <vector>

#include "ordered_map.hpp"

namespace kv {

constexpr u32 kNoRow = 0;  // the row of ranks about which nothing is known: each vector keeps its initial value there

struct RankKey {
    std::string worker_id;
    i64 dp_rank = 0;
    bool operator==(const RankKey& other) const { return dp_rank == other.dp_rank && worker_id == other.worker_id; }
};

struct RankKeyHash {
    TextHash text;
    std::size_t operator()(const RankKey& key) const {
        return text(key.worker_id) ^ static_cast<std::size_t>(mixed(static_cast<u64>(key.dp_rank)));
    }
};

class Ranks {
public:
    Ranks() : keys_(1), holds_(1) {}
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    // The rank's row; `kNoRow`: nothing holds it.
    u32 find(const RankKey& key) const {
        const auto found = rows_.find(key);
        return found == rows_.end() ? kNoRow : found->second;
    }
    const RankKey& key(u32 row) const { return keys_[row]; }
    // The rank's row, which is new if there was none; the caller must hold it at once.
    u32 row(const RankKey& key) {
        const auto found = rows_.find(key);
        if (found != rows_.end()) {
            return found->second;
        }
        u32 row = static_cast<u32>(keys_.size());
        if (free_.empty()) {
            keys_.emplace_back();
            holds_.push_back(0);
        } else {
            row = free_.back();
            free_.pop_back();
        }
        keys_[row] = key;
        rows_.emplace(key, row);
        return row;
    }
    void hold(u32 row) { ++holds_[row]; }
    void drop(u32 row) {
        if (--holds_[row] == 0 && row != kNoRow) {
            rows_.erase(keys_[row]);
            keys_[row] = {};
            free_.push_back(row);
        }
    }
    std::size_t size() const { return rows_.size(); }

private:
    std::unordered_map<RankKey, u32, RankKeyHash> rows_;
    std::vector<RankKey> keys_;
    std::vector<u32> holds_, free_;
};

// A held row.
class Held {
public:
    Held(Ranks& ranks, u32 row) : ranks_(&ranks), row_(row) { ranks_->hold(row_); }
    Held(Ranks& ranks, const RankKey& key) : Held(ranks, ranks.row(key)) {}
    Held(const Held& other) : Held(*other.ranks_, other.row_) {}
    Held& operator=(Held other) {
        std::swap(ranks_, other.ranks_);
        std::swap(row_, other.row_);
        return *this;
    }
    ~Held() { ranks_->drop(row_); }

    u32 row() const { return row_; }
    const RankKey& key() const { return ranks_->key(row_); }

private:
    Ranks* ranks_;
    u32 row_;
};

// Values of some ranks, by row, and in the order in which the ranks were added. It holds their rows.
template <typename Value>
class RankMap {
public:
    explicit RankMap(Ranks& ranks) : ranks_(&ranks) {}
    RankMap(const RankMap&) = delete;
    RankMap& operator=(const RankMap&) = delete;
    ~RankMap() {
        for (const u32 row : order_) {
            ranks_->drop(row);
        }
    }

    Value* find(u32 row) { return row < values_.size() && places_[row] != order_.end() ? &values_[row] : nullptr; }
    const Value* find(u32 row) const { return const_cast<RankMap*>(this)->find(row); }
    // The rank's value, which is `Value{}` if it is new.
    Value& add(u32 row) {
        if (row >= values_.size()) {
            values_.resize(row + 1);
            places_.resize(row + 1, order_.end());
        }
        if (places_[row] == order_.end()) {
            places_[row] = order_.insert(order_.end(), row);
            ranks_->hold(row);
        }
        return values_[row];
    }
    void erase(u32 row) {
        if (find(row) != nullptr) {
            order_.erase(places_[row]);
            places_[row] = order_.end();
            values_[row] = Value{};
            ranks_->drop(row);
        }
    }
    // The rows of a worker.
    std::vector<u32> of(std::string_view worker_id) const {
        std::vector<u32> found;
        for (const u32 row : order_) {
            if (ranks_->key(row).worker_id == worker_id) {
                found.push_back(row);
            }
        }
        return found;
    }
    std::size_t size() const { return order_.size(); }
    Value& operator[](u32 row) { return values_[row]; }
    const Value& operator[](u32 row) const { return values_[row]; }
    const std::list<u32>& rows() const { return order_; }
    const RankKey& key(u32 row) const { return ranks_->key(row); }

private:
    Ranks* ranks_;
    std::list<u32> order_;
    std::vector<Value> values_;
    std::vector<std::list<u32>::iterator> places_;
};

}  // namespace kv
