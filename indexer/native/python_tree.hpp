// A tree for Python. Several threads may use it: each call holds the interpreter's lock while it reads or changes the tree. An
// outline releases that lock between two slices, and for work on its own copies.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "outline.hpp"
#include "tree.hpp"

namespace kv {

namespace nb = nanobind;

// Callers have checked what came from outside. A wrong argument is a bug, and raises a ValueError or a TypeError.

// Sequence hashes: `bytes`, which are read in place, or a sequence of numbers, which is copied; no other buffer.
class HashesIn {
public:
    explicit HashesIn(nb::handle given) {
        PyObject* object = given.ptr();
        if (PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) % static_cast<Py_ssize_t>(sizeof(u64)) == 0) {
            data_ = reinterpret_cast<const u64*>(PyBytes_AS_STRING(object));
            count_ = static_cast<std::size_t>(PyBytes_GET_SIZE(object)) / sizeof(u64);
            return;
        }
        if (PyObject_CheckBuffer(object) || !nb::try_cast(given, copy_)) {
            throw nb::type_error("sequence_hashes: u64 numbers, or packed in bytes");
        }
        data_ = copy_.data();
        count_ = copy_.size();
    }
    HashesIn(const HashesIn&) = delete;
    HashesIn& operator=(const HashesIn&) = delete;

    const u64* data() const { return data_; }
    std::size_t size() const { return count_; }

private:
    std::vector<u64> copy_;
    const u64* data_ = nullptr;
    std::size_t count_ = 0;
};

// Writable int32s: 4 rows of `columns` each.
class DepthsOut {
public:
    explicit DepthsOut(nb::handle out) {
        if (PyObject_GetBuffer(out.ptr(), &view_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
            throw nb::python_error();
        }
    }
    DepthsOut(const DepthsOut&) = delete;
    DepthsOut& operator=(const DepthsOut&) = delete;
    ~DepthsOut() { PyBuffer_Release(&view_); }

    std::int32_t* data() const { return static_cast<std::int32_t*>(view_.buf); }
    std::size_t columns() const { return static_cast<std::size_t>(view_.len) / (kTiers * sizeof(std::int32_t)); }

private:
    Py_buffer view_{};
};

inline u32 checked_tier(u32 tier) {
    if (tier >= kTiers) {
        throw nb::value_error("tier: beyond 3");
    }
    return tier;
}

// Nodes of an outline as `OutlineNode`s of indexer/index/prefix_index.py.
inline nb::module_ index_words() { return nb::module_::import_("indexer.index.prefix_index"); }
inline nb::list outline_nodes(const Outline& outline, const std::vector<u32>& numbers) {
    const nb::object type = index_words().attr("OutlineNode");
    nb::list found;
    for (const u32 number : numbers) {
        const OutlineNode& of = outline.at(number);
        found.append(type(of.first, of.last, of.blocks, of.subtree_blocks, of.depth_blocks, of.children.size(), of.heat,
                          of.used_s, of.stored_s));
    }
    return found;
}

inline nb::list outline_children(const Outline& outline, std::optional<u32> node, nb::handle order, u64 offset, u64 limit) {
    const auto by = nb::cast<u32>(index_words().attr("OUTLINE_ORDERS").attr("index")(order));
    std::vector<u32> numbers;
    {
        const nb::gil_scoped_release unlocked;
        numbers = outline.children(node.value_or(kNone), static_cast<OutlineOrder>(by), offset, limit);
    }
    return outline_nodes(outline, numbers);
}

// The nodes from `node` up, at most `limit`.
inline nb::list outline_path(const Outline& outline, u32 node, u64 limit) {
    std::vector<u32> numbers;
    for (; node != kNone && numbers.size() < limit; node = outline.at(node).parent) {
        numbers.push_back(node);
    }
    return outline_nodes(outline, numbers);
}

class PyTree {
public:
    PyTree(u64 memory_bytes_max, u64 seed) : tree_(std::make_unique<Tree>(Limits{memory_bytes_max, seed})) {}

    // ------------------------------------------------------------------------------------------------- changes

    void add_rank(u32 rank, u32 capacity_blocks) {
        if (rank > kRankMax) {
            throw nb::value_error("rank: beyond 4095");
        }
        tree_->add_rank(rank, capacity_blocks);
    }

    std::size_t store(u32 rank, std::optional<u64> parent, nb::handle hashes, u32 tier, double now_s) {
        const HashesIn given(hashes);
        return tree_->store(rank, parent ? &*parent : nullptr, given.data(), given.size(), checked_tier(tier), now_s);
    }

    void remove(u32 rank, nb::handle hashes, u32 tier) {
        const HashesIn given(hashes);
        tree_->remove(rank, given.data(), given.size(), checked_tier(tier));
    }

    void clear(u32 rank, std::optional<u32> tier) { tree_->clear(rank, tier ? 1u << checked_tier(*tier) : kAllTiers); }
    void drop(u32 rank) { tree_->drop(rank); }

    std::size_t apply_batch(u32 rank, const nb::bytes& message, double now_s) {
        return tree_->apply_batch(rank, bytes_of(message), message.size(), now_s);
    }

    std::size_t load(u32 rank, const nb::iterable& chunks, double now_s) {
        const Rows rows(chunks);
        return tree_->load(rank, rows.views, now_s);
    }

