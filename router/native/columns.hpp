// One number of every rank, `stride` bytes apart.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

template <typename Number>
struct Column {
    const char* data;
    std::ptrdiff_t stride;
    Number operator[](std::size_t place) const {
        return *reinterpret_cast<const Number*>(data + static_cast<std::ptrdiff_t>(place) * stride);
    }
};

using Counts = Column<std::int64_t>;
using Depths = Column<std::int32_t>;
using Floats = Column<double>;

constexpr std::size_t kTiers = 4;

}  // namespace kv
