// A tree as Python holds it: arguments in, answers out, one lock.
//
// It may be used from several threads: each call holds the lock, and lets go of the interpreter's where it takes long, or has
// to wait. What is read meanwhile cannot change: it is bytes, or a copy.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "outline.hpp"
#include "python_input.hpp"
#include "tree.hpp"

namespace kv {

namespace nb = nanobind;

class PyTree {
public:
    PyTree(u32 parked_blocks_max, double parked_ttl_s, u64 memory_bytes_max, u64 seed)
        : tree_(std::make_unique<Tree>(Limits{parked_blocks_max, parked_ttl_s, memory_bytes_max, seed})) {}

    // ------------------------------------------------------------------------------------------------- facts

    void add_rank(u32 rank, u64 capacity_blocks) { locked()->add_rank(rank, capacity_blocks); }

    void store(nb::handle rank, nb::handle parent, nb::handle hashes, nb::handle tier, nb::handle now_s) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const double seconds = seconds_in(now_s);
        u64 parent_hash = 0;
        const bool has_parent = optional_hash_in(parent, "parent", parent_hash);
        const HashesIn given(hashes);
        locked()->store(rank_number, has_parent ? &parent_hash : nullptr, given.data(), given.size(), tier_number, seconds);
    }

    void remove(nb::handle rank, nb::handle hashes, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const HashesIn given(hashes);
        locked()->remove(rank_number, given.data(), given.size(), tier_number);
    }

