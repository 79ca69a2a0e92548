#pragma once

#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "outline.hpp"
#include "python_input.hpp"

namespace kv {

namespace nb = nanobind;

// An outline as Python holds it: rows as tuples, in the order of `OutlineNode` in indexer/index/outline.py. It never changes.
class PyOutline {
public:
    explicit PyOutline(Outline outline) : outline_(std::move(outline)) {}

    std::optional<u32> find(nb::handle last) const {
        const u32 node = outline_.find(hash_in(last, "sequence_hash"));
        return node == kNone ? std::nullopt : std::optional<u32>(node);
    }

    nb::list children(std::optional<u32> node, u32 order, u64 offset, u64 limit) const {
        std::vector<OutlineNode> rows;
        {
            const nb::gil_scoped_release unlocked;
            rows = outline_.children(node.value_or(kNone), static_cast<OutlineOrder>(order), offset, limit);
        }
        nb::list found;
        for (const OutlineNode& each : rows) {
            found.append(row(each));
        }
        return found;
    }

    // The nodes from `node` up, at most `limit`.
    nb::list path(u32 node, u64 limit) const {
        nb::list found;
        for (; node != kNone && found.size() < limit; node = outline_.at(node).parent) {
            found.append(row(outline_.at(node)));
        }
        return found;
    }

    u32 child_count(std::optional<u32> node) const { return outline_.child_count(node.value_or(kNone)); }
    u64 blocks() const { return outline_.blocks(); }
    u64 skipped_blocks() const { return outline_.skipped_blocks(); }
    u64 size() const { return outline_.size(); }

private:
    static nb::tuple row(const OutlineNode& of) {
        return nb::make_tuple(of.first, of.last, of.blocks, of.subtree_blocks, of.depth_blocks, of.children, of.heat,
                              of.used_s, of.stored_s);
    }

    Outline outline_;
};

}  // namespace kv
