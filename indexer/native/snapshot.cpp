// The whole state as bytes: the body of a snapshot, in the format of indexer/index/snapshot.py, where the frame around it
// is made and checked. A body is not trusted: every count is checked against the bytes that are left.
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "tree.hpp"

namespace kv {

namespace {

constexpr u8 kRunHasParent = 1, kParentUnknown = 2;
constexpr std::size_t kRunHeadBytes = 1 + 8 + 4 + 8 + 4;

void require(bool is_so, u64 at, const char* otherwise) {
    if (!is_so) {
        throw Malformed(at, otherwise);
    }
}

}  // namespace

std::string Tree::snapshot() const {
    std::string body;
    body.reserve(nodes() * sizeof(u64) + runs_.size() * kRunHeadBytes + 1024);
    append(body, ranks_.count());
    for (u32 rank = 0; rank < ranks_.numbers(); ++rank) {
        if (ranks_.has(rank)) {
            append(body, rank);
        }
    }
    append(body, sets_.size());
    std::unordered_map<u32, u32> numbers{{HolderSets::kEmpty, 0}};
    for (u32 set = 1; set < sets_.numbers(); ++set) {
        if (sets_.references(set) != 0) {
            numbers.emplace(set, static_cast<u32>(numbers.size()));
            const auto holders = members(set);
            append(body, static_cast<u32>(holders.size()));
            for (const auto& holder : holders) {
                append(body, holder.first << 4 | holder.second);
            }
        }
    }
    append(body, u64{runs_.size()});
    for (u32 run = next_in_walk(Runs::kRoot); run != Runs::kRoot; run = next_in_walk(run)) {
        const Run& own = runs_[run];
        const bool has_parent = own.parent != Runs::kRoot;
        append(body, has_parent ? kRunHasParent : own.is_parent_unknown != 0 ? kParentUnknown : u8{0});
        append(body, has_parent ? blocks_.hash(runs_[own.parent].last()) : u64{0});
        append(body, numbers.at(own.set));
        append(body, own.last_stored_s);
        append(body, own.length);
        body.append(reinterpret_cast<const char*>(blocks_.hashes() + own.begin), own.length * sizeof(u64));
    }
    append(body, u32{0});
    return body;
}

// Builds a new tree from a body; if it throws, that tree must not be used.
class SnapshotReader {
public:
    SnapshotReader(Tree& tree, const u8* data, std::size_t size) : tree_(tree), data_(data), size_(size) {}

    void read() {
        read_ranks();
        read_sets();
        read_runs();
        const u64 from = at_;
        require(take<u32>() == 0, from, "reserved is not 0");
        require(at_ == size_, at_, "bytes after the end");
    }

private:
    void expect(std::size_t bytes) const { require(size_ - at_ >= bytes, at_, "the body is cut"); }

    template <class T>
    T take() {
        expect(sizeof(T));
        at_ += sizeof(T);
        return kv::read<T>(data_ + at_ - sizeof(T));
    }

    template <class T>
    T take_count(std::size_t bytes_each) {
        const u64 from = at_;
        const T count = take<T>();
        require(count <= (size_ - at_) / bytes_each, from, "a count of more than follows");
        return count;
    }

    void read_ranks() {
        const u32 count = take_count<u32>(sizeof(u32));
        for (u32 each = 0, next = 0; each < count; ++each) {
            const u64 from = at_;
            const u32 rank = take<u32>();
            require(rank <= kRankMax && rank >= next, from, "a rank beyond 4095, or not ascending");
            next = rank + 1;
            tree_.add_rank(rank, 0);
        }
    }

    void read_sets() {
        const u32 count = take_count<u32>(2 * sizeof(u32));
        sets_.assign(1, HolderSets::kEmpty);
        for (u32 each = 0; each < count; ++each) {
            const u32 set = read_set();
            tree_.sets_.acquire(set);
            sets_.push_back(set);
        }
    }

    u32 read_set() {
        const u64 from = at_;
        const u32 count = take_count<u32>(sizeof(u32));
        require(count != 0, from, "a set without members");
        std::vector<u64> words(std::size_t{kRankWords} * kTiers, 0);
        for (u32 each = 0, next = 0; each < count; ++each) {
            const u64 at = at_;
            const u32 member = take<u32>(), rank = member >> 4;
            require((member & kAllTiers) != 0 && rank >= next, at, "a member without a tier, or not by rank ascending");
            check_rank(rank, at);
            next = rank + 1;
            for (u32 tier = 0; tier < kTiers; ++tier) {
                words[tier * kRankWords + rank / 64] |= u64{member >> tier & 1} << (rank % 64);
            }
        }
        return tree_.sets_.of_words(words.data(), kTiers, kRankWords);
    }

