#include "leases.hpp"

#include "latency.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

constexpr std::size_t kRecordBytesMax = 512 * 1024 - 64;  // `kv_protocol.journal.RECORD_BYTES_MAX`

}  // namespace

// ---------------------------------------------------------------------------------------------------------------- the journal

void PyJournal::add(const Pack& record, double now_s) {
    if (record.out.size() <= kRecordBytesMax) {
        put(record.out);
    } else {
        owner.attr("write")(bytes_of(record.out), now_s);
    }
}

void PyJournal::decided(const nb::handle& given) {
    const Verdict& verdict = nb::cast<const Verdict&>(given);
    const View& view = *verdict.view;
    nb::object trusts = given.attr("trusts");
    if (view.standing != standing_ || view.epochs != epochs_ || !trusts.is(trusts_)) {
        owner.attr("write_standings")(given);
        standing_ = view.standing;
        epochs_ = view.epochs;
        trusts_ = std::move(trusts);
    }
    nb::object request;
    try {
        request = encoded(given.attr("request"));
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_TypeError) && !error.matches(PyExc_OverflowError)) {
            throw;
        }
        owner.attr("write_loss")(view.now_s);
        return;
    }
    const nb::bytes packed = nb::borrow<nb::bytes>(request);
    Pack record;
    record.out = verdict.record({packed.c_str(), packed.size()}, nb::cast<u64>(kv_seq()));
    add(record, view.now_s);
}

void PyJournal::forget_seen() {
    standing_ = nullptr;
    epochs_ = nullptr;
    trusts_.reset();
}

// ---------------------------------------------------------------------------------------------------------------- leases

PyLeases::PyLeases(nb::object of, nb::object clock, double period_s, nb::object followers, nb::object kept)
    : core_object(std::move(of)), now(std::move(clock)), breakers(std::move(followers)), journal_object(std::move(kept)),
      core(nb::cast<PyCore*>(core_object)), journal(journal_object.is_none() ? nullptr : nb::cast<PyJournal*>(journal_object)),
      renew_s(period_s) {}

PyLease::PyLease(nb::object of, nb::object made)
    : leases_object(std::move(of)), verdict_object(std::move(made)), leases(nb::cast<PyLeases*>(leases_object)),
      verdict(nb::cast<const Verdict*>(verdict_object)), number(leases->taken_total + 1) {
    leases->core->take(*verdict);
    follow("", verdict->view->now_s);
    if (leases->journal != nullptr) {
        leases->journal->decided(verdict_object);
    }
    leases->taken_total = number;
    is_told = false;
    older = leases->newest_untold;
    (older == nullptr ? leases->eldest_untold : older->newer) = this;
    leases->newest_untold = this;
}

void PyLease::told() {
    if (!is_told) {
        (older == nullptr ? leases->eldest_untold : older->newer) = newer;
        (newer == nullptr ? leases->newest_untold : newer->older) = older;
        older = newer = nullptr;
        is_told = true;
    }
}

// Lets the breakers follow: the beginning, if `event` is empty, or else an event of `kv_protocol.ledger`.
void PyLease::follow(const char* event, double now_s) const {
    static PyObject* const is_any = PyUnicode_InternFromString("is_any");
    const nb::object any = nb::steal(PyObject_GetAttr(leases->breakers.ptr(), is_any));
    if (any.ptr() != Py_False) {
        const nb::object told = *event == '\0' ? nb::object(verdict_object.attr("promise"))
                                               : nb::module_::import_("kv_protocol.ledger").attr(event)("lease_id"_a = id());
        leases->breakers.attr("follow")(told, now_s);
    }
}

void PyLease::first_token() {
    if (first_byte_s.has_value()) {
        return;
    }
    const double now_s = leases->time();
    first_byte_s = now_s - verdict->view->now_s;
    follow("FirstToken", now_s);
    leases->core->first_token(id(), now_s);
    renew("first_token", now_s);
}

void PyLease::on_bytes() {
    if (!first_byte_s.has_value()) {
        first_token();
        return;
    }
    const double now_s = leases->time();
    if (now_s - renewed_s >= leases->renew_s) {
        leases->core->renewed(id(), now_s);
        renew("renewed", now_s);
    }
}

// Records the event: a `kv_protocol.journal.LedgerApplied`.
void PyLease::renew(const char* tag, double now_s) {
    renewed_s = now_s;
    if (leases->journal != nullptr) {
        Pack record;
        record.array(4);
        record.put("ledger");
        record.put(now_s);
        record.map(2);
        record.put("type");
        record.put(tag);
        record.put("lease_id");
        record.put(id());
        record.put("");
        leases->journal->add(record, now_s);
    }
    if (is_told) {
        leases->news.emplace_back(tag, id());
    }
}

