// Chats of the byte model (kv_runtime/text/byte_model.py) as strings whose characters are the tokens.
#include "hashing.hpp"

namespace nb = nanobind;

namespace kv {

namespace {

// The string at `key` of a message with two keys; null: there is none.
PyObject* string_at(PyObject* message, PyObject* key) {
    PyObject* found = PyDict_CheckExact(message) && PyDict_GET_SIZE(message) == 2 ? PyDict_GetItem(message, key) : nullptr;
    return found != nullptr && PyUnicode_CheckExact(found) ? found : nullptr;
}

// A character for each byte of the text in UTF-8; null: it has lone surrogates.
PyObject* byte_text(PyObject* text) {
    if (PyUnicode_IS_ASCII(text)) {
        return Py_NewRef(text);
    }
    const nb::object bytes = nb::steal(PyUnicode_AsUTF8String(text));
    if (!bytes.is_valid()) {
        PyErr_Clear();
        return nullptr;
    }
    PyObject* found = PyUnicode_DecodeLatin1(PyBytes_AS_STRING(bytes.ptr()), PyBytes_GET_SIZE(bytes.ptr()), nullptr);
    if (found == nullptr) {
        throw nb::python_error();
    }
    return found;
}

// For each message the mark of its role, its text and `end`; then `last`. A chat with options, or with more in a message
// than a role and a text, is what `other` makes of it.
nb::object chat_pieces(nb::handle other, nb::dict marks, nb::str end, nb::str last, nb::handle messages, nb::kwargs options) {
    static PyObject* const role_key = PyUnicode_InternFromString("role");
    static PyObject* const content_key = PyUnicode_InternFromString("content");
    const bool is_list = PyList_CheckExact(messages.ptr()) && options.size() == 0;
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(messages.ptr()) : 0;
    const nb::object pieces = nb::steal(PyTuple_New(3 * count + 1));
    bool is_plain = is_list;
    for (Py_ssize_t at = 0; is_plain && at < count; ++at) {
        PyObject* message = PyList_GET_ITEM(messages.ptr(), at);
        PyObject *role = string_at(message, role_key), *content = string_at(message, content_key);
        PyObject* mark = role == nullptr || content == nullptr ? nullptr : PyDict_GetItem(marks.ptr(), role);
        PyObject* text = mark == nullptr ? nullptr : byte_text(content);
        is_plain = text != nullptr;
        if (is_plain) {
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at, Py_NewRef(mark));
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at + 1, text);
            PyTuple_SET_ITEM(pieces.ptr(), 3 * at + 2, Py_NewRef(end.ptr()));
        }
    }
    if (!is_plain) {
        return other(messages, **options);
    }
    PyTuple_SET_ITEM(pieces.ptr(), 3 * count, Py_NewRef(last.ptr()));
    return pieces;
}

}  // namespace

void bind_chat_pieces(nb::module_& module) {
    module.def("chat_pieces", &chat_pieces, nb::arg("other"), nb::arg("marks"), nb::arg("end"), nb::arg("last"),
               nb::arg("messages"), nb::arg("options"));
}

}  // namespace kv
