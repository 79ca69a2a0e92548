// Bugs on purpose, in an extension built like the real one: `make sanitize` fails unless each of them stops the process.
// Part of no other build.
#include <climits>
#include <vector>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace {

int read_past_the_end(int index) {
    const std::vector<int> numbers(8, 1);
    return numbers.data()[index];
}

int use_after_free(int index) {
    const int* freed;
    {
        const std::vector<int> numbers(8, 1);
        freed = numbers.data();
    }
    return freed[index];
}

int overflow(int number) { return INT_MAX - 1 + number; }

}  // namespace

NB_MODULE(_planted, module) {
    module.def("read_past_the_end", &read_past_the_end, nb::arg("index"));
    module.def("use_after_free", &use_after_free, nb::arg("index"));
    module.def("overflow", &overflow, nb::arg("number"));
}
