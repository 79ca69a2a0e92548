#include "bindings.hpp"

NB_MODULE(_fold, module) {
    module.doc() = "The fold that a router decides by, in C++.";
    module.attr("INTERFACE") = 10;
    nanobind::set_leak_warnings(false);  // a process may end while verdicts are still referenced
    kv::bind_core(module);
}