void PyLease::end(nb::str how, std::optional<i64> cached, std::optional<i64> output, bool is_whole, bool is_streamed,
                  std::optional<i64> later_tokens, std::optional<double> decode_s) {
    if (outcome.is_valid()) {
        return;
    }
    const std::string_view name = how.c_str();
    ended_s = leases->time();
    const double duration_s = ended_s - verdict->view->now_s;
    if (is_whole && !first_byte_s.has_value()) {
        first_byte_s = duration_s;
    }
    const i64 output_or_0 = output.value_or(0);
    const i64 later = later_tokens.value_or(output_or_0 == 0 ? 0 : output_or_0 - 1);
    std::tie(ttft_s, itl_s) = latency_of(first_byte_s, duration_s, later, decode_s, is_streamed);
    outcome = std::move(how);
    cached_tokens = cached;
    output_tokens = output;
    came_whole = is_whole;
    if (is_whole) {
        follow("FirstToken", ended_s);
    }
    const bool is_cancelled = name == "cancelled";
    follow(is_cancelled ? "Cancelled" : "Finished", ended_s);
    leases->core->ended(id(), {ended_s, name == "ok", ttft_s, itl_s, output_or_0, cached});
    if (leases->journal != nullptr) {  // a `kv_protocol.journal.OutcomeKnown`
        Pack record;
        record.row("outcome", ended_s, id(), name, cached, ttft_s, duration_s, output, itl_s, is_whole);
        leases->journal->add(record, ended_s);
    }
    if (is_told) {
        leases->news.emplace_back(is_cancelled ? "cancelled" : "finished", id());
    } else {
        told();
    }
}

// ---------------------------------------------------------------------------------------------------------------- bindings

namespace {

// The encoder owns the journal, and the journal names it.
int visit_journal(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
        Py_VISIT(nb::inst_ptr<PyJournal>(self)->owner.ptr());
    }
    return 0;
}

int clear_journal(PyObject* self) {
    nb::inst_ptr<PyJournal>(self)->owner.reset();
    return 0;
}

PyType_Slot journal_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(visit_journal)}, {Py_tp_clear, reinterpret_cast<void*>(clear_journal)}, {0, nullptr}};

// What was told of is left out if it is over; the eldest comes first.
auto news_of(PyLeases& leases) {
    std::vector<std::pair<std::string, std::string>> events;
    std::swap(events, leases.news);
    std::vector<std::pair<nb::object, bool>> begun;
    while (PyLease* const lease = leases.eldest_untold) {
        lease->told();
        if (leases.core->ledger.has(lease->verdict->request->decision_id)) {
            begun.emplace_back(lease->verdict_object, lease->first_byte_s.has_value());
        }
    }
    return std::make_pair(std::move(events), std::move(begun));
}

}  // namespace

void bind_leases(nb::module_& module) {
    module.def("latency_of", &latency_of, "first_s"_a.none(), "duration_s"_a, "later_tokens"_a, "decode_s"_a.none(), nb::kw_only(), "is_streamed"_a);
    nb::class_<Batches>(module, "Batches")
        .def(nb::init<std::size_t, std::size_t>(), "batch_bytes_max"_a, "bytes_max"_a)
        .def("put", [](Batches& to, const nb::bytes& record, u64 numbers) { to.put({record.c_str(), record.size()}, numbers); }, "record"_a,
             "numbers"_a = 1)
        .def("complete", &Batches::complete)
        .def("pop",
             [](Batches& from) {
                 const Batches::Batch batch = from.pop();
                 return std::make_tuple(bytes_of(batch.records), batch.count, batch.numbers);
             })
        .def_prop_ro("complete_count", &Batches::complete_count)
        .def_ro("first", &Batches::first)
        .def_ro("records", &Batches::records)
        .def_ro("waiting_bytes", &Batches::bytes)
        .def_rw("pushed_out", &Batches::pushed_out);
    nb::class_<PyJournal, Batches>(module, "Journal", nb::type_slots(journal_slots))
        .def(nb::init<nb::object, nb::object, nb::object, std::size_t, std::size_t>(), "owner"_a, "kv_seq"_a, "encode"_a, "batch_bytes_max"_a,
             "bytes_max"_a)
        .def("decided", &PyJournal::decided, "verdict"_a)
        .def("forget_seen", &PyJournal::forget_seen);
    nb::class_<PyLeases>(module, "Leases")
        .def(nb::init<nb::object, nb::object, double, nb::object, nb::object>(), "core"_a, "now"_a, "renew_s"_a, "breakers"_a,
             "journal"_a.none())
        .def("news", &news_of);
    nb::class_<PyLease>(module, "Lease")
        .def(nb::init<nb::object, nb::object>(), "leases"_a, "verdict"_a)
        .def("first_token", &PyLease::first_token)
        .def("on_bytes", &PyLease::on_bytes)
        .def("end", &PyLease::end, "outcome"_a, "cached_tokens"_a = nb::none(), "output_tokens"_a = nb::none(), nb::kw_only(),
             "came_whole"_a = false, "is_streamed"_a = true, "later_tokens"_a = nb::none(), "decode_s"_a = nb::none())
        .def_ro("verdict", &PyLease::verdict_object)
        .def_ro("number", &PyLease::number)
        .def_ro("renewed_s", &PyLease::renewed_s)
        .def_ro("first_byte_s", &PyLease::first_byte_s)
        .def_ro("ttft_s", &PyLease::ttft_s)
        .def_ro("itl_s", &PyLease::itl_s)
        .def_prop_ro("ended_as",
                     [](const PyLease& lease) {  // as `kv_protocol.journal.OutcomeKnown`; None: it is open
                         return lease.outcome.is_valid()
                                    ? nb::object(nb::make_tuple("outcome", lease.ended_s, lease.verdict->request->decision_id, lease.outcome,
                                                                lease.cached_tokens, lease.ttft_s,
                                                                lease.ended_s - lease.verdict->view->now_s, lease.output_tokens,
                                                                lease.itl_s, lease.came_whole))
                                    : nb::none();
                     });
}

}  // namespace kv
