// The native core as a Python module: `Tree`, whose methods are those of indexer/core/prefix_index.py or what
// indexer/native/index.py makes them of; hashing; and the machine's limits, which benches compare with.
//
// A tree may be used from several threads: a lock is held by each call, and the interpreter's is let go of in those that
// take long. What is read meanwhile cannot change: it is bytes, or a copy.
#include <memory>
#include <mutex>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "hashing.hpp"
#include "machine_limits.hpp"
#include "python_input.hpp"
#include "tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

class PyTree {
public:
    PyTree(u32 parked_blocks_max, double parked_ttl_s, u64 memory_bytes_max, u64 seed)
        : tree_(std::make_unique<Tree>(Limits{parked_blocks_max, parked_ttl_s, memory_bytes_max, seed})) {}

    // ------------------------------------------------------------------------------------------------- facts

    void add_rank(u32 rank, u64 capacity_blocks) { locked()->add_rank(rank, capacity_blocks); }

    void store(nb::handle rank, nb::handle parent, nb::handle hashes, nb::handle tier, nb::handle now_s) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const double seconds = seconds_in(now_s);
        u64 parent_hash = 0;
        const bool has_parent = optional_hash_in(parent, "parent", parent_hash);
        const HashesIn given(hashes);
        locked()->store(rank_number, has_parent ? &parent_hash : nullptr, given.data(), given.size(), tier_number, seconds);
    }

    void remove(nb::handle rank, nb::handle hashes, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const HashesIn given(hashes);
        locked()->remove(rank_number, given.data(), given.size(), tier_number);
    }

    void clear(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank);
        const u32 tier_bits = tier.is_none() ? (1u << kTiers) - 1 : 1u << tier_in(tier);
        locked()->clear(rank_number, tier_bits);
    }

    void drop(std::int64_t rank) {
        if (rank >= 0 && rank <= std::int64_t{kRankMax}) {
            locked()->drop(static_cast<u32>(rank));
        }
    }

    nb::list apply_batch(nb::handle rank, nb::handle message, nb::handle now_s) {
        const u32 rank_number = rank_in(rank);
        const double seconds = seconds_in(now_s);
        const nb::bytes bytes = PyBytes_CheckExact(message.ptr())
            ? nb::borrow<nb::bytes>(message)
            : nb::steal<nb::bytes>(PyBytes_FromObject(nb::steal(PyMemoryView_FromObject(message.ptr())).ptr()));
        if (!bytes.is_valid()) {
            throw nb::python_error();
        }
        std::vector<Refusal> refusals;
        {
            const nb::gil_scoped_release unlocked;
            const auto* data = reinterpret_cast<const u8*>(bytes.c_str());
            refusals = locked()->apply_batch(rank_number, data, bytes.size(), seconds);
        }
        nb::list found;
        for (const Refusal& refusal : refusals) {
            found.append(nb::make_tuple(refusal.event, refusal.offset, refusal.reason));
        }
        return found;
    }

    void load(nb::handle rank, const nb::iterable& chunks, nb::handle now_s) {
        const u32 rank_number = rank_in(rank);
        const double seconds = seconds_in(now_s);
        std::vector<nb::bytes> kept;
        std::vector<ColumnsView> views;
        for (const nb::handle chunk : chunks) {
            const auto parents = nb::cast<nb::bytes>(chunk.attr("parents"));
            const auto hashes = nb::cast<nb::bytes>(chunk.attr("hashes"));
            const auto tiers = nb::cast<nb::bytes>(chunk.attr("tiers"));
            if (parents.size() != sizeof(u64) * tiers.size() || hashes.size() != parents.size()) {
                throw nb::value_error("columns: parents, hashes and tiers do not belong together");
            }
            views.push_back({bytes_of(parents), bytes_of(hashes), bytes_of(tiers), tiers.size()});
            kept.insert(kept.end(), {parents, hashes, tiers});
        }
        const nb::gil_scoped_release unlocked;
        locked()->load(rank_number, views, seconds);
    }

    std::set<u32> expire(double now_s) { return locked()->expire(now_s); }

    void restore_body(const nb::bytes& body, double now_s) {
        const nb::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        tree_ = restored(*tree_, bytes_of(body), body.size(), now_s);
    }

    // ------------------------------------------------------------------------------------------------- answers

    u32 match(nb::handle hashes, nb::handle out) {
        const HashesIn given(hashes);
        const Locked tree = locked();
        const DepthsOut depths(out, 1, tree->rank_numbers());
        return tree->match(given.data(), given.size(), depths.of_query(0), depths.columns());
    }

    void match_many(const nb::sequence& queries, nb::handle out) {
        std::vector<HashesIn> given;
        for (const nb::handle query : queries) {
            given.emplace_back(query);
        }
        const Locked tree = locked();
        const DepthsOut depths(out, given.size(), tree->rank_numbers());
        for (const HashesIn& query : given) {
            tree->prefetch(query.data(), query.size() == 0 ? 0 : 1);
        }
        for (std::size_t at = 0; at < given.size(); ++at) {
            tree->match(given[at].data(), given[at].size(), depths.of_query(at), depths.columns());
        }
    }

    nb::dict overlaps(nb::handle hashes) {
        const HashesIn given(hashes);
        std::size_t columns = 0;
        {
            const Locked tree = locked();
            columns = tree->rank_numbers();
            depths_.resize(columns * kTiers);
            tree->match(given.data(), given.size(), depths_.data(), columns);
        }
        nb::dict found;
        nb::tuple same;  // ranks often have equal depths, and a tuple can be shared
        const std::int32_t *gpu = depths_.data(), *host = gpu + columns, *disk = host + columns, *all = disk + columns;
        std::size_t shared = columns;
        for (std::size_t rank = 0; rank < columns; ++rank) {
            if (all[rank] == 0) {
                continue;
            }
            if (shared == columns || gpu[rank] != gpu[shared] || host[rank] != host[shared] ||
                disk[rank] != disk[shared] || all[rank] != all[shared]) {
                same = nb::make_tuple(gpu[rank], host[rank], disk[rank], all[rank]);
                shared = rank;
            }
            found[nb::int_(rank)] = same;
        }
        return found;
    }

    std::pair<u64, u64> digest_of(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const Locked tree = locked();
        const Digest* found = tree->digest(rank_number, tier_number);
        return found == nullptr ? std::pair<u64, u64>{0, 0} : std::pair<u64, u64>{found->count, found->total()};
    }

    nb::tuple bucket_digests(nb::handle rank, nb::handle tier) {
        const u32 rank_number = rank_in(rank), tier_number = tier_in(tier);
        const Digest nothing;
        const Locked tree = locked();
        const Digest* own = tree->digest(rank_number, tier_number);
        nb::list found;
        for (u32 bucket = 0; bucket < Digest::kBuckets; ++bucket) {
            found.append((own == nullptr ? nothing : *own).buckets()[bucket]);
        }
        return nb::tuple(found);
    }

    nb::list dump_columns(nb::handle rank, u64 chunk_blocks) {
        const u32 rank_number = rank_in(rank);
        std::vector<Columns> chunks;
        {
            const nb::gil_scoped_release unlocked;
            chunks = locked()->dump(rank_number, chunk_blocks);
        }
        nb::list found;
        for (const Columns& chunk : chunks) {
            found.append(nb::make_tuple(to_bytes(chunk.parents), to_bytes(chunk.hashes), to_bytes(chunk.tiers)));
        }
        return found;
    }

    nb::bytes snapshot_body() {
        std::string body;
        {
            const nb::gil_scoped_release unlocked;
            body = locked()->snapshot();
        }
        return to_bytes(body);
    }

    std::vector<u64> children(nb::handle hash) {
        u64 number = 0;
        const bool is_given = optional_hash_in(hash, "sequence_hash", number);
        return locked()->children(is_given ? &number : nullptr);
    }

    nb::dict holders(u64 hash) { return to_dict(locked()->holders(hash)); }

    nb::list stretches(u64 limit, u32 order) {
        nb::list found;
        for (const Stretch& each : locked()->prefixes(limit, static_cast<PrefixOrder>(order))) {
            found.append(nb::make_tuple(each.hash, each.has_parent ? nb::cast(each.parent) : nb::none(), each.blocks,
                                        each.depth_blocks, to_dict(each.holders), each.children, each.last_stored_s));
        }
        return found;
    }

    std::set<u32> overfull() { return locked()->overfull(); }
    nb::dict memory() { return to_dict(locked()->memory()); }
    nb::dict structure() { return to_dict(locked()->structure()); }
    std::vector<std::string> self_check() { return locked()->self_check(); }

    nb::tuple figures() {
        const Locked tree = locked();
        const Counters& counted = tree->counters();
        const ParkedBlocks& parked = tree->parked();
        return nb::make_tuple(tree->ranks(), tree->nodes(), tree->held_blocks(), parked.size(), tree->memory_bytes(),
                              counted.duplicate_blocks, counted.unknown_removals, parked.parked_total, parked.lost_total,
                              counted.parent_conflicts, counted.refused_blocks);
    }

