#include "holder_sets.hpp"

#include <algorithm>
#include <cstring>

namespace kv {

HolderSets::HolderSets(Budget& budget) : budget_(&budget) { reset(); }

void HolderSets::reset() {
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

u32 HolderSets::transition(u32 set, Holder holder, bool comes) {
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

u32 HolderSets::compute(u32 set, Holder holder, bool comes) {
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

u32 HolderSets::of_words(const u64* words, u32 planes, u32 width) {
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

bool HolderSets::is_same(const Set& set, const u64* words, u32 planes, u32 width) const {
    return set.planes == planes && set.width == width &&
        std::memcmp(this->words(set), words, planes * width * sizeof(u64)) == 0;
}

u32 HolderSets::intern(const u64* words, u32 planes, u32 width) {
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

u32 HolderSets::new_number() {
    charge(sizeof(Set));
    if (free_ != kNone) {
        const u32 made = free_;
        free_ = sets_[made].next;
        return made;
    }
    sets_.reserve(std::size_t{numbers_} + 1);
    return numbers_++;
}

void HolderSets::forget(u32 set) {
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

void HolderSets::enlarge_buckets() {
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

u32 HolderSets::tiers_of(u32 set, u32 rank) const {
    u32 bits = 0;
    for (u32 tier = 0; tier < sets_[set].planes; ++tier) {
        bits |= static_cast<u32>(contains(set, {rank, tier})) << tier;
    }
    return bits;
}

}  // namespace kv
