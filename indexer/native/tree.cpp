// Facts: what stores, removals, clears and drops do to blocks, runs and sets.
#include "tree.hpp"

#include <algorithm>
#include <cstring>

namespace kv {

namespace {

constexpr u32 kLineBlocks = 8, kSlotsAhead = 48;  // of a store: hashes in a cache line, and how far ahead slots are fetched
constexpr u32 kGrowingOrderMax = 3;            // a chain that grows block by block gets extents of up to 32 slots
constexpr u64 kReservedBlocksMax = u64{1} << 24;
constexpr u64 kWorthReset = u64{8} << 20;      // bytes; an empty tree with more gives them back

}  // namespace

std::size_t common_prefix(const u64* left, const u64* right, std::size_t count) {
    std::size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        u64 differ = 0;
        for (std::size_t lane = 0; lane < 8; ++lane) {
            differ |= left[at + lane] ^ right[at + lane];
        }
        if (differ != 0) {
            break;
        }
    }
    while (at < count && left[at] == right[at]) {
        ++at;
    }
    return at;
}

Tree::Tree(const Limits& limits)
    : limits_(limits),
      budget_{limits.memory_bytes_max},
      blocks_(budget_),
      map_(budget_, blocks_, limits.seed),
      sets_(budget_),
      runs_(budget_, blocks_, sets_),
      ranks_(budget_),
      parked_(budget_, limits.parked_blocks_max, limits.parked_ttl_s) {}

// ------------------------------------------------------------------------------------------------- ranks

void Tree::add_rank(u32 rank, u64 capacity_blocks) {
    if (!ranks_.has(rank)) {
        if (!budget_.fits_much(Ranks::kRankBytes + blocks_.bytes_for_more())) {
            throw IndexFull("no memory for another rank, and blocks of it");
        }
        ranks_.add(rank);
    }
    ranks_.at(rank).capacity = std::max(ranks_.at(rank).capacity, capacity_blocks);
    u64 all = 0;
    for (u32 each = 0; each < ranks_.numbers(); ++each) {
        all += ranks_.has(each) ? ranks_.at(each).capacity : 0;
    }
    reserve_for(all);
}

// The map is made large beforehand, though not beyond a quarter of what memory allows.
void Tree::reserve_for(u64 capacity_blocks) {
    u64 count = std::min(capacity_blocks, kReservedBlocksMax);
    if (limits_.memory_bytes_max != 0) {
        count = std::min(count, limits_.memory_bytes_max / 64);
    }
    map_.reserve(count);
}

void Tree::drop(u32 rank) {
    if (ranks_.has(rank)) {
        clear(rank, (1u << kTiers) - 1);
        ranks_.remove(rank);
    }
}

std::size_t Tree::refuse(u32 rank, std::size_t blocks) {
    counters_.refused_blocks += blocks;
    ranks_.at(rank).is_overfull = true;
    return blocks;
}

std::set<u32> Tree::overfull() const {
    std::set<u32> found;
    for (u32 rank = 0; rank < ranks_.numbers(); ++rank) {
        if (ranks_.has(rank) && ranks_.at(rank).is_overfull) {
            found.insert(rank);
        }
    }
    return found;
}

// ------------------------------------------------------------------------------------------------- store

// Returns how many of the blocks there was no memory for.
std::size_t Tree::store(u32 rank, const u64* parent, const u64* hashes, std::size_t count, u32 tier, double now_s) {
    ranks_.at(rank);
    u32 above = kNone;
    std::size_t at = 0;
    if (parent != nullptr) {
        prefetch(hashes, std::min<std::size_t>(count, 1));
        u64 missing = *parent;
        above = find(missing);
        while (above == kNone && at < count) {
            if (!parked_.park({rank, hashes[at], tier}, missing, now_s)) {
                return refuse(rank, not_held(hashes + at, count - at, {rank, tier}));
            }
            missing = hashes[at++];
            above = find(missing);
        }
    }
    return attach_and_wake(above, hashes + at, count - at, {rank, tier}, now_s);
}