private:
    // The tree while nobody else uses it; which one it is, is known only then.
    class Locked {
    public:
        explicit Locked(PyTree& owner) : lock_(owner.mutex_), tree_(owner.tree_.get()) {}
        Tree* operator->() const { return tree_; }

    private:
        std::unique_lock<std::mutex> lock_;
        Tree* tree_;
    };
    Locked locked() { return Locked(*this); }

    static const u8* bytes_of(const nb::bytes& bytes) { return reinterpret_cast<const u8*>(bytes.c_str()); }
    static nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
    template <class Key, class Value>
    static nb::dict to_dict(const std::vector<std::pair<Key, Value>>& pairs) {
        nb::dict found;
        for (const auto& each : pairs) {
            found[nb::cast(each.first)] = each.second;
        }
        return found;
    }

    std::unique_ptr<Tree> tree_;
    std::mutex mutex_;
    std::vector<std::int32_t> depths_;
};

// Our errors as those that the interface names.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const UnknownRank& error) {
        PyErr_SetObject(PyExc_KeyError, nb::int_(error.rank).ptr());
    } catch (const Malformed& error) {
        const nb::object type = nb::module_::import_("kv_protocol.errors").attr("MalformedMessage");
        PyErr_SetObject(type.ptr(), type(error.offset, error.reason).ptr());
    } catch (const IndexFull& error) {
        const nb::object type = nb::module_::import_("indexer.core.prefix_index").attr("IndexFull");
        PyErr_SetObject(type.ptr(), type(error.what()).ptr());
    }
}