    void clear(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank);
        const u32 tier_bits = tier.is_none() ? kAllTiers : 1u << tier_in(tier);
        locked()->clear(rank_number, tier_bits);
    }

    void drop(nb::handle rank) {
        u32 number = 0;
        if (is_rank(rank, number)) {
            locked()->drop(number);
        }
    }

    nb::list apply_batch(nb::handle rank, nb::handle message, nb::handle now_s) {
        const u32 rank_number = rank_in(rank);
        const double seconds = seconds_in(now_s);
        const nb::bytes bytes = unchanging(message);
        std::vector<Refusal> refusals;
        {
            const nb::gil_scoped_release unlocked;
            const auto* data = reinterpret_cast<const u8*>(bytes.c_str());
            refusals = locked()->apply_batch(rank_number, data, bytes.size(), seconds);
        }
        nb::list found;
        for (const Refusal& refusal : refusals) {
            found.append(nb::make_tuple(refusal.event, refusal.offset, refusal.reason, refusal.refused_blocks));
        }
        return found;
    }

    void load(nb::handle rank, const nb::iterable& chunks, nb::handle now_s) {
        const u32 rank_number = rank_in(rank);
        const double seconds = seconds_in(now_s);
        const Rows rows(chunks);
        const nb::gil_scoped_release unlocked;
        locked()->load(rank_number, rows.views, seconds);
    }

    void repair(nb::handle rank, const nb::bytes& buckets, const nb::iterable& chunks, nb::handle now_s) {
        const u32 rank_number = rank_in(rank);
        const double seconds = seconds_in(now_s);
        const Rows rows(chunks);
        const nb::gil_scoped_release unlocked;
        locked()->repair(rank_number, bytes_of(buckets), rows.views, seconds);
    }

    std::set<u32> expire(double now_s) { return locked()->expire(now_s); }

    void restore_body(const nb::bytes& body, nb::handle now_s) {
        const double seconds = seconds_in(now_s);
        const nb::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        auto made = std::make_unique<Tree>(tree_->limits());
        restore(*made, *tree_, bytes_of(body), body.size(), seconds);
        std::swap(tree_, made);
    }

    // ------------------------------------------------------------------------------------------------- answers

    // Without `ranks`, which are u32s: column i is of rank i.
    u32 match(nb::handle hashes, nb::handle out, const std::optional<nb::bytes>& ranks) {
        const HashesIn given(hashes);
        const DepthsOut depths(out, ranks ? ranks->size() / sizeof(u32) : locked()->rank_numbers());
        // Nothing that may run Python happens while a tree is locked: it could ask the tree.
        const Locked tree = locked();
        const std::size_t numbers = tree->rank_numbers(), count = depths.columns();
        if (ranks ? count * sizeof(u32) != ranks->size() : numbers > count) {
            throw nb::value_error("out: found columns of no rank, or a rank that was registered meanwhile and has no column");
        }
        if (!ranks) {
            return tree->match(given.data(), given.size(), depths.data(), count);
        }
        matched_.resize(kTiers * numbers);
        const u32 found = tree->match(given.data(), given.size(), matched_.data(), numbers);
        const auto* const rank = reinterpret_cast<const u32*>(ranks->c_str());
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            for (std::size_t at = 0; at < count; ++at) {
                depths.data()[tier * count + at] = rank[at] < numbers ? matched_[tier * numbers + rank[at]] : 0;
            }
        }
        return found;
    }

    nb::dict overlaps(nb::handle hashes) {
        const HashesIn given(hashes);
        std::vector<std::int32_t> depths;
        std::size_t columns = 0;
        {
            const Locked tree = locked();
            columns = tree->rank_numbers();
            depths.resize(columns * kTiers);
            tree->match(given.data(), given.size(), depths.data(), columns);
        }
        nb::dict found;
        nb::tuple same;  // ranks often have equal depths, and a tuple can be shared
        const std::int32_t *gpu = depths.data(), *host = gpu + columns, *disk = host + columns, *all = disk + columns;
        std::size_t shared = columns;
        for (std::size_t rank = 0; rank < columns; ++rank) {
            if (all[rank] == 0) {
                continue;
            }
            if (shared == columns || gpu[rank] != gpu[shared] || host[rank] != host[shared] ||
                disk[rank] != disk[shared] || all[rank] != all[shared]) {
                same = nb::make_tuple(gpu[rank], host[rank], disk[rank], all[rank]);
                shared = rank;
            }
            found[nb::int_(rank)] = same;
        }
        return found;
    }

    std::pair<u64, u64> digest_of(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const Locked tree = locked();
        const Digest* found = tree->digest(rank_number, tier_number);
        return found == nullptr ? std::pair<u64, u64>{0, 0} : std::pair<u64, u64>{found->count, found->total()};
    }

    nb::tuple bucket_digests(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        Digest digest;
        {
            const Locked tree = locked();
            if (const Digest* own = tree->digest(rank_number, tier_number)) {
                digest = *own;
            }
        }
        nb::list found;
        for (const u64* bucket = digest.buckets(); bucket != digest.buckets() + Digest::kBuckets; ++bucket) {
            found.append(*bucket);
        }
        return nb::tuple(found);
    }

    nb::list dump_columns(nb::handle rank, u64 chunk_blocks) {
        const u32 rank_number = rank_in(rank);
        std::vector<Columns> chunks;
        {
            const nb::gil_scoped_release unlocked;
            chunks = locked()->dump(rank_number, chunk_blocks);
        }
        nb::list found;
        for (const Columns& chunk : chunks) {
            found.append(nb::make_tuple(to_bytes(chunk.parents), to_bytes(chunk.hashes), to_bytes(chunk.tiers)));
        }
        return found;
    }

    nb::bytes snapshot_body() {
        std::string body;
        {
            const nb::gil_scoped_release unlocked;
            body = locked()->snapshot();
        }
        return to_bytes(body);
    }

    std::vector<u64> children(nb::handle hash) {
        u64 number = 0;
        const bool is_given = optional_hash_in(hash, "sequence_hash", number);
        return locked()->children(is_given ? &number : nullptr);
    }

    nb::dict holders(nb::handle hash) {
        const u64 number = hash_in(hash, "sequence_hash");
        const auto found = locked()->holders(number);
        return to_dict(found);
    }

    nb::bytes chain(nb::handle hash, u64 limit) {
        const u64 number = hash_in(hash, "sequence_hash");
        const std::vector<u64> found = locked()->chain(number, limit);
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(u64));
    }

    // Others get the lock between two slices: a mutex is not fair, so that this thread rests for as long as it takes to wake one.
    Outline outline(const std::vector<std::tuple<u64, double, double>>& requests) {
        std::vector<PassedRequest> passed;
        for (const auto& [hash, heat, used_s] : requests) {
            passed.push_back({hash, heat, used_s});
        }
        const nb::gil_scoped_release unlocked;
        Outline made;
        for (bool has_more = true; has_more; std::this_thread::sleep_for(kRest)) {
            has_more = made.copy(*locked());
        }
        for (std::size_t at = 0; at < passed.size(); at += Outline::kSliceRequests, std::this_thread::sleep_for(kRest)) {
            made.warm(*locked(), passed.data() + at, std::min<std::size_t>(Outline::kSliceRequests, passed.size() - at));
        }
        made.lay_out();
        return made;
    }

    std::set<u32> overfull() { return locked()->overfull(); }
    nb::dict memory() {
        const auto found = locked()->memory();
        return to_dict(found);
    }
    nb::dict structure() {
        const auto found = locked()->structure();
        return to_dict(found);
    }
    std::vector<std::string> self_check() { return locked()->self_check(); }

    // As IndexStatistics has them.
    std::vector<u64> figures() {
        const Locked tree = locked();
        const Counters& counted = tree->counters();
        const ParkedBlocks& parked = tree->parked();
        return {tree->ranks(),           tree->nodes(),          tree->held_blocks(),  parked.size(),
                tree->memory_bytes(),    counted.duplicate_blocks, counted.unknown_removals, parked.parked_total,
                parked.lost_total,       counted.parent_conflicts, counted.refused_blocks};
    }

