// The native core as a Python module: `Tree`, `Outline`, hashing, the pieces of chats, and the spans of messages. The methods
// of `Tree` are those of indexer/index/prefix_index.py; indexer/native/index.py wraps those whose names begin with `_`.
#include <nanobind/nanobind.h>

#include "python_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

void bind_hashing(nb::module_& module);

namespace {

// Raises the Python interface's error for an error of the core.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const UnknownRank& error) {
        PyErr_SetObject(PyExc_KeyError, nb::int_(error.rank).ptr());
    } catch (const Malformed& error) {
        const nb::object type = nb::module_::import_("kv_protocol.errors").attr("MalformedMessage");
        PyErr_SetObject(type.ptr(), type(error.offset, error.reason).ptr());
    } catch (const IndexFull& error) {
        const nb::object type = nb::module_::import_("indexer.index.prefix_index").attr("IndexFull");
        PyErr_SetObject(type.ptr(), type(error.what()).ptr());
    }
}

}  // namespace

}  // namespace kv

NB_MODULE(_core, module) {
    using kv::Outline;
    using kv::PyTree;
    module.doc() = "The native index and its outlines, hashing, the pieces of chats, and the spans of messages.";
    nb::register_exception_translator(kv::translate);
    nb::class_<Outline>(module, "Outline")
        .def("find", [](const Outline& outline, kv::u64 last) {
            const kv::u32 node = outline.find(last);
            return node == kv::kNone ? std::nullopt : std::optional<kv::u32>(node);
        }, "last"_a)
        .def("children", &kv::outline_children, "node"_a.none(), "order_by"_a, "offset"_a, "limit"_a)
        .def("path", &kv::outline_path, "node"_a, "limit"_a)
        .def("child_count", [](const Outline& outline, std::optional<kv::u32> node) {
            return outline.children(node.value_or(kv::kNone)).size();
        }, "node"_a.none())
        .def_prop_ro("blocks", &Outline::blocks)
        .def_prop_ro("skipped_blocks", &Outline::skipped_blocks)
        .def("__len__", &Outline::size);
    nb::class_<PyTree>(module, "Tree")
        .def(nb::init<kv::u64, kv::u64>(), nb::kw_only(), "memory_bytes_max"_a = 0, "seed"_a = 0)
        .def("register", &PyTree::add_rank, "rank"_a, "capacity_blocks"_a = 0)
        .def("store", &PyTree::store, "rank"_a, "parent"_a.none(), "sequence_hashes"_a, "tier"_a, "now_s"_a)
        .def("remove", &PyTree::remove, "rank"_a, "sequence_hashes"_a, "tier"_a)
        .def("clear", &PyTree::clear, "rank"_a, "tier"_a.none() = nb::none())
        .def("drop", &PyTree::drop, "rank"_a)
        .def("apply_batch", &PyTree::apply_batch, "rank"_a, "message"_a, "now_s"_a)
        .def("load", &PyTree::load, "rank"_a, "chunks"_a, "now_s"_a)
        .def("repair", &PyTree::repair, "rank"_a, "buckets"_a, "chunks"_a, "now_s"_a)
        .def("_restore", &PyTree::restore_body, "body"_a)
        .def("match", &PyTree::match, "sequence_hashes"_a, "out"_a, "ranks"_a.none() = nb::none())
        .def("_digest", &PyTree::digest_of, "rank"_a, "tier"_a)
        .def("bucket_digests", &PyTree::bucket_digests, "rank"_a, "tier"_a)
        .def("_dump", &PyTree::dump_columns, "rank"_a, "chunk_blocks"_a)
        .def("_snapshot", &PyTree::snapshot_body)
        .def("children", &PyTree::children, "sequence_hash"_a.none())
        .def("holders", &PyTree::holders, "sequence_hash"_a)
        .def("chain", &PyTree::chain, "sequence_hash"_a, "limit"_a)
        .def("outline", &PyTree::outline, "requests"_a = nb::tuple())
        .def("memory", &PyTree::memory)
        .def("structure", &PyTree::structure)
        .def("_figures", &PyTree::figures);
    module.def("message_span", [](const nb::bytes& message) -> nb::object {
        const auto found = kv::message_span(reinterpret_cast<const kv::u8*>(message.c_str()), message.size());
        return found ? nb::make_tuple(found->epoch, found->first_seq, found->last_seq, found->time_ns) : nb::object(nb::none());
    }, "message"_a);
    kv::bind_hashing(module);
}
