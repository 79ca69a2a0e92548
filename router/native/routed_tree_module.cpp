// In C++: `RoutedTree` of router/decision/routed_tree.py, where its contract is. All calls keep the GIL.
#include "bindings.hpp"
#include "routed_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

std::size_t add(RoutedTree& tree, const nb::bytes& chain, double expires_at_s, u64 request, std::size_t capacity) {
    const Words<u64> blocks(chain, "chain");
    return tree.add(blocks.data, blocks.count, Age{expires_at_s, request}, capacity);
}

std::size_t overlap(const RoutedTree& tree, const nb::bytes& chain, double now_s) {
    const Words<u64> blocks(chain, "chain");
    return tree.overlap(blocks.data, blocks.count, now_s);
}

nb::list rows(const RoutedTree& tree) {
    nb::list made;
    for (const RoutedTree::Row& row : tree.rows()) {
        const nb::bytes blocks(reinterpret_cast<const char*>(row.blocks->data()), row.blocks->size() * sizeof(u64));
        made.append(nb::make_tuple(row.parent, blocks, row.age.expires_at_s, row.age.request));
    }
    return made;
}

void restore(RoutedTree& tree, i64 parent, const nb::bytes& stretch, double expires_at_s, u64 request) {
    const Words<u64> blocks(stretch, "blocks");
    if (blocks.count == 0) {
        refuse("blocks", 0, "1 or more");
    }
    if (!tree.restore(parent, blocks.data, blocks.count, Age{expires_at_s, request})) {
        refuse("parent", parent, "-1, or an earlier row without such a child");
    }
}

}  // namespace

void bind_routed_tree(nb::module_& module) {
    nb::class_<RoutedTree>(module, "RoutedTree")
        .def(nb::init<>())
        .def("block_count", &RoutedTree::block_count)
        .def("next_expiry_s", &RoutedTree::next_expiry_s)
        .def("expire", &RoutedTree::expire, "now_s"_a)
        .def("add", &add, "chain"_a, "expires_at_s"_a, "request"_a, "capacity"_a)
        .def("overlap", &overlap, "chain"_a, "now_s"_a)
        .def("rows", &rows)
        .def("restore", &restore, "parent"_a, "blocks"_a, "expires_at_s"_a, "request"_a);
}

}  // namespace kv
