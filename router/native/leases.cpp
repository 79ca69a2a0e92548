// The journal of a router's decisions, and the leases of those that are carried out. Python makes one call for each thing that happens
// to a decision. All calls keep the GIL.
#include "bindings.hpp"
#include "request_sums.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

// The newest records of one journal, which are in no batch yet. `owner` is its `router.journal.encoder.JournalEncoder`, which takes the
// batches, and writes records of the rare kinds.
struct PyJournal {
    PyJournal(nb::object of, nb::object seq, nb::object encode, std::size_t record_bytes, std::size_t batch_bytes)
        : owner(std::move(of)), kv_seq(std::move(seq)), encoded(std::move(encode)), record_bytes_max_(record_bytes), batch_bytes_max_(batch_bytes) {}

    void put(std::string_view record) {
        if (count >= kRecordsMax || records_.size() + record.size() > batch_bytes_max_) {
            complete();
        }
        records_.append(record);
        ++count;
    }
    // Ends the batch, if it has a record.
    void complete() {
        if (count != 0) {
            const nb::bytes records = bytes_of(records_);
            records_.clear();
            owner.attr("add_batch")(records, std::exchange(count, 0));
        }
    }
    // Adds a record of any length.
    void add(std::string_view record, double now_s) {
        if (record.size() <= record_bytes_max_) {
            put(record);
        } else {
            owner.attr("write")(bytes_of(record), now_s);
        }
    }
    // Adds the records of standings that no earlier decision saw, then the decision's record.
    void decided(const nb::handle& given) {
        const Verdict& verdict = nb::cast<const Verdict&>(given);
        const Named& named = verdict.named;
        if (!named.model_view.is(seen.model_view) || !named.epochs.is(seen.epochs) || !named.trusts.is(seen.trusts)) {
            seen.model_view = named.model_view;
            seen.epochs = named.epochs;
            seen.trusts = named.trusts;
            owner.attr("write_standings")(given);
        }
        const double now_s = verdict.view->now_s;
        nb::object request;
        try {
            request = encoded(named.request);
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_TypeError) && !error.matches(PyExc_OverflowError)) {
                throw;
            }
            owner.attr("write_loss")(now_s);
            return;
        }
        record_.clear();
        const nb::bytes packed = nb::borrow<nb::bytes>(request);
        verdict.record(record_, {packed.c_str(), packed.size()}, nb::cast<u64>(kv_seq()));
        add(record_.view(), now_s);
    }
    void forget_seen() { seen = {}; }

    nb::object owner, kv_seq, encoded;
    Named seen;     // what the last decision had; the next one's standings are recorded if it has others
    u64 count = 0;  // how many records are in no batch

private:
    static constexpr u64 kRecordsMax = 4096;  // in a batch

    const std::size_t record_bytes_max_, batch_bytes_max_;  // a record over `record_bytes_max_` is written in parts
    std::string records_;                                   // joined
    Pack record_;                                           // the newest decision's
};

struct PyLease;

// The leases of one router, of the type `kind`: `now` is its clock, `breakers` its `router.fleet.breakers.Breakers`, `journal` none or its `PyJournal`.
struct PyLeases {
    PyLeases(nb::object type, nb::object of, nb::object clock, double period_s, nb::object followers, nb::object kept)
        : kind(std::move(type)), core_object(std::move(of)), now(std::move(clock)), breakers(std::move(followers)), journal_object(std::move(kept)),
          core(nb::cast<Core*>(core_object)), journal(journal_object.is_none() ? nullptr : nb::cast<PyJournal*>(journal_object)),
          renew_s(period_s) {}

    double time() const { return nb::cast<double>(now()); }
    void record(std::string_view packed, double now_s) {
        if (journal != nullptr) {
            journal->add(packed, now_s);
        }
    }

    void tell(const char* tag, std::string_view lease_id) {
        news.emplace_back(tag, lease_id);
        wake();
    }
    void wake() {
        if (!on_news.is_none()) {
            std::exchange(on_news, nb::none())();
        }
    }

