// For each rank: how many blocks it holds, and the digests of these blocks (kv_protocol/digest.py).
#pragma once

#include <memory>
#include <vector>

#include "common.hpp"

namespace kv {

class Digest {
public:
    static constexpr u32 kBuckets = 256;

    void add(u64 hash) { buckets_[hash >> 56] += splitmix64(hash); }
    void discard(u64 hash) { buckets_[hash >> 56] -= splitmix64(hash); }
    const u64* buckets() const { return buckets_; }
    u64 total() const {
        u64 sum = 0;
        for (const u64 bucket : buckets_) {
            sum += bucket;
        }
        return sum;
    }

    u64 count = 0;

private:
    u64 buckets_[kBuckets] = {};
};

struct Rank {
    u64 held = 0;  // blocks; one on two tiers counts once
    u64 capacity = 0;
    std::unique_ptr<Digest> digests[kTiers];
};

class Ranks {
public:
    static constexpr u64 kRankBytes = sizeof(Rank) + sizeof(Digest);

    explicit Ranks(Budget& budget) : budget_(&budget) {}

    Rank& at(u32 rank) const {
        if (!has(rank)) {
            throw UnknownRank(rank);
        }
        return *ranks_[rank];
    }
    bool has(u32 rank) const { return rank < ranks_.size() && ranks_[rank] != nullptr; }

    void add(u32 rank) {
        if (rank >= ranks_.size()) {
            ranks_.resize(rank + 1);
        }
        ranks_[rank] = std::make_unique<Rank>();
        charge(sizeof(Rank));
        ++count_;
    }

    void remove(u32 rank) {
        u64 bytes = sizeof(Rank);
        for (const auto& digest : ranks_[rank]->digests) {
            bytes += digest ? sizeof(Digest) : 0;
        }
        bytes_ -= bytes;
        budget_->used -= bytes;
        ranks_[rank].reset();
        --count_;
        while (!ranks_.empty() && ranks_.back() == nullptr) {
            ranks_.pop_back();
        }
    }

    Digest& digest(Holder holder) {
        auto& own = ranks_[holder.rank]->digests[holder.tier];
        if (!own) {
            own = std::make_unique<Digest>();
            charge(sizeof(Digest));
        }
        return *own;
    }
    u64 count_of(Holder holder) const {
        const auto& own = ranks_[holder.rank]->digests[holder.tier];
        return own ? own->count : 0;
    }

    u32 count() const { return count_; }
    // The largest rank's number plus 1.
    u32 numbers() const { return static_cast<u32>(ranks_.size()); }
    u64 bytes() const { return bytes_; }

private:
    void charge(u64 bytes) {
        bytes_ += bytes;
        budget_->used += bytes;
    }

    Budget* budget_;
    std::vector<std::unique_ptr<Rank>> ranks_;
    u32 count_ = 0;
    u64 bytes_ = 0;
};

}  // namespace kv
