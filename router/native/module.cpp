// In C++: `LoadTable` of router/fleet/load_table.py, where its contract is, and the arithmetic of router/decision/time_cost.py and
// router/fleet/rates.py. All calls keep the GIL.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "time_terms.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

constexpr i64 kRowMax = 1 << 20;

nb::bytes new_bytes(std::size_t bytes) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
    if (made == nullptr) {
        throw nb::python_error();
    }
    return nb::steal<nb::bytes>(made);
}

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

struct Buffer : Py_buffer {
    Buffer() : Py_buffer{} {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(this); }
};

// Numbers of eight bytes, one for each rank, of any object that shows its memory; a given count is required.
template <typename Number>
class Numbers {
public:
    Numbers(const nb::handle& given, const char* field, Py_ssize_t count = -1) {
        if (PyObject_GetBuffer(given.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
            throw nb::python_error();
        }
        const char kind = buffer_.format == nullptr ? 'B' : buffer_.format[0];
        const bool is_float = std::is_floating_point<Number>::value;
        const bool is_kind = is_float ? kind == 'd' : kind == 'q' || kind == 'l';
        if (buffer_.ndim != 1 || buffer_.itemsize != sizeof(Number) || !is_kind) {
            refuse(field, buffer_.ndim, is_float ? "one column of float64" : "one column of int64");
        }
        if (count >= 0 && buffer_.shape[0] != count) {
            refuse(field, buffer_.shape[0], std::to_string(count) + (count == 1 ? " number" : " numbers"));
        }
    }

    Py_ssize_t count() const { return buffer_.shape[0]; }
    Column<Number> column() const { return {static_cast<const char*>(buffer_.buf), buffer_.strides[0]}; }

private:
    Buffer buffer_;
};

double* floats_of(const nb::bytes& made) { return reinterpret_cast<double*>(PyBytes_AS_STRING(made.ptr())); }

nb::bytes terms(const ReferenceEngine& engine, const nb::handle& queued_tokens, const nb::handle& active_requests,
                const nb::handle& active_blocks, const nb::handle& shared_blocks, const nb::handle& credit,
                const nb::handle& prefill, const nb::handle& decode, double tokens, double block_size, double own_blocks,
                double output_tokens, double lateness_ms, double ttft_weight, bool is_prefilled, bool is_decoded) {
    const Sizes sizes{tokens,      block_size,  own_blocks,   output_tokens,
                      lateness_ms, ttft_weight, is_prefilled, is_decoded};
    const Numbers<i64> queued(queued_tokens, "queued_tokens");
    const Py_ssize_t count = queued.count();
    const Numbers<i64> requests(active_requests, "active_requests", count);
    const Numbers<i64> blocks(active_blocks, "active_blocks", count);
    const Numbers<i64> shared(shared_blocks, "shared_blocks", count);
    const Numbers<double> credited(credit, "credit", count);
    const Numbers<double> prefills(prefill, "prefill", count);
    const Numbers<double> decodes(decode, "decode", count);
    const RankColumns ranks{queued.column(),   requests.column(), blocks.column(), shared.column(),
                            credited.column(), prefills.column(), decodes.column()};
    const std::size_t of = static_cast<std::size_t>(count);
    nb::bytes made = new_bytes(kTerms * sizeof(double) * of);
    time_terms(engine, sizes, ranks, of, floats_of(made));
    return made;
}

nb::bytes factors(const FactorRules& rules, const nb::handle& prefill, const nb::handle& decode,
                  const nb::handle& prefill_belief, const nb::handle& decode_belief, const nb::handle& measured_s,
                  double prefill_shared, double prefill_mean, double decode_shared, double decode_mean, double now_s) {
    const Numbers<double> measured(measured_s, "measured_s");
    const Py_ssize_t count = measured.count();
    const Numbers<double> prefills(prefill, "prefill", count);
    const Numbers<double> decodes(decode, "decode", count);
    const Numbers<double> prefill_beliefs(prefill_belief, "prefill_belief", count);
    const Numbers<double> decode_beliefs(decode_belief, "decode_belief", count);
    const std::size_t of = static_cast<std::size_t>(count);
    nb::bytes made = new_bytes(2 * sizeof(double) * of);
    double* out = floats_of(made);
    used_factors(rules, {prefills.column(), prefill_beliefs.column(), measured.column()}, {prefill_shared, prefill_mean},
                 now_s, of, out);
    used_factors(rules, {decodes.column(), decode_beliefs.column(), measured.column()}, {decode_shared, decode_mean},
                 now_s, of, out + of);
    return made;
}

}  // namespace

}  // namespace kv

NB_MODULE(_load, module) {
    using kv::FactorRules;
    using kv::LoadTable;
    using kv::ReferenceEngine;
    module.doc() = "The load of ranks, what it costs, and what was routed to them, in C++.";
    module.attr("INTERFACE") = 2;
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
    nb::class_<ReferenceEngine>(module, "ReferenceEngine")
        .def("__init__",
             [](ReferenceEngine* made, double token, double pair, double step, double sequence, double kv_token) {
                 new (made) ReferenceEngine{token, pair, step, sequence, kv_token};
             })
        .def("terms", &kv::terms);
    nb::class_<FactorRules>(module, "FactorRules")
        .def("__init__",
             [](FactorRules* made, double forget_s, double alike, int halvings_max) {
                 new (made) FactorRules{forget_s, alike, halvings_max};
             })
        .def("used", &kv::factors);
}
