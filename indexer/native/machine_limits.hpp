// What the machine allows at best, measured: benches print it beside our own figures. Nanoseconds of CPU time of this
// thread for one operation.
#pragma once

#include "common.hpp"

namespace kv {

// Independent read-modify-writes of u64s at random places of a table, fetched 16 ahead.
double random_rmw_ns(u64 table_bytes, u64 operations, u64 seed);
// Reads each of whose places is what the one before read.
double pointer_chase_ns(u64 table_bytes, u64 operations, u64 seed);
// One comparison of two equal stretches of memory, in cache.
double compare_ns(u64 bytes, u64 rounds);

}  // namespace kv
