// An input is the body of a snapshot, restored into a tree that holds something: it is taken whole or not at all.
//
//     limits u8, then the body (`indexer/index/snapshot.py`)
#include "harness.hpp"

namespace {

using namespace fuzz;

constexpr std::uint64_t kBlocks = 12;

kv::Limits limits_of(std::uint8_t choice) {
    kv::Limits limits;
    limits.memory_bytes_max = choice & 2 ? 2'000'000 : 0;
    return limits;
}

// Two ranks that share a beginning, a hole, and a block with an unknown parent.
void fill(kv::Tree& tree) {
    std::uint64_t hashes[kBlocks];
    for (std::uint64_t at = 0; at < kBlocks; ++at) {
        hashes[at] = kv::splitmix64(at);
    }
    tree.add_rank(0, 0);
    tree.add_rank(5, 0);
    tree.store(0, nullptr, hashes, kBlocks, 0, 0);
    tree.store(5, nullptr, hashes, kBlocks / 2, 1, 0);
    tree.remove(0, hashes + 2, 1, 0);
    const std::uint64_t unknown = kv::splitmix64(100), behind = kv::splitmix64(101);
    tree.store(5, &unknown, &behind, 1, 0, 0);
}

std::unique_ptr<kv::Tree> restored_exactly(const kv::Tree& old, const std::vector<std::uint8_t>& body) {
#if KV_PLANTED_BUG == 2
    const std::vector<std::uint8_t> cut(body.begin(), body.end() - (body.empty() ? 0 : 1));
    return restored(old, cut.data(), body.size());
#else
    return restored(old, body.data(), body.size());
#endif
}

// The tree that the body says; none where it is refused.
std::unique_ptr<kv::Tree> restored_or_refused(kv::Tree& old, const std::vector<std::uint8_t>& body) {
    try {
        return restored_exactly(old, body);
    } catch (const kv::Malformed& error) {
        expect(error.offset <= body.size() && !error.reason.empty(), "an error names byte and reason");
#if KV_PLANTED_BUG == 1
        old.clear(0, 1);
#endif
    } catch (const kv::IndexFull&) {
        expect(old.limits().memory_bytes_max != 0, "no unbounded tree is full");
    }
    return nullptr;
}

void expect_good(kv::Tree& tree) {
    expect_sound(tree);
    expect_bounded(tree, false);
    look(tree, {kv::splitmix64(0), kv::splitmix64(1), kv::splitmix64(2)});
    expect_restorable(tree);
    expect_drained(tree);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    kv::Tree tree(limits_of(input.byte()));
    fill(tree);
    const std::string before = tree.snapshot();
    if (const std::unique_ptr<kv::Tree> made = restored_or_refused(tree, input.rest())) {
        expect_good(*made);
    }
    expect(tree.snapshot() == before, "what is made of a body is another tree");
    expect_sound(tree);
    return 0;
}