// The chain hangs behind `above`; what waited for one of its blocks hangs there before the next one comes.
std::size_t Tree::attach_and_wake(u32 above, const u64* hashes, std::size_t count, Holder holder, double now_s) {
    std::size_t at = 0;
    while (at < count) {
        std::size_t stop = count;
        if (!parked_.empty()) {
            stop = at;
            while (stop + 1 < count && !parked_.awaits(hashes[stop])) {
                ++stop;
            }
            ++stop;
        }
        at += attach(above, hashes + at, stop - at, holder, now_s);
        if (at < stop) {
            return refuse(holder.rank, not_held(hashes + at, count - at, holder));
        }
        wake(hashes[at - 1], now_s);
        above = at < count ? find(hashes[at - 1]) : kNone;
    }
    return 0;
}

std::size_t Tree::not_held(const u64* hashes, std::size_t count, Holder holder) const {
    std::size_t missing = 0;
    for (std::size_t at = 0; at < count; ++at) {
        const u32 block = find(hashes[at]);
        missing += block == kNone || !sets_.contains(runs_[runs_.of(block)].set, holder);
    }
    return missing;
}

void Tree::wake(u64 hash, double now_s) {
    if (parked_.empty()) {
        return;
    }
    std::vector<u64> came{hash};
    while (!came.empty()) {
        const u64 parent = came.back();
        came.pop_back();
        for (const ParkedBlock& block : parked_.take(parent)) {
            if (attach(find(parent), &block.hash, 1, {block.rank, block.tier}, now_s) == 0) {
                refuse(block.rank, 1);
            } else {
                came.push_back(block.hash);
            }
        }
    }
}

// Hold a chain behind `above` (kNone: from the beginning); return how many of its blocks there was memory for.
std::size_t Tree::attach(u32 above, const u64* hashes, std::size_t count, Holder holder, double now_s) {
    std::size_t at = 0;
    while (at < count) {
        u32 block = has_room_behind(above) ? kNone : find_behind(above, hashes[at]);
        if (block == kNone) {
            const Grown grown = grow_for(holder, above, hashes + at, count - at, now_s);
            if (grown.count != 0) {
                at += grown.count;
                above = grown.last;
                continue;
            }
            block = find(hashes[at]);
        }
        if (block == kNone || !is_affordable(block, holder)) {
            break;
        }
        link(block, above);
        const u32 run = runs_.of(block), offset = block - runs_[run].begin;
        const std::size_t most = std::min<std::size_t>(count - at, runs_[run].length - offset);
        const u32 length = static_cast<u32>(common_prefix(hashes + at, blocks_.hashes() + block, most));
        hold(run, offset, length, holder, now_s);
        above = block + length - 1;
        at += length;
    }
    return at;
}

// Whether nothing is behind `above` yet, and its extent has room: then what comes there is most likely new.
bool Tree::has_room_behind(u32 above) const {
    if (above == kNone) {
        return false;
    }
    const Run& run = runs_[runs_.of(above)];
    return run.last() == above && run.child_count == 0 && blocks_.used(run.extent) < blocks_.capacity(run.extent);
}

// Whether there is memory for one more holder of the block, where it is not held by him already.
bool Tree::is_affordable(u32 block, Holder holder) const {
    return budget_.limit == 0 || sets_.contains(runs_[runs_.of(block)].set, holder) ||
        budget_.fits(cost_of_change(holder));
}

// New blocks that one rank holds on one tier.
Tree::Grown Tree::grow_for(Holder holder, u32 above, const u64* hashes, std::size_t count, double now_s) {
    if (!budget_.fits(cost_of_change(holder))) {
        return {0, above};
    }
    const u32 set = sets_.with(HolderSets::kEmpty, holder);
    sets_.acquire(set);
    Digest& digest = ranks_.digest(holder);
    const Grown grown = grow(above, hashes, count, set, &digest, now_s);
    sets_.release(set);
    digest.count += grown.count;
    ranks_.at(holder.rank).held += grown.count;
    return grown;
}

// The block of that hash, most likely the next one behind `above`.
u32 Tree::find_behind(u32 above, u64 hash) const {
    if (above != kNone) {
        const Run& run = runs_[runs_.of(above)];
        const u32 guess = run.last() != above ? above + 1 : run.first_child != 0 ? runs_[run.first_child].begin : above;
        if (blocks_.hash(guess) == hash) {
            return guess;
        }
    }
    return find(hash);
}