private:
    // The tree with its lock held. `tree_` is read under the lock, because `restore` replaces it.
    class Locked {
    public:
        explicit Locked(PyTree& owner) : lock_(owner.mutex_, std::try_to_lock) {
            if (!lock_.owns_lock()) {  // its owner may wait for the interpreter's lock: release that while waiting
                const auto unlocked = PyGILState_Check() ? std::make_unique<nb::gil_scoped_release>() : nullptr;
                lock_.lock();
            }
            tree_ = owner.tree_.get();
        }
        Tree* operator->() const { return tree_; }
        const Tree& operator*() const { return *tree_; }

    private:
        std::unique_lock<std::mutex> lock_;
        Tree* tree_ = nullptr;
    };
    Locked locked() { return Locked(*this); }

    // The columns of chunks, which cannot change while this lives.
    struct Rows {
        explicit Rows(const nb::iterable& chunks) {
            for (const nb::handle chunk : chunks) {
                const nb::bytes parents = unchanging(chunk.attr("parents"));
                const nb::bytes hashes = unchanging(chunk.attr("hashes"));
                const nb::bytes tiers = unchanging(chunk.attr("tiers"));
                if (parents.size() != sizeof(u64) * tiers.size() || hashes.size() != parents.size()) {
                    throw nb::value_error("columns: parents, hashes and tiers do not belong together");
                }
                views.push_back({bytes_of(parents), bytes_of(hashes), bytes_of(tiers), tiers.size()});
                kept.insert(kept.end(), {parents, hashes, tiers});
            }
        }
        std::vector<ColumnsView> views;

    private:
        std::vector<nb::bytes> kept;
    };

    // The buffer itself if it is `bytes`, which do not change; else a copy as `bytes`.
    static nb::bytes unchanging(nb::handle buffer) {
        if (PyBytes_CheckExact(buffer.ptr())) {
            return nb::borrow<nb::bytes>(buffer);
        }
        const nb::object view = nb::steal(PyMemoryView_FromObject(buffer.ptr()));
        if (!view.is_valid()) {
            throw nb::python_error();
        }
        nb::object copy = nb::steal(PyBytes_FromObject(view.ptr()));
        if (!copy.is_valid()) {
            throw nb::python_error();
        }
        return nb::borrow<nb::bytes>(copy);
    }

    static const u8* bytes_of(const nb::bytes& bytes) { return reinterpret_cast<const u8*>(bytes.c_str()); }
    static nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
    template <class Key, class Value>
    static nb::dict to_dict(const std::vector<std::pair<Key, Value>>& pairs) {
        nb::dict found;
        for (const auto& each : pairs) {
            found[nb::cast(each.first)] = each.second;
        }
        return found;
    }

    static constexpr std::chrono::microseconds kRest{100};

    std::unique_ptr<Tree> tree_;
    std::vector<std::int32_t> matched_;  // of every rank
    std::mutex mutex_;
};

}  // namespace kv
