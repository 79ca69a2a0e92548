// Sets of holders. Equal sets are stored once, and a run names its set by a number.
//
//     set      bit matrix, planes (tiers in use) x width (words of 64 ranks), both as small as can be; set 0 is empty
//     memo     (set, holder, added or removed) -> set, a cache of fixed size: with 1,024 ranks a store of few blocks takes a fifth less time
//
// A run owns a reference. A set without references is forgotten, and its number may be given to another set; then its
// `generation` differs from the one in a memo's answer, and the answer is void.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffer.hpp"
#include "common.hpp"

namespace kv {

class HolderSets {
public:
    static constexpr u32 kEmpty = 0;

    explicit HolderSets(Budget& budget) : budget_(&budget) { reset(); }

    HolderSets(const HolderSets&) = delete;
    HolderSets& operator=(const HolderSets&) = delete;
    ~HolderSets() { free_words(); }

    // The set that has one holder more, or one less; a caller that keeps it must acquire it before any other call.
    u32 with(u32 set, Holder holder) { return transition(set, holder, true); }
    u32 without(u32 set, Holder holder) { return transition(set, holder, false); }

    // The set with this matrix of words, plane by plane.
    u32 of_words(const u64* words, u32 planes, u32 width) {
        u32 planes_used = 0, width_used = 0;
        for (u32 plane = 0; plane < planes; ++plane) {
            for (u32 word = 0; word < width; ++word) {
                if (words[plane * width + word] != 0) {
                    planes_used = plane + 1;
                    width_used = std::max(width_used, word + 1);
                }
            }
        }
        if (planes_used == 0) {
            return kEmpty;
        }
        u64 tight[kWordsMax];
        for (u32 plane = 0; plane < planes_used; ++plane) {
            std::memcpy(tight + plane * width_used, words + plane * width, width_used * sizeof(u64));
        }
        return intern(tight, planes_used, width_used);
    }

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

    // Bit t says whether the rank holds on tier t.
    u32 tiers_of(u32 set, u32 rank) const {
        u32 bits = 0;
        for (u32 tier = 0; tier < sets_[set].planes; ++tier) {
            bits |= static_cast<u32>(contains(set, {rank, tier})) << tier;
        }
        return bits;
    }

    u32 planes(u32 set) const { return sets_[set].planes; }
    u32 width(u32 set) const { return sets_[set].width; }
    const u64* words(u32 set) const { return words(sets_[set]); }

    u32 size() const { return live_; }
    u64 bytes() const { return bytes_; }
    // The most bytes that one more set adds to `bytes()`, if there are `ranks` ranks.
    u64 bytes_for_more(u32 ranks) const {
        const u64 buckets = live_ < buckets_.size() ? 0 : buckets_.size() * sizeof(u32);
        return sizeof(Set) + buckets + words_bytes((ranks / 64 + 1) * kTiers);
    }
    u32 references(u32 set) const { return sets_[set].references; }
    // The numbers of sets are below this one; some of them may be free.
    u32 numbers() const { return numbers_; }

    void reset() {
        if (bytes_ != 0) {
            budget_->used -= bytes_;
        }
        bytes_ = 0;
        free_words();
        sets_.release();
        sets_.reserve(1);
        numbers_ = 1;
        sets_[kEmpty].references = 1;
        buckets_.assign(64, kNone);
        answers_.assign(kAnswers, Answer{});
        free_ = kNone;
        live_ = 0;
        charge(sizeof(Set) + 64 * sizeof(u32) + kAnswers * sizeof(Answer));
    }

private:
    struct Set {
        u64 word;   // the set's only word, if one is enough
        u64* more;  // all words, if there are several, otherwise null; this set owns them
        u32 references;
        u32 generation;
        u32 digest;
        u32 next;  // next set of the same bucket, or next free number
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

    u32 transition(u32 set, Holder holder, bool comes) {
        const u64 question = u64{set} << 15 | u64{holder.code()} << 1 | u64{comes};
        Answer& answer = answers_[(question * 0x9E3779B97F4A7C15u) >> (64 - kAnswerBits)];
        if (answer.question == question && answer.from_generation == sets_[set].generation &&
            answer.to_generation == sets_[answer.to].generation) {
            return answer.to;
        }
        const u32 to = compute(set, holder, comes);
        answer = {question, sets_[set].generation, sets_[to].generation, to};
        return to;
    }

