// What the body of a snapshot says, whatever the order of its runs and how they are cut: two trees with the same state may
// differ in both. Bodies are the tree's own, and not doubted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fuzz {

struct State {
    using Holders = std::vector<std::uint32_t>;                      // rank << 4 | tier bits
    using Block = std::tuple<std::uint8_t, std::uint64_t, Holders>;  // flags of its run, parent, holders

    std::vector<std::uint32_t> ranks;
    std::map<std::uint64_t, Block> blocks;

    bool operator==(const State& other) const { return ranks == other.ranks && blocks == other.blocks; }
};

class StateReader {
public:
    explicit StateReader(const std::string& body) : at_(body.data()) {}

    State read() {
        State state;
        state.ranks = words();
        for (std::uint32_t left = take<std::uint32_t>(); left > 0; --left) {
            sets_.push_back(words());
        }
        for (std::uint64_t left = take<std::uint64_t>(); left > 0; --left) {
            read_run(state);
        }
        return state;
    }

private:
    template <class T>
    T take() {
        T value;
        std::memcpy(&value, at_, sizeof value);
        at_ += sizeof value;
        return value;
    }

    std::vector<std::uint32_t> words() {
        std::vector<std::uint32_t> found(take<std::uint32_t>());
        for (std::uint32_t& word : found) {
            word = take<std::uint32_t>();
        }
        return found;
    }

    // Within a run a block's parent is the block before; only its first one's may be missing.
    void read_run(State& state) {
        auto flags = take<std::uint8_t>();
        auto parent = take<std::uint64_t>();
        const State::Holders& holders = sets_[take<std::uint32_t>()];
        take<double>();  // of the run's latest block, whichever that is
        for (std::uint32_t left = take<std::uint32_t>(); left > 0; --left) {
            const auto hash = take<std::uint64_t>();
            state.blocks.emplace(hash, State::Block{flags, parent, holders});
            flags = 1;
            parent = hash;
        }
    }

    const char* at_;
    std::vector<State::Holders> sets_ = std::vector<State::Holders>(1);
};

inline State state_of(const std::string& body) { return StateReader(body).read(); }

}  // namespace fuzz
