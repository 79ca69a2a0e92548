// What the bindings of the core and of its verdicts share.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "core.hpp"

namespace kv {

using Seconds = std::optional<double>;
using RankTuple = std::pair<std::string, i64>;

inline nanobind::bytes bytes_of(const std::string& packed) { return nanobind::bytes(packed.data(), packed.size()); }

inline RankTuple rank_tuple(const RankKey& key) { return {key.worker_id, key.dp_rank}; }

inline Chain chain_of(const nanobind::bytes& packed) {
    const Words<u64> words(packed, "blocks");
    return std::make_shared<const std::vector<u64>>(words.data, words.data + words.count);
}

// The core, and the epochs of the index's last answer: the index gives the same tuple while none changes.
struct PyCore : Core {
    using Core::Core;
    std::shared_ptr<const std::vector<u64>> epochs_of(const nanobind::object& given) {
        if (given.is_none()) {
            return nullptr;
        }
        if (!epochs_given.is(given)) {
            epochs = std::make_shared<const std::vector<u64>>(nanobind::cast<std::vector<u64>>(given));
            epochs_given = given;
        }
        return epochs;
    }
    nanobind::object epochs_given = nanobind::none();
    std::shared_ptr<const std::vector<u64>> epochs;
};

template <typename Numbers>
nanobind::bytes packed(const Numbers& numbers, std::size_t count) {
    const std::size_t size = count * sizeof(typename Numbers::value_type);
    nanobind::bytes made = new_bytes(size);
    if (numbers.size() < count) {
        std::memset(PyBytes_AS_STRING(made.ptr()), 0, size);
    } else if (count != 0) {
        std::memcpy(PyBytes_AS_STRING(made.ptr()), numbers.data(), size);
    }
    return made;
}

void bind_verdict(nanobind::module_& module);
void bind_leases(nanobind::module_& module);

}  // namespace kv
