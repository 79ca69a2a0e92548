#include "blocks.hpp"

namespace kv {

u32 Blocks::allocate(u32 order) {
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

void Blocks::shrink(u32 extent, u32 count) {
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

void Blocks::reset() {
    hashes_.release();
    runs_.release();
    pages_.release();
    forget_free();
    budget_->used -= bytes();
    superblocks_ = free_superblocks_ = 0;
    extents_ = 0;
}

// There is a free superblock, and it counts as used.
bool Blocks::open_superblock() {
    if (!budget_->fits_much(kSuperblockBytes) || (free_superblocks_ == 0 && !add_superblock())) {
        return false;
    }
    --free_superblocks_;
    budget_->used += kSuperblockBytes;
    return true;
}

bool Blocks::add_superblock() {
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

void Blocks::put(u32 extent, u32 order) {
    page(extent) = {0, static_cast<u8>(order), 1};
    const u32 next = free_[order];
    hashes_[extent] = next;
    hashes_[extent + 1] = kNone;
    if (next != kNone) {
        hashes_[next + 1] = extent;
    }
    free_[order] = extent;
}

void Blocks::take(u32 extent, u32 order) {
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

void Blocks::free(u32 extent, u32 order) {
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

}  // namespace kv
