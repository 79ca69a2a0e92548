// Sends requests to workers, and takes their answers; `router/http/relay.py` extends `AnswerReceiver`. All calls keep the GIL.
#include <optional>
#include <stdexcept>

#include <nanobind/stl/string_view.h>

#include "bindings.hpp"
#include "fields.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv::http {

namespace {

constexpr std::size_t kJoinedBytesMax = 16 << 10;  // the largest body that is copied behind its head

// Types that `router.http` names when it is imported; they live as long as the process.
struct Types {
    nb::object connection, exchange, call, origin, zero = nb::float_(0.0);

    struct {
        Slot body, call, due_s, exchange, is_odd, origin, part, received, transport, watcher;
    } of_connection{{connection, "body"},   {connection, "call"}, {connection, "due_s"},    {connection, "exchange"},  {connection, "is_odd"},
                    {connection, "origin"}, {connection, "part"}, {connection, "received"}, {connection, "transport"}, {connection, "watcher"}};
    struct {
        Slot client, connection_line, has_begun, relay, when_gone;
    } of_exchange{{exchange, "client"}, {exchange, "connection_line"}, {exchange, "has_begun"}, {exchange, "relay"}, {exchange, "when_gone"}};
    struct {
        Slot body, headers, method, path;
    } of_call{{call, "body"}, {call, "headers"}, {call, "method"}, {call, "path"}};
    struct {
        Slot idle, writer;
    } of_origin{{origin, "idle"}, {origin, "writer"}};
};

const Types* named_types = nullptr;

const Types& types() {
    if (named_types == nullptr) {
        throw std::runtime_error("router.http.upstreams was not imported");
    }
    return *named_types;
}

// The Python methods that this file calls, and an attribute (`writing_paused`).
struct Names {
    Name begin{"begin"}, drop{"drop"}, feed{"feed"}, finish{"finish"}, give_up{"give_up"}, is_closing{"is_closing"}, on_end{"on_end"},
        on_head{"on_head"}, pause{"pause"}, popitem{"popitem"}, reset{"reset"}, take{"take"}, unsent{"get_write_buffer_size"},
        write{"write"}, writelines{"writelines"}, writing_paused{"writing_paused"};
};

const Names& names() {
    static const Names made;
    return made;
}

void check(const nb::handle& given, const nb::object& type) {
    if (!Py_IS_TYPE(given.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()))) {
        throw nb::type_error(("found " + std::string(Py_TYPE(given.ptr())->tp_name) + ", allowed " + nb::cast<std::string>(type.attr("__name__"))).c_str());
    }
}

nb::object held(const nb::handle& of) { return of.is_valid() ? nb::borrow(of) : nb::none(); }

template <typename... Given>
nb::object call(nb::handle of, const Name& name, const Given&... given) {
    PyObject* const all[] = {of.ptr(), given.ptr()...};
    return checked(PyObject_VectorcallMethod(name.object, all, sizeof...(given) + 1, nullptr));
}

// Writes requests to one worker.
class RequestWriter {
public:
    RequestWriter(const nb::bytes& prefix, const nb::bytes& host_line) : prefix_(view_of(prefix)), host_line_(view_of(host_line)) {}

    // The parts of a request. `body` is one part or a tuple of them; only short bytes are copied into one part with the head.
    nb::object request(Text method, Text path, const nb::bytes& headers, const nb::object& body) const {
        if (!all(method, kToken) || !all(path, kVisible)) {
            throw nb::value_error("request: found a method or path that is not visible ASCII");
        }
        std::size_t size = 0;
        const bool is_tuple = PyTuple_Check(body.ptr());
        if (is_tuple) {
            for (const nb::handle part : body) {
                size += nb::len(part);
            }
        } else {
            size = nb::len(body);
        }
        const bool is_joined = PyBytes_Check(body.ptr()) && size <= kJoinedBytesMax;
        const nb::object head = joined({method, " ", prefix_, path, " HTTP/1.1\r\n", host_line_, Digits(static_cast<std::int64_t>(size)), "\r\n",
                                        view_of(headers), "\r\n", is_joined ? view_of(nb::borrow<nb::bytes>(body)) : Text()});
        return is_joined ? nb::object(nb::make_tuple(head)) : is_tuple ? nb::object(nb::make_tuple(head) + body) : nb::object(nb::make_tuple(head, body));
    }

private:
    std::string prefix_, host_line_;
};

// Reads answers of workers; `dropped` are names of headers that clients do not get.
class AnswerReader {
public:
    struct Head {
        int status;
        nb::dict headers;
        std::string passed_on;  // the lines for the client
        std::int64_t body_bytes;
        bool reusable, is_stream;
        Text rest;  // what followed the head