    nb::object kind, core_object, now, breakers, journal_object;
    Core* core;
    PyJournal* journal;  // nullptr: none
    double renew_s;      // the shortest time between two renewals
    Pack scratch;        // the newest record
    u64 taken_total = 0;
    std::list<PyLease*> untold;  // not published yet, the eldest first; a lease that ends before is never published
    std::vector<std::pair<std::string, std::string>> news;  // tags and lease ids of events, for published leases
    nb::object on_news = nb::none();                        // called once when there is something to publish
};

// One decision that is carried out, and its outcome.
struct PyLease {
    PyLease(nb::object of, nb::object made)
        : leases_object(std::move(of)), verdict_object(std::move(made)), leases(nb::cast<PyLeases*>(leases_object)),
          verdict(nb::cast<const Verdict*>(verdict_object)), number(leases->taken_total + 1) {
        leases->core->take(*verdict);
        leases->core->stages.add(leases->core->match_s, leases->core->choose_s);
        if (is_followed()) {
            leases->breakers.attr("follow")(verdict_object.attr("promise"), verdict->view->now_s);
        }
        if (leases->journal != nullptr) {
            leases->journal->decided(verdict_object);
        }
        leases->taken_total = number;
        place = leases->untold.insert(leases->untold.end(), this);
        is_told = false;
        leases->wake();
    }
    PyLease(const PyLease&) = delete;
    PyLease& operator=(const PyLease&) = delete;
    ~PyLease() { told(); }

    std::string_view id() const { return verdict->request->decision_id; }
    // Marks the lease as published to replicas.
    void told() {
        if (!is_told) {
            leases->untold.erase(place);
            is_told = true;
        }
    }

    void first_token() {
        if (!first_byte_s.has_value() && ended.empty()) {
            const double now_s = leases->time();
            first_byte_s = now_s - verdict->view->now_s;
            follow("FirstToken", now_s);
            leases->core->first_token(id(), now_s);
            renewed("first_token", now_s);
        }
    }
    void on_bytes() {
        if (!first_byte_s.has_value()) {
            first_token();
        } else if (const double now_s = leases->time(); now_s - renewed_s >= leases->renew_s && ended.empty()) {
            leases->core->renewed(id(), now_s);
            renewed("renewed", now_s);
        }
    }
    void end(const nb::str& outcome, const Answer& answer, bool is_streamed, RequestSums* sums) {
        if (!ended.empty()) {
            return;
        }
        const std::string_view how = outcome.c_str();
        const bool is_ok = how == "ok", is_cancelled = how == "cancelled";
        const double now_s = leases->time(), duration_s = now_s - verdict->view->now_s;
        if (answer.came_whole) {
            first_byte_s = first_byte_s.value_or(duration_s);
            follow("FirstToken", now_s);
        }
        follow(is_cancelled ? "Cancelled" : "Finished", now_s);
        const i64 tokens = answer.output_tokens.value_or(0), later = answer.later_tokens.value_or(tokens == 0 ? 0 : tokens - 1);
        const bool is_one_token = is_ok && !verdict->request->is_decoded;  // a prefill worker's answer ends with its first token
        std::tie(ttft_s, itl_s) = latency_of(first_byte_s, duration_s, later, is_one_token ? 0.0 : answer.decode_s, is_streamed);
        Pack& record = leases->scratch;  // a `kv_protocol.journal.OutcomeKnown`
        record.clear();
        record.row("outcome", now_s, id(), how, answer.cached_tokens, ttft_s, duration_s, answer.output_tokens, itl_s, answer.came_whole);
        ended = record.view();
        leases->core->ended(id(), {now_s, is_ok, ttft_s, itl_s, tokens, answer.cached_tokens});
        leases->record(ended, now_s);
        if (is_ok && sums != nullptr) {
            sums->answered(*verdict, answer, itl_s);
        }
        is_told ? leases->tell(is_cancelled ? "cancelled" : "finished", id()) : told();
    }

