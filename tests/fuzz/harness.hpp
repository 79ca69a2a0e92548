// What the fuzzers share: reading an input as a program of small operations, and what must always be true of a tree.
//
// An input is read from its first byte to its last, and zeros follow: `fuzz/__main__.py` writes inputs in the same form.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../indexer/native/outline.hpp"
#include "../../indexer/native/tree.hpp"
#include "state.hpp"

namespace fuzz {

class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

    bool is_empty() const { return at_ == end_; }
    std::uint8_t byte() { return is_empty() ? std::uint8_t{0} : *at_++; }
    std::uint32_t word() {
        const std::uint32_t low = byte();
        return low | static_cast<std::uint32_t>(byte()) << 8;
    }
    // At most `size` bytes, in memory of exactly their size, so that a read beyond them is seen.
    std::vector<std::uint8_t> bytes(std::size_t size) {
        const std::size_t left = static_cast<std::size_t>(end_ - at_);
        const std::uint8_t* begin = at_;
        at_ += size < left ? size : left;
        return std::vector<std::uint8_t>(begin, at_);
    }
    std::vector<std::uint8_t> rest() { return bytes(static_cast<std::size_t>(end_ - at_)); }

private:
    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

// Abort, as libFuzzer and sanitizers do, unless `is_so`.
inline void expect(bool is_so, const char* what) {
    if (!is_so) {
        std::fprintf(stderr, "NOT SO: %s\n", what);
        std::abort();
    }
}

// What a tree counts and looks up agrees with the blocks of its snapshot.
inline void expect_sound(const kv::Tree& tree) {
    const State state = state_of(tree.snapshot());
    std::map<std::pair<std::uint32_t, std::uint32_t>, kv::Digest> digests;
    std::uint64_t held = 0, bytes = 0;
    for (const auto& [hash, block] : state.blocks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> holders;
        for (const std::uint32_t code : std::get<2>(block)) {
            holders.emplace_back(code >> 4, code & kv::kAllTiers);
            for (std::uint32_t tier = 0; tier < kv::kTiers; ++tier) {
                if ((code >> tier & 1) != 0) {
                    digests[{code >> 4, tier}].add(hash);
                    ++digests[{code >> 4, tier}].count;
                }
            }
        }
        held += holders.size();
        expect(tree.holders(hash) == holders, "a block is found, with its holders");
    }
    expect(state.blocks.size() == tree.nodes() && held == tree.held_blocks(), "blocks are counted");
    for (const std::uint32_t rank : state.ranks) {
        for (std::uint32_t tier = 0; tier < kv::kTiers; ++tier) {
            static const kv::Digest nothing;
            const kv::Digest* kept = tree.digest(rank, tier);
            const kv::Digest &own = kept == nullptr ? nothing : *kept, &seen = digests[{rank, tier}];
            expect(own.count == seen.count && std::equal(own.buckets(), own.buckets() + kv::Digest::kBuckets, seen.buckets()),
                   "a digest is that of the blocks held");
        }
    }
    for (const auto& [part, used] : tree.memory()) {
        bytes += used;
    }
    expect(bytes == tree.memory_bytes(), "the parts' bytes are what is used");
}

// Bytes of blocks and ranks, to which no removal adds. A removal may cut runs; that memory is not counted here.
inline std::uint64_t uncut_bytes(const kv::Tree& tree) {
    std::uint64_t bytes = 0;
    for (const auto& [part, used] : tree.memory()) {
        const std::string name = part;
        bytes += name == "blocks" || name == "map" || name == "ranks" ? used : 0;
    }
    return bytes;
}

// Memory is within the limit, or an empty tree's; after removals (`has_removed`) that of cut runs is exempt.
inline void expect_bounded(const kv::Tree& tree, bool has_removed) {
    static const std::uint64_t empty = kv::Tree(kv::Limits{}).memory_bytes();
    const std::uint64_t limit = tree.limits().memory_bytes_max;
    const std::uint64_t used = has_removed ? uncut_bytes(tree) : tree.memory_bytes();
    expect(limit == 0 || used <= std::max(limit, empty), "a tree keeps to its memory");
}

inline std::unique_ptr<kv::Tree> restored(const kv::Tree& old, const std::uint8_t* body, std::size_t size) {
    auto made = std::make_unique<kv::Tree>(old.limits());
    kv::restore(*made, old, body, size);
    return made;
}
inline std::unique_ptr<kv::Tree> restored(const kv::Tree& old, const std::string& body) {
    return restored(old, reinterpret_cast<const std::uint8_t*>(body.data()), body.size());
}

// An outline of a tree that rests has all its blocks, and every node can be found by its last block.
inline void look_at_outline(const kv::Tree& tree, const std::vector<std::uint64_t>& requests) {
    kv::Outline outline;
    while (outline.copy(tree)) {
    }
    for (const std::uint64_t hash : requests) {
        const kv::PassedRequest request{hash, 1, 1};
        outline.warm(tree, &request, 1);
    }
    outline.lay_out();
    expect(outline.blocks() == tree.nodes() && outline.skipped_blocks() == 0, "an outline has all blocks");
    for (std::uint32_t node = 0; node < outline.size(); ++node) {
        expect(outline.find(outline.at(node).last) == node, "a node is found by its last block");
    }
    for (const auto order : {kv::OutlineOrder::subtree, kv::OutlineOrder::heat, kv::OutlineOrder::recent, kv::OutlineOrder::blocks}) {
        outline.children(kv::kNone, order, 1, 3);
    }
}

// Calls `match` on `hashes`, every walk for people, and every dump; of most the only demand is that they end.
inline void look(const kv::Tree& tree, const std::vector<std::uint64_t>& hashes) {
    const std::size_t columns = std::max(tree.rank_numbers(), 1u);
    std::vector<std::int32_t> depths(kv::kTiers * columns);
    tree.prefetch(hashes.data(), hashes.size());
    tree.match(hashes.data(), hashes.size(), depths.data(), columns);
    tree.children(nullptr);
    for (const std::uint64_t hash : hashes) {
        tree.children(&hash);
        tree.holders(hash);
        tree.chain(hash, 9);
    }
    look_at_outline(tree, hashes);
    for (std::uint32_t rank = 0; rank < tree.rank_numbers(); ++rank) {
        try {
            tree.dump(rank, 5);
        } catch (const kv::UnknownRank&) {
        }
    }
}

// A snapshot says all: a tree made of it knows the same, unless there is no memory for both.
inline void expect_restorable(const kv::Tree& tree) {
    const std::string snapshot = tree.snapshot();
    try {
        const std::unique_ptr<kv::Tree> copy = restored(tree, snapshot);
        expect_sound(*copy);
        expect(state_of(copy->snapshot()) == state_of(snapshot), "a restored tree knows what its snapshot says");
    } catch (const kv::IndexFull&) {
        expect(tree.limits().memory_bytes_max != 0, "no unbounded tree is full");
    }
}

// Nothing is left of a tree without ranks.
inline void expect_drained(kv::Tree& tree) {
    for (std::uint32_t rank = tree.rank_numbers(); rank-- > 0;) {
        tree.drop(rank);
    }
    static const std::string empty = kv::Tree(kv::Limits{}).snapshot();
    expect_sound(tree);
    expect(tree.snapshot() == empty, "a drained tree's snapshot is a new tree's");
    for (const auto& [part, count] : tree.structure()) {
        expect(count == 0, part);
    }
}

}  // namespace fuzz
