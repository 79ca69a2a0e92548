// Stores: known blocks of a chain get one more holder, new ones are added behind the chain's parent. A parent that is not in
// the tree becomes a placeholder: a block without holders and without a known parent.
#include <algorithm>

#include "tree.hpp"

namespace kv {

namespace {

constexpr u32 kLineBlocks = 8, kSlotsAhead = 48;  // hashes in a cache line, and how far ahead slots are fetched
constexpr u32 kGrowingOrderMax = 3;               // a chain that grows block by block gets extents of up to 32 slots

}  // namespace

std::size_t Tree::store(u32 rank, const u64* parent, const u64* hashes, std::size_t count, u32 tier, double now_s) {
    ranks_.at(rank);
    prefetch(hashes, std::min<std::size_t>(count, parent != nullptr ? 1 : 0));
    u32 above = parent == nullptr ? kNone : find(*parent);
    const bool is_new_parent = parent != nullptr && above == kNone;
    if (is_new_parent) {
        above = placeholder(*parent, now_s);
    }
    const bool has_no_place = is_new_parent && above == kNone;
    const std::size_t held = has_no_place ? 0 : attach(above, hashes, count, {rank, tier}, now_s);
    if (is_new_parent && above != kNone) {
        prune(runs_.of(above));  // in case nothing hangs behind it after all
    }
    const std::size_t refused = not_held(hashes + held, count - held, {rank, tier});
    counters_.refused_blocks += refused;
    return refused;
}

// Adds a block without holders and without a known parent; kNone if there is no memory.
u32 Tree::placeholder(u64 hash, double now_s) {
    const Grown made = grow(kNone, &hash, 1, HolderSets::kEmpty, nullptr, now_s);
    if (made.count != 0) {
        runs_[runs_.of(made.last)].is_parent_unknown = 1;
    }
    return made.last;
}

std::size_t Tree::not_held(const u64* hashes, std::size_t count, Holder holder) const {
    std::size_t missing = 0;
    for (std::size_t at = 0; at < count; ++at) {
        const u32 block = find(hashes[at]);
        missing += block == kNone || !is_held(block, holder);
    }
    return missing;
}

// Makes `holder` hold a chain behind `above` (kNone: the root); returns how many of its blocks fitted into memory.
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
        if (block == kNone || (!is_affordable(holder) && !is_held(block, holder))) {
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

// Whether nothing is behind `above` yet, and its extent has room: then the next block is most likely new.
bool Tree::has_room_behind(u32 above) const {
    if (above == kNone) {
        return false;
    }
    const Run& run = runs_[runs_.of(above)];
    return run.last() == above && run.child_count == 0 && blocks_.used(run.extent) < blocks_.capacity(run.extent);
}

bool Tree::is_held(u32 block, Holder holder) const { return sets_.contains(runs_[runs_.of(block)].set, holder); }

// Whether there is memory for the most that a new holder may cost, apart from new blocks.
bool Tree::is_affordable(Holder holder) const {
    if (budget_.limit == 0) {
        return true;
    }
    const bool has_digest = ranks_.at(holder.rank).digests[holder.tier] != nullptr;
    const u64 cost_bytes = (has_digest ? 0 : sizeof(Digest)) + 2 * sizeof(Run) + sets_.bytes_for_more(ranks_.numbers());
    return budget_.fits(cost_bytes);
}

// Calls `grow` for blocks that one rank holds on one tier.
Tree::Grown Tree::grow_for(Holder holder, u32 above, const u64* hashes, std::size_t count, double now_s) {
    if (!is_affordable(holder)) {
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

// Puts `block` behind `above` if its parent was unknown; counts a conflict if it has another parent.
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

// Returns the run that ends with `block`; splits the block's run if none does.
u32 Tree::tail_at(u32 block) {
    const u32 run = runs_.of(block);
    return runs_[run].last() == block ? run : runs_.split(run, block - runs_[run].begin + 1).head;
}

// Adds blocks with one set of holders behind `above`, up to the first that is known already, and as far as memory allows.
Tree::Grown Tree::grow(u32 above, const u64* hashes, std::size_t count, u32 set, Digest* digest, double now_s) {
    Grown grown{0, above};
    while (grown.count < count) {
        const Growth growth = growth_behind(grown.last, count - grown.count, set, now_s);
        if (growth.run == Runs::kRoot) {
            break;
        }
        const u32 extent = runs_[growth.run].extent;
        const u32 room = blocks_.capacity(extent) - blocks_.used(extent);
        const u32 most = static_cast<u32>(std::min<std::size_t>(room, count - grown.count));
        const u32 filled = fill(growth.run, hashes + grown.count, most, digest);
        if (filled == 0) {
            if (growth.is_new) {
                blocks_.free_if_empty(extent);
                runs_.remove(growth.run);
            }
            break;
        }
        if (growth.is_new) {
            runs_.link(growth.run, grown.last == kNone ? Runs::kRoot : tail_at(grown.last));
        }
        grown = {grown.count + filled, runs_[growth.run].last()};
        if (filled < most) {
            break;
        }
    }
    return grown;
}

// The run to which blocks behind `above` are added: the run of `above`, or a new one. A new one lies in the same extent if
// that ends with `above` and has room: then the two can be merged once their holders are the same.
Tree::Growth Tree::growth_behind(u32 above, std::size_t count, u32 set, double now_s) {
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
    return extent == kNone ? Growth{Runs::kRoot, false} : Growth{runs_.add(extent, extent, set, now_s), true};
}

// Adds blocks to the run, up to the first that is known already or finds no room in the map; returns how many.
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
    const bool is_new_to_rank = sets_.tiers_of(set, holder.rank) == 0;
    Digest& digest = ranks_.digest(holder);
    run = runs_.isolate(run, offset, length);
    runs_.set_holders(run, sets_.with(set, holder));
    ranks_.at(holder.rank).held += is_new_to_rank ? length : 0;
    digest.count += length;
    const u64* hashes = blocks_.hashes() + runs_[run].begin;
    for (u32 at = 0; at < length; ++at) {
        digest.add(hashes[at]);
    }
    runs_.merge_around(run);
}

}  // namespace kv
