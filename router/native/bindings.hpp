// What the extension's classes share: packed words of 8 bytes, and errors as the project words them.
#pragma once

#include <cstddef>
#include <string>

#include <nanobind/nanobind.h>

#include "chain_tree.hpp"

namespace kv {

[[noreturn]] inline void refuse(const std::string& field, i64 found, const std::string& allowed) {
    throw nanobind::value_error((field + ": found " + std::to_string(found) + ", allowed " + allowed).c_str());
}

// Eight bytes each, as they lie in memory.
template <typename Word>
struct Words {
    Words(const nanobind::bytes& given, const char* field) : data(reinterpret_cast<const Word*>(given.c_str())) {
        if (given.size() % sizeof(Word) != 0) {
            refuse(field, static_cast<i64>(given.size()), "a multiple of 8 bytes");
        }
        count = given.size() / sizeof(Word);
    }
    const Word* data;
    std::size_t count;
};

void bind_routed_tree(nanobind::module_& module);

}  // namespace kv