        bool is_bodyless() const { return status == 204 || status == 304; }
        bool is_whole() const { return status >= 200 && body_bytes == static_cast<std::int64_t>(rest.size()); }
        // An `AnswerHead`.
        nb::object object() const {
            return named(answer_head, {nb::cast(status), headers, nb::cast(body_bytes), nb::cast(reusable), nb::cast(is_stream),
                                                    bytes(passed_on), bytes(rest)});
        }
    };

    explicit AnswerReader(nb::object dropped) : dropped_(std::move(dropped)) {}

    // The answer's head after interim answers, or the last interim head if there is no other; none: no head is complete.
    std::optional<Head> head(Text data) const {
        std::optional<Head> found;
        Text line, lines;
        while ((!found.has_value() || found->status < 200) && cut_head(data, 0, 502, line, lines)) {
            data.remove_prefix(line.size() + lines.size() + 4);
            found.emplace(parsed(line, lines)).rest = data;
        }
        return found;
    }

private:
    static int status_of(Text line) {
        const bool is_status = line.size() >= 12 && (line.substr(0, 9) == "HTTP/1.1 " || line.substr(0, 9) == "HTTP/1.0 ") &&
                               line[9] >= '1' && line[9] <= '5' && line.substr(10, 2).find_first_not_of("0123456789") == Text::npos &&
                               (line.size() == 12 || line[12] == ' ') && all(line.substr(12), kText);
        if (!is_status) {
            malformed(502, "status line: found " + shown(line) + ", allowed HTTP/1.1 and a status of 100 to 599");
        }
        const int status = 100 * (line[9] - '0') + 10 * (line[10] - '0') + (line[11] - '0');
        if (status == 101) {
            malformed(502, "status: found 101, allowed none that changes the protocol");
        }
        return status;
    }

    Head parsed(Text line, Text lines) const {
        constexpr Text kStream = "text/event-stream";
        Head made{};
        made.status = status_of(line);
        const bool http_1_1 = line[7] == '1';
        Fields fields;
        std::string& passed_on = made.passed_on;
        passed_on.reserve(line.size() + 2 + lines.size());
        passed_on.append("HTTP/1.1 ").append(line.substr(9)).append("\r\n");
        const std::size_t start_size = passed_on.size();
        fields.read(lines, 502, [&](const nb::object& name, Text of) {
            if (!contains(dropped_, name)) {
                passed_on.append(of).append("\r\n");
            }
        });
        made.headers = fields.headers;
        made.body_bytes = fields.body_bytes(http_1_1);
        if (made.status < 200 || made.is_bodyless()) {
            made.body_bytes = 0;
        }
        const Text connection = fields.value(kConnection);
        if (fields.has(kConnection)) {
            each_token(connection, [&](Text name) { remove(passed_on, start_size, name); });
        }
        made.reusable = http_1_1 && made.body_bytes != kUntilClose && !has_token(connection, "close");
        made.is_stream = same(fields.value(kType).substr(0, kStream.size()), kStream);
        return made;
    }

    // Removes the header lines of this name.
    static void remove(std::string& lines, std::size_t from, Text name) {
        for (std::size_t at = from, end = 0; at < lines.size(); at = end) {
            end = lines.find("\r\n", at) + 2;
            const Text line = Text(lines).substr(at, end - at);
            if (same(line.substr(0, line.find(':')), name)) {
                lines.erase(at, end - at);
                end = at;
            }
        }
    }

    nb::object dropped_;  // a frozenset of names
};

// The base of Python's class of connections; that class has the attributes.
class AnswerReceiver {
public:
    explicit AnswerReceiver(nb::object reader) : reader_object_(std::move(reader)), reader_(nb::cast<const AnswerReader*>(reader_object_)) {}

