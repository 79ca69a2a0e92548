#include "bindings.hpp"
#include "http.hpp"

NB_MODULE(_fold, module) {
    module.doc() = "The fold that a router decides by, and its readers of HTTP, in C++.";
    module.attr("INTERFACE") = nanobind::make_tuple(34, std::tuple_size_v<kv::TermNumbers>);
    nanobind::set_leak_warnings(false);  // a process may end while verdicts are still referenced
    kv::http::bind_answers(module);
    kv::bind_core(module);
    kv::bind_inbound(module);
    kv::http::bind_heads(module);
    kv::http::bind_calls(module);
    kv::http::bind_relay(module);
    kv::http::bind_bodies(module);
}
