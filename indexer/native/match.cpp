// Finds how many blocks of a prefix each rank holds: walks the runs, and drops ranks that do not hold the present run.
//
// Depths on the tiers 0..t are equal for all t as long as all holders lie on tier 0. So a tier gets a row of its own only
// once a set with its plane was met. `rows_` counts the rows; the last one also stands for all further tiers.
#include <algorithm>
#include <cstring>

#include "tree.hpp"

namespace kv {

namespace {

// Ranks that held every block so far, by row; and the depths of those that did not.
class Survivors {
public:
    Survivors(std::int32_t* out, std::size_t columns) : out_(out), columns_(columns) {}

    // Starts with the first run's holders; no rank has reached any depth yet. False: the run has no holders.
    bool begin(const u64* words, u32 planes, u32 width) {
        width_ = width;
        rows_ = planes;
        std::memset(out_, 0, rows_ * columns_ * sizeof(std::int32_t));
        for (u32 row = 0; row < planes; ++row) {
            for (u32 word = 0; word < width; ++word) {
                alive_[row][word] = words[row * width + word] | (row == 0 ? 0 : alive_[row - 1][word]);
            }
        }
        return planes != 0;
    }

    // Lets only the ranks in `words` survive; the others get `depth`. False: no rank is left.
    bool meet(const u64* words, u32 planes, u32 width, u32 depth) {
        if (rows_ == 1 && planes <= 1) {
            return meet_on_one_tier(words, width, depth);
        }
        while (rows_ < planes) {
            std::memcpy(alive_[rows_], alive_[rows_ - 1], width_ * sizeof(u64));
            std::memcpy(row_of(rows_), row_of(rows_ - 1), columns_ * sizeof(std::int32_t));
            ++rows_;
        }
        u64 left = 0;
        for (u32 row = 0; row < rows_; ++row) {
            for (u32 word = 0; word < width_; ++word) {
                const u64 holders = word < width ? up_to_plane(words, width, planes, row, word) : 0;
                settle(row, word, alive_[row][word] & ~holders, depth);
                alive_[row][word] &= holders;
                left |= alive_[row][word];
            }
        }
        return left != 0;
    }

    // Gives the surviving ranks `depth`, and tiers without a row of their own the last row.
    void finish(u32 depth) {
        for (u32 row = 0; row < rows_; ++row) {
            for (u32 word = 0; word < width_; ++word) {
                settle(row, word, alive_[row][word], depth);
            }
        }
        if (rows_ == 0) {
            std::memset(out_, 0, columns_ * sizeof(std::int32_t));
            rows_ = 1;
        }
        for (u32 row = rows_; row < kTiers; ++row) {
            std::memcpy(row_of(row), row_of(row - 1), columns_ * sizeof(std::int32_t));
        }
    }

private:
    bool meet_on_one_tier(const u64* words, u32 width, u32 depth) {
        u64 left = 0;
        const u32 both = std::min(width, width_);
        while (first_ < both && alive_[0][first_] == 0) {
            ++first_;
        }
        for (u32 word = first_; word < both; ++word) {
            if (const u64 gone = alive_[0][word] & ~words[word]) {
                settle(0, word, gone, depth);
                alive_[0][word] ^= gone;
            }
            left |= alive_[0][word];
        }
        for (u32 word = both; word < width_; ++word) {
            settle(0, word, alive_[0][word], depth);
        }
        width_ = both;
        return left != 0;
    }

    std::int32_t* row_of(u32 row) { return out_ + row * columns_; }

    void settle(u32 row, u32 word, u64 ranks, u32 depth) {
        std::int32_t* depths = row_of(row) + word * 64;
        if (ranks == ~u64{0}) {
            std::fill_n(depths, 64, static_cast<std::int32_t>(depth));
            return;
        }
        for (; ranks != 0; ranks &= ranks - 1) {
            depths[__builtin_ctzll(ranks)] = static_cast<std::int32_t>(depth);
        }
    }

    std::int32_t* out_;
    std::size_t columns_;
    u32 first_ = 0;  // as long as there is one row: in words before this no rank is left
    u32 width_ = 0;
    u32 rows_ = 0;
    u64 alive_[kTiers][kRankWords];
};

}  // namespace

// Writes to row t, one of 4, how many blocks the rank of each column holds on tiers 0..t; returns the most of any.
u32 Tree::match(const u64* hashes, std::size_t count, std::int32_t* out, std::size_t columns) const {
    if (columns == 0) {
        return 0;
    }
    Survivors survivors(out, columns);
    u32 depth = 0, run = Runs::kRoot, last_set = HolderSets::kEmpty;
    while (depth < count) {
        const u32 child = runs_[run].first_child;
        u32 block = runs_[child].begin;
        if (depth == 0 || child == 0 || blocks_.hash(block) != hashes[depth]) {
            block = find(hashes[depth]);
            if (block == kNone) {
                break;
            }
            run = runs_.of(block);
        } else {
            run = child;
        }
        const Run& own = runs_[run];
        if (own.set != last_set || depth == 0) {
            last_set = own.set;
            const u64* words = sets_.words(own.set);
            const u32 planes = sets_.planes(own.set), width = sets_.width(own.set);
            if (!(depth == 0 ? survivors.begin(words, planes, width) : survivors.meet(words, planes, width, depth))) {
                break;
            }
        }
        const std::size_t most = std::min<std::size_t>(count - depth, own.end() - block);
        depth += static_cast<u32>(common_prefix(hashes + depth, blocks_.hashes() + block, most));
    }
    survivors.finish(depth);
    return depth;
}

void Tree::prefetch(const u64* hashes, std::size_t count) const {
    for (std::size_t at = 0; at < count; ++at) {
        map_.prefetch(map_.spot(hashes[at]));
    }
}

}  // namespace kv