    void check_rank(u32 rank, u64 at) const {
        require(tree_.ranks_.has(rank), at, "a rank that is not one of the ranks");
    }

    void read_runs() {
        const u64 count = take_count<u64>(kRunHeadBytes + sizeof(u64));
        for (u64 each = 0; each < count; ++each) {
            read_run();
        }
        for (std::size_t set = 1; set < sets_.size(); ++set) {
            tree_.sets_.release(sets_[set]);
        }
        for (const auto& end : unheld_ends_) {
            const Run& run = tree_.runs_[tree_.runs_.of(end.first)];
            require(run.last() != end.first || run.child_count != 0, end.second, "a run that no rank holds, and no block follows");
        }
    }

    void read_run() {
        const u64 from = at_;
        expect(kRunHeadBytes);
        const u8 flags = take<u8>();
        const u64 parent = take<u64>();
        const u32 set = take<u32>();
        const double last_stored_s = take<double>();
        require(flags <= kParentUnknown, from, "flags beyond 2");
        require(flags == kRunHasParent || parent == 0, from + 1, "the parent of a run without a known one");
        const u32 above = flags == kRunHasParent ? tree_.find(parent) : kNone;
        require(flags != kRunHasParent || above != kNone, from + 1, "a parent that is in no run before");
        require(set < sets_.size(), from + 9, "a set that there is not");
        require(std::isfinite(last_stored_s), from + 13, "last_stored_s is no number");
        plant(above, flags == kParentUnknown, sets_[set], last_stored_s);
        if (set == 0) {
            unheld_ends_.emplace_back(last_, from);
        }
    }

    void plant(u32 above, bool is_parent_unknown, u32 set, double last_stored_s) {
        const u64 from = at_;
        const u32 count = take<u32>();
        require(count != 0 && count <= (size_ - at_) / sizeof(u64), from, "no blocks, or more than follow");
        hashes_.resize(count);
        std::memcpy(hashes_.data(), data_ + at_, count * sizeof(u64));
        const Tree::Grown grown = tree_.grow(above, hashes_.data(), count, set, nullptr, last_stored_s);
        if (grown.count < count) {
            require(tree_.find(hashes_[grown.count]) == kNone, at_ + grown.count * sizeof(u64), "a sequence hash that stands twice");
            throw IndexFull("no memory for the snapshot");
        }
        at_ += count * sizeof(u64);
        last_ = grown.last;
        if (is_parent_unknown) {
            tree_.runs_[tree_.runs_.of(tree_.find(hashes_[0]))].is_parent_unknown = 1;
        }
        count_held(set);
    }

    void count_held(u32 set) {
        for (const auto& holder : tree_.members(set)) {
            tree_.ranks_.at(holder.first).held += hashes_.size();
            for (u32 tier = 0; tier < kTiers; ++tier) {
                if ((holder.second >> tier & 1) != 0) {
                    Digest& digest = digest_of({holder.first, tier});
                    digest.count += hashes_.size();
                    for (const u64 hash : hashes_) {
                        digest.add(hash);
                    }
                }
            }
        }
    }

    Digest& digest_of(Holder holder) {
        const bool is_there = tree_.ranks_.at(holder.rank).digests[holder.tier] != nullptr;
        if (!is_there && !tree_.budget_.fits(sizeof(Digest))) {
            throw IndexFull("no memory for the snapshot");
        }
        return tree_.ranks_.digest(holder);
    }

    Tree& tree_;
    const u8* data_;
    std::size_t size_;
    u64 at_ = 0;
    u32 last_ = kNone;
    std::vector<u32> sets_;
    std::vector<u64> hashes_;
    std::vector<std::pair<u32, u64>> unheld_ends_;  // last block of a run without holders, and the run's offset in the body
};

void restore(Tree& made, const Tree& old, const u8* data, std::size_t size) {
    SnapshotReader(made, data, size).read();
    made.counters_ = old.counters_;
}

}  // namespace kv