    // Passes on an answer that came whole, and a stream that flows; for other answers it calls the connection's methods.
    void receive(nb::handle self, const nb::object& exchange, const nb::bytes& data) const {
        check(self, types().connection);
        check(exchange, types().exchange);
        const auto& [own, of] = std::tie(types().of_connection, types().of_exchange);
        const nb::object client = held(of.client.of(exchange)), body = held(own.body.of(self));
        if (!body.is_none()) {
            own.received.set(self, nb::bool_(true));
            const nb::object events = call(body, names().feed, data);
            if (events.is_none() || client.is_none()) {
                call(self, names().take, exchange, body, nb::int_(data.size()));
            } else if (PyBytes_GET_SIZE(events.ptr()) != 0) {
                call(client, names().write, events);
            }
            return;
        }
        const nb::object part = held(own.part.of(self));
        const nb::object all = PyBytes_GET_SIZE(part.ptr()) == 0 ? nb::object(data) : joined({view_of(nb::borrow<nb::bytes>(part)), view_of(data)});
        const std::optional<AnswerReader::Head> head = reader_->head(view_of(nb::borrow<nb::bytes>(all)));
        if (!head.has_value() || !head->is_whole() || client.is_none() || of.has_begun.of(exchange).is(Py_True)) {
            call(self, names().begin, exchange, head.has_value() ? head->object() : nb::none(), data);
            return;
        }
        const nb::object watcher = held(own.watcher.of(self));
        const nb::object added = call(watcher, names().on_head, nb::int_(head->status), head->headers, nb::bool_(head->is_stream));
        if (added.is_none()) {
            call(self, names().drop, exchange, nb::bool_(head->reusable));
            return;
        }
        const nb::object ends = held(of.connection_line.of(exchange));
        of.has_begun.set(exchange, nb::bool_(true));
        const Digits size(static_cast<std::int64_t>(head->rest.size()));
        const Text length = head->is_bodyless() ? Text() : "content-length: ", line_end = head->is_bodyless() ? Text() : "\r\n";
        call(client, names().write,
             joined({head->passed_on, view_of(nb::cast<nb::bytes>(added)), view_of(nb::cast<nb::bytes>(ends)), length,
                     head->is_bodyless() ? Text() : Text(size), line_end, "\r\n", head->rest}));
        of.relay.set(exchange, nb::none());
        release(self, head->reusable);
        const std::size_t tail = std::min(head->rest.size(), kTailBytes);
        call(watcher, names().on_end, bytes(head->rest.substr(head->rest.size() - tail)), nb::int_(0));
        of.client.set(exchange, nb::none());
        of.when_gone.set(exchange, nb::none());
        call(client, names().finish);
    }

    // After a complete answer: keeps the connection as idle, or closes it.
    static void release(nb::handle self, bool reusable) {
        check(self, types().connection);
        const auto& own = types().of_connection;
        if (!reusable || PyObject_IsTrue(call(own.transport.of(self), names().unsent).ptr()) != 0) {
            call(self, names().give_up);
            return;
        }
        if (own.is_odd.of(self).is(Py_True)) {
            call(self, names().reset);
        }
        for (const Slot* const each : {&own.exchange, &own.call, &own.watcher}) {
            each->set(self, nb::none());
        }
        own.due_s.set(self, types().zero);
        const nb::handle origin = own.origin.of(self);
        check(origin, types().origin);
        if (PyObject_SetItem(types().of_origin.idle.of(origin).ptr(), self.ptr(), Py_None) != 0) {
            throw nb::python_error();
        }
    }

private:
    nb::object reader_object_;
    const AnswerReader* reader_;
};

// Sends a call over the idle connection to `origin` that was used last; false: no connection was idle.
bool send(const nb::handle& origin, const nb::handle& exchange, const nb::handle& outbound, const nb::handle& watcher) {
    check(origin, types().origin);
    check(exchange, types().exchange);
    check(outbound, types().call);
    const auto& own = types().of_connection;
    const nb::object idle = held(types().of_origin.idle.of(origin));
    while (nb::len(idle) != 0) {
        const auto last = nb::cast<nb::tuple>(call(idle, names().popitem));
        const nb::object connection = last[0];
        check(connection, types().connection);
        const nb::object transport = held(own.transport.of(connection));
        if (call(transport, names().is_closing).is(Py_True)) {
            continue;
        }
        own.exchange.set(connection, exchange);
        own.call.set(connection, outbound);
        own.watcher.set(connection, watcher);
        own.due_s.set(connection, types().zero);
        types().of_exchange.relay.set(exchange, connection);
        if (get(types().of_exchange.client.of(exchange), names().writing_paused).is(Py_True)) {
            call(connection, names().pause);
        }
        const auto& [body, headers, method, path] = types().of_call;
        const RequestWriter& writer = *nb::cast<const RequestWriter*>(types().of_origin.writer.of(origin));
        call(transport, names().writelines,
             writer.request(text_of(method.of(outbound)), text_of(path.of(outbound)), nb::cast<nb::bytes>(headers.of(outbound)), held(body.of(outbound))));
        return true;
    }
    return false;
}

}  // namespace

void bind_relay(nb::module_& module) {
    module.def("name_relay",
               [](nb::object connection, nb::object exchange, nb::object call, nb::object origin) {
                   named_types = new Types{std::move(connection), std::move(exchange), std::move(call), std::move(origin)};
               },
               "connection"_a, "exchange"_a, "call"_a, "origin"_a);
    nb::class_<RequestWriter>(module, "RequestWriter")
        .def(nb::init<const nb::bytes&, const nb::bytes&>(), nb::arg(), nb::arg())
        .def("request", &RequestWriter::request, nb::arg(), nb::arg(), nb::arg(), nb::arg());
    nb::class_<AnswerReader>(module, "AnswerReader")
        .def(nb::init<nb::object>(), nb::arg())
        .def("head",
             [](const AnswerReader& reader, const nb::bytes& data) {
                 const std::optional<AnswerReader::Head> head = reader.head(view_of(data));
                 return head.has_value() ? head->object() : nb::none();
             },
             nb::arg());
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
