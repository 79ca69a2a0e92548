// The reader's side of a tree in shared memory, as Python holds it. Only one thread of a process uses it.
#pragma once

#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python_input.hpp"
#include "shared_region.hpp"

namespace kv {

namespace nb = nanobind;

class PyReader {
public:
    PyReader(SharedRegion& region, u32 number) : region_(region), reader_(number) {}

    // The versions of names (0: nothing is known) and of all that is told, and the number of columns that `out` needs.
    // Where `out` has fewer, and where nothing is known, it is unchanged.
    std::tuple<u64, u64, u32> match(nb::handle hashes, nb::handle out) {
        const HashesIn given(hashes);
        const DepthsOut depths(out, 1, 0);
        const SharedRegion::Reading now(region_, reader_);
        if (now.place() == nullptr) {
            return {0, now.version(), 0};
        }
        const Tree& tree = now.place()->its_tree();
        if (tree.rank_numbers() <= depths.columns()) {
            tree.match(given.data(), given.size(), depths.of_query(0), depths.columns());
        }
        return {now.place()->names_version, now.version(), tree.rank_numbers()};
    }

    // What the writer told of the slots, and its version; 0 and nothing where nothing is known.
    std::pair<u64, nb::bytes> names() {
        std::string found;
        u64 version = 0;
        {
            const SharedRegion::Reading now(region_, reader_);
            if (now.place() != nullptr) {
                found.assign(now.place()->names, now.place()->names_bytes);
                version = now.place()->names_version;
            }
        }
        return {version, nb::bytes(found.data(), found.size())};
    }

    // Epoch, seq and doubt of each slot's stream, zeros where nothing is known; whether a writer goes on writing them; and
    // the versions of names and of all that is told.
    std::tuple<std::vector<std::tuple<u64, u64, u32>>, bool, u64, u64> statuses(const std::vector<u32>& slots) {
        std::vector<std::tuple<u64, u64, u32>> found(slots.size());
        const SharedRegion::Reading now(region_, reader_);
        const u64 names_version = now.place() == nullptr ? 0 : now.place()->names_version;
        for (std::size_t at = 0; now.place() != nullptr && at < slots.size(); ++at) {
            if (slots[at] <= kRankMax) {
                const SlotStatus& status = now.place()->statuses[slots[at]];
                found[at] = {status.epoch, status.seq, status.doubt};
            }
        }
        return {std::move(found), now.is_written(), names_version, now.version()};
    }

    // Whether anything is known, the place in the log, and how far a writer that begins has come.
    std::tuple<bool, u64, std::string> progress() {
        const SharedRegion::Reading now(region_, reader_);
        return {now.place() != nullptr, now.place() == nullptr ? 0 : now.place()->log_seq, now.progress()};
    }

private:
    SharedRegion& region_;
    u32 reader_;
};

inline void make_region(SharedRegion* at, u32 readers, u64 memory_bytes_max) {
    if (readers == 0 || readers > SharedRegion::kReadersMax) {
        throw nb::value_error(("readers: " + text(readers) + ", allowed 1.." + text(SharedRegion::kReadersMax)).c_str());
    }
    new (at) SharedRegion(readers, memory_bytes_max);
}

inline PyReader reader_of(SharedRegion& region, u32 number) {
    if (number >= region.readers()) {
        throw nb::value_error(("number: " + text(number) + ", allowed 0.." + text(region.readers() - 1)).c_str());
    }
    return PyReader(region, number);
}

}  // namespace kv