    nb::object leases_object, verdict_object;
    PyLeases* leases;
    const Verdict* verdict;
    u64 number;  // its place among the router's leases, from 1
    std::list<PyLease*>::iterator place;  // in `untold`, unless it is told
    bool is_told = true;
    double renewed_s = 0;
    std::optional<double> first_byte_s, ttft_s, itl_s;
    std::string ended;  // the journal's record of the outcome; empty: the lease is open

private:
    bool is_followed() const {
        static const nb::handle by_key = PyUnicode_InternFromString("by_key");
        return PyObject_IsTrue(nb::getattr(leases->breakers, by_key).ptr()) != 0;
    }
    // Lets the breakers follow an event of `kv_protocol.ledger`.
    void follow(const char* event, double now_s) const {
        if (is_followed()) {
            const nb::object made = nb::module_::import_("kv_protocol.ledger").attr(event);
            leases->breakers.attr("follow")(made("lease_id"_a = id()), now_s);
        }
    }
    // Records the event: a `kv_protocol.journal.LedgerApplied`.
    void renewed(const char* tag, double now_s) {
        renewed_s = now_s;
        Pack& record = leases->scratch;
        record.clear();
        record.array(4);
        record.put("ledger");
        record.put(now_s);
        record.map(2);
        record.put("type");
        record.put(tag);
        record.put("lease_id");
        record.put(id());
        record.put("");
        leases->record(record.view(), now_s);
        if (is_told) {
            leases->tell(tag, id());
        }
    }
};

nb::object take(const nb::handle& leases, nb::object verdict) {
    nb::object lease = nb::inst_alloc(nb::cast<PyLeases*>(leases)->kind);
    new (nb::inst_ptr<PyLease>(lease)) PyLease(nb::borrow(leases), std::move(verdict));
    nb::inst_mark_ready(lease);
    return lease;
}

// The encoder owns the journal, and the journal refers to the encoder: Python's garbage collector must see the cycle.
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

// Returns the events of leases published before, and the verdicts of the leases to publish now, each with whether its prompt is
// computed. A lease that the ledger ended is left out.
auto news_of(PyLeases& leases) {
    std::vector<std::pair<std::string, std::string>> events;
    std::swap(events, leases.news);
    std::vector<std::pair<nb::object, bool>> begun;
    while (!leases.untold.empty()) {
        PyLease* const lease = leases.untold.front();
        lease->told();
        if (leases.core->ledger.has(lease->id())) {
            begun.emplace_back(lease->verdict_object, lease->first_byte_s.has_value());
        }
    }
    return std::make_pair(std::move(events), std::move(begun));
}

}  // namespace

void bind_leases(nb::module_& module) {
    nb::class_<PyJournal>(module, "Journal", nb::type_slots(journal_slots))
        .def(nb::init<nb::object, nb::object, nb::object, std::size_t, std::size_t>())
        .def("put", [](PyJournal& to, const nb::bytes& record) { to.put({record.c_str(), record.size()}); }, "record"_a)
        .def("complete", &PyJournal::complete)
        .def_ro("records", &PyJournal::count)
        .def("decided", &PyJournal::decided, "verdict"_a)
        .def("forget_seen", &PyJournal::forget_seen);
    nb::class_<PyLeases>(module, "Leases")
        .def(nb::init<nb::object, nb::object, nb::object, double, nb::object, nb::object>(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none())
        .def("take", &take, "verdict"_a)
        .def("news", &news_of)
        .def_rw("on_news", &PyLeases::on_news, nb::arg().none());
    nb::class_<PyLease>(module, "Lease")
        .def("first_token", &PyLease::first_token)
        .def("on_bytes", &PyLease::on_bytes)
        .def("end", &PyLease::end, "outcome"_a, "answer"_a = Answer(), "is_streamed"_a = true, "sums"_a = nb::none())
        .def_ro("verdict", &PyLease::verdict_object)
        .def_ro("number", &PyLease::number)
        .def_ro("renewed_s", &PyLease::renewed_s)
        .def_ro("first_byte_s", &PyLease::first_byte_s)
        .def_ro("ttft_s", &PyLease::ttft_s)
        .def_ro("itl_s", &PyLease::itl_s)
        .def_prop_ro("ended", [](const PyLease& lease) { return bytes_of(lease.ended); });
}

}  // namespace kv
