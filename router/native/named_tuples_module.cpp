// Named tuples made without their `__new__`, which is interpreted also where the caller is compiled. A request makes some
// twenty of them, at 0.6 us each and 1.0 with keywords; here at 0.1.
//
// The call of a class goes through the pointer `tp_vectorcall` of its type, where that is set (Python/C API, "Type Objects").
// Subclasses do not inherit it. A call with a wrong or missing argument is passed on to `__new__`, which raises the error.
#include <unordered_map>

#include "bindings.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

struct Shape {
    nb::tuple fields;
    nb::dict defaults;
};

// Never freed: a class that is in it lives as long as the process.
std::unordered_map<PyObject*, Shape>& shapes() {
    static auto* const known = new std::unordered_map<PyObject*, Shape>();
    return *known;
}

PyObject* call_new(PyObject* made, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    const nb::object positional = nb::steal(PyTuple_New(count)), named = nb::steal(PyDict_New());
    if (!positional.is_valid() || !named.is_valid()) {
        return nullptr;
    }
    for (Py_ssize_t at = 0; at < count; ++at) {
        PyTuple_SET_ITEM(positional.ptr(), at, nb::borrow(args[at]).release().ptr());
    }
    for (Py_ssize_t at = 0; names != nullptr && at < PyTuple_GET_SIZE(names); ++at) {
        if (PyDict_SetItem(named.ptr(), PyTuple_GET_ITEM(names, at), args[count + at]) != 0) {
            return nullptr;
        }
    }
    return PyType_Type.tp_call(made, positional.ptr(), named.ptr());
}

// The field of this name, looked for from `from` on, as callers mostly name fields in their order. Names of fields and of
// arguments are interned: equal ones are the same object. -1: none.
Py_ssize_t field_of(const nb::tuple& fields, PyObject* name, Py_ssize_t from) {
    const Py_ssize_t count = PyTuple_GET_SIZE(fields.ptr());
    for (Py_ssize_t step = 0; step < count; ++step) {
        const Py_ssize_t at = from + step < count ? from + step : from + step - count;
        if (PyTuple_GET_ITEM(fields.ptr(), at) == name) {
            return at;
        }
    }
    return -1;
}

bool fill_named(PyObject** items, const Shape& shape, PyObject* names, PyObject* const* values, Py_ssize_t from) {
    for (Py_ssize_t given = 0; given < PyTuple_GET_SIZE(names); ++given) {
        const Py_ssize_t at = field_of(shape.fields, PyTuple_GET_ITEM(names, given), from);
        if (at < 0 || items[at] != nullptr) {
            return false;
        }
        items[at] = nb::borrow(values[given]).release().ptr();
        from = at + 1;
    }
    return true;
}

bool fill_defaults(PyObject** items, const Shape& shape) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(shape.fields.ptr()); ++at) {
        if (items[at] == nullptr) {
            PyObject* const value = PyDict_GetItem(shape.defaults.ptr(), PyTuple_GET_ITEM(shape.fields.ptr(), at));
            if (value == nullptr) {
                return false;
            }
            items[at] = nb::borrow(value).release().ptr();
        }
    }
    return true;
}

PyObject* make(PyObject* made, PyObject* const* args, std::size_t flags, PyObject* names) {
    const Shape& shape = shapes().find(made)->second;
    const Py_ssize_t fields = PyTuple_GET_SIZE(shape.fields.ptr());
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (count + named > fields) {
        return call_new(made, args, count, names);
    }
    auto* const type = reinterpret_cast<PyTypeObject*>(made);
    nb::object filled = nb::steal(type->tp_alloc(type, fields));
    if (!filled.is_valid()) {
        return nullptr;
    }
    PyObject** const items = reinterpret_cast<PyTupleObject*>(filled.ptr())->ob_item;
    for (Py_ssize_t at = 0; at < count; ++at) {
        items[at] = nb::borrow(args[at]).release().ptr();
    }
    const bool is_named = named == 0 || fill_named(items, shape, names, args + count, count);
    if (!is_named || (count + named < fields && !fill_defaults(items, shape))) {
        return call_new(made, args, count, names);
    }
    return filled.release().ptr();
}

void make_directly(const nb::type_object& made) {
    auto* const type = reinterpret_cast<PyTypeObject*>(made.ptr());
    if (!PyType_FastSubclass(type, Py_TPFLAGS_TUPLE_SUBCLASS) || !nb::hasattr(made, "_field_defaults")) {
        throw nb::type_error("a class of named tuples is needed");
    }
    nb::object kept = nb::borrow(made);
    shapes().insert_or_assign(kept.release().ptr(), Shape{made.attr("_fields"), made.attr("_field_defaults")});
    type->tp_vectorcall = make;
}

}  // namespace

void bind_named_tuples(nb::module_& module) { module.def("make_directly", &make_directly, nb::arg("made")); }

}  // namespace kv
