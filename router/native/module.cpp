// In C++: `LoadTable` of router/fleet/load_table.py, where its contract is. All calls keep the GIL.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

constexpr i64 kRowMax = 1 << 20;

i64* words_of(const nb::bytes& made) { return reinterpret_cast<i64*>(PyBytes_AS_STRING(made.ptr())); }

struct Row {
    i64 queued_tokens = 0;
    i64 requests = 0;
    i64 extra_blocks = 0;
    u64 epoch = 0;
};

class LoadTable {
public:
    u64 add(i64 row, const nb::bytes& chain) {
        const Words<u64> blocks(chain, "chain");
        checked(row);
        return static_cast<u64>(row) << 32 | tree_.add(static_cast<u32>(row), blocks.data, blocks.count);
    }

    void remove(u64 end) {
        if (!tree_.remove(static_cast<u32>(end >> 32), static_cast<u32>(end))) {
            throw nb::key_error(std::to_string(end).c_str());
        }
    }

    i64 blocks(i64 row) { return tree_.blocks(checked(row)); }

    void put(i64 row, i64 queued_tokens, i64 requests, i64 extra_blocks) {
        Row& numbers = at(row);
        numbers.queued_tokens = queued_tokens;
        numbers.requests = requests;
        numbers.extra_blocks = extra_blocks;
    }

    void set_epoch(i64 row, u64 epoch) { at(row).epoch = epoch; }

    nb::bytes columns(const nb::bytes& rows, const nb::bytes& chain) {
        const Words<i64> of(rows, "rows");
        const Words<u64> blocks(chain, "chain");
        nb::bytes made = new_bytes(4 * rows.size());
        i64* out = words_of(made);
        for (std::size_t place = 0; place < of.count; ++place) {
            const Row& numbers = row_or_none(of.data[place]);
            out[place] = numbers.queued_tokens;
            out[of.count + place] = numbers.requests;
            out[2 * of.count + place] = numbers.extra_blocks + tree_.blocks(static_cast<u64>(of.data[place]));
        }
        tree_.depths(blocks.data, blocks.count, of.data, of.count, out + 3 * of.count);
        return made;
    }

    nb::object expected(const nb::bytes& rows, const nb::bytes& chain, const nb::tuple& epochs) {
        const Words<i64> of(rows, "rows");
        const Words<u64> blocks(chain, "chain");
        if (epochs.size() != of.count) {
            refuse("epochs", static_cast<i64>(epochs.size()), "as many as rows");
        }
        depths_.resize(of.count);
        tree_.depths(blocks.data, blocks.count, of.data, of.count, depths_.data());
        bool is_any = false;
        for (std::size_t place = 0; place < of.count; ++place) {
            if (depths_[place] != 0 && row_or_none(of.data[place]).epoch != epoch_in(epochs, place)) {
                depths_[place] = 0;
            }
            is_any = is_any || depths_[place] != 0;
        }
        if (!is_any) {
            return nb::none();
        }
        nb::bytes made = new_bytes(rows.size());
        std::copy(depths_.begin(), depths_.end(), words_of(made));
        return made;
    }

    std::size_t node_count() const { return tree_.node_count(); }
    bool is_empty() const { return tree_.is_empty(); }

private:
    static u32 checked(i64 row) {
        if (row < 1 || row > kRowMax) {
            refuse("row", row, "1..1048576");
        }
        return static_cast<u32>(row);
    }

    static u64 epoch_in(const nb::tuple& epochs, std::size_t place) {
        const unsigned long long epoch =
            PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(epochs.ptr(), static_cast<Py_ssize_t>(place)));
        if (epoch == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
            throw nb::python_error();
        }
        return epoch;
    }

    Row& at(i64 row) {
        const u32 number = checked(row);
        if (number >= rows_.size()) {
            rows_.resize(number + 1);
        }
        return rows_[number];
    }

    const Row& row_or_none(i64 row) const {
        return static_cast<u64>(row) < rows_.size() ? rows_[static_cast<u64>(row)] : none_;
    }

    ChainTree tree_;
    std::vector<Row> rows_;
    std::vector<i64> depths_;
    const Row none_{};
};

}  // namespace

}  // namespace kv

NB_MODULE(_load, module) {
    using kv::LoadTable;
    module.doc() = "The load of ranks, what it costs, how it is recorded, what was routed to them, and named tuples, in C++.";
    module.attr("INTERFACE") = 5;
    nb::set_leak_warnings(false);  // a process may end while tables are still referenced
    nb::class_<LoadTable>(module, "LoadTable")
        .def(nb::init<>())
        .def("add", &LoadTable::add, "row"_a, "chain"_a)
        .def("remove", &LoadTable::remove, "end"_a)
        .def("blocks", &LoadTable::blocks, "row"_a)
        .def("put", &LoadTable::put, "row"_a, "queued_tokens"_a, "requests"_a, "extra_blocks"_a)
        .def("set_epoch", &LoadTable::set_epoch, "row"_a, "epoch"_a)
        .def("columns", &LoadTable::columns, "rows"_a, "chain"_a)
        .def("expected", &LoadTable::expected, "rows"_a, "chain"_a, "epochs"_a)
        .def("node_count", &LoadTable::node_count)
        .def("is_empty", &LoadTable::is_empty);
    kv::bind_routed_tree(module);
    kv::bind_costs(module);
    kv::bind_records(module);
    kv::bind_named_tuples(module);
}
