#include "python_input.hpp"

#include <cmath>
#include <cstring>

namespace kv {

namespace {

// The value of an int that is a u64: from its digits, where they have the usual 30 bits, since lists are long.
bool u64_of(PyObject* number, u64& found) {
#if PYLONG_BITS_IN_DIGIT == 30
    if (PyLong_Check(number)) {
        const auto* digits = reinterpret_cast<PyLongObject*>(number);
#if PY_VERSION_HEX >= 0x030C0000
        const bool is_negative = (digits->long_value.lv_tag & 2) != 0;
        const std::size_t count = is_negative ? 4 : digits->long_value.lv_tag >> 3;
        const digit* value = digits->long_value.ob_digit;
#else
        const std::size_t count = Py_SIZE(digits) < 0 ? 4 : static_cast<std::size_t>(Py_SIZE(digits));
        const digit* value = digits->ob_digit;
#endif
        switch (count) {
            case 0: found = 0; return true;
            case 1: found = value[0]; return true;
            case 2: found = value[0] | u64{value[1]} << 30; return true;
            case 3: found = value[0] | u64{value[1]} << 30 | u64{value[2]} << 60; return value[2] < 16;
            default: return false;
        }
    }
    return false;
#else
    if (!PyLong_Check(number)) {
        return false;
    }
    found = PyLong_AsUnsignedLongLong(number);
    if (found == static_cast<u64>(-1) && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
    }
    return true;
#endif
}

bool is_one_of(const char* format, std::initializer_list<const char*> formats) {
    for (const char* each : formats) {
        if (format != nullptr && std::strcmp(format, each) == 0) {
            return true;
        }
    }
    return false;
}

nb::object checks(const char* name) { return nb::module_::import_("indexer.index.buffers").attr(name); }

}  // namespace

void HashesIn::read(nb::handle given) {
    PyObject* object = given.ptr();
    if (PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) % static_cast<Py_ssize_t>(sizeof(u64)) == 0) {
        owner_ = nb::borrow(given);
        refer_to(PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)));
    } else if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        read_items(given);
    } else if (!read_buffer(given)) {
        read_items(nb::steal(PySequence_Tuple(checks("checked_hashes")(given).ptr())));
    }
}

void HashesIn::read_items(nb::handle items) {
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
    PyObject** item = PySequence_Fast_ITEMS(items.ptr());
    copy_.resize(count);
    for (std::size_t at = 0; at < count; ++at) {
        if (!u64_of(item[at], copy_[at])) {
            read_items(nb::steal(PySequence_Tuple(checks("checked_hashes")(items).ptr())));  // plain numbers, or an error
            return;
        }
    }
    data_ = copy_.data();
    count_ = count;
}

bool HashesIn::read_buffer(nb::handle given) {
    if (PyObject_GetBuffer(given.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        view_.obj = nullptr;
        return false;
    }
    const bool is_wire = is_one_of(view_.format, {"B", "<Q", "<L"});
    const bool is_own = view_.itemsize == sizeof(u64) && is_one_of(view_.format, {"Q", "L"});
    if (view_.ndim != 1 || !(is_wire || is_own) || view_.len % static_cast<Py_ssize_t>(sizeof(u64)) != 0) {
        PyBuffer_Release(&view_);
        view_.obj = nullptr;
        return false;
    }
    refer_to(view_.buf, static_cast<std::size_t>(view_.len));
    return true;
}

void HashesIn::refer_to(const void* data, std::size_t bytes) {
    count_ = bytes / sizeof(u64);
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(u64) == 0) {
        data_ = static_cast<const u64*>(data);
        return;
    }
    copy_.resize(count_);
    if (bytes != 0) {
        std::memcpy(copy_.data(), data, bytes);
    }
    data_ = copy_.data();
}

DepthsOut::DepthsOut(nb::handle out, std::size_t columns_min) {
    if (PyObject_GetBuffer(out.ptr(), &view_, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
        const auto bytes = static_cast<std::size_t>(view_.len);
        const std::size_t numbers = bytes / sizeof(std::int32_t);
        columns_ = numbers / kTiers;
        const bool is_int32s = view_.itemsize == sizeof(std::int32_t) && is_one_of(view_.format, {"i", "l"});
        const bool is_aligned = numbers == 0 || reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(std::int32_t) == 0;
        if (is_int32s && is_aligned && columns_ * kTiers == numbers && columns_ >= columns_min) {
            data_ = static_cast<std::int32_t*>(view_.buf);
            return;
        }
        PyBuffer_Release(&view_);
    } else {
        PyErr_Clear();
    }
    view_.obj = nullptr;
    checks("checked_depths")(out, columns_min);
    throw nb::type_error("out: not aligned to its numbers");
}

bool is_rank(nb::handle rank, u32& found) {
    u64 number = 0;
    const bool is_one = u64_of(rank.ptr(), number) && number <= kRankMax;
    found = is_one ? static_cast<u32>(number) : 0;
    return is_one;
}

u32 rank_in(nb::handle rank) {
    u32 found = 0;
    if (!is_rank(rank, found)) {
        PyErr_SetObject(PyExc_KeyError, rank.ptr());
        throw nb::python_error();
    }
    return found;
}

u32 tier_in(nb::handle tier) {
    u64 found = 0;
    if (!u64_of(tier.ptr(), found) || found >= kTiers) {
        checks("checked_tier")(tier);
        throw nb::type_error("tier: not read");
    }
    return static_cast<u32>(found);
}

double seconds_in(nb::handle now_s) {
    const double found = PyFloat_AsDouble(now_s.ptr());
    if (found == -1.0 && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    if (!std::isfinite(found)) {
        checks("checked_now")(now_s);
    }
    return found;
}

bool optional_hash_in(nb::handle hash, const char* field, u64& found) {
    if (hash.is_none()) {
        return false;
    }
    found = hash_in(hash, field);
    return true;
}

u64 hash_in(nb::handle hash, const char* field) {
    u64 found = 0;
    if (!u64_of(hash.ptr(), found)) {
        checks("checked_hash")(field, hash);
        throw nb::type_error("not a u64");
    }
    return found;
}

}  // namespace kv
