// Sets of holders, each kept once however many runs have it: the holders of a run are one number.
//
//     set      bit matrix, planes (tiers in use) x width (words of 64 ranks), both as small as can be; set 0 is empty
//     memo     (set, holder, come or gone) -> set, a cache of fixed size
//
// A run owns a reference. A set without references is forgotten, and its number may be given to another set:
// `generation` tells a memo that its answer is of an earlier set with this number.
#pragma once

#include <vector>

#include "buffer.hpp"
#include "common.hpp"

namespace kv {

class HolderSets {
public:
    static constexpr u32 kEmpty = 0;

    explicit HolderSets(Budget& budget);
    HolderSets(const HolderSets&) = delete;
    HolderSets& operator=(const HolderSets&) = delete;
    ~HolderSets() { free_words(); }

    // The set that has one holder more, or one less; a caller that keeps it acquires it before any other call.
    u32 with(u32 set, Holder holder) { return transition(set, holder, true); }
    u32 without(u32 set, Holder holder) { return transition(set, holder, false); }
    // The set of a matrix of words, plane by plane.
    u32 of_words(const u64* words, u32 planes, u32 width);

    void acquire(u32 set) { ++sets_[set].references; }
    void release(u32 set) {
        if (--sets_[set].references == 0 && set != kEmpty) {
            forget(set);
        }
    }

    bool contains(u32 set, Holder holder) const {
        const Set& own = sets_[set];
        const u32 word = holder.rank / 64;
        return holder.tier < own.planes && word < own.width &&
            (words(own)[holder.tier * own.width + word] >> (holder.rank % 64) & 1) != 0;
    }
    // Bit t: the rank holds on tier t.
    u32 tiers_of(u32 set, u32 rank) const;

    u32 planes(u32 set) const { return sets_[set].planes; }
    u32 width(u32 set) const { return sets_[set].width; }
    const u64* words(u32 set) const { return words(sets_[set]); }

    u32 size() const { return live_; }
    u64 bytes() const { return bytes_; }
    // The most that another set of so many ranks costs beyond that.
    u64 bytes_for_more(u32 ranks) const {
        const u64 buckets = live_ < buckets_.size() ? 0 : buckets_.size() * sizeof(u32);
        return sizeof(Set) + buckets + words_bytes((ranks / 64 + 1) * kTiers);
    }
    u32 references(u32 set) const { return sets_[set].references; }
    // One more than the largest number of a set.
    u32 numbers() const { return numbers_; }
    void reset();

private:
    struct Set {
        u64 word;   // the only one, where one is enough
        u64* more;  // else all of them; this set owns them
        u32 references;
        u32 generation;
        u32 digest;
        u32 next;  // of the same bucket, or free
        u16 width;
        u16 planes;
    };
    struct Answer {
        u64 question = ~u64{0};
        u32 from_generation = 0;
        u32 to_generation = 0;
        u32 to = 0;
    };
    static constexpr u32 kAnswerBits = 12, kAnswers = 1u << kAnswerBits, kWordsMax = kRankWords * kTiers;

    const u64* words(const Set& set) const { return set.more != nullptr ? set.more : &set.word; }
    static u64 words_bytes(u32 count) { return count > 1 ? count * sizeof(u64) : 0; }
    void free_words() {
        for (u32 set = 0; set < numbers_; ++set) {
            delete[] sets_[set].more;
        }
    }
    u32 transition(u32 set, Holder holder, bool comes);
    u32 compute(u32 set, Holder holder, bool comes);
    u32 intern(const u64* words, u32 planes, u32 width);
    bool is_same(const Set& set, const u64* words, u32 planes, u32 width) const;
    u32 new_number();
    void forget(u32 set);
    void enlarge_buckets();
    void charge(u64 bytes) {
        bytes_ += bytes;
        budget_->used += bytes;
    }

    Budget* budget_;
    Buffer<Set> sets_;
    u32 numbers_ = 0;
    std::vector<u32> buckets_;
    std::vector<Answer> answers_;
    u32 free_ = kNone;
    u32 live_ = 0;
    u64 bytes_ = 0;
};

// Bits of a cumulative word: the ranks of word `word` that hold on one of the tiers 0..plane.
inline u64 up_to_plane(const u64* words, u32 width, u32 planes, u32 plane, u32 word) {
    u64 bits = 0;
    for (u32 at = 0; at <= plane && at < planes; ++at) {
        bits |= words[at * width + word];
    }
    return bits;
}

}  // namespace kv
