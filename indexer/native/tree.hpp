// The native prefix index, as indexer/index/prefix_index.py describes it, made of blocks, a map, sets and runs. It knows
// nothing of Python, and only one thread at a time may use it.
//
//     tree.cpp      ranks, and the tree as a whole          match.cpp     how much of a prefix each rank holds
//     store.cpp     stores                                  walk.cpp      making dumps; walks for people
//     remove.cpp    removals and clears                     snapshot.cpp  the whole state as bytes
//     load.cpp      loading dumps; repairs                  outline.hpp   its shape, for people
//     batch.cpp     messages of canonical batches
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "block_map.hpp"
#include "blocks.hpp"
#include "common.hpp"
#include "holder_sets.hpp"
#include "ranks.hpp"
#include "runs.hpp"

namespace kv {

// The batches of a message: consecutive seqs of one epoch, and the time of the last.
struct Span {
    u64 epoch, first_seq, last_seq;
    std::int64_t time_ns;
};
// Returns nothing if the message is malformed, or its seqs are not consecutive.
std::optional<Span> message_span(const u8* data, std::size_t size);

// Rows of a dump, by column; `tiers` bits 0..3: held on this tier, bit 7: has a parent.
struct Columns {
    std::string parents, hashes, tiers;
};
struct ColumnsView {
    const u8* parents;
    const u8* hashes;
    const u8* tiers;
    std::size_t rows;
};
constexpr u8 kRowHasParent = 0x80;

struct Counters {
    u64 duplicate_blocks = 0, unknown_removals = 0, parent_conflicts = 0, refused_blocks = 0;
};

class Tree {
public:
    explicit Tree(const Limits& limits);
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    const Limits& limits() const { return limits_; }
    const Counters& counters() const { return counters_; }

    // changes; all but `add_rank` and `drop` throw UnknownRank for an unknown rank, and then change nothing. A returned
    // `size_t` is the number of blocks for which there was no memory.
    void add_rank(u32 rank, u64 capacity_blocks);
    std::size_t store(u32 rank, const u64* parent, const u64* hashes, std::size_t count, u32 tier, double now_s);
    void remove(u32 rank, const u64* hashes, std::size_t count, u32 tier);
    void clear(u32 rank, u32 tier_bits);
    void drop(u32 rank);
    std::size_t load(u32 rank, const std::vector<ColumnsView>& chunks, double now_s);
    // `buckets`: 256 bits, set for the buckets to repair; afterwards the rank's blocks in these buckets are exactly the rows
    std::size_t repair(u32 rank, const u8* buckets, const std::vector<ColumnsView>& chunks, double now_s);
    // throws Malformed, and then nothing has changed
    std::size_t apply_batch(u32 rank, const u8* data, std::size_t size, double now_s);

    // queries
    // writes to row t, one of 4, how many blocks the rank of each column holds on tiers 0..t; returns the most of any
    u32 match(const u64* hashes, std::size_t count, std::int32_t* out, std::size_t columns) const;
    // fetches the places of these hashes in the map, which are read next
    void prefetch(const u64* hashes, std::size_t count) const;
    u32 rank_numbers() const { return ranks_.numbers(); }
    const Digest* digest(u32 rank, u32 tier) const;
    std::vector<Columns> dump(u32 rank, std::size_t chunk_blocks) const;
    std::vector<u64> children(const u64* hash) const;  // nullptr: of the root
    std::vector<std::pair<u32, u32>> holders(u64 hash) const;
    // the blocks from `hash` on up to a fork, at most `limit`
    std::vector<u64> chain(u64 hash, std::size_t limit) const;
    std::string snapshot() const;

    // figures
    u64 nodes() const { return map_.size(); }
    u64 held_blocks() const;
    u32 ranks() const { return ranks_.count(); }
    u64 memory_bytes() const { return budget_.used; }
    std::vector<std::pair<const char*, u64>> memory() const;
    std::vector<std::pair<const char*, u64>> structure() const;

private:
    friend class Outline;
    friend class SnapshotReader;
    friend void restore(Tree& made, const Tree& old, const u8* data, std::size_t size);

    struct Grown {
        std::size_t count;  // blocks that were added
        u32 last;           // the last of them; `above` if there are none
    };
    struct Growth {
        u32 run;  // 0: there is no memory for one
        bool is_new;
    };
    struct Piece {
        u32 offset, length;  // of a run
    };

    u32 find(u64 hash) const { return map_.find(hash); }

    // tree.cpp
    void reserve_for(u64 capacity_blocks);
    void reset_if_empty();

    // store.cpp
    u32 placeholder(u64 hash, double now_s);
    std::size_t attach(u32 above, const u64* hashes, std::size_t count, Holder holder, double now_s);
    u32 find_behind(u32 above, u64 hash) const;
    std::size_t not_held(const u64* hashes, std::size_t count, Holder holder) const;
    bool has_room_behind(u32 above) const;
    bool is_held(u32 block, Holder holder) const;
    bool is_affordable(Holder holder) const;
    void hold(u32 run, u32 offset, u32 length, Holder holder, double now_s);
    void link(u32 block, u32 above);
    u32 tail_at(u32 block);
    Grown grow_for(Holder holder, u32 above, const u64* hashes, std::size_t count, double now_s);
    Grown grow(u32 above, const u64* hashes, std::size_t count, u32 set, Digest* digest, double now_s);
    Growth growth_behind(u32 above, std::size_t count, u32 set, double now_s);
    u32 fill(u32 run, const u64* hashes, u32 count, Digest* digest);

    // remove.cpp
    Piece piece_at(const u64* hashes, std::size_t left, u32 block) const;
    void release(u32 run, u32 offset, u32 length, Holder holder);
    void prune(u32 run);
    void erase_last(u32 run, u32 count);
    void clear_tier(Holder holder);

    // batch.cpp
    void prefetch_event(const u8* frame) const;

    // load.cpp
    std::size_t hold_rows(u32 rank, const std::vector<ColumnsView>& chunks, double now_s);
    std::vector<u64> held_in(const u8* buckets, Holder holder) const;
    std::size_t load_chain(u32 rank, const ColumnsView& rows, std::size_t at, double now_s);

    // walk.cpp
    u32 next_in_walk(u32 run) const;
    std::vector<std::pair<u32, u32>> members(u32 set) const;

    const Limits limits_;
    Budget budget_;
    Blocks blocks_;
    BlockMap map_;
    HolderSets sets_;
    Runs runs_;
    Ranks ranks_;
    Counters counters_;
    std::vector<u64> chain_;  // hashes of the event or the rows that are being applied, aligned
};

// Gives `made`, a new tree, the state of a snapshot's body and the counters of `old`. Throws Malformed or IndexFull; then
// `made` must not be used.
void restore(Tree& made, const Tree& old, const u8* data, std::size_t size);

// How many leading hashes of both are the same, at most `count`.
std::size_t common_prefix(const u64* left, const u64* right, std::size_t count);

}  // namespace kv
