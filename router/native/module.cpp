#include "bindings.hpp"

NB_MODULE(_fold, module) {
    module.doc() = "The fold that a router decides by, and named tuples, in C++.";
    module.attr("INTERFACE") = 8;
    nanobind::set_leak_warnings(false);  // a process may end while verdicts are still referenced
    kv::bind_named_tuples(module);
    kv::bind_core(module);
}