    std::size_t repair(u32 rank, const nb::bytes& buckets, const nb::iterable& chunks, double now_s) {
        const Rows rows(chunks);
        return tree_->repair(rank, bytes_of(buckets), rows.views, now_s);
    }

    void restore_body(const nb::bytes& body) {
        auto made = std::make_unique<Tree>(tree_->limits());
        restore(*made, *tree_, bytes_of(body), body.size());
        std::swap(tree_, made);
    }

    // ------------------------------------------------------------------------------------------------- answers

    // Column i is of the i-th of `ranks`, which are u32s; without `ranks` it is of rank i.
    u32 match(nb::handle hashes, nb::handle out, const std::optional<nb::bytes>& ranks) {
        const HashesIn given(hashes);
        const DepthsOut depths(out);
        const std::size_t numbers = tree_->rank_numbers(), count = depths.columns();
        if (ranks ? count * sizeof(u32) != ranks->size() : numbers > count) {
            throw nb::value_error("out: not a column for each rank");
        }
        if (!ranks) {
            return tree_->match(given.data(), given.size(), depths.data(), count);
        }
        matched_.resize(kTiers * numbers);
        const u32 found = tree_->match(given.data(), given.size(), matched_.data(), numbers);
        const auto* const rank = reinterpret_cast<const u32*>(ranks->c_str());
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            for (std::size_t at = 0; at < count; ++at) {
                depths.data()[tier * count + at] = rank[at] < numbers ? matched_[tier * numbers + rank[at]] : 0;
            }
        }
        return found;
    }

    std::pair<u64, u64> digest_of(u32 rank, u32 tier) {
        const Digest* found = tree_->digest(rank, checked_tier(tier));
        return found == nullptr ? std::pair<u64, u64>{0, 0} : std::pair<u64, u64>{found->count, found->total()};
    }

    nb::tuple bucket_digests(u32 rank, u32 tier) {
        const Digest* own = tree_->digest(rank, checked_tier(tier));
        const Digest digest = own == nullptr ? Digest{} : *own;  // a copy: another thread may run while the list grows
        nb::list found;
        for (const u64* bucket = digest.buckets(); bucket != digest.buckets() + Digest::kBuckets; ++bucket) {
            found.append(*bucket);
        }
        return nb::tuple(found);
    }

    nb::list dump_columns(u32 rank, u64 chunk_blocks) {
        nb::list found;
        for (const Columns& chunk : tree_->dump(rank, chunk_blocks)) {
            found.append(nb::make_tuple(to_bytes(chunk.parents), to_bytes(chunk.hashes), to_bytes(chunk.tiers)));
        }
        return found;
    }

    nb::bytes snapshot_body() { return to_bytes(tree_->snapshot()); }

    std::vector<u64> children(std::optional<u64> hash) { return tree_->children(hash ? &*hash : nullptr); }

    nb::dict holders(u64 hash) { return to_dict(tree_->holders(hash)); }

    nb::bytes chain(u64 hash, u64 limit) {
        const std::vector<u64> found = tree_->chain(hash, limit);
        return nb::bytes(found.data(), found.size() * sizeof(u64));
    }

    // Other threads run between two slices: after each, this one waits for the interpreter's lock again.
    Outline outline(const std::vector<std::tuple<u64, double, double>>& requests) {
        std::vector<PassedRequest> passed;
        for (const auto& [hash, heat, used_s] : requests) {
            passed.push_back({hash, heat, used_s});
        }
        Outline made;
        while (made.copy(*tree_)) {
            rest();
        }
        for (std::size_t at = 0; at < passed.size(); at += Outline::kSliceRequests) {
            made.warm(*tree_, passed.data() + at, std::min<std::size_t>(Outline::kSliceRequests, passed.size() - at));
            rest();
        }
        const nb::gil_scoped_release unlocked;
        made.lay_out();
        return made;
    }

    nb::dict memory() { return to_dict(tree_->memory()); }
    nb::dict structure() { return to_dict(tree_->structure()); }

    // The fields of IndexStatistics, in their order.
    std::vector<u64> figures() {
        const Counters& counted = tree_->counters();
        return {tree_->ranks(),           tree_->nodes(),           tree_->held_blocks(),     tree_->memory_bytes(),
                counted.duplicate_blocks, counted.unknown_removals, counted.parent_conflicts, counted.refused_blocks};
    }

private:
    // The columns of chunks, which cannot change while this lives.
    struct Rows {
        explicit Rows(const nb::iterable& chunks) {
            for (const nb::handle chunk : chunks) {
                const nb::bytes parents = nb::cast<nb::bytes>(chunk.attr("parents"));
                const nb::bytes hashes = nb::cast<nb::bytes>(chunk.attr("hashes"));
                const nb::bytes tiers = nb::cast<nb::bytes>(chunk.attr("tiers"));
                views.push_back({bytes_of(parents), bytes_of(hashes), bytes_of(tiers), tiers.size()});
                kept.insert(kept.end(), {parents, hashes, tiers});
            }
        }
        std::vector<ColumnsView> views;

    private:
        std::vector<nb::bytes> kept;
    };

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

    static void rest() {  // lets other threads take the interpreter's lock
        const nb::gil_scoped_release unlocked;
        std::this_thread::sleep_for(std::chrono::microseconds{100});
    }

    std::unique_ptr<Tree> tree_;
    std::vector<std::int32_t> matched_;  // depths of every rank, for `match`
};

}  // namespace kv