u64 set_digest(const nb::bytes& hashes) {
    if (hashes.size() % sizeof(u64) != 0) {
        throw nb::value_error("hashes: the length must be a multiple of 8 bytes");
    }
    const HashesIn given(hashes);
    u64 digest = 0;
    for (std::size_t at = 0; at < given.size(); ++at) {
        digest += splitmix64(given.data()[at]);
    }
    return digest;
}

}  // namespace

}  // namespace kv

NB_MODULE(_core, module) {
    using kv::PyTree;
    module.doc() = "Native core of the prefix index.";
    nb::register_exception_translator(kv::translate);
    nb::class_<PyTree>(module, "Tree")
        .def(nb::init<kv::u32, double, kv::u64, kv::u64>(), "parked_blocks_max"_a, "parked_ttl_s"_a,
             "memory_bytes_max"_a, "seed"_a)
        .def("add_rank", &PyTree::add_rank, "rank"_a, "capacity_blocks"_a)
        .def("store", &PyTree::store, "rank"_a, "parent"_a.none(), "sequence_hashes"_a, "tier"_a, "now_s"_a)
        .def("remove", &PyTree::remove, "rank"_a, "sequence_hashes"_a, "tier"_a)
        .def("clear", &PyTree::clear, "rank"_a, "tier"_a.none() = nb::none())
        .def("drop", &PyTree::drop, "rank"_a)
        .def("apply_batch_raw", &PyTree::apply_batch, "rank"_a, "message"_a, "now_s"_a)
        .def("load", &PyTree::load, "rank"_a, "chunks"_a, "now_s"_a)
        .def("expire", &PyTree::expire, "now_s"_a)
        .def("restore_body", &PyTree::restore_body, "body"_a, "now_s"_a)
        .def("match", &PyTree::match, "sequence_hashes"_a, "out"_a)
        .def("match_many", &PyTree::match_many, "queries"_a, "out"_a)
        .def("overlaps", &PyTree::overlaps, "sequence_hashes"_a)
        .def("digest_of", &PyTree::digest_of, "rank"_a, "tier"_a)
        .def("bucket_digests", &PyTree::bucket_digests, "rank"_a, "tier"_a)
        .def("dump_columns", &PyTree::dump_columns, "rank"_a, "chunk_blocks"_a)
        .def("snapshot_body", &PyTree::snapshot_body)
        .def("children", &PyTree::children, "sequence_hash"_a.none())
        .def("holders", &PyTree::holders, "sequence_hash"_a)
        .def("stretches", &PyTree::stretches, "limit"_a, "order"_a)
        .def("overfull", &PyTree::overfull)
        .def("memory", &PyTree::memory)
        .def("structure", &PyTree::structure)
        .def("figures", &PyTree::figures)
        .def("self_check", &PyTree::self_check);
    module.def("set_digest", &kv::set_digest, "hashes"_a);
    kv::bind_hashing(module);
    module.def("random_rmw_ns", &kv::random_rmw_ns, "table_bytes"_a, "operations"_a, "seed"_a,
               nb::call_guard<nb::gil_scoped_release>());
    module.def("pointer_chase_ns", &kv::pointer_chase_ns, "table_bytes"_a, "operations"_a, "seed"_a,
               nb::call_guard<nb::gil_scoped_release>());
    module.def("compare_ns", &kv::compare_ns, "size_bytes"_a, "rounds"_a, nb::call_guard<nb::gil_scoped_release>());
}
