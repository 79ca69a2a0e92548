// Words of the sets that need more than one: pieces of 2, 4, 8 .. 256 words. A free piece is linked through its first word.
#pragma once

#include "buffer.hpp"
#include "common.hpp"

namespace kv {

class SetWords {
public:
    static constexpr u32 kOrders = 8;

    SetWords() { forget_free(); }

    // Bytes of the piece that takes `count` words, 2..256.
    static u64 bytes_for(u32 count) { return sizeof(u64) << (order_of(count) + 1); }

    u64* at(u32 piece) { return words_.data() + piece; }
    const u64* at(u32 piece) const { return words_.data() + piece; }

    // A piece with room for `count` words, whose number is not 0. Throws std::bad_alloc, and then nothing has changed.
    u32 take(u32 count) {
        const u32 order = order_of(count);
        u32 piece = free_[order];
        if (piece != 0) {
            free_[order] = static_cast<u32>(words_[piece]);
            return piece;
        }
        piece = end_;
        words_.reserve(std::size_t{end_} + (2u << order));
        end_ += 2u << order;
        return piece;
    }
    void give_back(u32 piece, u32 count) {
        words_[piece] = free_[order_of(count)];
        free_[order_of(count)] = piece;
    }
    void reset() {
        words_.release();
        forget_free();
        end_ = kBegin;
    }

private:
    static constexpr u32 kBegin = 2;

    static u32 order_of(u32 count) {
        u32 order = 0;
        while ((2u << order) < count) {
            ++order;
        }
        return order;
    }
    void forget_free() {
        for (u32& head : free_) {
            head = 0;
        }
    }

    Buffer<u64> words_;
    u32 end_ = kBegin;
    u32 free_[kOrders];
};

}  // namespace kv