// `block` was said to come behind `above`: it does, or it is a conflict.
void Tree::link(u32 block, u32 above) {
    const u32 run = runs_.of(block);
    const Run& own = runs_[run];
    if (block != own.begin) {
        counters_.parent_conflicts += above != block - 1;
        return;
    }
    if (!own.is_parent_unknown) {
        const u32 parent = own.parent == Runs::kRoot ? kNone : runs_[own.parent].last();
        counters_.parent_conflicts += above != parent;
        return;
    }
    if (above != kNone && runs_.is_behind(above, run)) {
        ++counters_.parent_conflicts;
        return;
    }
    runs_[run].is_parent_unknown = 0;
    if (above != kNone) {
        const u32 parent = tail_at(above);
        runs_.unlink(run);
        runs_.link(run, parent);
    }
}

// The run that ends with `block`.
u32 Tree::tail_at(u32 block) {
    const u32 run = runs_.of(block);
    return runs_[run].last() == block ? run : runs_.split(run, block - runs_[run].begin + 1).head;
}

// New blocks with one set of holders behind `above`: as many as are new in a row, and as memory allows.
Tree::Grown Tree::grow(u32 above, const u64* hashes, std::size_t count, u32 set, Digest* digest, double now_s) {
    Grown grown{0, above};
    while (grown.count < count) {
        const Place place = place_behind(grown.last, count - grown.count, set, now_s);
        if (place.run == Runs::kRoot) {
            break;
        }
        const u32 extent = runs_[place.run].extent;
        const u32 room = blocks_.capacity(extent) - blocks_.used(extent);
        const u32 most = static_cast<u32>(std::min<std::size_t>(room, count - grown.count));
        const u32 filled = fill(place.run, hashes + grown.count, most, digest);
        if (filled == 0) {
            if (place.is_new) {
                blocks_.free_if_empty(extent);
                runs_.remove(place.run);
            }
            break;
        }
        if (place.is_new) {
            runs_.link(place.run, grown.last == kNone ? Runs::kRoot : tail_at(grown.last));
        }
        grown = {grown.count + filled, runs_[place.run].last()};
        if (filled < most) {
            break;
        }
    }
    return grown;
}

// The run that takes what comes behind `above`: the same one, or a new one; in the same extent, where that ends there and
// has room, so that runs which become alike later can be merged.
Tree::Place Tree::place_behind(u32 above, std::size_t count, u32 set, double now_s) {
    if (!budget_.fits(sizeof(Run))) {
        return {Runs::kRoot, false};
    }
    u32 order = order_for(count);
    if (above != kNone) {
        const u32 run = runs_.of(above);
        Run& own = runs_[run];
        const u32 used = blocks_.used(own.extent);
        const bool is_leaf = own.last() == above && own.child_count == 0;
        if (own.last() == above && own.end() == own.extent + used && used < blocks_.capacity(own.extent)) {
            if (is_leaf && own.set == set) {
                own.last_stored_s = std::max(own.last_stored_s, now_s);
                return {run, false};
            }
            return {runs_.add(own.extent, own.end(), set, now_s), true};
        }
        if (is_leaf && own.set == set) {
            order = std::max(order, std::min(blocks_.order(own.extent) + 1, kGrowingOrderMax));
        }
    }
    u32 extent = blocks_.allocate(order);
    while (extent == kNone && order > 0) {
        extent = blocks_.allocate(--order);
    }
    return extent == kNone ? Place{Runs::kRoot, false} : Place{runs_.add(extent, extent, set, now_s), true};
}

// The most that a new holder of known blocks may cost in bytes, beside blocks.
u64 Tree::cost_of_change(Holder holder) const {
    const bool has_digest = ranks_.at(holder.rank).digests[holder.tier] != nullptr;
    return (has_digest ? 0 : sizeof(Digest)) + 2 * sizeof(Run) + sets_.bytes_for_more(ranks_.numbers());
}

// The run has more blocks, up to the first that is known already or finds no room in the map; return how many.
u32 Tree::fill(u32 run, const u64* hashes, u32 count, Digest* digest) {
    const u32 begin = runs_[run].end();
    u64* const own = blocks_.hashes() + begin;
    SpotsAhead spots(map_, hashes, count);
    u32 done = 0;
    for (; done < count; ++done) {
        if (done % kLineBlocks == 0) {
            blocks_.prefetch(begin + done + kSlotsAhead);
            __builtin_prefetch(hashes + done + kSlotsAhead);
        }
        own[done] = hashes[done];
        if (map_.find_or_insert(hashes[done], spots.at(done), begin + done) != begin + done) {
            break;
        }
        blocks_.set_run(begin + done, run);
        if (digest != nullptr) {
            digest->add(hashes[done]);
        }
    }
    runs_[run].length += done;
    blocks_.extend(runs_[run].extent, done);
    return done;
}

