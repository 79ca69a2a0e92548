// Where blocks live: in slots of extents, so that the blocks of a chain lie side by side in memory.
//
//     slot     has a block's sequence hash, and the run that it belongs to; its number is the block's
//     extent   4 << order consecutive slots, of which the first `used` are in use; order 0..10
//
// Extents come from superblocks of 4096 slots by the buddy system: an extent's upper half is given back as soon as it is
// empty, and free neighbours grow together again. Free extents are linked through the hashes of their first two slots.
#pragma once

#include "buffer.hpp"
#include "common.hpp"

namespace kv {

class Blocks {
public:
    static constexpr u32 kOrders = 11, kPage = 4, kSuperblock = kPage << (kOrders - 1);

    explicit Blocks(Budget& budget) : budget_(&budget) { forget_free(); }

    u64* hashes() { return hashes_.data(); }
    const u64* hashes() const { return hashes_.data(); }
    u64 hash(u32 slot) const { return hashes_[slot]; }
    u32 run(u32 slot) const { return runs_[slot]; }
    void set_run(u32 slot, u32 run) { runs_[slot] = run; }
    // Prefetches for a write; the slot may be beyond the end.
    void prefetch(u32 slot) const {
        __builtin_prefetch(hashes_.data() + slot, 1);
        __builtin_prefetch(runs_.data() + slot, 1);
        asm volatile("");  // as in BlockMap::prefetch
    }

    u32 capacity(u32 extent) const { return kPage << page(extent).order; }
    u32 order(u32 extent) const { return page(extent).order; }
    u32 used(u32 extent) const { return page(extent).used; }
    u32 extents() const { return extents_; }
    // The bytes of superblocks in use. One that is wholly free is kept for later blocks, and does not count.
    u64 bytes() const { return (superblocks_ - free_superblocks_) * kSuperblockBytes; }
    u64 kept_bytes() const { return superblocks_ * kSuperblockBytes; }
    // By how much `bytes()` would grow for one more small extent.
    u64 bytes_for_more() const {
        for (u32 order = 0; order + 1 < kOrders; ++order) {
            if (free_[order] != kNone) {
                return 0;
            }
        }
        return kSuperblockBytes;
    }

    // An extent of that order, with no block in use; kNone if there is no memory for it.
    u32 allocate(u32 order) {
        u32 found = order;
        while (found < kOrders && free_[found] == kNone) {
            ++found;
        }
        if (found >= kOrders - 1) {
            if (!open_superblock()) {
                return kNone;
            }
            found = kOrders - 1;
        }
        const u32 extent = free_[found];
        take(extent, found);
        while (found > order) {
            --found;
            put(extent + (kPage << found), found);
        }
        page(extent) = {0, static_cast<u8>(order), 0};
        ++extents_;
        return extent;
    }

    // `count` more blocks of the extent are in use.
    void extend(u32 extent, u32 count) { page(extent).used = static_cast<u16>(page(extent).used + count); }

    // Takes the last `count` blocks out of use. An empty extent is freed, and one that is at most half used is halved.
    void shrink(u32 extent, u32 count) {
        Page& own = page(extent);
        own.used = static_cast<u16>(own.used - count);
        if (own.used == 0) {
            --extents_;
            free(extent, own.order);
            return;
        }
        while (own.order > 0 && own.used <= (kPage << (own.order - 1))) {
            --own.order;
            free(extent + (kPage << own.order), own.order);
        }
    }

    void free_if_empty(u32 extent) {
        if (used(extent) == 0) {
            shrink(extent, 0);
        }
    }

    // Frees all extents, and gives memory back.
    void reset() {
        hashes_.release();
        runs_.release();
        pages_.release();
        forget_free();
        budget_->used -= bytes();
        superblocks_ = free_superblocks_ = 0;
        extents_ = 0;
    }

private:
    struct Page {
        u16 used;
        u8 order;
        u8 is_free;
    };
    static constexpr u64 kSuperblockBytes = kSuperblock * (sizeof(u64) + sizeof(u32)) + kSuperblock / kPage * sizeof(Page);


    Page& page(u32 slot) { return pages_[slot / kPage]; }
    const Page& page(u32 slot) const { return pages_[slot / kPage]; }

    // Takes a free or a new superblock into use; false: no memory.
    bool open_superblock() {
        if (!budget_->fits_much(kSuperblockBytes) || (free_superblocks_ == 0 && !add_superblock())) {
            return false;
        }
        --free_superblocks_;
        budget_->used += kSuperblockBytes;
        return true;
    }

    bool add_superblock() {
        const u64 slots = (superblocks_ + 1) * kSuperblock;
        if (slots > kNone) {
            return false;
        }
        try {
            hashes_.reserve(slots);
            runs_.reserve(slots);
            pages_.reserve(slots / kPage);
        } catch (const std::bad_alloc&) {
            return false;
        }
        put(static_cast<u32>(superblocks_++ * kSuperblock), kOrders - 1);
        ++free_superblocks_;
        return true;
    }

    void put(u32 extent, u32 order) {
        page(extent) = {0, static_cast<u8>(order), 1};
        const u32 next = free_[order];
        hashes_[extent] = next;
        hashes_[extent + 1] = kNone;
        if (next != kNone) {
            hashes_[next + 1] = extent;
        }
        free_[order] = extent;
    }

    void take(u32 extent, u32 order) {
        const u32 next = static_cast<u32>(hashes_[extent]), previous = static_cast<u32>(hashes_[extent + 1]);
        if (next != kNone) {
            hashes_[next + 1] = previous;
        }
        if (previous == kNone) {
            free_[order] = next;
        } else {
            hashes_[previous] = next;
        }
        page(extent).is_free = 0;
    }

    void free(u32 extent, u32 order) {
        while (order + 1 < kOrders) {
            const u32 buddy = extent ^ (kPage << order);
            if (!page(buddy).is_free || page(buddy).order != order) {
                break;
            }
            take(buddy, order);
            extent = extent < buddy ? extent : buddy;
            ++order;
        }
        put(extent, order);
        if (order == kOrders - 1) {
            ++free_superblocks_;
            budget_->used -= kSuperblockBytes;
        }
    }

    void forget_free() {
        for (u32& head : free_) {
            head = kNone;
        }
    }

    Budget* budget_;
    Buffer<u64> hashes_;
    Buffer<u32> runs_;
    Buffer<Page> pages_;
    u32 free_[kOrders];
    u64 superblocks_ = 0, free_superblocks_ = 0;
    u32 extents_ = 0;
};

// The order of the extent for `count` blocks, or for the first that fit: at most a quarter is empty, except in order 0.
inline u32 order_for(std::size_t count) {
    u32 order = 0;
    while (order + 1 < Blocks::kOrders && (std::size_t{Blocks::kPage} << order) < count) {
        ++order;
    }
    const std::size_t capacity = std::size_t{Blocks::kPage} << order;
    return order > 0 && capacity > count && capacity - count > capacity / 4 ? order - 1 : order;
}

}  // namespace kv
