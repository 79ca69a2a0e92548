#pragma once

#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "outline.hpp"

namespace kv {

namespace nb = nanobind;

// An outline as Python holds it, which never changes: nodes are `OutlineNode`s of indexer/index/outline.py.
class PyOutline {
public:
    explicit PyOutline(Outline outline) : outline_(std::move(outline)) {}

    std::optional<u32> find(u64 last) const {
        const u32 node = outline_.find(last);
        return node == kNone ? std::nullopt : std::optional<u32>(node);
    }

    nb::list children(std::optional<u32> node, nb::handle order, u64 offset, u64 limit) const {
        const auto by = nb::cast<u32>(words().attr("OUTLINE_ORDERS").attr("index")(order));
        std::vector<OutlineNode> rows;
        {
            const nb::gil_scoped_release unlocked;
            rows = outline_.children(node.value_or(kNone), static_cast<OutlineOrder>(by), offset, limit);
        }
        return nodes(rows);
    }

    // The nodes from `node` up, at most `limit`.
    nb::list path(u32 node, u64 limit) const {
        std::vector<OutlineNode> rows;
        for (; node != kNone && rows.size() < limit; node = outline_.at(node).parent) {
            rows.push_back(outline_.at(node));
        }
        return nodes(rows);
    }

    u32 child_count(std::optional<u32> node) const { return outline_.child_count(node.value_or(kNone)); }
    u64 blocks() const { return outline_.blocks(); }
    u64 skipped_blocks() const { return outline_.skipped_blocks(); }
    u64 size() const { return outline_.size(); }

private:
    static nb::module_ words() { return nb::module_::import_("indexer.index.outline"); }
    static nb::list nodes(const std::vector<OutlineNode>& rows) {
        const nb::object type = words().attr("OutlineNode");
        nb::list found;
        for (const OutlineNode& of : rows) {
            found.append(type(of.first, of.last, of.blocks, of.subtree_blocks, of.depth_blocks, of.children, of.heat,
                              of.used_s, of.stored_s));
        }
        return found;
    }

    Outline outline_;
};

}  // namespace kv