void Tree::hold(u32 run, u32 offset, u32 length, Holder holder, double now_s) {
    runs_[run].last_stored_s = std::max(runs_[run].last_stored_s, now_s);
    const u32 set = runs_[run].set;
    if (sets_.contains(set, holder)) {
        counters_.duplicate_blocks += length;
        return;
    }
    Rank& rank = ranks_.at(holder.rank);
    rank.held += sets_.tiers_of(set, holder.rank) == 0 ? length : 0;
    Digest& digest = ranks_.digest(holder);
    digest.count += length;
    const u64* hashes = blocks_.hashes() + runs_[run].begin + offset;
    for (u32 at = 0; at < length; ++at) {
        digest.add(hashes[at]);
    }
    run = runs_.isolate(run, offset, length);
    runs_.set_holders(run, sets_.with(set, holder));
    runs_.merge_around(run);
}

// ------------------------------------------------------------------------------------------------- remove

void Tree::remove(u32 rank, const u64* hashes, std::size_t count, u32 tier) {
    ranks_.at(rank);
    const Holder holder{rank, tier};
    std::size_t fetched = 0;
    for (std::size_t at = 0; at < count;) {
        if (at >= fetched) {
            fetched = std::min<std::size_t>(count, at + SpotsAhead::kAhead);
            prefetch(hashes + at, fetched - at);
        }
        const bool was_parked = !parked_.empty() && parked_.remove({rank, hashes[at], tier});
        const u32 block = find(hashes[at]);
        Row row{0, 1};
        bool is_held = false;
        if (block != kNone) {
            row = row_at(hashes + at, parked_.empty() ? count - at : 1, block);
            is_held = sets_.contains(runs_[runs_.of(block)].set, holder);
        }
        if (is_held) {
            release(runs_.of(block), row.offset, row.length, holder);
        } else {
            counters_.unknown_removals += row.length - (was_parked ? 1 : 0);
        }
        at += row.length;
    }
    reset_if_empty();
}

// The blocks of one run, from `block` on up or down, that the hashes name in a row.
Tree::Row Tree::row_at(const u64* hashes, std::size_t left, u32 block) const {
    const Run& run = runs_[runs_.of(block)];
    const u32 offset = block - run.begin;
    const std::size_t most = std::min<std::size_t>(left, run.length - offset);
    const u32 upwards = static_cast<u32>(common_prefix(hashes, blocks_.hashes() + block, most));
    u32 downwards = 1;
    while (downwards < left && downwards <= offset && hashes[downwards] == blocks_.hash(block - downwards)) {
        ++downwards;
    }
    return upwards >= downwards ? Row{offset, upwards} : Row{offset - (downwards - 1), downwards};
}

void Tree::release(u32 run, u32 offset, u32 length, Holder holder) {
    const u32 before = runs_[run].set;
    const u32 after = sets_.without(before, holder);
    sets_.acquire(after);
    Digest& digest = ranks_.digest(holder);
    digest.count -= length;
    ranks_.at(holder.rank).held -= sets_.tiers_of(after, holder.rank) == 0 ? length : 0;
    const u64* hashes = blocks_.hashes() + runs_[run].begin + offset;
    for (u32 at = 0; at < length; ++at) {
        digest.discard(hashes[at]);
    }
    const Run& own = runs_[run];
    if (after == HolderSets::kEmpty && own.child_count == 0 && offset != 0 && offset + length == own.length) {
        erase_last(run, length);
    } else {
        run = runs_.isolate(run, offset, length);
        runs_.set_holders(run, after);
        if (after == HolderSets::kEmpty && runs_[run].child_count == 0) {
            prune(run);
        } else {
            runs_.merge_around(run);
        }
    }
    sets_.release(after);
}

// The run is no more where nobody holds it and nothing hangs on it; and so on, upwards.
void Tree::prune(u32 run) {
    while (run != Runs::kRoot && runs_[run].set == HolderSets::kEmpty && runs_[run].child_count == 0) {
        const u32 parent = runs_[run].parent;
        erase_last(run, runs_[run].length);
        runs_.unlink(run);
        runs_.remove(run);
        run = parent;
    }
    runs_.merge_with_child(run);
}

