// An input is a program: bytes choose operations on a tree, so that messages meet states and not just an empty tree.
//
//     limits u8, then operations: op u8, rank u8, and what the operation reads (`Program::step`)
//
// A malformed message changes nothing; all others leave a tree that does not contradict itself, keeps
// to its memory, and survives snapshot and restore; of ranks that are dropped nothing is left.
#include <set>

#include "harness.hpp"

namespace {

using namespace fuzz;

// Few, so that operations meet each other's blocks; the first are what a careless map takes for "no hash".
std::uint64_t hash_of(std::uint8_t number) {
    constexpr std::uint64_t odd[] = {0, ~0ull, 1, 0xFFFF'FFFFull, 1ull << 63, 1ull << 32};
    return number < 6 ? odd[number] : kv::splitmix64(number);
}

kv::Limits limits_of(std::uint8_t choice) {
    kv::Limits limits;
    static const std::uint64_t empty = kv::Tree(kv::Limits{}).memory_bytes();
    const std::uint64_t memory[] = {0, 1, empty + 65'000, 300'000};  // the third: some blocks, and little beside them
    limits.memory_bytes_max = memory[choice >> 2 & 3];
    limits.seed = choice;
    return limits;
}

void put(std::vector<std::uint8_t>& to, std::uint64_t value, int bytes) {
    for (int at = 0; at < bytes; ++at) {
        to.push_back(static_cast<std::uint8_t>(value >> 8 * at));
    }
}

class Program {
public:
    Program(const std::uint8_t* data, std::size_t size)
        : input_(data, size), limits_(limits_of(input_.byte())), tree_(std::make_unique<kv::Tree>(limits_)) {
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            add(rank, 0);
        }
    }

    void run() {
        for (int steps = 1; !input_.is_empty(); ++steps) {
            step();
            expect_bounded(*tree_, has_removed_);
            if (steps % 16 == 0) {
                expect_sound(*tree_);
            }
        }
        expect_sound(*tree_);
        expect_restorable(*tree_);
        expect_drained(*tree_);
    }

private:
    void step() {
        const std::uint8_t op = input_.byte();
        const std::uint32_t rank = rank_of(input_.byte());
        try {
            take(op, rank);
            expect(op % 16 == 9 || op % 16 >= 11 || ranks_.count(rank) == 1, "a known rank");
        } catch (const kv::UnknownRank&) {
            expect(ranks_.count(rank) == 0, "an unknown rank");
        }
    }

    void take(std::uint8_t op, std::uint32_t rank) {
        switch (op % 16) {
        case 0: has_removed_ = true; apply(rank, input_.bytes(input_.word())); break;  // most likely no message at all
        case 1: case 2: case 3: apply(rank, message()); break;
        case 4: case 5: case 6: store(rank); break;
        case 7: case 8: remove(rank); break;
        case 9: drop(rank); break;
        case 10: has_removed_ = true; tree_->clear(rank, input_.byte() & 15u); break;
        case 11: add(rank, input_.byte() % 4 == 0 ? input_.word() : 0); break;
        case 12: restore(); break;
        case 13: now_s_ += input_.byte() / 16.0; break;
        default: look(*tree_, hashes(input_.byte() % 32)); break;
        }
    }

    // A few, one of them in the second word of a bit set, one in the fifth.
    static std::uint32_t rank_of(std::uint8_t choice) {
        return choice == 255 ? 319 : choice % 8 == 7 ? 64 : choice % 8;
    }

    std::vector<std::uint64_t> hashes(std::uint8_t count) {
        std::vector<std::uint64_t> made;
        std::uint8_t number = input_.byte();  // blocks in a row, unless the input goes on elsewhere
        for (std::uint8_t at = 0; at < count; ++at, ++number) {
            made.push_back(hash_of(number));
        }
        return made;
    }

    // A message that can be cut into batches, but for a field that is one too large here and there.
    std::vector<std::uint8_t> message() {
        std::vector<std::uint8_t> made;
        const std::uint8_t batches = input_.byte() % 4;
        put(made, batches, 2);
        for (std::uint8_t at = 0; at < batches; ++at) {
            const std::uint8_t form = input_.byte();  // kind 2 bits, tier 3 bits, parent 1 bit
            const bool is_odd = form >= 0xE0;         // else it is an event: one that is none refuses its message
            const std::uint8_t kind = is_odd ? form & 3 : (form & 3) % 3, has_parent = (is_odd || kind == 0) && (form >> 5 & 1);
            const std::uint8_t tier = (form >> 2 & 7u) % 5;
            has_removed_ |= kind != 0;
            const std::vector<std::uint64_t> blocks = hashes(kind == 2 ? 0 : input_.byte() % 32);
            put(made, 1, 1);
            put(made, kind, 1);
            put(made, is_odd ? tier : tier % 4, 1);
            put(made, has_parent, 1);
            put(made, 1, 8);
            put(made, at + 1u, 8);
            put(made, 0, 8);
            put(made, 0, 8);
            put(made, has_parent ? hash_of(input_.byte()) : 0, 8);
            put(made, has_parent ? 1 : 0, 4);
            put(made, blocks.size(), 4);
            for (const std::uint64_t hash : blocks) {
                put(made, hash, 8);
            }
        }
        return made;
    }

    void apply(std::uint32_t rank, const std::vector<std::uint8_t>& message) {
        const std::string before = tree_->snapshot();
        try {
            expect(apply_exactly(rank, message) <= message.size() / 8, "no more blocks are refused than were told");
        } catch (const kv::Malformed& error) {
            expect(error.offset <= message.size() && !error.reason.empty(), "an error names byte and reason");
#if KV_PLANTED_BUG == 1
            tree_->clear(rank, 1);
#endif
            expect(tree_->snapshot() == before, "a malformed message changes nothing");
        }
    }

    std::size_t apply_exactly(std::uint32_t rank, const std::vector<std::uint8_t>& message) {
#if KV_PLANTED_BUG == 2
        const std::vector<std::uint8_t> cut(message.begin(), message.end() - (message.size() > 8 ? 8 : 0));
        return tree_->apply_batch(rank, cut.data(), message.size(), now_s_);
#else
        return tree_->apply_batch(rank, message.data(), message.size(), now_s_);
#endif
    }

    void store(std::uint32_t rank) {
        const std::uint8_t form = input_.byte();
        const std::uint64_t parent = hash_of(form & 1 ? input_.byte() : 0);
        const std::vector<std::uint64_t> blocks = hashes(form >> 3);
        tree_->store(rank, form & 1 ? &parent : nullptr, blocks.data(), blocks.size(), form >> 1 & 3u, now_s_);
    }

    void remove(std::uint32_t rank) {
        has_removed_ = true;
        const std::uint8_t form = input_.byte();
        const std::vector<std::uint64_t> blocks = hashes(form >> 2);
        tree_->remove(rank, blocks.data(), blocks.size(), form & 3u);
    }

    void add(std::uint32_t rank, std::uint64_t capacity_blocks) {
        try {
            tree_->add_rank(rank, capacity_blocks);
            ranks_.insert(rank);
        } catch (const kv::IndexFull&) {
            expect(limits_.memory_bytes_max != 0, "no unbounded tree is full");
        }
    }

    void drop(std::uint32_t rank) {
        has_removed_ = true;
        tree_->drop(rank);
        ranks_.erase(rank);
    }

    void restore() {
        const std::string before = tree_->snapshot();
        try {
            tree_ = restored(*tree_, before);
            has_removed_ = false;
        } catch (const kv::IndexFull&) {
            expect(limits_.memory_bytes_max != 0, "no unbounded tree is full");
        }
        expect(state_of(tree_->snapshot()) == state_of(before), "a tree that is restored knows what its snapshot says");
    }

    Input input_;
    kv::Limits limits_;
    std::unique_ptr<kv::Tree> tree_;
    std::set<std::uint32_t> ranks_;
    bool has_removed_ = false;  // since the tree was made
    double now_s_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Program(data, size).run();
    return 0;
}
