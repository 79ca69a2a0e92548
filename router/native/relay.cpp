// Takes what a worker sends over one connection: `router/http/relay.py` extends it. All calls keep the GIL.
#include "http.hpp"

namespace nb = nanobind;

namespace kv::http {

namespace {

// The attributes that it reads, sets and calls.
struct Names {
    Name begin{"begin"}, body{"body"}, call{"call"}, client{"client"}, connection_line{"connection_line"}, drop{"drop"}, due_s{"due_s"},
        exchange{"exchange"}, feed{"feed"}, finish{"finish"}, give_up{"give_up"}, has_begun{"has_begun"}, headers{"headers"}, idle{"idle"},
        is_closing{"is_closing"}, is_odd{"is_odd"}, method{"method"}, on_end{"on_end"}, on_head{"on_head"}, origin{"origin"}, part{"part"},
        path{"path"}, pause{"pause"}, popitem{"popitem"}, received{"received"}, relay{"relay"}, request{"request"}, reset{"reset"},
        take{"take"}, transport{"transport"}, unsent{"get_write_buffer_size"}, watcher{"watcher"}, when_gone{"when_gone"}, write{"write"},
        writelines{"writelines"}, writing_paused{"writing_paused"};
};

const Names& names() {
    static const Names made;
    return made;
}

void set(nb::handle of, const Name& name, nb::handle to) {
    if (PyObject_SetAttr(of.ptr(), name.object, to.ptr()) != 0) {
        throw nb::python_error();
    }
}

template <typename... Given>
nb::object call(nb::handle of, const Name& name, const Given&... given) {
    PyObject* const all[] = {of.ptr(), given.ptr()...};
    return checked(PyObject_VectorcallMethod(name.object, all, sizeof...(given) + 1, nullptr));
}

// The base of a connection, which has the attributes; `reader` is the method of an `AnswerReader`.
class AnswerReceiver {
public:
    explicit AnswerReceiver(nb::object reader) : reader_(std::move(reader)) {}

    // An answer that came whole is passed on here, and so is a stream that flows; of others the methods take their steps.
    void receive(nb::handle self, const nb::object& exchange, const nb::bytes& data) const {
        const Names& of = names();
        const nb::object client = get(exchange, of.client), body = get(self, of.body);
        if (!body.is_none()) {
            set(self, of.received, Py_True);
            const nb::object events = call(body, of.feed, data);
            if (events.is_none() || client.is_none()) {
                call(self, of.take, exchange, body, nb::int_(data.size()));
            } else if (PyBytes_GET_SIZE(events.ptr()) != 0) {
                call(client, of.write, events);
            }
            return;
        }
        const nb::object begins = client.is_none() ? nb::borrow(Py_True) : get(exchange, of.has_begun), part = get(self, of.part);
        PyObject* const given[] = {data.ptr(), part.ptr(), begins.ptr()};
        const auto found = nb::steal<nb::tuple>(checked(PyObject_Vectorcall(reader_.ptr(), given, 3, nullptr)).release());
        const nb::object status = found[0], headers = found[1], tail = found[4], reusable = found[5], is_stream = found[6];
        if (PyObject_IsTrue(status.ptr()) == 0) {
            call(self, of.begin, exchange, headers, data);
            return;
        }
        const nb::object watcher = get(self, of.watcher), added = call(watcher, of.on_head, status, headers, is_stream);
        if (added.is_none()) {
            call(self, of.drop, exchange, reusable);
            return;
        }
        const nb::object ends = get(exchange, of.connection_line);
        set(exchange, of.has_begun, Py_True);
        std::string out;
        for (const nb::handle each : {nb::handle(found[2]), nb::handle(added), nb::handle(ends), nb::handle(found[3])}) {
            out.append(view_of(nb::cast<nb::bytes>(each)));
        }
        call(client, of.write, bytes(out));
        set(exchange, of.relay, Py_None);
        release(self, reusable.is(Py_True));
        call(watcher, of.on_end, tail, nb::int_(0));
        set(exchange, of.client, Py_None);
        set(exchange, of.when_gone, Py_None);
        call(client, of.finish);
    }

    // The answer is complete: keep the connection as idle, or close it.
    static void release(nb::handle self, bool reusable) {
        const Names& of = names();
        if (!reusable || PyObject_IsTrue(call(get(self, of.transport), of.unsent).ptr()) != 0) {
            call(self, of.give_up);
            return;
        }
        if (get(self, of.is_odd).is(Py_True)) {
            call(self, of.reset);
        }
        for (const Name* const each : {&of.exchange, &of.call, &of.watcher}) {
            set(self, *each, Py_None);
        }
        set(self, of.due_s, nb::float_(0.0));
        if (PyObject_SetItem(get(get(self, of.origin), of.idle).ptr(), self.ptr(), Py_None) != 0) {
            throw nb::python_error();
        }
    }

private:
    nb::object reader_;
};

// Sends a call over the connection to its origin that was used last; returns whether one was idle.
bool send(const nb::handle& origin, const nb::handle& exchange, const nb::handle& outbound, const nb::handle& watcher) {
    const Names& of = names();
    const auto idle = nb::cast<nb::dict>(get(origin, of.idle));
    while (idle.size() != 0) {
        const auto last = nb::cast<nb::tuple>(call(idle, of.popitem));
        const nb::object connection = last[0], transport = get(connection, of.transport);
        if (call(transport, of.is_closing).is(Py_True)) {
            continue;
        }
        set(connection, of.exchange, exchange);
        set(connection, of.call, outbound);
        set(connection, of.watcher, watcher);
        set(connection, of.due_s, nb::float_(0.0));
        set(exchange, of.relay, connection);
        if (get(get(exchange, of.client), of.writing_paused).is(Py_True)) {
            call(connection, of.pause);
        }
        const nb::object method = get(outbound, of.method), path = get(outbound, of.path), headers = get(outbound, of.headers);
        call(transport, of.writelines, call(origin, of.request, method, path, headers, get(outbound, of.body)));
        return true;
    }
    return false;
}

}  // namespace

void bind_relay(nb::module_& module) {
    module.def("send", &send, nb::arg(), nb::arg(), nb::arg(), nb::arg());
    nb::class_<AnswerReceiver>(module, "AnswerReceiver")
        .def(nb::init<nb::object>(), nb::arg())
        .def("receive", [](nb::handle_t<AnswerReceiver> self, const nb::object& exchange, const nb::bytes& data) {
                 nb::cast<AnswerReceiver&>(self).receive(self, exchange, data);
             },
             nb::arg(), nb::arg())
        .def("release", [](nb::handle_t<AnswerReceiver> self, bool reusable) { AnswerReceiver::release(self, reusable); }, nb::arg());
}

}  // namespace kv::http