// The last `count` blocks of a run that ends its extent are no more.
void Tree::erase_last(u32 run, u32 count) {
    Run& own = runs_[run];
    own.length -= count;
    const u64* hashes = blocks_.hashes() + own.end();
    SpotsAhead spots(map_, hashes, count);
    for (u32 at = 0; at < count; ++at) {
        map_.erase(spots.at(at), own.end() + at);
    }
    blocks_.shrink(own.extent, count);
}

void Tree::clear(u32 rank, u32 tier_bits) {
    ranks_.at(rank);
    for (u32 tier = 0; tier < kTiers; ++tier) {
        if ((tier_bits >> tier & 1) != 0) {
            parked_.forget(rank, tier);
            clear_tier({rank, tier});
        }
    }
    if (tier_bits == (1u << kTiers) - 1) {
        ranks_.at(rank).is_overfull = false;
    }
    reset_if_empty();
}

void Tree::clear_tier(Holder holder) {
    for (u32 run = 1; run < runs_.numbers() && ranks_.count_of(holder) != 0; ++run) {
        if (runs_[run].length != 0 && sets_.contains(runs_[run].set, holder)) {
            release(run, 0, runs_[run].length, holder);
        }
    }
}

void Tree::reset_if_empty() {
    if (map_.size() != 0 || budget_.used < kWorthReset) {
        return;
    }
    runs_.reset();
    sets_.reset();
    blocks_.reset();
    map_.reset();
}

// ------------------------------------------------------------------------------------------------- load

void Tree::load(u32 rank, const std::vector<ColumnsView>& chunks, double now_s) {
    clear(rank, (1u << kTiers) - 1);
    for (const ColumnsView& rows : chunks) {
        load_rows(rank, rows, now_s);
    }
}

void Tree::load_rows(u32 rank, const ColumnsView& rows, double now_s) {
    for (std::size_t at = 0; at < rows.rows;) {
        at += load_chain(rank, rows, at, now_s);
    }
}

namespace {

u64 word_at(const u8* column, std::size_t row) {
    u64 word;
    std::memcpy(&word, column + row * sizeof word, sizeof word);
    return word;
}

}  // namespace

// Hold the rows that follow each other from `at` on; return how many they are.
std::size_t Tree::load_chain(u32 rank, const ColumnsView& rows, std::size_t at, double now_s) {
    const u32 bits = rows.tiers[at] & ((1u << kTiers) - 1);
    const bool has_parent = (rows.tiers[at] & kRowHasParent) != 0;
    const u64 parent = word_at(rows.parents, at);
    u32 above = has_parent ? find(parent) : kNone;
    const bool is_new_parent = has_parent && above == kNone;
    if (is_new_parent) {
        above = placeholder(parent, now_s);
        if (above == kNone) {
            refuse(rank, 1);
            return 1;
        }
    }
    std::size_t length = 1;
    aligned_.assign(1, word_at(rows.hashes, at));
    while (!(is_new_parent && !parked_.empty()) && at + length < rows.rows &&
           rows.tiers[at + length] == (bits | kRowHasParent) && word_at(rows.parents, at + length) == aligned_.back()) {
        aligned_.push_back(word_at(rows.hashes, at + length++));
    }
    u64 conflicts = counters_.parent_conflicts;
    for (u32 tier = 0; tier < kTiers; ++tier) {
        if ((bits >> tier & 1) != 0) {
            attach_and_wake(above, aligned_.data(), length, {rank, tier}, now_s);
            const bool is_first_tier = (bits & ((1u << tier) - 1)) == 0;  // a row is one thing told, on whatever tiers
            conflicts = is_first_tier ? counters_.parent_conflicts : conflicts;
        }
    }
    counters_.parent_conflicts = conflicts;
    if (is_new_parent) {
        wake(parent, now_s);
        prune(runs_.of(above));
    }
    return length;
}

// A block that nobody holds, whose parent is not known.
u32 Tree::placeholder(u64 hash, double now_s) {
    const Grown made = grow(kNone, &hash, 1, HolderSets::kEmpty, nullptr, now_s);
    if (made.count != 0) {
        runs_[runs_.of(made.last)].is_parent_unknown = 1;
    }
    return made.last;
}

u64 Tree::held_blocks() const {
    u64 held = 0;
    for (u32 rank = 0; rank < ranks_.numbers(); ++rank) {
        held += ranks_.has(rank) ? ranks_.at(rank).held : 0;
    }
    return held;
}

}  // namespace kv