    u32 compute(u32 set, Holder holder, bool comes) {
        const u32 planes = std::max<u32>(sets_[set].planes, comes ? holder.tier + 1 : 0);
        const u32 width = std::max<u32>(sets_[set].width, comes ? holder.rank / 64 + 1 : 0);
        u64 words[kWordsMax] = {};
        for (u32 plane = 0; plane < sets_[set].planes; ++plane) {
            std::memcpy(words + plane * width, this->words(set) + plane * sets_[set].width, sets_[set].width * sizeof(u64));
        }
        u64& word = words[holder.tier * width + holder.rank / 64];
        const u64 bit = u64{1} << (holder.rank % 64);
        word = comes ? word | bit : word & ~bit;
        return of_words(words, planes, width);
    }

    u32 intern(const u64* words, u32 planes, u32 width) {
        u64 mixed = splitmix64(planes << 16 | width);
        for (u32 at = 0; at < planes * width; ++at) {
            mixed = splitmix64(mixed ^ words[at]);
        }
        const u32 digest = static_cast<u32>(mixed >> 32);
        for (u32 at = buckets_[digest % buckets_.size()]; at != kNone; at = sets_[at].next) {
            if (sets_[at].digest == digest && is_same(sets_[at], words, planes, width)) {
                return at;
            }
        }
        const u32 made = new_number();
        Set& set = sets_[made];
        set.planes = static_cast<u16>(planes);
        set.width = static_cast<u16>(width);
        set.digest = digest;
        if (planes * width > 1) {
            set.more = new u64[planes * width];
            charge(words_bytes(planes * width));
            std::memcpy(set.more, words, planes * width * sizeof(u64));
        } else {
            set.word = words[0];
        }
        if (++live_ > buckets_.size()) {
            enlarge_buckets();
        }
        u32& head = buckets_[digest % buckets_.size()];
        sets_[made].next = head;
        head = made;
        return made;
    }

    bool is_same(const Set& set, const u64* words, u32 planes, u32 width) const {
        return set.planes == planes && set.width == width &&
            std::memcmp(this->words(set), words, planes * width * sizeof(u64)) == 0;
    }

    u32 new_number() {
        charge(sizeof(Set));
        if (free_ != kNone) {
            const u32 made = free_;
            free_ = sets_[made].next;
            return made;
        }
        sets_.reserve(std::size_t{numbers_} + 1);
        return numbers_++;
    }

    void forget(u32 set) {
        u32* link = &buckets_[sets_[set].digest % buckets_.size()];
        while (*link != set) {
            link = &sets_[*link].next;
        }
        Set& own = sets_[set];
        *link = own.next;
        const u64 bytes = sizeof(Set) + words_bytes(own.planes * own.width);
        bytes_ -= bytes;
        budget_->used -= bytes;
        delete[] own.more;
        own.more = nullptr;
        ++own.generation;
        own.planes = own.width = 0;
        own.next = free_;
        free_ = set;
        --live_;
    }

    void enlarge_buckets() {
        charge(buckets_.size() * sizeof(u32));
        std::vector<u32> old(buckets_.size() * 2, kNone);
        old.swap(buckets_);
        for (const u32 head : old) {
            for (u32 at = head; at != kNone;) {
                const u32 next = sets_[at].next;
                u32& bucket = buckets_[sets_[at].digest % buckets_.size()];
                sets_[at].next = bucket;
                bucket = at;
                at = next;
            }
        }
    }

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

// The ranks of word `word` that hold on one of the tiers 0..plane, as bits.
inline u64 up_to_plane(const u64* words, u32 width, u32 planes, u32 plane, u32 word) {
    u64 bits = 0;
    for (u32 at = 0; at <= plane && at < planes; ++at) {
        bits |= words[at * width + word];
    }
    return bits;
}

}  // namespace kv
